"""The search features of cards, segments (some cards in arrays), and the index of the cards of a source.

New cards form a segment of their own; many small segments are merged into one. Searches read the segments without
waiting; `catch_up` runs in another thread.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from math import isfinite
from threading import Lock
from time import monotonic
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.search.port import Encoder, FeatureStorage, Floats
from kiwi_mcp.search.tokens import COMMON, spelled, stem, words

SIZE = 388  # the bytes of a packed vector: a byte for each of 384 coordinates, and their common scale

_RECIPE = b"3"  # changes when the same text would give other words
_MOST = 255
_SCALE = np.dtype("<f4")
_ONE_SCALE = struct.Struct("<f")

FieldCounts: TypeAlias = NDArray[np.uint8]


FIELDS = ((2.0, 0.3), (1.0, 0.3), (1.0, 0.6), (1.0, 0.6), (0.5, 0.7))
"""The fields of a card: the weight of the words of each, and how much its length reduces that weight.

The name, the server or category and tags, the description, the names of parameters, and their descriptions.
"""


def digest_of(card: Card, encoder: str) -> bytes:
    """Return the digest of a card's text for an encoder: the key of its stored features."""
    texts = (card.tool_id, card.name, card.description, home_of(card), *chain.from_iterable(card.parameters))
    return blake2b("\0".join((encoder, *texts)).encode(errors="replace"), digest_size=16, person=_RECIPE).digest()


def home_of(card: Card) -> str:
    """Return the server of an item, or its category and tags."""
    # All items of a server have the same category and tags.
    names = (card.server,) if card.server else (card.category, *card.tags)
    return " ".join(dict.fromkeys(filter(None, names)))


def passage_of(card: Card) -> str:
    """Return the text of a card that is encoded."""
    names = ", ".join(spelled(name) for name, _ in card.parameters)
    head = f"{spelled(home_of(card))} {spelled(card.name or card.tool_id)}".strip()
    return f"{head}: {card.description}{f' Parameters: {names}' if names else ''}"


def words_of(card: Card) -> bytes:
    """Return the stems of a card with their counts in each field, packed."""
    texts = (
        card.tool_id if stem(card.name) == stem(card.tool_id) else f"{card.tool_id} {card.name}",
        home_of(card),
        card.description,
        " ".join(name for name, _ in card.parameters),
        " ".join(text for _, text in card.parameters),
    )
    counts: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        for word in words(text):
            if word not in COMMON:
                counts.setdefault(stem(word), [0] * len(FIELDS))[place] += 1
    table = np.minimum(np.array([*counts.values()], int).reshape(-1, len(FIELDS)), _MOST).astype(np.uint8)
    return b"\0".join((" ".join(counts).encode(), table.tobytes()))


def unpack_words(packed: bytes) -> tuple[Sequence[str], FieldCounts]:
    """Return the stems, and a row for each with its counts in each field."""
    stems, _, table = packed.partition(b"\0")
    return stems.decode().split(" ") if stems else [], np.frombuffer(table, np.uint8).reshape(-1, len(FIELDS))


def is_sound(features: CardFeatures) -> bool:
    """Whether stored features are intact: a disk or another program may have changed them."""
    # Thousands are checked before the first search returns, so nothing is unpacked here.
    stems, gap, table = features.words.partition(b"\0")
    try:
        stems.decode()
    except UnicodeDecodeError:
        return False
    count = stems.count(b" ") + 1 if stems else 0
    if not gap or len(table) != count * len(FIELDS):
        return False
    if not (vector := features.vector):
        return True
    scale = _ONE_SCALE.unpack_from(vector, SIZE - _ONE_SCALE.size)[0] if len(vector) == SIZE else 0.0
    return isfinite(scale) and 0 < scale <= 1


def pack_vectors(rows: Floats) -> Sequence[bytes]:
    """Return packed vectors: each coordinate as a fraction of the largest. A row that is not finite becomes zero."""
    rows = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(1e-12)) / np.float32(127)
    whole = np.rint(rows / scales).astype(np.int8)
    return [row.tobytes() + scale.astype(_SCALE).tobytes() for row, scale in zip(whole, scales, strict=True)]


