"""Filters and orders of a search."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.search.port import Filter, Hit, sort_hits

MAIL = Card("project", "local", "mail", "1.0.0", tags=("crm",), category="web/mail", tool_type="api")
POST = Card("mcp", "outbox", "post", "0.0.0", tool_type="mcp_tool", server="outbox")
NOTE = Card("user", "local", "note", "1.0.0", category="web", tool_type="script", modified=9.0)


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
def test_a_filter_selects_items_with_one_of_its_values_for_each_key(only: Filter, kept: list[Card]) -> None:
    assert [card for card in (MAIL, NOTE, POST) if only.keeps(card)] == kept


@pytest.mark.req("K-SE-02")
def test_hits_are_ordered_by_score_date_or_name() -> None:
    hits = [Hit(NOTE, 0.9), Hit(MAIL, 0.2)]

    assert [hit.card.tool_id for hit in sort_hits(hits, "score")] == ["note", "mail"]
    assert [hit.card.tool_id for hit in sort_hits(hits, "date")] == ["note", "mail"]
    assert [hit.card.tool_id for hit in sort_hits(hits, "name")] == ["mail", "note"]
    with pytest.raises(InvalidRequest):
        sort_hits(hits, "magic")
