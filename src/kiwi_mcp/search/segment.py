"""A segment: some cards in arrays, made at once and never changed but for the vectors that arrive and cards that go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.sheet import SIZE, unpack_vectors, unpack_words

COARSE = 128
"""How many coordinates are compared with all cards; the few that are near are compared in full."""

Slots = NDArray[np.int32]


class Segment:
    """Cards with, for each stem, those that hold it and how much it says about each, and with their vectors."""

    def __init__(self, cards: Sequence[Card], packed: Sequence[bytes]) -> None:
        self.cards = tuple(cards)
        self.words = tuple(packed)
        self.is_alive = np.ones(len(cards), bool)
        self._ranges, self._slots, self._impacts = _postings(packed)
        self._packed = np.zeros((len(cards), SIZE), np.uint8)
        self._coarse = np.zeros((len(cards), COARSE), np.float32)
        self.is_encoded = np.zeros(len(cards), bool)
        self.dead = 0

    def postings(self, stem: str) -> tuple[Slots, Floats]:
        """Return the slots of the cards that hold a stem, ascending, and its impact on each."""
        begin, end = self._ranges.get(stem, (0, 0))
        return self._slots[begin:end], self._impacts[begin:end]

    def holding(self, stem: str) -> int:
        """Return how many cards hold a stem, those that are gone among them."""
        begin, end = self._ranges.get(stem, (0, 0))
        return end - begin

    def holds(self, stem: str, slot: int) -> bool:
        """Whether a card holds a stem."""
        slots, _ = self.postings(stem)
        place = int(np.searchsorted(slots, slot))
        return place < len(slots) and int(slots[place]) == slot

    def beginning_with(self, word: str, most: int) -> Sequence[str]:
        """Return some of the stems that begin so."""
        start = bisect_left(self._vocabulary, word)
        return [stem for stem in self._vocabulary[start : start + most] if stem.startswith(word)]

    def drop(self, slot: int) -> None:
        """Take a card out of every search."""
        if self.is_alive[slot]:
            self.is_alive[slot] = False
            self.dead += 1

    def put_vectors(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Add the vectors of some cards."""
        where = np.asarray(slots, np.int32)
        joined = b"".join(packed)
        self._packed[where] = np.frombuffer(joined, np.uint8).reshape(-1, SIZE)
        self._coarse[where] = unpack_vectors(joined)[:, :COARSE]
        self.is_encoded[where] = True

    def packed_vector(self, slot: int) -> bytes:
        """Return the vector of a card as it is kept."""
        return self._packed[slot].tobytes()

    def nearness(self, requests: Floats) -> Floats:
        """Return, for each request and each card, nearly how near they are, from the coordinates that say most."""
        return requests[:, :COARSE] @ self._coarse.T

    def exact_nearness(self, requests: Floats, slots: Slots) -> Floats:
        """Return how near some cards are to each request."""
        return requests @ unpack_vectors(self._packed[slots].tobytes()).T

    @cached_property
    def _vocabulary(self) -> Sequence[str]:
        return sorted(self._ranges)


def merge(segments: Sequence[Segment]) -> Segment:
    """Return one segment with the cards of several that are not gone."""
    rows = [(one, int(slot)) for one in segments for slot in one.is_alive.nonzero()[0]]
    merged = Segment([one.cards[slot] for one, slot in rows], [one.words[slot] for one, slot in rows])
    encoded = [place for place, (one, slot) in enumerate(rows) if one.is_encoded[slot]]
    if encoded:
        merged.put_vectors(encoded, [rows[place][0].packed_vector(rows[place][1]) for place in encoded])
    return merged


def _postings(packed: Iterable[bytes]) -> tuple[Mapping[str, tuple[int, int]], Slots, Floats]:
    sheets = [unpack_words(one) for one in packed]
    numbers: dict[str, int] = {}
    counts = np.fromiter((len(stems) for stems, _ in sheets), np.int32, len(sheets))
    every = chain.from_iterable(stems for stems, _ in sheets)
    numbered = np.fromiter((numbers.setdefault(stem, len(numbers)) for stem in every), np.int32, int(counts.sum()))
    order = np.argsort(numbered, kind="stable")
    slots = np.repeat(np.arange(len(sheets), dtype=np.int32), counts)[order]
    impacts = np.concatenate([impacts for _, impacts in sheets] or [np.zeros(0, np.float32)])[order]
    ends = np.cumsum(np.bincount(numbered, minlength=len(numbers))).tolist()
    return dict(zip(numbers, zip([0, *ends], ends, strict=False), strict=True)), slots, impacts
