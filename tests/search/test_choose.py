"""Filters and orders of a search."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.search.choose import Filter, arrange
from kiwi_mcp.search.port import Card, Hit

MAIL = Card("project/local/mail@1.0.0", "mail", tags=("crm",), category="web/mail", source="project", tool_type="api")
POST = Card("mcp/outbox/post@0.0.0", "post", source="mcp", tool_type="mcp_tool", server="outbox")
NOTE = Card("user/local/note@1.0.0", "note", category="web", source="user", tool_type="script", modified=9.0)


@pytest.mark.req("K-SE-02")
@pytest.mark.parametrize(
    ("only", "kept"),
    [
        (Filter(), [MAIL, NOTE, POST]),
        (Filter(types=("api",)), [MAIL]),
        (Filter(sources=("user",)), [NOTE]),
        (Filter(sources=("user", "project")), [MAIL, NOTE]),
        (Filter(tags=("crm", "other")), [MAIL]),
        (Filter(categories=("web",)), [MAIL, NOTE]),
        (Filter(categories=("web/mail",)), [MAIL]),
        (Filter(categories=("we",)), []),
        (Filter(types=("api",), sources=("user",)), []),
        (Filter(servers=("outbox",)), [POST]),
        (Filter(servers=("outbox", "inbox"), tags=("crm",)), []),
    ],
)
def test_a_filter_keeps_what_has_one_of_its_words_in_each_kind(only: Filter, kept: list[Card]) -> None:
    assert [card for card in (MAIL, NOTE, POST) if only.keeps(card)] == kept


@pytest.mark.req("K-SE-02")
def test_hits_are_shown_by_score_date_or_name() -> None:
    hits = [Hit(NOTE, 0.9), Hit(MAIL, 0.2)]

    assert [hit.card.tool_id for hit in arrange(hits, "score")] == ["note", "mail"]
    assert [hit.card.tool_id for hit in arrange(hits, "date")] == ["note", "mail"]
    assert [hit.card.tool_id for hit in arrange(hits, "name")] == ["mail", "note"]
    with pytest.raises(InvalidRequest):
        arrange(hits, "magic")
