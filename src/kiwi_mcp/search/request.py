"""A request as it is searched for: its parts, the stems of each and how much they count, and what each means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from kiwi_mcp.search.clauses import parts_of
from kiwi_mcp.search.frequency import weight_of
from kiwi_mcp.search.lexicon import meanings_of, rarity_of
from kiwi_mcp.search.port import Card, Encoder, Floats
from kiwi_mcp.search.segment import Segment
from kiwi_mcp.search.words import COMMON, stem, words

MAX_QUERY = 4_000
MAX_WORDS = 64


class Pool(Protocol):
    """Cards to search, in segments, and how many of all cards hold a stem: a pool may show only the likely ones."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The cards."""

    @property
    def count(self) -> int:
        """How many cards there are in all."""

    def holding(self, stem: str) -> int:
        """Return how many of all cards hold a stem."""

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that any card holds."""

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards of a name."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: first the whole, then its parts, if there are several."""

    text: str
    texts: tuple[str, ...]
    counted: tuple[Mapping[str, int], ...]
    """The words of each that say something, as written, and how often."""
    vectors: Floats | None
    """What each means, where an encoder could tell."""

    @property
    def stems(self) -> AbstractSet[str]:
        """The stems of the whole."""
        return {stem(word) for word in self.counted[0]}


@dataclass(frozen=True, slots=True)
class Term:
    """One word of a request: the stems it stands for here, and how much it counts."""

    word: str
    stems: Mapping[str, float]
    rarity: float
    count: int
    """How many cards hold it."""


def read_request(text: str, encoder: Encoder | None) -> Request:
    """Return a request, read; what is beyond any need is cut off."""
    text = text[:MAX_QUERY]
    texts = (text, *parts_of(text))
    vectors = _meant(texts, encoder) if encoder and text.strip() else None
    whole, *parts = map(_counted, texts)
    # A part of a long request may hold words that are not searched for.
    known = [{word: count for word, count in part.items() if word in whole} for part in parts]
    return Request(text, texts, (whole, *known), vectors)


def terms_of(request: Request, pools: Sequence[Pool]) -> Mapping[str, Term]:
    """Return each word of a request with what it stands for among some cards, rarest first."""
    total = sum(pool.count for pool in pools)
    meanings = meanings_of(request.counted[0], _Words(pools))
    terms = [_term(word, stems, pools, total) for word, stems in meanings.items()]
    return {term.word: term for term in sorted(terms, key=lambda term: (term.count, term.word))}


def _counted(text: str) -> Mapping[str, int]:
    written = words(text)
    said = Counter([word for word in written if word not in COMMON] or written)
    return dict(islice(said.items(), MAX_WORDS))


class _Words:
    """The words of some pools."""

    def __init__(self, pools: Sequence[Pool]) -> None:
        self._pools = pools

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        return {found for pool in self._pools for found in pool.among(stems)}

    def beginning_with(self, word: str, most: int) -> AbstractSet[str]:
        segments = [segment for pool in self._pools for segment in pool.segments]
        return {found for segment in segments for found in segment.beginning_with(word, most)}


def _term(word: str, stems: Mapping[str, float], pools: Sequence[Pool], total: int) -> Term:
    held = sum(pool.holding(found) for pool in pools for found in stems)
    return Term(word, stems, rarity_of(held, total) * weight_of(word), held)


def _meant(texts: Sequence[str], encoder: Encoder) -> Floats:
    vectors = encoder.encode(texts)
    if not np.isfinite(vectors).all():
        raise ValueError("the encoder gives no vectors")
    return vectors
