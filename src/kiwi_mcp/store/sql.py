"""Placeholders, fragments, chunks, ids, and text that every database can store."""

from __future__ import annotations

from collections.abc import Sequence

from kiwi_mcp.store.database import Value

LONGEST = 2_000
"""The most that is kept of a text, in characters."""


def plain(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values of a row, with texts that every database can hold."""
    text = ""
    for value in values:
        if type(value) is str:
            text += value
    if text.isascii() and len(text) <= LONGEST and "\0" not in text:  # as the texts of most rows
        return values
    return [clean(value) if type(value) is str else value for value in values]


def id_range(wanted: str) -> tuple[str, str]:
    """Return the first id that begins with a text, and the first that comes after all of them."""
    start = clean(wanted.upper())
    return start, f"{start}["  # `[` comes after the last letter of an id


def clean(text: str) -> str:
    """Return a text as every database can hold it."""
    return text[:LONGEST].encode(errors="replace").decode().replace("\0", "\ufffd")
