"""Placeholders, fragments, chunks, ids, and text that every database can store."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.store.database import Value

LONGEST = 2_000
"""The most that is kept of a text, in characters."""


def plain(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values of a row, with texts that every database can hold."""
    # Nearly always all of it is plain, and that is seen at once.
    if _is_plain("".join([value for value in values if type(value) is str])):
        return values
    return [clean(value) if type(value) is str else value for value in values]


def clean(text: str) -> str:
    """Return a text as every database can hold it."""
    return text if _is_plain(text) else text[:LONGEST].encode(errors="replace").decode().replace("\0", "\ufffd")


def _is_plain(text: str) -> bool:
    return text.isascii() and "\0" not in text and len(text) <= LONGEST
