"""The index: everything that searches know of some cards, which follows them as they come, change and go.

Cards are held in segments. New ones make a segment of their own; many small ones are made into one. Searches read
whatever segments there are, without waiting; `catch_up` is for another thread.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from threading import Lock
from time import monotonic
from typing import NamedTuple

from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.search.port import Card, Encoder, Keep
from kiwi_mcp.search.segment import Segment, merge
from kiwi_mcp.search.sheet import digest_of, is_sound, pack_vectors, passage_of, words_of

Key = tuple[str, str]
_AT_ONCE, _AT_ONCE_LETTERS = 64, 50_000
"""How many new cards, and of how many letters, are indexed, words only, on the time of whoever asks."""
_WORDED, _ENCODED = 2_000, 8
"""How many cards are taken at a time: what takes part of a second must not be lost when a process ends."""
_MOST_SEGMENTS, _FAR_LARGER = 4, 4


class Progress(NamedTuple):
    """How many cards there are, how many can be found by words, and how many by meaning."""

    cards: int
    worded: int
    encoded: int


class Place(NamedTuple):
    """Where a card is, and the digest of its text."""

    segment: Segment
    slot: int
    digest: bytes


class Index:
    """Searches some cards, whose vectors come from one encoder; may be used from several threads."""

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
    ) -> Index:
        """Return an index of segments that are there: where each card is by its identity and path, and by its name."""
        index = cls(encoder)
        index.segments, index._places, index._named = tuple(segments), places, named
        return index

    @property
    def places(self) -> Mapping[Key, Place]:
        """Where each card is that can be found, by its identity and path."""
        with self._lock:
            return dict(self._places)

    def gathered(self) -> Index:
        """Return the same index in one segment, which is searched faster; what goes or comes meanwhile is not in it."""
        known, named = self.places, self._named
        merged = merge(self.segments)
        keys = [(card.identity, card.path) for card in merged.cards]
        places = {key: Place(merged, slot, known[key].digest) for slot, key in enumerate(keys) if key in known}
        return Index.of(self._encoder, (merged,), places, named)

    @property
    def count(self) -> int:
        """How many cards can be found."""
        return len(self._places)

    @property
    def progress(self) -> Progress:
        """How far the index is."""
        encoded = sum(int((one.is_encoded & one.is_alive).sum()) for one in self.segments)
        return Progress(len(self._places) + len(self._new), len(self._places), encoded)

    def holding(self, stem: str) -> int:
        """Return how many cards hold a stem."""
        return sum(segment.holding(stem) for segment in self.segments)

    def among(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that any card holds."""
        return {found for segment in self.segments for found in segment.among(stems)}

    def living(self, step: int = 1) -> Sequence[Card]:
        """Return the cards that can be found, or one of so many."""
        return [one.cards[slot] for one in self.segments for slot in one.living[::step].tolist()]

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards of a name."""
        return self._named.get(tool_id, ())

    def follow(self, cards: Sequence[Card]) -> None:
        """Make it an index over exactly these cards; where many are new, `catch_up` has to be called for them."""
        with self._lock:
            if cards is self._cards and not isinstance(cards, list):  # a list may have changed under the same name
                return
            wanted = {(card.identity, card.path): card for card in cards}
            for key in [key for key, place in self._places.items() if not _is_same(wanted.get(key), place)]:
                place = self._places.pop(key)
                place.segment.drop(place.slot)
            self._new = {key: card for key, card in wanted.items() if key not in self._places}
            self._cards, self._named = cards, _by_name(cards)
            if _are_few([*self._new.values()]):
                self._add(self._new, {})

    def catch_up(self, keep: Keep | None, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is new, words first, for about so long; return whether more is to do."""
        until = monotonic() + seconds
        while self._new:
            self._take_words(keep)
            if monotonic() > until:
                return True
        self._tidy()
        while encoder and (places := self._unencoded()):
            self._encode(places, keep, encoder)
            if monotonic() > until:
                return True
        return False

    def _take_words(self, keep: Keep | None) -> None:
        some = dict([*self._new.items()][:_WORDED])
        digests = {key: digest_of(card, self._encoder) for key, card in some.items()}
        read = keep.read([*digests.values()]) if keep else {}
        kept = {digest: one for digest, one in read.items() if is_sound(one)}
        made = {digests[key]: Kept(words_of(card), b"") for key, card in some.items() if digests[key] not in kept}
        if keep and made:
            keep.write(made)
        with self._lock:
            # Whatever was followed meanwhile has the last word.
            still = {key: card for key, card in some.items() if self._new.get(key) is card}
            self._add(still, {**kept, **made})

    def _add(self, cards: Mapping[Key, Card], kept: Mapping[bytes, Kept]) -> None:
        if not cards:
            return
        digests = [digest_of(card, self._encoder) for card in cards.values()]
        sheets = [
            kept.get(digest) or Kept(words_of(card), b"") for digest, card in zip(digests, cards.values(), strict=True)
        ]
        largest = max(self.segments, key=lambda one: len(one.cards), default=None)
        # A few cards say little about how long texts usually are.
        usual = largest.usual if largest and len(largest.cards) > len(cards) else None
        segment = Segment.of([*cards.values()], [sheet.words for sheet in sheets], usual)
        if encoded := [(slot, sheet.vector) for slot, sheet in enumerate(sheets) if sheet.vector]:
            segment.put_vectors([slot for slot, _ in encoded], [vector for _, vector in encoded])
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

    def _encode(self, places: Sequence[tuple[Card, Place]], keep: Keep | None, encoder: Encoder) -> None:
        # What was indexed at once was not looked for, and another process may have been quicker.
        kept = keep.read([place.digest for _, place in places]) if keep else {}
        known = {digest: one.vector for digest, one in kept.items() if one.vector and is_sound(one)}
        new = {place.digest: card for card, place in places if place.digest not in known}
        made = (
            dict(zip(new, pack_vectors(encoder.encode([*map(passage_of, new.values())])), strict=True)) if new else {}
        )
        vectors = {**known, **made}
        segment = places[0][1].segment
        segment.put_vectors([place.slot for _, place in places], [vectors[place.digest] for _, place in places])
        if keep and made:
            words = {place.digest: segment.words[place.slot] for _, place in places}
            keep.write({digest: Kept(words[digest], vector) for digest, vector in made.items()})

    def _tidy(self) -> None:
        """Make one segment of many small ones, and of those most of whose cards are gone."""
        with self._lock:
            by_size = sorted(self.segments, key=lambda one: len(one.cards), reverse=True)
            are_worn = any(one.dead * 2 > len(one.cards) for one in by_size)
            if len(by_size) <= _MOST_SEGMENTS and not are_worn:
                return
            # One that is far larger than all others together stays as it is.
            others = sum(len(one.cards) for one in by_size[1:])
            poor = by_size[1:] if len(by_size[0].cards) > _FAR_LARGER * others and not are_worn else by_size
            merged = merge(poor)
            for slot, card in enumerate(merged.cards):
                place = self._places[card.identity, card.path]
                self._places[card.identity, card.path] = place._replace(segment=merged, slot=slot)
            self.segments = (*(one for one in self.segments if one not in poor), merged)


def _are_few(cards: Sequence[Card]) -> bool:
    """Whether cards are so few, and so short, that their words are made in an instant."""
    if len(cards) > _AT_ONCE:
        return False
    said = sum(len(text) for card in cards for pair in card.parameters for text in pair)
    return said + sum(len(card.description) for card in cards) <= _AT_ONCE_LETTERS


def _is_same(card: Card | None, place: Place) -> bool:
    known = place.segment.cards[place.slot]
    return card is known or card == known


def _by_name(cards: Sequence[Card]) -> Mapping[str, Sequence[Card]]:
    named: dict[str, list[Card]] = {}
    for card in cards:
        named.setdefault(card.tool_id, []).append(card)
    return named
