"""What is safe to show on a terminal."""

from __future__ import annotations

import re

# Everything a terminal would act on instead of show: control characters but for tab and newline, the C1 range, and the
# invisible characters that turn or hide text.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\U000e0000-\U000e007f]")


def shown(text: str) -> str:
    """Return text in which nothing acts on the terminal; what would is written as its code."""
    return _UNSAFE.sub(_code, text.replace("\r\n", "\n"))


def _code(found: re.Match[str]) -> str:
    point = ord(found[0])
    return f"\\x{point:02x}" if point < 0x100 else f"\\u{{{point:x}}}"  # noqa: PLR2004 - one byte