def unpack_vectors(packed: bytes) -> Floats:
    """Return packed vectors as rows of about length one."""
    whole, scales = parted(np.frombuffer(packed, np.uint8).reshape(-1, SIZE))
    return whole.astype(np.float32) * scales


def parted(table: NDArray[np.uint8]) -> tuple[NDArray[np.int8], Floats]:
    """Return packed vectors as rows of integers, and a column of their scales."""
    return table[:, : SIZE - 4].view(np.int8), np.ascontiguousarray(table[:, SIZE - 4 :]).view(_SCALE)


COARSE = 128  # how many coordinates are compared with all cards; the nearest cards are compared in full

_SATURATION = 0.6  # how fast a repeated word stops adding to the score of a card: another word adds more

Slots: TypeAlias = NDArray[np.int32]
Flags: TypeAlias = NDArray[np.bool_]


class SegmentArrays(NamedTuple):
    """The arrays of a segment."""

    ranges: Mapping[str, tuple[int, int]]
    """Where the postings of each stem begin and end; cards with the stem in their names come first."""
    slots: Slots
    impacts: Floats
    in_name: Flags
    name_sizes: Floats
    usual: Floats  # the usual length of each field
    packed: NDArray[np.uint8]
    coarse: Floats
    """The first coordinates of all cards, a row for each coordinate: this layout is the fastest to multiply with."""
    is_encoded: Flags
    is_alive: Flags


