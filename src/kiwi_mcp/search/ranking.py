"""Ranking: what a request says and what it means, held against cards; best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.search.port import Card, Floats, Hit, Why
from kiwi_mcp.search.request import Pool, Request, Term, terms_of
from kiwi_mcp.search.segment import Segment, Slots
from kiwi_mcp.search.words import stem, words

_WHOLE_WORDS, _WHOLE_MEANING = 0.67, 0.5
"""How much the whole of a request counts against the best of its parts."""
_MEANING, _NAME = 1.8, 0.15
"""How much meaning, and the share of a name that was said, count against words."""
_SURE, _LEAST_SURE = 0.4, 0.3
"""Words count in full where the best card holds so much of a request, and never less than so."""
_NEAR = 0.3
"""From how near on a card is found by its meaning alone."""
_SHORTLIST = 300
_MOST_POSTINGS = 400_000
_LEAST, _BEST_INEXACT = 1e-6, 0.99


class Ranked(NamedTuple):
    """The best hits, and how many there are in all."""

    hits: Sequence[Hit]
    total: int


@dataclass(frozen=True, slots=True)
class _Said:
    """What words say of the cards of a segment: a row for the whole request, and one for each part."""

    segment: Segment
    rows: Floats


@dataclass(frozen=True, slots=True)
class _Scale:
    """What words are measured by: the most that any card holds of the whole, of a part, and how sure that makes."""

    whole: float
    part: float
    sureness: float


@dataclass(frozen=True, slots=True)
class _Found:
    """A card among the best, the part of the request it answers, and how near it is in meaning."""

    score: float
    segment: Segment
    slot: int
    part: int
    meaning: float

    @property
    def card(self) -> Card:
        return self.segment.cards[self.slot]


def rank(request: Request, pools: Sequence[Pool], *, limit: int, keeps: Callable[[Card], bool] | None = None) -> Ranked:
    """Return the cards that match, best first; those that do not match, or are not to be kept, are left out."""
    terms = terms_of(request, pools)
    said = [_said(request, terms, segment) for pool in pools for segment in pool.segments if segment.cards]
    scale = _scale(request, terms, said)
    best = [_best(request, one, scale, max(limit, _SHORTLIST), keeps) for one in said]
    exact = [card for card in _exact(request.text, pools) if keeps is None or keeps(card)]
    named = {(card.identity, card.path) for card in exact}
    inexact = [one for found, _ in best for one in found if (one.card.identity, one.card.path) not in named]
    hits = [Hit(card, 1.0, Why(tuple(request.counted[0]), is_exact=True)) for card in exact]
    places = nsmallest(max(limit, 0), inexact, key=lambda one: _order(one.score, one.card))
    ranked = [*hits, *(_hit(one, request, terms) for one in places)]
    total = max(sum(count for _, count in best), len(exact))
    return Ranked(sorted(ranked, key=lambda hit: _order(hit.score, hit.card))[: max(limit, 0)], total)


def _said(request: Request, terms: Mapping[str, Term], segment: Segment) -> _Said:
    rows = np.zeros((len(request.texts), len(segment.cards)), np.float32)
    room = _MOST_POSTINGS
    for term in terms.values():
        # A word that is everywhere says little and costs much; it counts only where nothing rarer was found.
        if room < _MOST_POSTINGS and term.count > room:
            break
        room -= term.count
        for found, share in term.stems.items():
            slots, impacts = segment.postings(found)
            if len(slots):
                gained = impacts * np.float32(share * term.rarity)
                for row, counted in zip(rows, request.counted, strict=True):
                    if count := counted.get(term.word, 0):
                        row[slots] += gained * np.float32(_weight(count))
    rows[:, ~segment.is_alive] = 0
    return _Said(segment, rows)


def _scale(request: Request, terms: Mapping[str, Term], said: Sequence[_Said]) -> _Scale:
    most = np.max([one.rows.max(axis=1) for one in said], axis=0) if said else np.zeros(len(request.texts))
    full = [sum(terms[word].rarity * _weight(count) for word, count in counted.items()) for counted in request.counted]
    sure = max(float(most[row]) / max(full[row], _LEAST) for row in range(len(full)))
    return _Scale(
        max(float(most[0]), _LEAST),
        max(float(most[1:].max()) if len(most) > 1 else 0.0, _LEAST),
        min(1.0, max(_LEAST_SURE, sure / _SURE)),
    )


def _best(
    request: Request, said: _Said, scale: _Scale, size: int, keeps: Callable[[Card], bool] | None
) -> tuple[Sequence[_Found], int]:
    """Return the cards of a segment that match best, and how many match."""
    segment = said.segment
    by_words = _joined(said.rows[0] / scale.whole, said.rows[1:] / scale.part, _WHOLE_WORDS)
    near = segment.nearness(request.vectors) if request.vectors is not None else None
    by_meaning = _joined(near[0], near[1:], _WHOLE_MEANING) if near is not None else np.zeros_like(by_words)
    matches = ((by_words > 0) | (by_meaning >= _NEAR)) & segment.is_alive
    if keeps is not None:
        for slot in matches.nonzero()[0].tolist():
            matches[slot] = keeps(segment.cards[slot])
    (slots,) = matches.nonzero()
    rough = by_words[slots] * scale.sureness + _MEANING * by_meaning[slots]
    if len(slots) > size:
        slots = slots[np.argpartition(-rough, size - 1)[:size]]
    return [*_exactly(request, said, scale, slots.astype(np.int32), by_words[slots])], int(matches.sum())


def _exactly(request: Request, said: _Said, scale: _Scale, slots: Slots, by_words: Floats) -> Iterator[_Found]:
    """Give cards with their exact score."""
    near = _nearness(request, said.segment, slots)
    by_meaning = _joined(near[0], near[1:], _WHOLE_MEANING)
    parts = said.rows[1:, slots] * np.float32(scale.sureness / scale.part) + _MEANING * near[1:]
    answered = parts.argmax(axis=0) + 1 if len(parts) else np.zeros(len(slots), int)
    most = 1 + _NAME + (_MEANING if request.vectors is not None else 0)
    asked = request.stems
    for place, slot in enumerate(slots.tolist()):
        own = {stem(word) for word in words(said.segment.cards[slot].tool_id)}
        named = len(own & asked) / max(len(own), 1)
        raw = by_words[place] * scale.sureness + _MEANING * by_meaning[place] + _NAME * named
        score = min(max(round(float(raw) / most, 6), _LEAST), _BEST_INEXACT)
        yield _Found(score, said.segment, slot, int(answered[place]), max(0.0, float(near[:, place].max())))


def _nearness(request: Request, segment: Segment, slots: Slots) -> Floats:
    if request.vectors is None:
        return np.zeros((len(request.texts), len(slots)), np.float32)
    return segment.exact_nearness(request.vectors, slots)


def _joined(whole: Floats, parts: Floats, share: float) -> Floats:
    return np.float32(share) * whole + np.float32(1 - share) * parts.max(axis=0) if len(parts) else whole


def _weight(count: int) -> float:
    return 1 + log(count)


def _exact(text: str, pools: Sequence[Pool]) -> Iterator[Card]:
    wanted = text.strip()
    for pool in pools:
        for card in pool.named(wanted.rpartition("/")[2].partition("@")[0]):
            if wanted in {card.tool_id, card.identity, card.identity.partition("@")[0]}:
                yield card


def _hit(found: _Found, request: Request, terms: Mapping[str, Term]) -> Hit:
    held = tuple(
        term.word for term in terms.values() if any(found.segment.holds(one, found.slot) for one in term.stems)
    )
    part = request.texts[found.part] if found.part else ""
    return Hit(found.card, found.score, Why(held, part, round(found.meaning, 4)))


def _order(score: float, card: Card) -> tuple[float, bool, str, str, str]:
    return (-score, card.source != "builtin", card.tool_id, card.identity, card.path)
