"""Sheets: what a search has worked out of the text of one item."""

from __future__ import annotations

from typing import NamedTuple


class Kept(NamedTuple):
    """What is kept of a card's text: its words with their impacts, and its vector (empty until it is encoded)."""

    words: bytes
    vector: bytes
