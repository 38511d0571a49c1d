"""The search features of one card, and a segment: some cards in arrays."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from math import isfinite
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.search.port import Floats
from kiwi_mcp.search.tokens import COMMON, spelled, stem, words

SIZE = 388
"""The bytes of a packed vector: a byte for each of 384 coordinates, and their common scale."""

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
    counts: dict[str, list[int]] = {}
    for place, text in enumerate(_texts(card)):
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


def _texts(card: Card) -> tuple[str, ...]:
    return (
        card.tool_id if stem(card.name) == stem(card.tool_id) else f"{card.tool_id} {card.name}",
        home_of(card),
        card.description,
        " ".join(name for name, _ in card.parameters),
        " ".join(text for _, text in card.parameters),
    )


COARSE = 128
"""How many coordinates are compared with all cards; the nearest cards are compared in full."""

_SATURATION = 0.6
"""How fast a repeated word stops adding to the score of a card: another word adds more."""

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
    usual: Floats
    """The usual length of each field."""
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
        ranges, slots, impacts, in_name, usual = _postings(words, usual)
        count = len(cards)
        sizes = np.maximum(np.bincount(slots[in_name], minlength=count), 1).astype(np.float32)
        packed, coarse = np.zeros((count, SIZE), np.uint8), np.zeros((COARSE, count), np.float32)
        none, every = np.zeros(count, bool), np.ones(count, bool)
        parts = SegmentArrays(
            ranges, slots, impacts, in_name, sizes, usual, packed, coarse, is_encoded=none, is_alive=every
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
    encoded = [place for place, (one, slot) in enumerate(rows) if one.is_encoded[slot]]
    if encoded:
        merged.put_vectors(encoded, [bytes(rows[place][0].parts.packed[rows[place][1]]) for place in encoded])
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


def _postings(
    packed: Sequence[bytes], usual: Floats | None
) -> tuple[Mapping[str, tuple[int, int]], Slots, Floats, Flags, Floats]:
    sheets = [unpack_words(one) for one in packed]
    numbers: dict[str, int] = {}
    sizes = np.fromiter((len(stems) for stems, _ in sheets), np.int32, len(sheets))
    every = chain.from_iterable(stems for stems, _ in sheets)
    numbered = np.fromiter((numbers.setdefault(stem, len(numbers)) for stem in every), np.int32, int(sizes.sum()))
    counts = np.concatenate([counts for _, counts in sheets] or [np.zeros((0, len(FIELDS)), np.uint8)])
    slots = np.repeat(np.arange(len(sheets), dtype=np.int32), sizes)
    impacts, usual = impacts_of(counts, slots, len(sheets), usual)
    in_name = counts[:, 0] > 0
    order = np.argsort(2 * numbered + ~in_name, kind="stable")
    ends = np.cumsum(np.bincount(numbered, minlength=len(numbers))).tolist()
    ranges = dict(zip(numbers, zip([0, *ends], ends, strict=False), strict=True))
    return ranges, slots[order], impacts[order], in_name[order], usual
