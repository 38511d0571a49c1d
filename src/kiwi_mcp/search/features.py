"""The search features of one card: its words by field, and its packed vector."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain
from math import isfinite
from typing import TypeAlias

import numpy as np
from msgspec import Struct
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


class Field(Struct, frozen=True):
    """One field of a card: the weight of its words, and how much its length reduces that weight."""

    weight: float
    by_length: float


FIELDS = (Field(2.0, 0.3), Field(1.0, 0.3), Field(1.0, 0.6), Field(1.0, 0.6), Field(0.5, 0.7))
"""The name, the server or category and tags, the description, the names of parameters, and their descriptions."""


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
    is_worded = bool(gap) and len(table) == count * len(FIELDS)
    return is_worded and (not features.vector or _is_sound_vector(features.vector))


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


def _is_sound_vector(vector: bytes) -> bool:
    if len(vector) != SIZE:
        return False
    (scale,) = _ONE_SCALE.unpack_from(vector, SIZE - _ONE_SCALE.size)
    return isfinite(scale) and 0 < scale <= 1


def _texts(card: Card) -> tuple[str, ...]:
    return (
        card.tool_id if stem(card.name) == stem(card.tool_id) else f"{card.tool_id} {card.name}",
        home_of(card),
        card.description,
        " ".join(name for name, _ in card.parameters),
        " ".join(text for _, text in card.parameters),
    )
