"""Scoring: what the words of a request, and what they mean, say of every card of a segment, in arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.request import Request, Term
from kiwi_mcp.search.segment import Segment, Slots

MEANING, NAME = 2.2, 0.2
"""How much meaning, and the share of a name that was said, count against words."""

_WHOLE_WORDS, _WHOLE_MEANING = 0.6, 0.4
"""How much the whole of a request counts against the best of its parts."""
_SURE, _LEAST_SURE = 0.4, 0.3
"""Words count in full where the best card holds so much of a request, and never less than so."""
_NEAR = 0.2
"""From how near on a card is found by its meaning alone."""
_MOST_POSTINGS = 400_000
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class View:
    """The cards of a segment as a request sees them."""

    segment: Segment
    words: Floats
    """How much each card holds of the whole request, and, a row each, of its parts."""
    named: Floats
    """The share of each card's name that the request says."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What words are measured by: the most that any card holds of the whole, of a part, and how sure that makes."""

    whole: float
    part: float
    sureness: float


@dataclass(frozen=True, slots=True)
class Judged:
    """Some cards of a view: the score of each, the part of the request it answers, and how near it is in meaning."""

    view: View
    slots: Slots
    is_hit: NDArray[np.bool_]
    """Whether it matches: by a word, by meaning, or because it is remembered."""
    scores: Floats
    said: Floats
    parts: Slots
    meant: Floats
    """By the whole and the best part."""
    near: Floats
    """By whichever is nearest."""


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
        for found, share in term.stems.items():
            slots, impacts, in_name = segment.postings(found)
            gained = impacts * np.float32(share * term.rarity)
            for row, counted in zip(rows, request.counted, strict=True):
                if count := counted.get(term.word, 0):
                    row[slots] += gained * np.float32(_weight(count))
            if found not in seen:
                named[slots] += in_name
                seen.add(found)
    rows[:, ~segment.is_alive] = 0
    return View(segment, rows, named / segment.name_sizes)


def scale_of(request: Request, terms: Mapping[str, Term], views: Sequence[View]) -> Scale:
    """Return what words are measured by in some views."""
    none = np.zeros(len(request.texts), np.float32)
    most = np.max([none, *(view.words.max(axis=1) for view in views if view.segment.cards)], axis=0)
    full = [sum(terms[word].rarity * _weight(count) for word, count in counted.items()) for counted in request.counted]
    sure = max(float(most[row]) / max(full[row], _LEAST) for row in range(len(full)))
    return Scale(
        max(float(most[0]), _LEAST),
        max(float(most[1:].max(initial=0)), _LEAST),
        min(1.0, max(_LEAST_SURE, sure / _SURE)),
    )


def by_words(view: View, scale: Scale) -> Floats:
    """Return how well each card answers by its words, from 0 to 1."""
    return _joined(view.words[0] / scale.whole, view.words[1:] / scale.part, _WHOLE_WORDS)


def by_meaning(near: Floats) -> Floats:
    """Return how well cards answer by their meaning, from how near they are to the whole and to each part."""
    return _joined(near[0], near[1:], _WHOLE_MEANING)


def filled(near: Floats, said: Floats, is_encoded: NDArray[np.bool_]) -> Floats:
    """Return how near cards are; one that has no vector yet is taken to be as near as its words let expect."""
    return np.where(is_encoded, near, said * near[is_encoded].max(initial=0)).astype(np.float32)


def judge(request: Request, view: View, scale: Scale, slots: Slots, remembered: Slots) -> Judged:
    """Return the exact scores of some cards, some of which are remembered."""
    near = np.zeros((len(request.texts), len(slots)), np.float32)
    if request.vectors is not None:
        near = view.segment.exact_nearness(request.vectors, slots)
    said = _joined(view.words[0, slots] / scale.whole, view.words[1:, slots] / scale.part, _WHOLE_WORDS)
    meant = np.maximum(by_meaning(near), 0)
    is_hit = (said > 0) | (meant >= _NEAR) | np.isin(slots, remembered)
    meant = filled(meant, said, view.segment.is_encoded[slots])
    raw = (said + NAME * view.named[slots]) * scale.sureness + MEANING * meant
    most = 1 + NAME + (MEANING if request.vectors is not None else 0)
    parts = view.words[1:, slots] * np.float32(scale.sureness / scale.part) + MEANING * near[1:]
    answered = parts.argmax(axis=0) + 1 if len(parts) else np.zeros(len(slots), int)
    scores = (raw / most).astype(np.float32)
    return Judged(view, slots, is_hit, scores, said, answered.astype(np.int32), meant, near.max(axis=0))


def _joined(whole: Floats, parts: Floats, share: float) -> Floats:
    return np.float32(share) * whole + np.float32(1 - share) * parts.max(axis=0) if len(parts) else whole


def _weight(count: int) -> float:
    return 1 + log(count)
