"""Scoring: what the words of a request, and what they mean, say of every card of a segment, in arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.request import Request, Term
from kiwi_mcp.search.segment import Flags, Segment, Slots

_Kind = TypeVar("_Kind", bound=np.generic)

MEANING, NAME = 2.6, 0.2
"""How much meaning, and the share of a name that was said, count against words."""

_WHOLE_WORDS, _WHOLE_MEANING = 0.6, 0.4
"""How much the whole of a request counts against the best of its parts."""
_BESIDE_MEANING, _ALONE = (0.6, 0.15), (0.5, 0.3)
"""Words count in full where the best card holds so much of a request, and never less than so."""
_NEAR, _SEEMS = 0.2, 1.7
"""From how near on a card is found by its meaning alone, and how much nearer it is than its first coordinates say."""
_MOST_POSTINGS = 400_000
_LEAST = 1e-6
_NO_SLOTS: Slots = np.zeros(0, np.int32)
_NO_FLAGS: Flags = np.zeros(0, bool)


@dataclass(frozen=True, slots=True)
class View:
    """The cards of a segment as a request sees them."""

    segment: Segment
    words: Floats
    """How much each card holds of the whole request, and, a row each, of its parts; from 0 to 1 once measured."""
    named: Floats
    """How many words of each card's name the request says."""


class Chosen(NamedTuple):
    """Cards of a view that are worth a closer look, and which of them are remembered."""

    view: View
    slots: Slots
    is_remembered: Flags


@dataclass(frozen=True, slots=True)
class Judged:
    """The chosen cards of all views: the score of each, the part of the request it answers, how near in meaning."""

    views: Sequence[View]
    numbers: Slots
    """Which of the views each is of."""
    slots: Slots
    is_hit: Flags
    """Whether it matches: by a word, by meaning, or because it is remembered."""
    scores: Floats
    said: Floats
    is_named: Flags
    """Whether the words of the request are those of its name."""
    parts: Slots
    near: Floats
    """To the whole or a part, whichever is nearest."""

    def segment(self, row: int) -> Segment:
        """Return where a card is."""
        return self.views[int(self.numbers[row])].segment


def view_of(request: Request, terms: Mapping[str, Term], segment: Segment) -> View:
    """Return what the words of a request say of the cards of a segment."""
    rows = np.zeros((len(request.texts), len(segment.cards)), np.float32)
    named = np.zeros(len(segment.cards), np.float32)
    seen: set[str] = set()
    room = _MOST_POSTINGS
    for term in terms.values():
        # A word that is everywhere says little and costs much; it counts only where nothing rarer was found.
        if room < _MOST_POSTINGS and term.count > room:
            break
        room -= term.count
        counts = [(row, counted[term.word]) for row, counted in enumerate(request.counted) if term.word in counted]
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
    return View(segment, rows, named)


def measure(request: Request, terms: Mapping[str, Term], views: Sequence[View]) -> float:
    """Measure the words of all views by the most that any card holds, and return how sure that makes of words.

    Each part is measured by its own best card: one that asks for little is asked for as well.
    """
    least = np.full(len(request.texts), _LEAST, np.float32)
    most = np.max([least, *(view.words.max(axis=1) for view in views)], axis=0)
    full = [sum(terms[word].rarity * _weight(count) for word, count in counted.items()) for counted in request.counted]
    sure = max(held / max(whole, _LEAST) for held, whole in zip(most.tolist(), full, strict=True))
    for view in views:
        np.divide(view.words, most[:, None], out=view.words)
    enough, least_sure = _ALONE if request.vectors is None else _BESIDE_MEANING
    return min(1.0, max(least_sure, float(sure) / enough))


