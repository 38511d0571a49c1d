"""Ranking: a request held against cards; those that match, best first, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kiwi_mcp.search.memory import Recall
from kiwi_mcp.search.port import Card, Floats, Hit, Why
from kiwi_mcp.search.request import Pool, Request, Term, terms_of
from kiwi_mcp.search.scoring import MEANING, Judged, Scale, View, by_meaning, by_words, judge, scale_of, view_of
from kiwi_mcp.search.segment import Slots

_NEAR = 0.18
"""From how near on, by the coordinates that say most, a card is found by its meaning alone."""
_SHORTLIST = 300
_LEAST, _BEST_INEXACT = 1e-6, 0.99

Keeps = Callable[[Card], bool] | None


class Ranked(NamedTuple):
    """The best hits, and how many there are in all."""

    hits: Sequence[Hit]
    total: int


class _Matches(NamedTuple):
    """The cards of a view that match, and roughly how well; `remembered` ones are looked at whatever that is."""

    view: View
    slots: Slots
    rough: Floats
    remembered: Slots


class _Place(NamedTuple):
    """A card among the best."""

    score: float
    judged: Judged
    row: int
    is_remembered: bool

    @property
    def card(self) -> Card:
        return self.judged.view.segment.cards[int(self.judged.slots[self.row])]


def rank(
    request: Request, pools: Sequence[Pool], *, limit: int, keeps: Keeps = None, recall: Recall | None = None
) -> Ranked:
    """Return the cards that match, best first; those that do not match, or are not to be kept, are left out.

    `recall` is what is remembered of requests like this one. A card whose name was asked for stands above all that is.
    """
    terms = terms_of(request, pools)
    views = [view_of(request, terms, segment) for pool in pools for segment in pool.segments if segment.cards]
    scale = scale_of(request, terms, views)
    matches = [_matches(request, view, scale, keeps, recall) for view in views]
    exact = [card for card in _exact(request.text, pools) if keeps is None or keeps(card)]
    named = {(card.identity, card.path) for card in exact}
    judged = [judge(request, view, scale, slots) for view, slots in _shortlist(matches, max(limit, _SHORTLIST))]
    best = [one for one in _best(judged, limit + len(exact), recall) if (one.card.identity, one.card.path) not in named]
    found = [*(Hit(card, 1.0, Why(tuple(request.counted[0]), is_exact=True)) for card in exact)]
    found += [_hit(one, request, terms) for one in sorted(best, key=lambda one: _order(one.score, one.card))[:limit]]
    total = sum(len(one.slots) for one in matches) + sum(not _is_among(card, matches) for card in exact)
    return Ranked(sorted(found, key=lambda hit: _order(hit.score, hit.card))[: max(limit, 0)], total)


def _matches(request: Request, view: View, scale: Scale, keeps: Keeps, recall: Recall | None) -> _Matches:
    segment = view.segment
    said = by_words(view, scale)
    is_match = (said > 0) & segment.is_alive
    rough = said * scale.sureness
    if request.vectors is not None:
        meant = by_meaning(segment.nearness(request.vectors))
        is_match |= (meant >= _NEAR) & segment.is_alive
        rough = rough + MEANING * meant
    known = segment.of_items(recall.found) if recall else np.zeros(0, np.int32)
    is_match[known] = segment.is_alive[known]
    if keeps is not None:
        for slot in is_match.nonzero()[0].tolist():
            is_match[slot] = keeps(segment.cards[slot])
    slots = is_match.nonzero()[0].astype(np.int32)
    return _Matches(view, slots, rough[slots], known[is_match[known]])


def _is_among(card: Card, matches: Sequence[_Matches]) -> bool:
    item = (card.identity.partition("@")[0],)
    rows = ((one, slot) for one in matches for slot in one.view.segment.of_items(item).tolist())
    return any(one.view.segment.cards[slot] == card and slot in one.slots for one, slot in rows)


def _shortlist(matches: Sequence[_Matches], size: int) -> Iterator[tuple[View, Slots]]:
    """Give the cards that are worth a closer look."""
    every = np.concatenate([one.rough for one in matches] or [np.zeros(0, np.float32)])
    least = np.partition(every, len(every) - size)[len(every) - size] if len(every) > size else -np.inf
    for one in matches:
        slots = one.slots[one.rough >= least]
        yield one.view, np.union1d(slots, one.remembered) if len(one.remembered) else slots


def _best(judged: Sequence[Judged], size: int, recall: Recall | None) -> Sequence[_Place]:
    """Return the best places, and all that are as good as the last of them."""
    lifted = [_lifted(one, recall) for one in judged]
    every = np.concatenate([scores for scores, _ in lifted] or [np.zeros(0, np.float32)])
    least = np.partition(every, len(every) - size)[len(every) - size] if len(every) > size > 0 else -np.inf
    return [
        _Place(min(max(round(float(scores[row]), 6), _LEAST), _BEST_INEXACT), one, row, bool(is_remembered[row]))
        for one, (scores, is_remembered) in zip(judged, lifted, strict=True)
        for row in (scores >= least).nonzero()[0].tolist()
    ]


def _lifted(judged: Judged, recall: Recall | None) -> tuple[Floats, Slots]:
    """Return scores with what is remembered counted in, and which cards that has lifted."""
    if recall is None:
        return judged.scores, np.zeros(len(judged.slots), np.int32)
    rows = {slot: row for row, slot in enumerate(judged.slots.tolist())}
    scores = judged.scores.copy()
    for item, known in recall.items.items():
        for slot in judged.view.segment.of_items([item]).tolist():
            if (row := rows.get(slot)) is not None:
                scores[row] = known.lifted(float(scores[row]))
    return scores, np.array(scores > judged.scores, np.int32)


def _exact(text: str, pools: Sequence[Pool]) -> Iterator[Card]:
    wanted = text.strip()
    for pool in pools:
        for card in pool.named(wanted.rpartition("/")[2].partition("@")[0]):
            if wanted in {card.tool_id, card.identity, card.identity.partition("@")[0]}:
                yield card


def _hit(place: _Place, request: Request, terms: Mapping[str, Term]) -> Hit:
    judged, row = place.judged, place.row
    segment, slot = judged.view.segment, int(judged.slots[row])
    held = tuple(term.word for term in terms.values() if any(segment.holds(one, slot) for one in term.stems))
    part = request.texts[judged.parts[row]] if judged.parts[row] else ""
    meaning = round(max(0.0, float(judged.near[row])), 4)
    return Hit(place.card, place.score, Why(held, part, meaning, place.is_remembered))


def _order(score: float, card: Card) -> tuple[float, bool, str, str, str]:
    return (-score, card.source != "builtin", card.tool_id, card.identity, card.path)
