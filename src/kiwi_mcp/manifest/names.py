"""Which names and paths an item may have: one rule for create, load, search and run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_TOOL_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,127}", re.ASCII)
_DEVICE = re.compile(r"(?:con|prn|aux|nul|com[0-9]|lpt[0-9])(?:\.[^/]*)?", re.ASCII | re.IGNORECASE)
_UNSAFE = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]')

MAX_PATH = 255
MAX_PATH_DEPTH = 16


def is_tool_id(text: str) -> bool:
    """Whether the text may name an item: ASCII, lower case, and no device of any system."""
    return _TOOL_ID.fullmatch(text) is not None and _DEVICE.fullmatch(text) is None


def is_safe_path(path: str) -> bool:
    """Whether the text is a relative POSIX path that stays below its folder on every system."""
    parts = path.split("/")
    return (
        0 < len(path) <= MAX_PATH
        and len(parts) <= MAX_PATH_DEPTH
        and not path.startswith("~")
        and _UNSAFE.search(path) is None
        and all(_is_safe_part(part) for part in parts)
    )


def _is_safe_part(part: str) -> bool:
    # An empty part is a leading, trailing or doubled slash; a trailing dot covers `.` and `..`.
    return bool(part) and not part.endswith((".", " ")) and not part.startswith(" ") and _DEVICE.fullmatch(part) is None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known word, or nothing where none is near."""
    spelled = {name.lower(): name for name in sorted(known)}
    near = get_close_matches(word.lower()[:100], spelled, n=1, cutoff=0.6)
    return f"Did you mean `{spelled[near[0]]}`? " if near else ""
