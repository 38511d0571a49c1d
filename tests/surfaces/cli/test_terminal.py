"""What is safe to show on a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
