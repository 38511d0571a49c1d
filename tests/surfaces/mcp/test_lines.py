from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.surfaces.mcp.handshake import OVERLONG, LineBuffer


def taken(lines: LineBuffer) -> list[bytes]:
    found = []
    while (line := lines.take()) is not None:
        found.append(line)
    return found


def fed(data: bytes, cuts: list[int], limit: int) -> list[bytes]:
    """The lines of a stream that arrives in pieces."""
    lines, found, start = LineBuffer(limit), list[bytes](), 0
    for cut in [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]:
        if cut > start:
            lines.feed(data[start:cut])
            start = cut
            found += taken(lines)
    lines.feed(b"")
    found += taken(lines)
    assert lines.is_ended
    return found


def expected(data: bytes, limit: int) -> list[bytes]:
    *whole, last = data.split(b"\n")
    return [OVERLONG if len(line) > limit else line for line in [*whole, *([last] if last else [])]]


@given(st.lists(st.sampled_from([b"a", b"bc", b"\n", b"\r\n", b"long line"])), st.lists(st.integers(0, 400)))
@settings(deadline=None, max_examples=60)
def test_chunk_boundaries_never_change_lines(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    assert fed(data, cuts, limit=12) == expected(data, limit=12)


def test_an_overlong_line_is_reported_once_and_the_next_line_is_whole() -> None:
    lines = LineBuffer(limit=10)
    for _ in range(5):
        lines.feed(b"x" * 8)
    assert taken(lines) == [OVERLONG]
    lines.feed(b"tail\nnext\n")
    assert taken(lines) == [b"next"]


def test_a_line_that_was_pushed_back_comes_first() -> None:
    lines = LineBuffer()
    lines.feed(b"one\ntwo\nthr")
    first = lines.take()
    assert first == b"one"
    lines.push_back(first)
    assert taken(lines) == [b"one", b"two"]
    assert not lines.is_ended


def test_an_overlong_line_that_was_pushed_back_is_still_reported() -> None:
    lines = LineBuffer(limit=4)
    lines.feed(b"much too long\n")
    first = lines.take()
    assert first is OVERLONG
    lines.push_back(first)
    lines.feed(b"")
    assert not lines.is_ended
    assert lines.take() is OVERLONG
    assert lines.is_ended