class Segment:
    """Cards with their vectors and, for each stem, the cards that hold it with its impact on each.

    After it is made, only vectors are added and cards are removed.
    """

    def __init__(
        self,
        cards: Sequence[Card],
        words: Sequence[bytes],
        parts: SegmentArrays,
        identities: Sequence[str] | None = None,
    ) -> None:
        """Make a segment of its parts; `identities` are those of the cards, if it takes time to read each card."""
        self.cards, self.words, self.parts = cards, words, parts
        self.is_alive, self.is_encoded = parts.is_alive, parts.is_encoded
        self.name_sizes, self.usual = parts.name_sizes, parts.usual
        self._identities = identities
        self._ranges, self._slots, self._impacts, self._in_name, *_ = parts
        self._packed, self._coarse = parts.packed, parts.coarse
        self.dead = len(cards) - int(parts.is_alive.sum())

    @classmethod
    def of(cls, cards: Sequence[Card], words: Sequence[bytes], usual: Floats | None = None) -> Segment:
        """Return a segment of cards with their packed words; it has no vectors yet."""
        sheets, count = [unpack_words(one) for one in words], len(cards)
        numbers: dict[str, int] = {}
        sizes = np.fromiter((len(stems) for stems, _ in sheets), np.int32, count)
        every = chain.from_iterable(stems for stems, _ in sheets)
        numbered = np.fromiter((numbers.setdefault(stem, len(numbers)) for stem in every), np.int32, int(sizes.sum()))
        counts = np.concatenate([counts for _, counts in sheets] or [np.zeros((0, len(FIELDS)), np.uint8)])
        slots = np.repeat(np.arange(count, dtype=np.int32), sizes)
        impacts, usual = impacts_of(counts, slots, count, usual)
        in_name = counts[:, 0] > 0
        order = np.argsort(2 * numbered + ~in_name, kind="stable")
        ends = np.cumsum(np.bincount(numbered, minlength=len(numbers))).tolist()
        parts = SegmentArrays(
            ranges=dict(zip(numbers, zip([0, *ends], ends, strict=False), strict=True)),
            slots=slots[order],
            impacts=impacts[order],
            in_name=in_name[order],
            name_sizes=np.maximum(np.bincount(slots[in_name], minlength=count), 1).astype(np.float32),
            usual=usual,
            packed=np.zeros((count, SIZE), np.uint8),
            coarse=np.zeros((COARSE, count), np.float32),
            is_encoded=np.zeros(count, bool),
            is_alive=np.ones(count, bool),
        )
        return cls(tuple(cards), tuple(words), parts)

    @classmethod
    def from_features(
        cls, cards: Sequence[Card], features: Sequence[CardFeatures], usual: Floats | None = None
    ) -> Segment:
        """Return a segment of cards with their packed words, and the vectors that are known."""
        segment = cls.of(cards, [one.words for one in features], usual)
        if encoded := {slot: one.vector for slot, one in enumerate(features) if one.vector}:
            segment.put_vectors([*encoded], [*encoded.values()])
        return segment

    def postings(self, stem: str) -> tuple[Slots, Floats, int]:
        """Return the cards that hold a stem, its impact on each, and for how many, the first, the name holds it."""
        begin, end = self._ranges.get(stem, (0, 0))
        return self._slots[begin:end], self._impacts[begin:end], int(np.count_nonzero(self._in_name[begin:end]))

    def document_frequency(self, stem: str) -> int:
        """Return how many cards hold a stem, including removed cards."""
        begin, end = self._ranges.get(stem, (0, 0))
        return end - begin

    def stems_of(self, slot: int) -> AbstractSet[str]:
        """Return the stems that a card holds."""
        return {*self.words[slot].partition(b"\0")[0].decode().split(" ")}

    def beginning_with(self, word: str, most: int) -> Sequence[str]:
        """Return some stems with a prefix."""
        start = bisect_left(self._vocabulary, word)
        return [stem for stem in self._vocabulary[start : start + most] if stem.startswith(word)]

    def known_stems(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of `stems` that a card holds."""
        return self._ranges.keys() & stems

    @property
    def active(self) -> Slots:
        """The slots of the cards that are not removed."""
        # A copy: cards are dropped meanwhile, and numpy counts the flags before it collects them.
        return self.is_alive.copy().nonzero()[0].astype(np.int32)

    def of_items(self, items: Iterable[str]) -> Sequence[int]:
        """Return the slots of the cards of some items, given by full names without versions."""
        return [slot for item in items for slot in self._of_item.get(item, ())]

    def drop(self, slot: int) -> None:
        """Remove a card from every search."""
        if self.is_alive[slot]:
            self.is_alive[slot] = False
            self.dead += 1

    def put_vectors(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Add the vectors of some cards."""
        where = np.asarray(slots, np.int32)
        joined = b"".join(packed)
        self._packed[where] = np.frombuffer(joined, np.uint8).reshape(-1, SIZE)
        self._coarse[:, where] = unpack_vectors(joined)[:, :COARSE].T
        self.is_encoded[where] = True

    def nearness(self, queries: Floats) -> Floats:
        """Return the approximate similarity of each query and each card, from the first coordinates."""
        return queries[:, :COARSE] @ self._coarse

    def exact_nearness(self, queries: Floats, slots: Slots) -> Floats:
        """Return the exact similarity of each query and some cards."""
        whole, scales = parted(self._packed.take(slots, axis=0))
        return (queries @ whole.astype(np.float32).T) * scales.T

    @cached_property
    def _of_item(self) -> Mapping[str, Sequence[int]]:
        slots: dict[str, list[int]] = {}
        for slot, identity in enumerate(self._identities or [card.identity for card in self.cards]):
            slots.setdefault(identity.partition("@")[0], []).append(slot)
        return slots

    @cached_property
    def _vocabulary(self) -> Sequence[str]:
        return sorted(self._ranges)


def merge(segments: Sequence[Segment]) -> Segment:
    """Return one segment with the cards of several that are not removed."""
    rows = [(one, slot) for one in segments for slot in one.active.tolist()]
    merged = Segment.of([one.cards[slot] for one, slot in rows], [one.words[slot] for one, slot in rows])
    encoded = {at: bytes(one.parts.packed[slot]) for at, (one, slot) in enumerate(rows) if one.is_encoded[slot]}
    if encoded:
        merged.put_vectors([*encoded], [*encoded.values()])
    return merged


def impacts_of(counts: FieldCounts, slots: Slots, cards: int, usual: Floats | None = None) -> tuple[Floats, Floats]:
    """Return the impact of each word on its card, from 0 to 1 (BM25F), and the usual length of each field."""
    lengths = np.stack([np.bincount(slots, column, cards) for column in counts.T], axis=1).astype(np.float32)
    if usual is None:
        usual = np.maximum(lengths.mean(axis=0), np.float32(1)) if cards else np.ones(len(FIELDS), np.float32)
    weights, by_length = np.array(FIELDS, np.float32).T
    norms = weights / (1 - by_length + by_length * lengths / usual)
    frequency = (counts * norms[slots]).sum(axis=1)
    return frequency / (_SATURATION + frequency), usual


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
            for key, place in [*self._places.items()]:
                known = place.segment.cards[place.slot]
                card = wanted.get(key)
                if card is not known and card != known:
                    del self._places[key]
                    place.segment.drop(place.slot)
            self._new = {key: card for key, card in wanted.items() if key not in self._places}
            named: dict[str, list[Card]] = {}
            for card in cards:
                named.setdefault(card.tool_id, []).append(card)
            self._cards, self._named = cards, named
            if len(self._new) <= _AT_ONCE:
                texts = (text for card in self._new.values() for pair in card.parameters for text in pair)
                descriptions = (card.description for card in self._new.values())
                if sum(map(len, chain(texts, descriptions))) <= _AT_ONCE_CHARACTERS:
                    self._add(self._new, {})

    def catch_up(self, features: FeatureStorage | None, encoder: Encoder | None, *, seconds: float) -> bool:
        """Index what is new, words first, for about `seconds`; return whether more is left."""
        until = monotonic() + seconds
        while self._new:
            some = dict([*self._new.items()][:_WORDED])
            digests = {key: digest_of(card, self._encoder) for key, card in some.items()}
            read = features.read([*digests.values()]) if features else {}
            kept = {digest: one for digest, one in read.items() if is_sound(one)}
            missing = {digests[key]: card for key, card in some.items() if digests[key] not in kept}
            made = {digest: CardFeatures(words_of(card), b"") for digest, card in missing.items()}
            if features and made:
                features.write(made)
            with self._lock:
                # The cards may have changed meanwhile: only those that are still wanted are added.
                still = {key: card for key, card in some.items() if self._new.get(key) is card}
                self._add(still, {**kept, **made})
            if monotonic() > until:
                return True
        self._tidy()
        while encoder and (places := self._unencoded()):
            self._encode(places, features, encoder)
            if monotonic() > until:
                return True
        return False

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
        new = {place.digest: passage_of(card) for card, place in places if place.digest not in known}
        made = dict(zip(new, pack_vectors(encoder.encode([*new.values()])), strict=True)) if new else {}
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


class CandidatePool:
    """The cards that a server found for one request; words are counted in all that it holds."""

    def __init__(self, segment: Segment, count: int, held: Mapping[str, int], damaged: Sequence[str] = ()) -> None:
        self.damaged = damaged  # the versions of which what the server keeps is damaged
        self.segments: Sequence[Segment] = (segment,)
        self.count = count
        self._held = held

    def document_frequency(self, stem: str) -> int:
        """Return how many of all cards hold a stem."""
        return self._held.get(stem) or self.segments[0].document_frequency(stem)

    def known_stems(self, stems: AbstractSet[str]) -> AbstractSet[str]:
        """Return those of some stems that any card holds."""
        return (self._held.keys() & stems) | self.segments[0].known_stems(stems)

    def named(self, tool_id: str) -> Sequence[Card]:
        """Return the cards of a name."""
        return [card for card in self.segments[0].cards if card.tool_id == tool_id]


CardPool: TypeAlias = CardIndex | CandidatePool
"""Cards to search, in segments, with counts over all cards: a pool may hold only the candidates."""
