"""Text from outside without what could control a terminal or hide from its reader."""

from __future__ import annotations

import re

from kiwi_mcp.domain.patterns import lazy_pattern

_UNSEEN = (
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb"
    r"\U000e0000-\U000e0fff]"
)
"""Characters that control a terminal, change the direction of writing, or are invisible to people but not to models."""
_CONTROL = lazy_pattern(_UNSEEN)
# Sequences that move a terminal's cursor, set its title or its colour, then every other character that is not visible.
_SEQUENCE = lazy_pattern(rf"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-_])|{_UNSEEN}")


def strip_controls(text: str) -> str:
    """Return a text without terminal sequences, control characters and invisible characters."""
    return _SEQUENCE.sub("", text)


def escape_controls(text: str) -> str:
    """Return a text in which control characters and invisible characters are written as their codes."""
    if text.isascii() and text.isprintable():  # as most lines are, and compiling the pattern takes a while
        return text
    return _CONTROL.sub(_code, text.replace("\r\n", "\n"))


class StreamEscaper:
    """Escapes a text that arrives in pieces, as `escape_controls` does with the whole."""

    def __init__(self) -> None:
        self._end = ""

    def feed(self, piece: str) -> str:
        """Return what can be shown so far; a carriage return waits for the character behind it."""
        text = self._end + piece
        self._end = "\r" if text.endswith("\r") else ""
        return escape_controls(text.removesuffix("\r") if self._end else text)

    def finish(self) -> str:
        """Return the rest."""
        rest, self._end = self._end, ""
        return escape_controls(rest)


def _code(found: re.Match[str]) -> str:
    point = ord(found[0])
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{{{point:x}}}"  # noqa: PLR2004 - one byte
