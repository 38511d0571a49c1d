"""Ranking: rough scores of all cards, exact scores of a shortlist, their order, and near misses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from heapq import nsmallest
from itertools import islice
from math import log
from time import monotonic
from typing import NamedTuple, TypeVar, get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.items import NO_SOURCE, SOURCE_TRAITS, Source
from kiwi_mcp.search.index import CardPool, Flags, Segment, Slots
from kiwi_mcp.search.port import Floats, Hit, MatchReason
from kiwi_mcp.search.query import ParsedQuery, Term, terms_of
from kiwi_mcp.search.recall import RecallMatches
from kiwi_mcp.search.tokens import words

_ALIKE = 0.3  # the minimum share of letter pairs that two similar words have in common
_MOST_WORDS, _MOST_NAMES = 8, 20_000  # how many words of a query are compared with how many names
_TIME_LIMIT = 0.25  # the time limit of that comparison in seconds: it is optional, and the caller waits for it


def near_misses(
    query: ParsedQuery, pools: Sequence[CardPool], *, limit: int, keeps: Callable[[Card], bool]
) -> Sequence[Card]:
    """Return the cards with names most similar to a word of a query, which may be more than a typo away."""
    asked = [*map(_pairs, islice(query.counted[0], _MOST_WORDS))]
    if not asked:
        return []

    @cache  # names share words
    def likeness(word: str) -> float:
        own = _pairs(word)
        return max(len(one & own) / len(one | own) for one in asked)

    until, found = monotonic() + _TIME_LIMIT, list[tuple[float, Card]]()
    segments = (segment for pool in pools for segment in pool.segments)
    cards = islice((one.cards[slot] for one in segments for slot in one.active.tolist()), _MOST_NAMES)
    for card in filter(keeps, cards):
        alike = max(map(likeness, words(card.tool_id)), default=0.0)
        if alike >= _ALIKE:
            found.append((alike, card))
        if monotonic() > until:
            break
    best = nsmallest(limit, found, key=lambda one: (-one[0], one[1].tool_id, one[1].identity))
    return [card for _, card in best]


def _pairs(word: str) -> AbstractSet[str]:
    """Return the pairs of letters of a word, its edges included."""
    framed = f" {word} "
    return {framed[at : at + 2] for at in range(len(framed) - 1)}


_Kind = TypeVar("_Kind", bound=np.generic)
MEANING, NAME = 2.6, 0.2  # the weights of meaning, and of the matched share of a name, relative to words

_WHOLE_WORDS, _WHOLE_MEANING = 0.6, 0.4  # the weight of the whole query against its best clause
_BESIDE_MEANING, _ALONE = (0.6, 0.15), (0.5, 0.3)
"""The share of a query in the best card from which words count in full, and their minimum weight."""
_NEAR, _SEEMS = 0.2, 1.7
"""The minimum similarity of a hit by meaning alone, and the usual ratio of exact to rough similarity."""
_MOST_POSTINGS = 400_000
_SMALLEST_SCORE = 1e-6
_NO_SLOTS: Slots = np.zeros(0, np.int32)
_NO_FLAGS: Flags = np.zeros(0, bool)


class SegmentScores(Struct, frozen=True):
    """The scores of the cards of a segment for a query."""

    segment: Segment
    words: Floats
    """The word score of each card for the whole query and, a row each, for its clauses; normalized to 0 to 1."""
    named: Floats  # how many words of each card's name are in the query


class Shortlist(NamedTuple):
    """The cards of a segment that get exact scores, and which of them were recalled."""

    view: SegmentScores
    slots: Slots
    is_recalled: Flags


class ScoredCards(Struct, frozen=True):
    """The cards of all shortlists with their exact scores."""

    views: Sequence[SegmentScores]
    numbers: Slots  # the number of the view of each card
    slots: Slots
    is_hit: Flags  # whether it matches: by a word, by meaning, or because it was recalled
    scores: Floats
    said: Floats
    is_named: Flags  # whether the words of the query are those of its name
    parts: Slots
    near: Floats  # the similarity to the whole query or to a clause, the larger one

    def segment(self, row: int) -> Segment:
        """Return the segment of a card."""
        return self.views[int(self.numbers[row])].segment


def score_segment(query: ParsedQuery, terms: Mapping[str, Term], segment: Segment) -> SegmentScores:
    """Return the word scores of a query for the cards of a segment."""
    rows = np.zeros((len(query.texts), len(segment.cards)), np.float32)
    named = np.zeros(len(segment.cards), np.float32)
    seen: set[str] = set()
    room = _MOST_POSTINGS
    for term in terms.values():
        # A very common word is expensive; it counts only if nothing rarer was found.
        if room < _MOST_POSTINGS and term.count > room:
            break
        room -= term.count
        counts = [(row, counted[term.word]) for row, counted in enumerate(query.counted) if term.word in counted]
        for found, share in term.stems.items():
            slots, impacts, in_name = segment.postings(found)
            if not len(slots):
                continue
            for row, count in counts:
                np.add.at(rows[row], slots, impacts * np.float32(share * term.rarity * _weight(count)))
            if in_name and found not in seen:
                named[slots[:in_name]] += 1
                seen.add(found)
    if segment.dead:
        rows[:, ~segment.is_alive] = 0
    return SegmentScores(segment, rows, named)


def normalize(query: ParsedQuery, terms: Mapping[str, Term], views: Sequence[SegmentScores]) -> float:
    """Normalize the word scores of each clause by its own best card, and return how far words can be trusted."""
    least = np.full(len(query.texts), _SMALLEST_SCORE, np.float32)
    most = np.max([least, *(view.words.max(axis=1) for view in views)], axis=0)
    full = [sum(terms[word].rarity * _weight(count) for word, count in counted.items()) for counted in query.counted]
    sure = max(held / max(whole, _SMALLEST_SCORE) for held, whole in zip(most.tolist(), full, strict=True))
    for view in views:
        np.divide(view.words, most[:, None], out=view.words)
    enough, least_sure = _ALONE if query.vectors is None else _BESIDE_MEANING
    return min(1.0, max(least_sure, float(sure) / enough))


def rough_scores(query: ParsedQuery, views: Sequence[SegmentScores], sureness: float) -> Sequence[Floats]:
    """Return the rough score of each card of each view: above 0 if it may match."""
    said = [_joined(view.words, _WHOLE_WORDS) for view in views]
    rough = [words * np.float32(sureness) for words in said]
    if (vectors := query.vectors) is None:
        return rough
    near = [np.maximum(_joined(view.segment.nearness(vectors), _WHOLE_MEANING), 0) for view in views]
    # Copies: cards are encoded meanwhile, and numpy counts a mask before it uses it.
    encoded = [view.segment.is_encoded.copy() for view in views]
    # Over all views: new cards are in a segment of their own, without vectors yet.
    nearest = max((_nearest(*each) for each in zip(near, encoded, strict=True)), default=0.0)
    filled = (_filled(*each, nearest=nearest) for each in zip(near, said, encoded, strict=True))
    for view, scores, meaning in zip(views, rough, filled, strict=True):
        np.add(scores, np.float32(MEANING * _SEEMS) * meaning, out=scores)
        if view.segment.dead:
            scores[~view.segment.is_alive] = 0
    return rough


def score_shortlist(query: ParsedQuery, chosen: Sequence[Shortlist], sureness: float) -> ScoredCards:
    """Return the exact scores of some cards."""
    sizes, none = [len(one.slots) for one in chosen], np.zeros((len(query.texts), 0), np.float32)
    words = _in_a_row(none, (one.view.words.take(one.slots, axis=1) for one in chosen))
    near = np.zeros_like(words)
    if (vectors := query.vectors) is not None:
        near = _in_a_row(none, (one.view.segment.exact_nearness(vectors, one.slots) for one in chosen))
    lengths = _in_a_row(none[0], (one.view.segment.name_sizes[one.slots] for one in chosen))
    named = _in_a_row(none[0], (one.view.named[one.slots] for one in chosen)) / lengths
    is_encoded = _in_a_row(_NO_FLAGS, (one.view.segment.is_encoded[one.slots] for one in chosen))
    said, meant = _joined(words, _WHOLE_WORDS), np.maximum(_joined(near, _WHOLE_MEANING), 0)
    is_hit = (said > 0) | (meant >= _NEAR) | _in_a_row(_NO_FLAGS, (one.is_recalled for one in chosen))
    meaning = _filled(meant, said, is_encoded, nearest=_nearest(meant, is_encoded))
    raw = (said + NAME * named) * sureness + MEANING * meaning
    most = 1 + NAME + (MEANING if query.vectors is not None else 0)
    parts = words[1:] * np.float32(sureness) + MEANING * near[1:]
    return ScoredCards(
        views=[one.view for one in chosen],
        numbers=np.repeat(np.arange(len(chosen), dtype=np.int32), sizes),
        slots=_in_a_row(_NO_SLOTS, (one.slots for one in chosen)),
        is_hit=is_hit,
        scores=(raw / most).astype(np.float32),
        said=said,
        is_named=(named >= 1) & (lengths == len(query.stems)),
        parts=(parts.argmax(axis=0) + 1 if len(parts) else np.zeros(sum(sizes))).astype(np.int32),
        near=near.max(axis=0),
    )


def _filled(near: Floats, said: Floats, is_encoded: Flags, *, nearest: float) -> Floats:
    """Return similarities; that of a card without a vector is estimated from its words."""
    return near if is_encoded.all() else np.where(is_encoded, near, said * np.float32(nearest))


def _nearest(near: Floats, is_encoded: Flags) -> float:
    return float((near if is_encoded.all() else near[is_encoded]).max(initial=0))


def _joined(rows: Floats, share: float) -> Floats:
    """Return one score per card: `share` of that for the whole query, the rest of that for the best clause."""
    whole: Floats = rows[0]
    return np.float32(share) * whole + np.float32(1 - share) * rows[1:].max(axis=0) if len(rows) > 1 else whole


def _weight(count: int) -> float:
    return 1 + log(count)


def _in_a_row(none: NDArray[_Kind], some: Iterable[NDArray[_Kind]]) -> NDArray[_Kind]:
    return np.concatenate([none, *some], axis=-1)


_LIKELY = 0.22  # the minimum rough score of a card without a word of the query; below it, filters are not applied
_SHORTLIST, _GROUPS = 300, 1_200
_LEAST, _MOST, _SAME_WORDS = 1e-6, 0.98, 0.99
"""The minimum and maximum score of a card, and the score if its name has the same words, spelled otherwise."""
_SHARE, _SPARE = 0.6, 10
"""The factor for the scores of cards that rank behind others, and how many such may be among the best."""

_NONE: Floats = np.zeros(0, np.float32)
_ORDER = {source: place for place, source in enumerate(get_args(Source))}

Keeps = Callable[[Card], bool] | None


class RankedHits(NamedTuple):
    """The best hits, and how many there are in all."""

    hits: Sequence[Hit]
    total: int


class _Place(NamedTuple):
    """A card among the best."""

    score: float
    segment: Segment
    slot: int
    row: int
    is_recalled: bool

    @property
    def card(self) -> Card:
        return self.segment.cards[self.slot]


def rank(
    query: ParsedQuery,
    pools: Sequence[CardPool],
    *,
    limit: int,
    keeps: Keeps = None,
    recall: RecallMatches | None = None,
    is_behind: Callable[[Card], bool] = lambda _: False,
) -> RankedHits:
    """Return the cards that match a query and pass `keeps`, best first.

    `recall` is what is remembered of similar queries. `is_behind` tells which cards rank behind others. A card that was
    asked for by name ranks first.
    """
    terms = terms_of(query, pools)
    views = [score_segment(query, terms, segment) for pool in pools for segment in pool.segments if segment.cards]
    sureness = normalize(query, terms, views)
    rough = rough_scores(query, views, sureness)
    if keeps is not None:
        for view, scores in zip(views, rough, strict=True):
            for slot in ((view.words[0] > 0) | (scores >= _LIKELY)).nonzero()[0].tolist():
                if not keeps(view.segment.cards[slot]):
                    view.words[:, slot] = scores[slot] = 0
            scores[(view.words[0] <= 0) & (scores < _LIKELY)] = 0
    exact = [card for card in _exact(query.text, pools) if keeps is None or keeps(card)]
    named = {(card.identity, card.path) for card in exact}
    scored = score_shortlist(query, [*_shortlist(views, rough, max(limit, _SHORTLIST), keeps, recall)], sureness)
    best = _best(scored, limit + len(exact) + _SPARE, recall)
    behind = [is_behind(one.card) for one in best]
    if not all(behind):  # they rank behind others, if there are others
        best = [
            one._replace(score=max(round(one.score * _SHARE, 6), _LEAST)) if is_one else one
            for one, is_one in zip(best, behind, strict=True)
        ]
    others = [one for one in best if (one.card.identity, one.card.path) not in named]
    reason = MatchReason(tuple(query.counted[0]), is_exact=True)
    hits = [Hit(card, 1.0, reason) for card in sorted(exact, key=lambda card: _order(1.0, card))]
    for place in sorted(others, key=lambda one: _order(one.score, one.card))[: max(limit, 0)]:
        held, row = place.segment.stems_of(place.slot), place.row
        matched = tuple(term.word for term in terms.values() if not held.isdisjoint(term.stems))
        part = query.texts[scored.parts[row]] if scored.parts[row] else ""
        meaning = round(max(0.0, float(scored.near[row])), 4)
        hits.append(Hit(place.card, place.score, MatchReason(matched, part, meaning, place.is_recalled)))
    return RankedHits(hits[: max(limit, 0)], _total(views, scored, exact))


def _total(views: Sequence[SegmentScores], scored: ScoredCards, exact: Sequence[Card]) -> int:
    """Return how many cards match: by a word, by meaning alone, or by their name alone."""
    worded = sum(np.count_nonzero(view.words[0] > 0) for view in views)
    unsaid = np.count_nonzero(scored.is_hit & (scored.said <= 0))
    hits = scored.is_hit.nonzero()[0].tolist() if exact else ()
    counted = {(id(scored.segment(row)), int(scored.slots[row])) for row in hits}
    by_name = sum(
        not any(
            view.segment.cards[slot] == card and (view.words[0, slot] > 0 or (id(view.segment), slot) in counted)
            for view in views
            for slot in view.segment.of_items([card.identity.partition("@")[0]])
        )
        for card in exact
    )
    return int(worded + unsaid + by_name)


def _shortlist(
    views: Sequence[SegmentScores], rough: Sequence[Floats], size: int, keeps: Keeps, recall: RecallMatches | None
) -> Iterator[Shortlist]:
    """Yield the cards that get exact scores: about the best `size`, and those that were recalled."""
    peaks = [_NONE]
    for scores in rough:
        # The best score of each of some groups: a lower bound that is found faster than an order of all scores.
        rows = len(scores) // _GROUPS
        peaks.append(scores[: rows * _GROUPS].reshape(rows, _GROUPS).max(axis=0) if rows > 1 else scores)
    minimum = max(_score_at_rank(np.concatenate(peaks), size), _LEAST)
    likely = [(scores >= minimum).nonzero()[0].astype(np.int32) for scores in rough]
    best = np.concatenate([_NONE, *(scores[some] for scores, some in zip(rough, likely, strict=True))])
    least = _score_at_rank(best, size)
    for view, scores, some in zip(views, rough, likely, strict=True):
        segment, slots = view.segment, some[scores[some] >= least]
        items = segment.of_items(recall.found) if recall else ()
        known = [one for one in items if segment.is_alive[one] and (keeps is None or keeps(segment.cards[one]))]
        if known:
            slots = np.union1d(slots, np.array(known, np.int32))
        if len(slots):
            yield Shortlist(view, slots, np.isin(slots, known) if known else np.zeros(len(slots), bool))


def _best(scored: ScoredCards, size: int, recall: RecallMatches | None) -> Sequence[_Place]:
    """Return the best cards, and all with the same score as the last of them."""
    scores = _lifted(scored, recall)
    least = _score_at_rank(scores[scored.is_hit], size)
    return [
        _Place(
            max(round(float(scores[row]), 6), _LEAST),
            scored.segment(row),
            int(scored.slots[row]),
            row,
            bool(scored.scores[row] < scores[row] < _SAME_WORDS),
        )
        for row in (scored.is_hit & (scores >= least)).nonzero()[0].tolist()
    ]


def _score_at_rank(scores: Floats, size: int) -> float:
    """Return the score at rank `size`."""
    return float(np.partition(scores, len(scores) - size)[len(scores) - size]) if len(scores) > size > 0 else -np.inf


def _lifted(scored: ScoredCards, recall: RecallMatches | None) -> Floats:
    """Return scores with recall included; a card with exactly the words of the query in its name ranks highest."""
    scores = np.minimum(scored.scores, np.float32(_MOST))
    if recall is not None and recall.items:
        first = 1.0  # the score of the best card, which a recalled card passes only if the match is sure
        if scored.is_hit.any():
            row = int(np.where(scored.is_hit, scores, 0).argmax())
            card = scored.segment(row).cards[int(scored.slots[row])]
            first = recall.to_pass(card.identity.partition("@")[0], float(scores[row]))
        for number, view in enumerate(scored.views):
            rows = {int(scored.slots[row]): row for row in (scored.numbers == number).nonzero()[0].tolist()}
            for item, known in recall.items.items():
                for slot in view.segment.of_items([item]):
                    if (at := rows.get(slot)) is not None:
                        scores[at] = min(known.lifted(float(scores[at]), first), _MOST)
    scores[scored.is_named] = _SAME_WORDS
    return scores


def _exact(text: str, pools: Sequence[CardPool]) -> Iterator[Card]:
    wanted = text.strip()
    for pool in pools:
        for card in pool.named(wanted.rpartition("/")[2].partition("@")[0]):
            if wanted in {card.tool_id, card.identity, card.identity.partition("@")[0]}:
                yield card


def _order(score: float, card: Card) -> tuple[float, bool, int, str, str, str]:
    # The item that a name resolves to comes before the items that it hides.
    place = _ORDER.get(card.source, len(_ORDER))
    is_built_in = SOURCE_TRAITS.get(card.source, NO_SOURCE).is_built_in
    return (-score, not is_built_in, place, card.tool_id, card.identity, card.path)
