"""Keyword search: the words of a need against the words of cards, rare words first, small mistakes forgiven."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from itertools import islice
from math import log
from string import ascii_lowercase, digits

from kiwi_mcp.search.port import Card, Hit
from kiwi_mcp.search.postings import Postings, impacts
from kiwi_mcp.search.words import COMMON, stem, words

MAX_QUERY = 4_000
MAX_WORDS = 64

_SHORTLIST = 100
_NAME_SHARE = 0.15
_LEAST, _BEST_INEXACT = 1e-6, 0.99
_PREFIX, _TYPO = 0.7, 0.6
_MOST_EXPANSIONS = 16
_MOST_POSTINGS = 16_000


@dataclass(frozen=True, slots=True)
class _Term:
    """One word of a query: as written, the stems it stands for here, and how much it counts."""

    word: str
    stems: Mapping[str, float]
    weight: float
    count: int
    """How many cards hold it."""


class Keywords:
    """Ranks cards by the words they share with a query. Cards are indexed once and followed as they change."""

    def __init__(self) -> None:
        self._cards: Sequence[Card] = ()
        self._named: dict[str, list[Card]] = {}
        self._postings = Postings()

    def rank(self, query: str, cards: Sequence[Card], *, limit: int) -> Sequence[Hit]:
        """Return the cards that match, best first; an equal score puts built-in items first, then goes by name."""
        if cards is not self._cards or isinstance(cards, list):  # a list may have changed under the same name
            self._follow(cards)
        query = query[:MAX_QUERY]
        terms = self._terms(query)
        exact = {(card.identity, card.path): (1.0, card) for card in self._exact(query)}
        best = self._best(terms, max(limit, _SHORTLIST))
        found = [one for one in best if (one[1].identity, one[1].path) not in exact] if exact else best
        held = partial(_why, query, terms)
        ranked = sorted((*exact.values(), *found), key=_order)
        return [Hit(card, score, held) for score, card in ranked[: max(limit, 0)]]

    def _follow(self, cards: Sequence[Card]) -> None:
        if self._postings.is_worn:
            self._postings = Postings()
        self._postings.follow(cards)
        self._cards, self._named = cards, {}
        for card in cards:
            self._named.setdefault(card.tool_id, []).append(card)

    def _terms(self, query: str) -> Sequence[_Term]:
        """Return the words that count, rarest first."""
        written = words(query)
        counted = Counter([word for word in written if word not in COMMON] or written)
        terms = [self._term(word, count) for word, count in islice(counted.items(), MAX_WORDS)]
        return sorted(terms, key=lambda term: (term.count, term.word))

    def _term(self, word: str, count: int) -> _Term:
        stems = self._meanings(word)
        held = sum(self._postings.by_stem[found].count for found in stems)
        total = len(self._postings.cards)
        rarity = log(1 + (max(total - held, 0) + 0.5) / (held + 0.5))
        return _Term(word, stems, (1 + log(count)) * rarity, held)

    def _meanings(self, word: str) -> Mapping[str, float]:
        """Return the stems a word stands for: itself, else words that begin so, else words one slip away."""
        index, root = self._postings.by_stem, stem(word)
        if root in index and index[root].count:
            return {root: 1.0}
        if longer := self._beginning_with(word):
            return dict.fromkeys(longer, _PREFIX)
        near = {slip for slip in {*_slips(word), *_slips(root)} if slip in index and index[slip].count}
        return dict.fromkeys(sorted(near)[:_MOST_EXPANSIONS], _TYPO)

    def _beginning_with(self, word: str) -> Sequence[str]:
        if len(word) < 3:  # noqa: PLR2004 - two letters begin almost anything
            return ()
        vocabulary = self._postings.vocabulary()
        start = bisect_left(vocabulary, word)
        return [found for found in vocabulary[start : start + _MOST_EXPANSIONS] if found.startswith(word)]

    def _best(self, terms: Sequence[_Term], size: int) -> Iterator[tuple[float, Card]]:
        cards, scores = self._postings.cards, self._scores(terms)
        best = nlargest(size, [(score, slot) for slot, score in scores.items() if slot in cards])
        asked = {found for term in terms for found in term.stems}
        for place, (score, slot) in enumerate(best):
            # A name that is asked for lifts a card among the best; it makes no card one of them.
            named = _share(cards[slot].tool_id, asked) * best[0][0] if place < _SHORTLIST else 0.0
            total = (score + _NAME_SHARE * named) / (1 + _NAME_SHARE)
            yield min(round(total, 6) or _LEAST, _BEST_INEXACT), cards[slot]

    def _scores(self, terms: Sequence[_Term]) -> Mapping[int, float]:
        scores: dict[int, float] = {}
        whole, room = sum(term.weight for term in terms), _MOST_POSTINGS
        for term in terms:
            # A word that is everywhere says little and costs much; it counts only where nothing rarer was found.
            if scores and term.count > room:
                break
            room -= term.count
            for found, share in term.stems.items():
                posting, factor = self._postings.by_stem[found], share * term.weight / whole
                for slot, impact in zip(posting.slots, posting.impacts, strict=True):
                    scores[slot] = scores.get(slot, 0.0) + factor * impact
        return scores

    def _exact(self, query: str) -> Iterator[Card]:
        wanted = query.strip()
        for card in self._named.get(wanted.rpartition("/")[2].partition("@")[0], ()):
            if wanted in {card.tool_id, card.identity, card.identity.partition("@")[0]}:
                yield card


def _share(name: str, asked: AbstractSet[str]) -> float:
    own = {stem(word) for word in words(name)}
    return len(own & asked) / max(len(own), 1)


def _why(query: str, terms: Sequence[_Term], card: Card) -> tuple[str, ...]:
    held = impacts(card).keys()
    return tuple(term.word for term in terms if held & term.stems.keys()) or (query,)


def _order(found: tuple[float, Card]) -> tuple[float, bool, str, str, str]:
    score, card = found
    return (-score, card.source != "builtin", card.tool_id, card.identity, card.path)


def _slips(word: str) -> Iterator[str]:
    """Give every text one slip away: a letter lost, doubled, swapped or replaced."""
    if len(word) < 4:  # noqa: PLR2004 - short words are all near each other
        return
    for at in range(len(word) + 1):
        head, tail = word[:at], word[at:]
        yield from (f"{head}{letter}{tail}" for letter in ascii_lowercase + digits)
        if tail:
            yield head + tail[1:]
            yield from (f"{head}{letter}{tail[1:]}" for letter in ascii_lowercase + digits)
        if len(tail) > 1:
            yield f"{head}{tail[1]}{tail[0]}{tail[2:]}"
