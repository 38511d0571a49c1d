"""What differs between two sides of some changes, for a person to read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from difflib import unified_diff

from kiwi_mcp.kernel.checkpoints.record import Change, shown
from kiwi_mcp.kernel.checkpoints.tree import Entry

_LARGEST = 100_000
"""The largest content that is compared line by line, in bytes."""
_MOST = 60_000
"""How long a diff is at the most, in characters."""


def differences(listed: Sequence[Change], contents: Mapping[str, bytes]) -> str:
    """Return one text that shows every change, cut where it is long."""
    text = ""
    for place, change in enumerate(listed):
        text += _one(change, contents)
        if len(text) > _MOST:
            return f"{text[:_MOST]}\n… and {len(listed) - place - 1} more paths\n"
    return text


def _one(change: Change, contents: Mapping[str, bytes]) -> str:
    path = shown(change.path)
    before, after = (path if entry else "/dev/null" for entry in (change.before, change.after))
    lines = [_lines(entry, contents) for entry in (change.before, change.after)]
    if lines[0] is None or lines[1] is None:
        return f"{path}: not text, or long; {_size(change.before)} → {_size(change.after)}\n"
    found = "".join(unified_diff(lines[0], lines[1], before, after))
    if change.before and change.after and change.before.mode != change.after.mode:
        found = f"{path}: mode {change.before.mode:o} → {change.after.mode:o}\n{found}"
    return found or f"{path}: {_size(change.before)} → {_size(change.after)}\n"


def _lines(entry: Entry | None, contents: Mapping[str, bytes]) -> list[str] | None:
    if entry is None:
        return []
    data = contents.get(entry.id)
    if data is None or len(data) > _LARGEST or b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    kept = [line if line.isprintable() else json.dumps(line, ensure_ascii=False)[1:-1] for line in text.split("\n")]
    last = kept.pop()
    return [*(f"{line}\n" for line in kept), *([f"{last}\n\\ no newline at the end\n"] if last else [])]


def _size(entry: Entry | None) -> str:
    return "nothing" if entry is None else f"{entry.size:,} bytes"
