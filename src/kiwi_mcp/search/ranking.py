"""Ranking: a request held against cards; those that match, best first, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from kiwi_mcp.domain.items import Source
from kiwi_mcp.search.memory import Recall
from kiwi_mcp.search.port import Card, Floats, Hit, Why
from kiwi_mcp.search.request import Pool, Request, Term, terms_of
from kiwi_mcp.search.scoring import (
    MEANING,
    Judged,
    Scale,
    View,
    by_meaning,
    by_words,
    filled,
    judge,
    scale_of,
    view_of,
)
from kiwi_mcp.search.segment import Slots

_NEARLY, _SEEMS = 0.06, 1.7
"""From how near on a card is looked at, by the coordinates that say most, and how much nearer it is than it seems."""
_SHORTLIST = 300
_LEAST, _MOST, _SAME_WORDS = 1e-6, 0.98, 0.99
"""The scores between which cards stand, and that of one whose name has the words of the request, spelled otherwise."""

_ORDER = {source: place for place, source in enumerate(get_args(Source))}

Keeps = Callable[[Card], bool] | None


class Ranked(NamedTuple):
    """The best hits, and how many there are in all."""

    hits: Sequence[Hit]
    total: int


class _Likely(NamedTuple):
    """The cards of a view that may match, and roughly how well; `remembered` ones are looked at whatever that is."""

    view: View
    slots: Slots
    rough: Floats
    remembered: Slots
    worded: int
    """How many of them match by their words."""


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
    likely = [_likely(request, view, scale, keeps, recall) for view in views]
    exact = [card for card in _exact(request.text, pools) if keeps is None or keeps(card)]
    named = {(card.identity, card.path) for card in exact}
    shortlist = _shortlist(likely, max(limit, _SHORTLIST))
    judged = [judge(request, view, scale, slots, remembered) for view, slots, remembered in shortlist]
    best = _best(request, judged, limit + len(exact), recall)
    others = [one for one in best if (one.card.identity, one.card.path) not in named]
    found = [*(Hit(card, 1.0, Why(tuple(request.counted[0]), is_exact=True)) for card in exact)]
    found += [_hit(one, request, terms) for one in sorted(others, key=lambda one: _order(one.score, one.card))[:limit]]
    unsaid = sum(int((one.is_hit & (one.said <= 0)).sum()) for one in judged)
    unseen = sum(not _is_among(card, judged) for card in exact)
    total = sum(one.worded for one in likely) + unsaid + unseen
    return Ranked(sorted(found, key=lambda hit: _order(hit.score, hit.card))[: max(limit, 0)], total)


def _likely(request: Request, view: View, scale: Scale, keeps: Keeps, recall: Recall | None) -> _Likely:
    segment = view.segment
    said = by_words(view, scale)
    is_match = (said > 0) & segment.is_alive
    rough = said * scale.sureness
    if request.vectors is not None:
        seems = by_meaning(segment.nearness(request.vectors))
        is_match |= (seems >= _NEARLY) & segment.is_alive
        rough = rough + MEANING * _SEEMS * filled(seems, said, segment.is_encoded)
    known = segment.of_items(recall.found) if recall else np.zeros(0, np.int32)
    is_match[known] = segment.is_alive[known]
    if keeps is not None:
        for slot in is_match.nonzero()[0].tolist():
            is_match[slot] = keeps(segment.cards[slot])
    slots = is_match.nonzero()[0].astype(np.int32)
    return _Likely(view, slots, rough[slots], known[is_match[known]], int((said[slots] > 0).sum()))


def _is_among(card: Card, judged: Sequence[Judged]) -> bool:
    item = (card.identity.partition("@")[0],)
    for one in judged:
        for slot in one.view.segment.of_items(item).tolist():
            # What holds a word of the request was counted, whether it was looked at closely or not.
            if one.view.segment.cards[slot] == card and (one.view.words[0, slot] > 0 or slot in one.slots[one.is_hit]):
                return True
    return False


def _shortlist(likely: Sequence[_Likely], size: int) -> Iterator[tuple[View, Slots, Slots]]:
    """Give the cards that are worth a closer look, and which of them are remembered."""
    least = _least(np.concatenate([one.rough for one in likely] or [np.zeros(0, np.float32)]), size)
    for one in likely:
        slots = one.slots[one.rough >= least]
        yield one.view, np.union1d(slots, one.remembered) if len(one.remembered) else slots, one.remembered


def _best(request: Request, judged: Sequence[Judged], size: int, recall: Recall | None) -> Sequence[_Place]:
    """Return the best places, and all that are as good as the last of them."""
    lifted = [_lifted(request, one, recall) for one in judged]
    every = [scores[one.is_hit] for one, scores in zip(judged, lifted, strict=True)]
    least = _least(np.concatenate(every or [np.zeros(0, np.float32)]), size)
    return [
        _Place(max(round(float(scores[row]), 6), _LEAST), one, row, bool(one.scores[row] < scores[row] < _SAME_WORDS))
        for one, scores in zip(judged, lifted, strict=True)
        for row in (one.is_hit & (scores >= least)).nonzero()[0].tolist()
    ]


def _least(scores: Floats, size: int) -> float:
    """Return the least of the best scores, of which there are so many."""
    return float(np.partition(scores, len(scores) - size)[len(scores) - size]) if len(scores) > size > 0 else -np.inf


def _lifted(request: Request, judged: Judged, recall: Recall | None) -> Floats:
    """Return scores with what is remembered counted in; a name that was said stands above all that is not."""
    segment, scores = judged.view.segment, np.minimum(judged.scores, np.float32(_MOST))
    if recall is not None:
        rows = {slot: row for row, slot in enumerate(judged.slots.tolist())}
        places = [
            (known, rows.get(slot))
            for item, known in recall.items.items()
            for slot in segment.of_items([item]).tolist()
        ]
        for known, row in places:
            if row is not None:
                scores[row] = min(known.lifted(float(scores[row])), _MOST)
    is_said = (judged.view.named[judged.slots] >= 1) & (segment.name_sizes[judged.slots] == len(request.stems))
    scores[is_said] = _SAME_WORDS
    return scores


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


def _order(score: float, card: Card) -> tuple[float, bool, int, str, str, str]:
    # What a name stands for comes before what it would stand for elsewhere.
    place = _ORDER.get(card.source, len(_ORDER))
    return (-score, card.source != "builtin", place, card.tool_id, card.identity, card.path)
