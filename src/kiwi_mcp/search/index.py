"""The index of some cards: it follows the cards that are added, changed and removed.

New cards form a segment of their own; many small segments are merged into one. Searches read the segments without
waiting; `catch_up` runs in another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from threading import Lock
from time import monotonic
from typing import NamedTuple

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.search.port import Encoder, FeatureStorage
from kiwi_mcp.search.segment import Segment, digest_of, is_sound, merge, pack_vectors, passage_of, words_of

Key = tuple[str, str]
_AT_ONCE, _AT_ONCE_CHARACTERS = 64, 50_000
"""How many new cards, with how many characters, are indexed by words while the caller waits."""
_WORDED, _ENCODED = 2_000, 8
"""How many cards are indexed at a time: the work of part of a second may be lost when a process ends."""
_MOST_SEGMENTS, _FAR_LARGER = 4, 4


class IndexProgress(NamedTuple):
    """How many cards there are, how many can be found by words, and how many by meaning."""

    cards: int
    worded: int
    encoded: int


class Place(NamedTuple):
    """Where a card is, and the digest of its text."""

    segment: Segment
    slot: int
    digest: bytes


class CardIndex:
    """The index of some cards with the vectors of one encoder; several threads may use it."""

    def __init__(self, encoder: str = "") -> None:
        self._encoder = encoder
        self._lock = Lock()
        self._cards: Sequence[Card] | None = None
        self._places: MutableMapping[Key, Place] = {}
        self._new: dict[Key, Card] = {}
        self._named: Mapping[str, Sequence[Card]] = {}
        self.segments: tuple[Segment, ...] = ()

    @classmethod
    def of(
        cls,
        encoder: str,
        segments: Sequence[Segment],
        places: MutableMapping[Key, Place],
        named: Mapping[str, Sequence[Card]],
    ) -> CardIndex:
        """Return an index of existing segments; `places` has the place of each card, `named` the cards of each name."""
        index = cls(encoder)
        index.segments, index._places, index._named = tuple(segments), places, named
        return index

    @property
    def places(self) -> Mapping[Key, Place]:
        """The place of each indexed card, by its identity and path."""
        with self._lock:
            return dict(self._places)

    def merged(self) -> CardIndex:
        """Return the same index in one segment, which is searched faster; changes made meanwhile are not in it."""
        known, named = self.places, self._named
        merged = merge(self.segments)
        keys = [(card.identity, card.path) for card in merged.cards]
        places = {key: Place(merged, slot, known[key].digest) for slot, key in enumerate(keys) if key in known}
        return CardIndex.of(self._encoder, (merged,), places, named)

    @property
    def count(self) -> int:
        """How many cards can be found."""
        return len(self._places)

    @property
    def progress(self) -> IndexProgress:
        """The progress of the index."""
        encoded = sum(int((one.is_encoded & one.is_alive).sum()) for one in self.segments)
        return IndexProgress(len(self._places) + len(self._new), len(self._places), encoded)

    def document_frequency(self, stem: str) -> int:
        """Return how many cards hold a stem."""
        return sum(segment.document_frequency(stem) for segment in self.segments)

    def known_stems(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of `stems` that any card holds."""
        return {found for segment in self.segments for found in segment.known_stems(stems)}

    def active(self, step: int = 1) -> Sequence[Card]:
        """Return the indexed cards, or every `step`-th of each segment."""
        return [one.cards[slot] for one in self.segments for slot in one.active[::step].tolist()]

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards with a name."""
        return self._named.get(tool_id, ())

    def follow(self, cards: Sequence[Card]) -> None:
        """Make this the index of exactly these cards; if many are new, `catch_up` indexes them."""
        with self._lock:
            if cards is self._cards and not isinstance(cards, list):  # a list may have been changed in place
                return
            wanted = {(card.identity, card.path): card for card in cards}
            for key in [key for key, place in self._places.items() if not _is_same(wanted.get(key), place)]:
                place = self._places.pop(key)
                place.segment.drop(place.slot)
            self._new = {key: card for key, card in wanted.items() if key not in self._places}
            named: dict[str, list[Card]] = {}
            for card in cards:
                named.setdefault(card.tool_id, []).append(card)
            self._cards, self._named = cards, named
            if _are_few([*self._new.values()]):
                self._add(self._new, {})

    def catch_up(self, features: FeatureStorage | None, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is new, words first, for about `seconds`; return whether more is left."""
        until = monotonic() + seconds
        while self._new:
            self._take_words(features)
            if monotonic() > until:
                return True
        self._tidy()
        while encoder and (places := self._unencoded()):
            self._encode(places, features, encoder)
            if monotonic() > until:
                return True
        return False

    def _take_words(self, features: FeatureStorage | None) -> None:
        some = dict([*self._new.items()][:_WORDED])
        digests = {key: digest_of(card, self._encoder) for key, card in some.items()}
        read = features.read([*digests.values()]) if features else {}
        kept = {digest: one for digest, one in read.items() if is_sound(one)}
        made = {
            digests[key]: CardFeatures(words_of(card), b"") for key, card in some.items() if digests[key] not in kept
        }
        if features and made:
            features.write(made)
        with self._lock:
            # The cards may have changed meanwhile: only those that are still wanted are added.
            still = {key: card for key, card in some.items() if self._new.get(key) is card}
            self._add(still, {**kept, **made})

    def _add(self, cards: Mapping[Key, Card], kept: Mapping[bytes, CardFeatures]) -> None:
        if not cards:
            return
        digests = [digest_of(card, self._encoder) for card in cards.values()]
        stored = [
            kept.get(digest) or CardFeatures(words_of(card), b"")
            for digest, card in zip(digests, cards.values(), strict=True)
        ]
        largest = max(self.segments, key=lambda one: len(one.cards), default=None)
        # A few cards are no measure of the usual length of texts.
        usual = largest.usual if largest and len(largest.cards) > len(cards) else None
        segment = Segment.from_features([*cards.values()], stored, usual)
        for slot, (key, digest) in enumerate(zip(cards, digests, strict=True)):
            self._places[key] = Place(segment, slot, digest)
        self._new = {key: card for key, card in self._new.items() if key not in cards}
        self.segments = (*self.segments, segment)

    def _unencoded(self) -> Sequence[tuple[Card, Place]]:
        """Return some of the cards that have no vector yet, of one segment."""
        for segment in self.segments:
            missing = (segment.is_alive & ~segment.is_encoded).nonzero()[0][:_ENCODED].tolist()
            cards = [segment.cards[slot] for slot in missing]
            with self._lock:
                found = [(card, self._places.get((card.identity, card.path))) for card in cards]
            if some := [(card, place) for card, place in found if place and place.segment is segment]:
                return some
        return ()

    def _encode(self, places: Sequence[tuple[Card, Place]], features: FeatureStorage | None, encoder: Encoder) -> None:
        # The storage was not read for cards that were indexed at once, and another process may have been faster.
        kept = features.read([place.digest for _, place in places]) if features else {}
        known = {digest: one.vector for digest, one in kept.items() if one.vector and is_sound(one)}
        new = {place.digest: card for card, place in places if place.digest not in known}
        made = (
            dict(zip(new, pack_vectors(encoder.encode([*map(passage_of, new.values())])), strict=True)) if new else {}
        )
        vectors = {**known, **made}
        segment = places[0][1].segment
        segment.put_vectors([place.slot for _, place in places], [vectors[place.digest] for _, place in places])
        if features and made:
            words = {place.digest: segment.words[place.slot] for _, place in places}
            features.write({digest: CardFeatures(words[digest], vector) for digest, vector in made.items()})

    def _tidy(self) -> None:
        """Merge many small segments into one, and segments that have lost most of their cards."""
        with self._lock:
            by_size = sorted(self.segments, key=lambda one: len(one.cards), reverse=True)
            are_sparse = any(one.dead * 2 > len(one.cards) for one in by_size)
            if len(by_size) <= _MOST_SEGMENTS and not are_sparse:
                return
            # A segment that is far larger than all others together is not merged.
            others = sum(len(one.cards) for one in by_size[1:])
            merging = by_size[1:] if len(by_size[0].cards) > _FAR_LARGER * others and not are_sparse else by_size
            merged = merge(merging)
            for slot, card in enumerate(merged.cards):
                place = self._places[card.identity, card.path]
                self._places[card.identity, card.path] = place._replace(segment=merged, slot=slot)
            self.segments = (*(one for one in self.segments if one not in merging), merged)


def _are_few(cards: Sequence[Card]) -> bool:
    """Whether cards are few and short enough to be indexed at once."""
    if len(cards) > _AT_ONCE:
        return False
    characters = sum(len(text) for card in cards for pair in card.parameters for text in pair)
    return characters + sum(len(card.description) for card in cards) <= _AT_ONCE_CHARACTERS


def _is_same(card: Card | None, place: Place) -> bool:
    known = place.segment.cards[place.slot]
    return card is known or card == known
