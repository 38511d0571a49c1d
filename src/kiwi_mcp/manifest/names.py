"""Hints for misspelled words, and short names of items."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the nearest known word, or nothing where none is near."""
    spelled = {name.lower(): name for name in sorted(known)}
    near = difflib.get_close_matches(word.lower()[:100], spelled, n=1, cutoff=0.6)
    return f"Did you mean `{spelled[near[0]]}`? " if near else ""


def use_one_of(word: str, known: Collection[str]) -> str:
    """Return a fix that names every known word, and first the nearest one."""
    return f"{did_you_mean(word, known)}Use one of: {', '.join(known)}."


def short(reference: str) -> str:
    """Return the short name in a reference to an item, without its namespace and version."""
    return reference.rpartition("/")[2].partition("@")[0]
