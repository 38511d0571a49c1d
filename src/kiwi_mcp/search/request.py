"""A request as it is searched for: its parts, the stems of each and how much they count, and what each means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice
from math import log
from string import ascii_lowercase, digits
from typing import Protocol

from kiwi_mcp.search.clauses import parts_of
from kiwi_mcp.search.frequency import weight_of
from kiwi_mcp.search.port import Card, Encoder, Floats
from kiwi_mcp.search.segment import Segment
from kiwi_mcp.search.words import COMMON, stem, words

MAX_QUERY = 4_000
MAX_WORDS = 64

_PREFIX, _TYPO = 0.7, 0.6
_MOST_EXPANSIONS = 16
_SHORTEST_PREFIX, _SHORTEST_TYPO = 3, 4


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
    vectors = encoder.encode(texts) if encoder and text.strip() else None
    whole, *parts = map(_counted, texts)
    # A part of a long request may hold words that are not searched for.
    known = [{word: count for word, count in part.items() if word in whole} for part in parts]
    return Request(text, texts, (whole, *known), vectors)


def terms_of(request: Request, pools: Sequence[Pool]) -> Mapping[str, Term]:
    """Return each word of a request with what it stands for among some cards, rarest first."""
    total = sum(pool.count for pool in pools)
    terms = [_term(word, pools, total) for word in request.counted[0]]
    return {term.word: term for term in sorted(terms, key=lambda term: (term.count, term.word))}


def _counted(text: str) -> Mapping[str, int]:
    written = words(text)
    said = Counter([word for word in written if word not in COMMON] or written)
    return dict(islice(said.items(), MAX_WORDS))


def _term(word: str, pools: Sequence[Pool], total: int) -> Term:
    stems = _meanings(word, pools)
    held = sum(pool.holding(found) for pool in pools for found in stems)
    rarity = log(1 + (max(total - held, 0) + 0.5) / (held + 0.5))
    return Term(word, stems, rarity * weight_of(word), held)


def _meanings(word: str, pools: Sequence[Pool]) -> Mapping[str, float]:
    """Return the stems a word stands for: itself, else words that begin so, else words one slip away."""
    root = stem(word)
    if any(pool.holding(root) for pool in pools):
        return {root: 1.0}
    segments = [segment for pool in pools for segment in pool.segments]
    if len(word) >= _SHORTEST_PREFIX:
        longer = {found for one in segments for found in one.beginning_with(word, _MOST_EXPANSIONS)}
        if longer:
            return dict.fromkeys(sorted(longer)[:_MOST_EXPANSIONS], _PREFIX)
    if len(word) < _SHORTEST_TYPO:
        return {}
    wrong = {*slips(word), *slips(root)}
    near = {found for segment in segments for found in segment.among(wrong)}
    return dict.fromkeys(sorted(near)[:_MOST_EXPANSIONS], _TYPO)


def slips(word: str) -> Iterator[str]:
    """Give every text one slip away: a letter lost, doubled, swapped or replaced."""
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        yield from (f"{head}{letter}{tail}" for letter in ascii_lowercase + digits)
        if tail:
            yield head + tail[1:]
            yield from (f"{head}{letter}{tail[1:]}" for letter in ascii_lowercase + digits)
        if len(tail) > 1:
            yield f"{head}{tail[1]}{tail[0]}{tail[2:]}"
