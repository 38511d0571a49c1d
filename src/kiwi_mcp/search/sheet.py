"""Sheets: what a search needs of one card, made from its text alone, and the bytes in which it is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import numpy as np

from kiwi_mcp.search.port import Card, Floats
from kiwi_mcp.search.words import COMMON, spelled, stem, words

SIZE = 388
"""How many bytes a vector takes: a byte for each of 384 coordinates, and the scale of all."""

_RECIPE = b"1"  # raised when the same text would give other words
_SATURATION = 1.2
_SCALE = np.dtype("<f4")
_IMPACT = np.dtype("<f2")


@dataclass(frozen=True, slots=True)
class Field:
    """One part of a card: how much its words count, how much its length counts, and how long it usually is."""

    weight: float
    by_length: float
    usual: int


_NAME = Field(2.0, 0.3, 3)
_HOME = Field(1.0, 0.3, 2)
_DESCRIPTION = Field(1.0, 0.6, 16)
_PARAMETERS = Field(0.7, 0.6, 6)
_PARAMETER_TEXTS = Field(0.3, 0.7, 24)


def digest_of(card: Card, encoder: str) -> bytes:
    """Return what the sheet of a card is kept under: another for every other text, recipe or encoder."""
    texts = (card.tool_id, card.name, card.description, home_of(card), *chain.from_iterable(card.parameters))
    return blake2b("\0".join((encoder, *texts)).encode(errors="replace"), digest_size=16, person=_RECIPE).digest()


def home_of(card: Card) -> str:
    """Return what tells where an item is at home: its server, its folder, its tags."""
    return " ".join(filter(None, (card.server, card.category, *card.tags)))


def passage_of(card: Card) -> str:
    """Return the text that stands for a card when meanings are compared."""
    names = ", ".join(spelled(name) for name, _ in card.parameters)
    head = f"{spelled(home_of(card))} {spelled(card.name or card.tool_id)}".strip()
    return f"{head}: {card.description}{f' Parameters: {names}' if names else ''}"


def impacts_of(card: Card) -> Mapping[str, float]:
    """Return for each stem of a card how much it says about it, from 0 to 1: its fields weighed, and saturated."""
    frequency: dict[str, float] = {}
    for part, text in _fields(card):
        found = [stem(word) for word in words(text) if word not in COMMON]
        norm = 1 - part.by_length + part.by_length * len(found) / part.usual
        for word, count in Counter(found).items():
            frequency[word] = frequency.get(word, 0.0) + part.weight * count / norm
    return {word: weight / (_SATURATION + weight) for word, weight in frequency.items()}


def pack_words(impacts: Mapping[str, float]) -> bytes:
    """Return stems and impacts as bytes."""
    return " ".join(impacts).encode() + b"\0" + np.fromiter(impacts.values(), _IMPACT, len(impacts)).tobytes()


def unpack_words(packed: bytes) -> tuple[Sequence[str], Floats]:
    """Return the stems, and the impact of each."""
    stems, _, values = packed.partition(b"\0")
    return stems.decode().split(), np.frombuffer(values, _IMPACT).astype(np.float32)


def pack_vectors(rows: Floats) -> Sequence[bytes]:
    """Return vectors as bytes: each coordinate as a share of the largest."""
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(1e-12)) / np.float32(127)
    whole = np.rint(rows / scales).astype(np.int8)
    return [row.tobytes() + scale.astype(_SCALE).tobytes() for row, scale in zip(whole, scales, strict=True)]


def unpack_vectors(packed: bytes) -> Floats:
    """Return vectors that were packed one after the other, a row each, nearly of length one."""
    table = np.frombuffer(packed, np.uint8).reshape(-1, SIZE)
    scales = np.ascontiguousarray(table[:, SIZE - 4 :]).view(_SCALE)
    return table[:, : SIZE - 4].view(np.int8).astype(np.float32) * scales


def _fields(card: Card) -> Iterator[tuple[Field, str]]:
    yield _NAME, card.tool_id if stem(card.name) == stem(card.tool_id) else f"{card.tool_id} {card.name}"
    yield _HOME, home_of(card)
    yield _DESCRIPTION, card.description
    yield _PARAMETERS, " ".join(name for name, _ in card.parameters)
    yield _PARAMETER_TEXTS, " ".join(text for _, text in card.parameters)
