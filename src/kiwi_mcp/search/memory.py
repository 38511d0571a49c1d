"""Memory: the requests after which items were used, held against a new one, so that what helped before stands higher.

A remembered request counts as one more description of its item: where the new one is more like it than the item's own
score says, the item is lifted a part of the way. Nothing is ever lowered, and what was never used stays as it was.
Where that stands first, it stays there, unless the new request is nearly one that another item was used after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import log
from typing import NamedTuple

import numpy as np

from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.request import Request
from kiwi_mcp.search.segment import Slots
from kiwi_mcp.search.sheet import SIZE, unpack_vectors
from kiwi_mcp.search.words import COMMON, stem, words

_WHOLE = 0.5
"""How much the whole of a request counts against the best of its parts."""
_MEANING, _OVERLAP = 0.9, 0.09
"""How much nearness in meaning says of how alike two requests are, and words that they share beside it."""
_WORDS = 1.8
"""The same for shared words, where nothing is known of meanings: two that ask for the same share about half of them."""
_READ = 0.75
"""How much of a use it is to read an item and not to run it."""
_LIFT, _LIFT_BY_EACH, _MOST = 0.35, 0.025, 10
"""How far an item is lifted towards how alike requests are: by any, and by each of so many that count."""
_AGAIN, _ASKED_AGAIN = 0.95, 0.9
"""From how much the same on a request is one that was made before, and how far it lifts then."""
_BEHIND = 0.5
"""How much less a request counts for each step that it is behind the one that is most alike."""
_COUNTS, _FOUND = 0.2, 0.4
"""From how alike on a request counts, and from where on an item is found by it alone."""
_SURE = 0.8
"""From how near in meaning, or how many words shared, an item may pass a better one that was never used."""
_STEP = 0.001
"""How close behind such a one the others stay."""
_PLAIN = 0.25
"""What scores less than this is no answer that others would have to stay behind."""
_COARSE, _LOOKED_AT = 32, 600
"""By how many coordinates of their vectors requests are chosen that are looked at closely, and how many are."""
_FEW = 100
"""Of fewer requests than these nobody can tell which words are rare."""
_NOTHING = 1e-6
_SAME = 0.8
"""How much of their words two requests share that are one."""


class Known(NamedTuple):
    """How like a request is to the best of those that an item was used after, and what that does for it."""

    alike: float
    pull: float
    """The score that the item is lifted towards, and how far."""
    lift: float
    is_sure: bool
    """Whether it may pass what was never used."""

    def lifted(self, score: float, first: float) -> float:
        """Return the score of the item with what is remembered of it counted in: never less.

        `first` is a score that it passes only if that is sure.
        """
        lifted = score + self.lift * max(0.0, self.pull - score)
        return lifted if self.is_sure or lifted <= first else max(score, first - _STEP * (1 - lifted))


@dataclass(frozen=True, slots=True)
class Recall:
    """What is remembered of requests like one that is made now."""

    items: Mapping[str, Known]
    used: AbstractSet[str]
    """All items of which anything is remembered."""

    def to_pass(self, first: str, score: float) -> float:
        """Return the score that what is remembered passes only where it is sure, given the best item without it."""
        return score if first not in self.used and score >= _PLAIN else 1.0

    @property
    def found(self) -> Sequence[str]:
        """The items that were wanted by requests so like this one that they are found by that alone, the best first."""
        found = [item for item, known in self.items.items() if known.alike >= _FOUND]
        return sorted(found, key=lambda item: -self.items[item].alike)


class Memory:
    """Remembered requests, ready to be compared with; it never changes, so that any thread may ask it."""

    def __init__(self, traces: Sequence[Trace], encoder: str = "") -> None:
        self._items = [*dict.fromkeys(trace.item for trace in traces)]
        self._used = frozenset(self._items)
        places = {item: place for place, item in enumerate(self._items)}
        self._item = np.array([places[trace.item] for trace in traces], np.int32)
        self._worth = np.array([1.0 if trace.is_run else _READ for trace in traces], np.float32)
        self._read_words([stems_of(trace.request) for trace in traces])
        known = [is_known(trace, encoder) for trace in traces]
        self._is_encoded = np.array(known, bool)
        packed = b"".join(
            trace.vector if has_vector else bytes(SIZE) for trace, has_vector in zip(traces, known, strict=True)
        )
        self._packed = np.frombuffer(packed, np.uint8).reshape(-1, SIZE)
        self._coarse = np.ascontiguousarray(unpack_vectors(packed)[:, :_COARSE])

    @property
    def is_complete(self) -> bool:
        """Whether it is known of all requests what they mean."""
        return bool(self._is_encoded.all())

    def recall(self, request: Request) -> Recall:
        """Return what is remembered of requests like this one."""
        overlap = _joined(np.stack([self._overlap({stem(word) for word in counted}) for counted in request.counted]))
        slots = self._likely(request, overlap)
        alike, same = self._likeness(request, slots, overlap[slots])
        items, worth, count = self._item[slots], self._worth[slots], len(self._items)
        best, most = np.zeros(count, np.float32), np.zeros(count, np.float32)
        np.maximum.at(best, items, worth * alike)
        np.maximum.at(most, items, worth * same)
        counts = np.bincount(items[worth * alike >= _COUNTS], minlength=count)
        pull = best - _BEHIND * (best.max(initial=0) - best)
        lift = _LIFT + _LIFT_BY_EACH * np.minimum(counts, _MOST)
        lift += (_ASKED_AGAIN - lift) * np.clip((most - _SURE) / (_AGAIN - _SURE), 0, 1)
        found = (best >= _COUNTS).nonzero()[0]
        known = (each[found].tolist() for each in (best, pull, lift, most >= _SURE))
        return Recall(dict(zip([self._items[one] for one in found], map(Known, *known), strict=True)), self._used)

    def _likely(self, request: Request, overlap: Floats) -> Slots:
        """Return the requests that are worth a closer look."""
        if len(overlap) <= _LOOKED_AT:
            return np.arange(len(overlap), dtype=np.int32)
        rough = overlap
        if request.vectors is not None:
            seems = _joined(request.vectors[:, :_COARSE] @ self._coarse.T)
            rough = np.where(self._is_encoded, np.maximum(seems, overlap), overlap)
        slots = (rough >= _COUNTS / _WORDS).nonzero()[0].astype(np.int32)
        return slots[np.argpartition(rough[slots], -_LOOKED_AT)[-_LOOKED_AT:]] if len(slots) > _LOOKED_AT else slots

    def _likeness(self, request: Request, slots: Slots, overlap: Floats) -> tuple[Floats, Floats]:
        """Return how alike some requests are, and how much they are the same."""
        by_words = np.minimum(_WORDS * overlap, 1)
        if request.vectors is None:
            return by_words, overlap
        near = _joined(request.vectors @ unpack_vectors(self._packed[slots].tobytes()).T)
        by_meaning = np.clip(_MEANING * near + _OVERLAP * overlap, 0, 1)
        is_encoded = self._is_encoded[slots]
        return np.where(is_encoded, by_meaning, by_words), np.where(is_encoded, by_meaning, overlap)

    def _overlap(self, stems: AbstractSet[str]) -> Floats:
        """Return how many of its words each remembered request shares with another, rare ones counting more."""
        shared = np.zeros(len(self._item), np.float32)
        unknown = self._rarity_of(0)
        for one in stems:
            if (slots := self._holding.get(one)) is not None:
                shared[slots] += np.float32(self._rarity[one])
        asked = sum(self._rarity.get(one, unknown) for one in stems)
        return np.asarray(2 * shared / np.maximum(self._weight + asked, _NOTHING), np.float32)

    def _rarity_of(self, held: int) -> float:
        return log(1 + (max(len(self._item), _FEW) - held + 0.5) / (held + 0.5))

    def _read_words(self, stems: Sequence[AbstractSet[str]]) -> None:
        counts = Counter(one for some in stems for one in some)
        self._rarity = {one: self._rarity_of(held) for one, held in counts.items()}
        self._weight = np.array([sum(self._rarity[one] for one in some) for some in stems], np.float32)
        slots: dict[str, list[int]] = {}
        for slot, some in enumerate(stems):
            for one in some:
                slots.setdefault(one, []).append(slot)
        self._holding = {one: np.array(held, np.int32) for one, held in slots.items()}


def item_of(identity: str) -> str:
    """Return the full name of an item, whatever its version."""
    return identity.partition("@")[0]


def stems_of(request: str) -> frozenset[str]:
    """Return the stems of what a request says."""
    written = words(request)
    return frozenset(stem(word) for word in written if word not in COMMON) or frozenset(map(stem, written))


def is_same(one: str, other: str) -> bool:
    """Whether two requests say the same, so that one of them need not be remembered."""
    mine, theirs = stems_of(one), stems_of(other)
    return len(mine & theirs) >= _SAME * len(mine | theirs)


def _joined(rows: Floats) -> Floats:
    whole, parts = rows[0], rows[1:]
    return np.asarray(_WHOLE * whole + (1 - _WHOLE) * parts.max(axis=0) if len(parts) else whole, np.float32)


def is_known(trace: Trace, encoder: str) -> bool:
    """Whether a request has a vector of an encoder; a disk, or another program, may have changed it."""
    return bool(encoder) and trace.encoder == encoder and len(trace.vector) == SIZE
