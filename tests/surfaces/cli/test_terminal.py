"""What is safe to show on a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.surfaces.cli.progress import _line
from kiwi_mcp.surfaces.cli.screen import first_sentence, fitted
from kiwi_mcp.surfaces.cli.terminal import shown


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
def test_what_a_terminal_would_act_on_is_written_as_its_code(text: str, safe: str) -> None:
    assert shown(text) == safe


@given(st.text())
def test_nothing_that_is_shown_is_a_control_character(text: str) -> None:
    assert all(unicodedata.category(character) != "Cc" for character in shown(text) if character not in "\n\t")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Read a file. Only within the roots.", "Read a file."),
        ("Read files, e.g. Word. More follows.", "Read files, e.g. Word."),
        ("Version 1.2 of it", "Version 1.2 of it"),
        ("One line\nand another", "One line"),
    ],
)
def test_a_description_is_told_by_its_first_sentence(text: str, sentence: str) -> None:
    assert first_sentence(text) == sentence


@given(st.text(), st.integers(1, 200))
def test_a_line_fits_its_terminal_and_shows_that_it_was_cut(text: str, width: int) -> None:
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
def test_progress_is_told_in_words_or_in_numbers_and_never_empty(step: Progress, line: str) -> None:
    assert _line(step) == line
