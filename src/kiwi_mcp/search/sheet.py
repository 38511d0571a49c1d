"""Sheets: what a search needs of one card, made from its text alone, and the bytes in which it is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from math import isfinite
from struct import Struct
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.words import COMMON, spelled, stem, words

SIZE = 388
"""How many bytes a vector takes: a byte for each of 384 coordinates, and the scale of all."""

_RECIPE = b"3"  # raised when the same text would give other words
_MOST = 255
_SCALE = np.dtype("<f4")
_ONE_SCALE = Struct("<f")

Counts: TypeAlias = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a card: how much its words count, and how much it matters that there are many of them."""

    weight: float
    by_length: float


FIELDS = (Field(2.0, 0.3), Field(1.0, 0.3), Field(1.0, 0.6), Field(1.0, 0.6), Field(0.5, 0.7))
"""The name, where it is at home, the description, the names of parameters, and what is said of them."""


def digest_of(card: Card, encoder: str) -> bytes:
    """Return what the sheet of a card is kept under: another for every other text, recipe or encoder."""
    texts = (card.tool_id, card.name, card.description, home_of(card), *chain.from_iterable(card.parameters))
    return blake2b("\0".join((encoder, *texts)).encode(errors="replace"), digest_size=16, person=_RECIPE).digest()


def home_of(card: Card) -> str:
    """Return what tells where an item is at home: its server, its folder, its tags."""
    # What a server offers has the server for a category, and tags that all of it has.
    words = (card.server,) if card.server else (card.category, *card.tags)
    return " ".join(dict.fromkeys(filter(None, words)))


def passage_of(card: Card) -> str:
    """Return the text that stands for a card when meanings are compared."""
    names = ", ".join(spelled(name) for name, _ in card.parameters)
    head = f"{spelled(home_of(card))} {spelled(card.name or card.tool_id)}".strip()
    return f"{head}: {card.description}{f' Parameters: {names}' if names else ''}"


def words_of(card: Card) -> bytes:
    """Return the stems of a card, with how often each field holds them, as bytes."""
    counts: dict[str, list[int]] = {}
    for place, text in enumerate(_texts(card)):
        for word in words(text):
            if word not in COMMON:
                counts.setdefault(stem(word), [0] * len(FIELDS))[place] += 1
    table = np.minimum(np.array([*counts.values()], int).reshape(-1, len(FIELDS)), _MOST).astype(np.uint8)
    return b"\0".join((" ".join(counts).encode(), table.tobytes()))


def unpack_words(packed: bytes) -> tuple[Sequence[str], Counts]:
    """Return the stems, and a row for each with how often each field holds it."""
    stems, _, table = packed.partition(b"\0")
    return stems.decode().split(" ") if stems else [], np.frombuffer(table, np.uint8).reshape(-1, len(FIELDS))


def is_sound(kept: Kept) -> bool:
    """Whether what was kept can be searched: a disk, or another program, may have changed it."""
    # Thousands are looked at before a first search is answered, so that nothing is taken apart here.
    stems, gap, table = kept.words.partition(b"\0")
    try:
        stems.decode()
    except UnicodeDecodeError:
        return False
    count = stems.count(b" ") + 1 if stems else 0
    is_worded = bool(gap) and len(table) == count * len(FIELDS)
    return is_worded and (not kept.vector or _is_sound_vector(kept.vector))


def pack_vectors(rows: Floats) -> Sequence[bytes]:
    """Return vectors as bytes: each coordinate as a share of the largest. One that is no vector is near nothing."""
    rows = np.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(1e-12)) / np.float32(127)
    whole = np.rint(rows / scales).astype(np.int8)
    return [row.tobytes() + scale.astype(_SCALE).tobytes() for row, scale in zip(whole, scales, strict=True)]


def unpack_vectors(packed: bytes) -> Floats:
    """Return vectors that were packed one after the other, a row each, nearly of length one."""
    whole, scales = parted(np.frombuffer(packed, np.uint8).reshape(-1, SIZE))
    return whole.astype(np.float32) * scales


def parted(table: NDArray[np.uint8]) -> tuple[NDArray[np.int8], Floats]:
    """Return packed vectors, a row each, as their whole numbers and, a column, what to multiply them by."""
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
