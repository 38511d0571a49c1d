"""Ranking: a request held against cards; those that match, best first, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, get_args

import numpy as np

from kiwi_mcp.domain.items import Source
from kiwi_mcp.search.memory import Recall
from kiwi_mcp.search.port import Card, Floats, Hit, Why
from kiwi_mcp.search.request import Pool, Request, Term, terms_of
from kiwi_mcp.search.scoring import Chosen, Judged, View, judge, measure, rough_of, view_of
from kiwi_mcp.search.segment import Segment

_LIKELY = 0.22
"""How well a card that holds no word of a request has to answer it, roughly, before its filters are looked at."""
_SHORTLIST, _GROUPS = 300, 1_200
_LEAST, _MOST, _SAME_WORDS = 1e-6, 0.98, 0.99
"""The scores between which cards stand, and that of one whose name has the words of the request, spelled otherwise."""
_SHARE, _SPARE = 0.6, 10
"""What share of its score counts for what stands behind others, and how many such may be among the best."""

_NONE: Floats = np.zeros(0, np.float32)
_ORDER = {source: place for place, source in enumerate(get_args(Source))}

Keeps = Callable[[Card], bool] | None


class Ranked(NamedTuple):
    """The best hits, and how many there are in all."""

    hits: Sequence[Hit]
    total: int


class _Place(NamedTuple):
    """A card among the best."""

    score: float
    segment: Segment
    slot: int
    row: int
    is_remembered: bool

    @property
    def card(self) -> Card:
        return self.segment.cards[self.slot]


def rank(
    request: Request,
    pools: Sequence[Pool],
    *,
    limit: int,
    keeps: Keeps = None,
    recall: Recall | None = None,
    is_behind: Callable[[Card], bool] = lambda _: False,
) -> Ranked:
    """Return the cards that match, best first; those that do not match, or are not to be kept, are left out.

    `recall` is what is remembered of requests like this one, and `is_behind` tells which cards stand behind others. A
    card whose name was asked for stands above all that is.
    """
    terms = terms_of(request, pools)
    views = [view_of(request, terms, segment) for pool in pools for segment in pool.segments if segment.cards]
    sureness = measure(request, terms, views)
    rough = rough_of(request, views, sureness)
    if keeps is not None:
        for view, scores in zip(views, rough, strict=True):
            _leave_out(view, scores, keeps)
    exact = [card for card in _exact(request.text, pools) if keeps is None or keeps(card)]
    named = {(card.identity, card.path) for card in exact}
    judged = judge(request, [*_shortlist(views, rough, max(limit, _SHORTLIST), keeps, recall)], sureness)
    best = _put_behind(_best(judged, limit + len(exact) + _SPARE, recall), is_behind)
    others = [one for one in best if (one.card.identity, one.card.path) not in named]
    said = Why(tuple(request.counted[0]), is_exact=True)
    first = [Hit(card, 1.0, said) for card in sorted(exact, key=lambda card: _order(1.0, card))]
    ordered = sorted(others, key=lambda one: _order(one.score, one.card))
    found = [*first, *(_hit(one, judged, request, terms) for one in ordered[: max(limit, 0)])][: max(limit, 0)]
    return Ranked(found, _total(views, judged, exact))


def _total(views: Sequence[View], judged: Judged, exact: Sequence[Card]) -> int:
    """Return how many cards match: by a word, by meaning alone, or by nothing but their name."""
    worded = sum(np.count_nonzero(view.words[0] > 0) for view in views)
    unsaid = np.count_nonzero(judged.is_hit & (judged.said <= 0))
    return int(worded + unsaid + sum(not _is_among(card, views, judged) for card in exact))


def _leave_out(view: View, rough: Floats, keeps: Callable[[Card], bool]) -> None:
    """Take what is not to be kept out of all that may match."""
    for slot in ((view.words[0] > 0) | (rough >= _LIKELY)).nonzero()[0].tolist():
        if not keeps(view.segment.cards[slot]):
            view.words[:, slot] = rough[slot] = 0
    rough[(view.words[0] <= 0) & (rough < _LIKELY)] = 0


def _is_among(card: Card, views: Sequence[View], judged: Judged) -> bool:
    """Whether a card was counted: because it holds a word of the request, or because it was looked at and is a hit."""
    hits = judged.is_hit.nonzero()[0].tolist()
    looked_at = {(id(judged.segment(row)), int(judged.slots[row])) for row in hits}
    return any(
        view.segment.cards[slot] == card and (view.words[0, slot] > 0 or (id(view.segment), slot) in looked_at)
        for view in views
        for slot in view.segment.of_items([card.identity.partition("@")[0]])
    )


def _shortlist(
    views: Sequence[View], rough: Sequence[Floats], size: int, keeps: Keeps, recall: Recall | None
) -> Iterator[Chosen]:
    """Give the cards that are worth a closer look: the best so many, roughly, and those that are remembered."""
    floor = max(_least(np.concatenate([_NONE, *map(_peaks, rough)]), size), _LEAST)
    likely = [(scores >= floor).nonzero()[0].astype(np.int32) for scores in rough]
    least = _least(np.concatenate([_NONE, *(scores[some] for scores, some in zip(rough, likely, strict=True))]), size)
    for view, scores, some in zip(views, rough, likely, strict=True):
        segment, slots = view.segment, some[scores[some] >= least]
        items = segment.of_items(recall.found) if recall else ()
        known = [one for one in items if segment.is_alive[one] and (keeps is None or keeps(segment.cards[one]))]
        if known:
            slots = np.union1d(slots, np.array(known, np.int32))
        if len(slots):
            yield Chosen(view, slots, np.isin(slots, known) if known else np.zeros(len(slots), bool))


def _peaks(scores: Floats) -> Floats:
    """Return the best score of each of some groups: as many cards at least reach the least of the best of them.

    All scores would take far longer to put in order.
    """
    rows = len(scores) // _GROUPS
    return scores[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0) if rows > 1 else scores


def _best(judged: Judged, size: int, recall: Recall | None) -> Sequence[_Place]:
    """Return the best places, and all that are as good as the last of them."""
    scores = _lifted(judged, recall)
    least = _least(scores[judged.is_hit], size)
    return [
        _Place(
            max(round(float(scores[row]), 6), _LEAST),
            judged.segment(row),
            int(judged.slots[row]),
            row,
            bool(judged.scores[row] < scores[row] < _SAME_WORDS),
        )
        for row in (judged.is_hit & (scores >= least)).nonzero()[0].tolist()
    ]


def _put_behind(places: Sequence[_Place], is_behind: Callable[[Card], bool]) -> Sequence[_Place]:
    """Let some stand behind others, where there are others."""
    behind = [is_behind(one.card) for one in places]
    if all(behind):
        return places
    return [
        one._replace(score=max(round(one.score * _SHARE, 6), _LEAST)) if is_one else one
        for one, is_one in zip(places, behind, strict=True)
    ]


def _least(scores: Floats, size: int) -> float:
    """Return the least of the best scores, of which there are so many."""
    return float(np.partition(scores, len(scores) - size)[len(scores) - size]) if len(scores) > size > 0 else -np.inf


def _lifted(judged: Judged, recall: Recall | None) -> Floats:
    """Return scores with what is remembered counted in; a name that was said stands above all that is not."""
    scores = np.minimum(judged.scores, np.float32(_MOST))
    if recall is not None and recall.items:
        _lift(judged, scores, recall)
    scores[judged.is_named] = _SAME_WORDS
    return scores


def _lift(judged: Judged, scores: Floats, recall: Recall) -> None:
    first = _first(judged, scores, recall)
    for number, view in enumerate(judged.views):
        rows = {int(judged.slots[row]): row for row in (judged.numbers == number).nonzero()[0].tolist()}
        for item, known in recall.items.items():
            for slot in view.segment.of_items([item]):
                if (row := rows.get(slot)) is not None:
                    scores[row] = min(known.lifted(float(scores[row]), first), _MOST)


def _first(judged: Judged, scores: Floats, recall: Recall) -> float:
    """Return the score of the best card, if what is remembered must not pass it lightly."""
    if not judged.is_hit.any():
        return 1.0
    row = int(np.where(judged.is_hit, scores, 0).argmax())
    card = judged.segment(row).cards[int(judged.slots[row])]
    return recall.to_pass(card.identity.partition("@")[0], float(scores[row]))


def _exact(text: str, pools: Sequence[Pool]) -> Iterator[Card]:
    wanted = text.strip()
    for pool in pools:
        for card in pool.named(wanted.rpartition("/")[2].partition("@")[0]):
            if wanted in {card.tool_id, card.identity, card.identity.partition("@")[0]}:
                yield card


def _hit(place: _Place, judged: Judged, request: Request, terms: Mapping[str, Term]) -> Hit:
    held, row = place.segment.stems_of(place.slot), place.row
    words = tuple(term.word for term in terms.values() if not held.isdisjoint(term.stems))
    part = request.texts[judged.parts[row]] if judged.parts[row] else ""
    meaning = round(max(0.0, float(judged.near[row])), 4)
    return Hit(place.card, place.score, Why(words, part, meaning, place.is_remembered))


def _order(score: float, card: Card) -> tuple[float, bool, int, str, str, str]:
    # What a name stands for comes before what it would stand for elsewhere.
    place = _ORDER.get(card.source, len(_ORDER))
    return (-score, card.source != "builtin", place, card.tool_id, card.identity, card.path)
