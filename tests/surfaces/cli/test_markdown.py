"""Markdown that is rendered while it streams, and the escaping of pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.safe_text import StreamEscaper, escape_controls
from kiwi_mcp.surfaces.cli.thread_screen import MarkdownStream

B, D, C, R = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[0m"
TEXTS = st.text(alphabet="ab *`#->~\n\r\x1b[", max_size=60)


def rendered(text: str, size: int) -> str:
    stream = MarkdownStream()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return "".join(map(stream.feed, pieces)) + stream.finish()


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ntext", "plain\ntext"),
        ("## A title\nmore", f"{B}A title{R}\nmore"),
        ("- one\n* two\n  + three", "• one\n• two\n  • three"),
        ("1. one\n2. two", "1. one\n2. two"),
        ("> said **loudly** so", f"{D}│ said {B}loudly{R}{D} so{R}"),
        ("a **bold** and `code`.", f"a {B}bold{R} and {C}code{R}."),
        ("**bold** first", f"{B}bold{R} first"),
        ("2**3 is 8, `open", "2**3 is 8, `open"),
        ("#no title, -1", "#no title, -1"),
        (
            "```python\nx = '**a**'\n# no\n```\n**b**",
            f"{D}```python{R}\n{C}x = '**a**'{R}\n{C}# no{R}\n{D}```{R}\n{B}b{R}",
        ),
        ("---\n", "---\n"),
        ("- \n", "• \n"),
    ],
)
def test_markdown_is_shown_alike_in_pieces_of_any_size(text: str, shown: str, size: int) -> None:
    assert rendered(text, size) == shown


@given(TEXTS, st.integers(1, 5))
def test_the_size_of_the_pieces_changes_nothing_that_is_shown(text: str, size: int) -> None:
    assert _plain(rendered(text, size)) == _plain(rendered(text, 1000))


@given(st.text(alphabet="ab \n.,", max_size=60))
def test_plain_text_is_shown_at_once(text: str) -> None:
    stream = MarkdownStream()
    shown = "".join(map(stream.feed, text))
    assert shown.rstrip() == text.rstrip()


@given(st.text(), st.integers(1, 4))
def test_pieces_are_escaped_as_the_whole_is(text: str, size: int) -> None:
    escaper = StreamEscaper()
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    shown = "".join(map(escaper.feed, pieces)) + escaper.finish()
    assert shown == escape_controls(text)
    assert "\x1b" not in shown


def test_a_sequence_that_is_split_over_pieces_is_escaped() -> None:
    escaper = StreamEscaper()
    shown = [escaper.feed(piece) for piece in ("a\x1b", "]0;ti", "tle\x07b\r", "\nc\r", "d")]
    assert "".join(shown) == "a\\x1b]0;title\\x07b\nc\\x0dd"


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[\d*m", "", text)