def rough_of(request: Request, views: Sequence[View], sureness: float) -> Sequence[Floats]:
    """Return roughly how well each card of each view answers: above 0 if it may match."""
    said = [_joined(view.words, _WHOLE_WORDS) for view in views]
    rough = [words * np.float32(sureness) for words in said]
    if (vectors := request.vectors) is None:
        return rough
    near = [np.maximum(_joined(view.segment.nearness(vectors), _WHOLE_MEANING), 0) for view in views]
    # Copies: cards are encoded meanwhile, and numpy counts what a mask holds before it takes that much.
    encoded = [view.segment.is_encoded.copy() for view in views]
    # Of all views: new cards are a segment of their own, in which none has a vector yet.
    nearest = max((_nearest(*each) for each in zip(near, encoded, strict=True)), default=0.0)
    filled = (_filled(*each, nearest=nearest) for each in zip(near, said, encoded, strict=True))
    for view, scores, meaning in zip(views, rough, filled, strict=True):
        np.add(scores, np.float32(MEANING * _SEEMS) * meaning, out=scores)
        if view.segment.dead:
            scores[~view.segment.is_alive] = 0
    return rough


def judge(request: Request, chosen: Sequence[Chosen], sureness: float) -> Judged:
    """Return the exact scores of some cards."""
    sizes, none = [len(one.slots) for one in chosen], np.zeros((len(request.texts), 0), np.float32)
    words = _in_a_row(none, (one.view.words.take(one.slots, axis=1) for one in chosen))
    near = np.zeros_like(words)
    if (vectors := request.vectors) is not None:
        near = _in_a_row(none, (one.view.segment.exact_nearness(vectors, one.slots) for one in chosen))
    lengths = _in_a_row(none[0], (one.view.segment.name_sizes[one.slots] for one in chosen))
    named = _in_a_row(none[0], (one.view.named[one.slots] for one in chosen)) / lengths
    is_encoded = _in_a_row(_NO_FLAGS, (one.view.segment.is_encoded[one.slots] for one in chosen))
    said, meant = _joined(words, _WHOLE_WORDS), np.maximum(_joined(near, _WHOLE_MEANING), 0)
    is_hit = (said > 0) | (meant >= _NEAR) | _in_a_row(_NO_FLAGS, (one.is_remembered for one in chosen))
    meaning = _filled(meant, said, is_encoded, nearest=_nearest(meant, is_encoded))
    raw = (said + NAME * named) * sureness + MEANING * meaning
    most = 1 + NAME + (MEANING if request.vectors is not None else 0)
    parts = words[1:] * np.float32(sureness) + MEANING * near[1:]
    return Judged(
        views=[one.view for one in chosen],
        numbers=np.repeat(np.arange(len(chosen), dtype=np.int32), sizes),
        slots=_in_a_row(_NO_SLOTS, (one.slots for one in chosen)),
        is_hit=is_hit,
        scores=(raw / most).astype(np.float32),
        said=said,
        is_named=(named >= 1) & (lengths == len(request.stems)),
        parts=(parts.argmax(axis=0) + 1 if len(parts) else np.zeros(sum(sizes))).astype(np.int32),
        near=near.max(axis=0),
    )


def _filled(near: Floats, said: Floats, is_encoded: Flags, *, nearest: float) -> Floats:
    """Return how near cards are; one that has no vector yet is taken to be as near as its words let expect."""
    return near if is_encoded.all() else np.where(is_encoded, near, said * np.float32(nearest))


def _nearest(near: Floats, is_encoded: Flags) -> float:
    return float((near if is_encoded.all() else near[is_encoded]).max(initial=0))


def _joined(rows: Floats, share: float) -> Floats:
    """Return what cards are to the whole, of which so much counts, and to the best of the parts, in one."""
    whole: Floats = rows[0]
    return np.float32(share) * whole + np.float32(1 - share) * rows[1:].max(axis=0) if len(rows) > 1 else whole


def _weight(count: int) -> float:
    return 1 + log(count)


def _in_a_row(none: NDArray[_Kind], some: Iterable[NDArray[_Kind]]) -> NDArray[_Kind]:
    return np.concatenate([none, *some], axis=-1)
