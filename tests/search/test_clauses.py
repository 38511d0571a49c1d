"""Parts of a request: as many as there are things asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.search.clauses import MOST, parts_of


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (
            "Find the weather in Paris. Send it to my boss by mail.",
            ["Find the weather in Paris", "Send it to my boss by mail"],
        ),
        ("read the file; translate the text", ["read the file", "translate the text"]),
        ("list my open issues and send them to Ann", ["list my open issues", "send them to Ann"]),
        ("book a room for two, then invite the whole team", ["book a room for two", "invite the whole team"]),
        ("weather in Paris and London", []),
        ("send mail", []),
        ("", []),
    ],
)
def test_a_request_for_several_things_has_a_part_for_each(request_: str, parts: list[str]) -> None:
    assert [*parts_of(request_)] == parts


@given(st.text(max_size=200) | st.lists(st.sampled_from(["do it now", ". ", ", and ", "; "]), max_size=80).map("".join))
def test_parts_are_few_and_each_is_a_piece_of_the_request(text: str) -> None:
    parts = parts_of(text)

    assert len(parts) <= MOST
    assert len(parts) != 1
    assert all(part in text for part in parts)
