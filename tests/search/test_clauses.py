"""Parts of a request: one for each requested thing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.search.query import MAX_CLAUSES, split_clauses


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
        ("shrink a photo and turn euros into dollars", ["shrink a photo", "turn euros into dollars"]),
        ("resize a photo and convert currencies", ["resize a photo", "convert currencies"]),
        (
            "resize a picture, rename a file, and take a screenshot",
            ["resize a picture", "rename a file", "take a screenshot"],
        ),
        ("weather in Paris and London", []),
        ("flights to New York and London in May", []),
        ("search and replace text in a file", []),
        ("read and write files to a disk", []),
        ("make a photo black and white with a filter", []),
        ("send mail", []),
        ("", []),
    ],
)
def test_a_request_for_several_things_has_a_part_for_each(request_: str, parts: list[str]) -> None:
    assert [*split_clauses(request_)] == parts


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        ("1. resize a picture 2. rename a file 3. go home", ["resize a picture", "rename a file", "go home"]),
        ("Please: (1) resize a picture (2) rename a file", ["resize a picture", "rename a file"]),
        ("1. resize a picture\n2. go home", ["resize a picture", "go home"]),
        ("I have version 2. Send it to all", ["I have version 2", "Send it to all"]),
        ("wait until July 1. Then call all of them", ["wait until July 1", "Then call all of them"]),
    ],
)
def test_text_numbered_from_one_is_a_list(request_: str, parts: list[str]) -> None:
    assert [*split_clauses(request_)] == parts


@given(
    st.text(max_size=200)
    | st.lists(st.sampled_from(["do it now", ". ", ", and ", "; ", ", add it", " 1. ", " 2. "]), max_size=80).map(
        "".join
    )
)
def test_parts_are_few_and_substrings_of_the_request(text: str) -> None:
    parts = split_clauses(text)

    assert len(parts) <= MAX_CLAUSES
    assert len(parts) != 1
    assert all(part in " ".join(text.split()) for part in parts)
