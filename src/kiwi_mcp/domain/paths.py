"""Names and paths: one rule for what an author writes, what a folder holds and what comes from outside."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from unicodedata import normalize

MAX_PATH = 255
MAX_PATH_DEPTH = 16

_TOOL_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}", re.ASCII)
_NAMESPACE = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}", re.ASCII)
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.[^/]*)?", re.ASCII | re.IGNORECASE)
# Control characters, halves of characters, marks that turn the direction of text, and what some system forbids.
_UNSAFE = re.compile(r'[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\\:*?"<>|]')


def is_tool_id(text: str) -> bool:
    """Whether the text may name an item: ASCII, lower case, and no device of any system."""
    return _TOOL_ID.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def is_namespace(text: str) -> bool:
    """Whether the text may name a namespace: ASCII, lower case, and no device of any system."""
    return _NAMESPACE.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def is_safe_path(path: str) -> bool:
    """Whether the text is a relative POSIX path that stays below its folder on every system."""
    return 0 < len(path) <= MAX_PATH and _is_safe(path)


@lru_cache(maxsize=4_096)
def _is_safe(path: str) -> bool:
    # Remembered, as the same few names stand in thousands of versions.
    parts = path.split("/")
    return (
        len(parts) <= MAX_PATH_DEPTH
        and not path.startswith("~")
        and _UNSAFE.search(path) is None
        and all(_is_safe_part(part) for part in parts)
    )


def clashes(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each path that cannot stand beside another of them on every system, and that other one.

    Two paths clash if they are one and the same, differ only in case or in how letters are composed, or if one is a
    folder on the way to the other.
    """
    taken: dict[str, str] = {}
    for path in paths:
        if (folded := _folded(path)) in taken:
            yield path, taken[folded]
        else:
            taken[folded] = path
    for path in paths:
        folder = _folded(path)
        while folder := folder.rpartition("/")[0]:
            if folder in taken:
                yield path, taken[folder]


def _is_safe_part(part: str) -> bool:
    # An empty part is a leading, trailing or doubled slash; a trailing dot covers `.` and `..`.
    return (
        bool(part)
        and not part.endswith((".", " "))
        and not part.startswith(" ")
        and len(part.encode()) <= MAX_PATH
        and _DEVICE.fullmatch(part) is None
    )


def _folded(path: str) -> str:
    # Folding case may take a composed letter apart, so it is composed again.
    return normalize("NFC", normalize("NFC", path).casefold())
