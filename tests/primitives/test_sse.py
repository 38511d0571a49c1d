from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.primitives.http.sse import LONGEST_LINE, Events, LineSplitter, ServerEvent

STREAM = (
    b"\xef\xbb\xbf: comment\r\nretry: 100\r\nevent: add\r\ndata: one\r\ndata:  two\r\nid: 7\r\n\r\n"
    b"data\rdata\r\rdata: \xc3\xbc\n\nretry: x\nnothing: y\n\nid: 8\n\ndata: last\n\ndata: cut off"
)
EVENTS = [
    ServerEvent("add", "one\n two", "7", 100),
    ServerEvent("message", "\n", "7"),
    ServerEvent("message", "ü", "7"),
    ServerEvent("message", "last", "8"),
]


def test_events_are_parsed_as_the_specification_says() -> None:
    assert list(Events().feed(STREAM)) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_chunk_boundaries_do_not_matter(cuts: list[int]) -> None:
    parser, edges = Events(), [0, *sorted(cuts), len(STREAM)]
    assert [e for a, b in pairwise(edges) for e in parser.feed(STREAM[a:b])] == EVENTS


def test_lines_end_with_cr_lf_or_both_and_the_last_may_have_no_line_end() -> None:
    lines = LineSplitter()
    assert [*lines.feed(b"a\r"), *lines.feed(b"\nb\n"), *lines.feed(b"c\rd\xff")] == ["a", "b", "c"]
    assert list(lines.finish()) == ["d\ufffd"]


def test_an_endless_line_is_refused_at_the_limit() -> None:
    lines = LineSplitter()
    assert list(lines.feed(b"x" * LONGEST_LINE)) == []
    with pytest.raises(TooLarge):
        list(lines.feed(b"x"))


def test_an_event_of_many_lines_is_refused_at_the_limit() -> None:
    with pytest.raises(TooLarge):
        list(Events().feed((b"data: " + b"x" * 100_000 + b"\n") * 41))
