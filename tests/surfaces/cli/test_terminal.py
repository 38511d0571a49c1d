"""Text that is safe to show on a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.safe_text import escape_controls
from kiwi_mcp.kernel.view import first_sentence
from kiwi_mcp.surfaces.cli.screen import fitted
from kiwi_mcp.surfaces.cli.session import progress_text


@pytest.mark.case("UNI-03")
@pytest.mark.parametrize(
    ("text", "safe"),
    [
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b]52;c;ZXZpbA==\x07", "\\x1b]52;c;ZXZpbA==\\x07"),
        ("\x1b]8;;http://evil.test\x1b\\click\x1b]8;;\x1b\\", "\\x1b]8;;http://evil.test\\x1b\\click\\x1b]8;;\\x1b\\"),
        ("\x9b31mred", "\\x9b31mred"),
        ("over\rwritten", "over\\x0dwritten"),
        ("a\u202eb", "a\\u{202e}b"),
        ("a\U000e0041b", "a\\u{e0041}b"),
        ("a\r\nb\tc", "a\nb\tc"),
        ("🥝 žluťoučký", "🥝 žluťoučký"),
    ],
)
def test_terminal_control_characters_are_escaped(text: str, safe: str) -> None:
    assert escape_controls(text) == safe


@given(st.text())
def test_no_shown_text_contains_a_control_character(text: str) -> None:
    written = escape_controls(text)
    assert all(unicodedata.category(character) != "Cc" for character in written if character not in "\n\t")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Read a file. Only within the roots.", "Read a file."),
        ("Read files, e.g. Word. More follows.", "Read files, e.g. Word."),
        ("Version 1.2 of it", "Version 1.2 of it"),
        ("One line\nand another", "One line"),
    ],
)
def test_a_description_is_shown_by_its_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@given(st.text(), st.integers(1, 200))
def test_a_line_fits_the_terminal_and_shows_that_it_was_cut(text: str, width: int) -> None:
    line = fitted(text, width)
    assert len(line) <= width
    assert line == text or line.endswith("…")


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (Progress("half", 2, 4), "half (2/4)"),
        (Progress("half"), "half"),
        (Progress("", 2, 4), "2/4"),
        (Progress("", 3), "3"),
        (Progress(""), ""),
    ],
)
def test_progress_is_shown_as_words_or_numbers_and_never_empty(step: Progress, line: str) -> None:
    assert progress_text(step) == line
