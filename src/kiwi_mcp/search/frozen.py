"""A frozen index: all that searches know of many cards, as bytes that are read at once at the next start.

A card is made of its line when somebody first looks at it; a search looks at few of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypedDict, cast, overload

import numpy as np

from kiwi_mcp.search.index import Index, Key, Place
from kiwi_mcp.search.port import Card
from kiwi_mcp.search.segment import Parts, Segment

_GONE = bytes(16)
"""The digest of a card that is gone."""
_ALIGNED = 64
_HERE = Path(__file__).parent
_CODE = ("port.py", "words.py", "sheet.py", "segment.py", "frozen.py")
_FIELDS = tuple(Card.__dataclass_fields__)
_TAGS, _PARAMETERS = _FIELDS.index("tags"), _FIELDS.index("parameters")
_PARTS = ("lines", "line_ends", "words", "word_ends", "stem_ends")


@cache
def recipe_of(encoder: str) -> str:
    """Return what changes whenever the same cards would give another index: the code that makes it counts as well."""
    code = b"\0".join((_HERE / name).read_bytes() for name in _CODE)
    return sha256(encoder.encode() + b"\0" + code).hexdigest()


class _Said(TypedDict):
    """What is told of a segment beside its arrays."""

    shapes: Mapping[str, tuple[str, Sequence[int]]]
    keys: Sequence[tuple[str, str, str]]
    """The identity, the path and the name of each card."""
    stems: Sequence[str]


class FrozenCards(Sequence[Card]):
    """Cards as lines of JSON, each read when it is first looked at."""

    def __init__(self, lines: bytes, ends: Sequence[int]) -> None:
        self._lines = lines
        self._ends = ends
        self._made: list[Card | None] = [None] * len(ends)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> Card: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Card]: ...
    def __getitem__(self, place: int | slice) -> Card | Sequence[Card]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        card = self._made[place]
        if card is None:
            start = self._ends[place - 1] if place else 0
            card = self._made[place] = _card(json.loads(self._lines[start : self._ends[place]]))
        return card


class _Named(Mapping[str, Sequence[Card]]):
    """Cards by the names of their items."""

    def __init__(self, named: Sequence[tuple[str, Segment, int]]) -> None:
        self._listed = named

    @cached_property
    def _places(self) -> Mapping[str, Sequence[tuple[Segment, int]]]:
        places: dict[str, list[tuple[Segment, int]]] = {}
        for name, segment, slot in self._listed:
            places.setdefault(name, []).append((segment, slot))
        return places

    def __getitem__(self, name: str) -> Sequence[Card]:
        return [segment.cards[slot] for segment, slot in self._places[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def freeze(index: Index) -> bytes:
    """Return an index as bytes, its segments as they are."""
    parts: dict[str, bytes] = {}
    said: list[_Said] = []
    digests = {(id(place.segment), place.slot): place.digest for place in index.places.values()}
    for number, segment in enumerate(index.segments):
        arrays = {name: part for name, part in segment.parts._asdict().items() if isinstance(part, np.ndarray)}
        lines = [json.dumps(_row(card), separators=(",", ":")).encode() for card in segment.cards]
        ranges = segment.parts.ranges
        own = {
            "lines": b"".join(lines),
            "line_ends": _ends(map(len, lines)),
            "words": b"".join(segment.words),
            "word_ends": _ends(map(len, segment.words)),
            "stem_ends": _ends(end - begin for begin, end in ranges.values()),
            "digests": b"".join(digests.get((id(segment), slot), _GONE) for slot in range(len(lines))),
            **{name: value.tobytes() for name, value in arrays.items()},
        }
        parts |= {f"{number} {name}": part for name, part in own.items()}
        said.append(
            {
                "shapes": {name: (value.dtype.str, value.shape) for name, value in arrays.items()},
                "keys": [(card.identity, card.path, card.tool_id) for card in segment.cards],
                "stems": [*ranges],
            }
        )
    return _joined({"said": json.dumps(said, separators=(",", ":")).encode(), **parts})


def thaw(data: bytearray, encoder: str) -> Index:
    """Return the index that was frozen, which goes on using these bytes."""
    parts = _parted(data)
    places: dict[Key, Place] = {}
    named: list[tuple[str, Segment, int]] = []
    segments = []
    every: Sequence[_Said] = json.loads(bytes(parts["said"]))
    for number, said in enumerate(every):
        segment = _segment(said, {name: parts[f"{number} {name}"] for name in (*_PARTS, *said["shapes"])})
        digests = bytes(parts[f"{number} digests"])
        for slot, (identity, path, name) in enumerate(said["keys"]):
            digest = digests[slot * len(_GONE) : (slot + 1) * len(_GONE)]
            if digest != _GONE:
                places[identity, path] = Place(segment, slot, digest)
                named.append((name, segment, slot))
        segments.append(segment)
    return Index.of(encoder, segments, places, _Named(named))


def _segment(said: _Said, parts: Mapping[str, memoryview]) -> Segment:
    shapes = said["shapes"].items()
    arrays = {name: np.frombuffer(parts[name], np.dtype(kind)).reshape(shape) for name, (kind, shape) in shapes}
    ranges = dict(zip(said["stems"], pairwise([0, *_numbers(parts["stem_ends"])]), strict=True))
    words = bytes(parts["words"])
    return Segment(
        FrozenCards(bytes(parts["lines"]), _numbers(parts["line_ends"])),
        tuple(words[begin:end] for begin, end in pairwise([0, *_numbers(parts["word_ends"])])),
        Parts(ranges=ranges, **arrays),
        [identity for identity, _, _ in said["keys"]],
    )


def _joined(parts: Mapping[str, bytes]) -> bytes:
    head = json.dumps({name: len(part) for name, part in parts.items()}).encode()
    return b"".join(_padded(part) for part in (len(head).to_bytes(8, "little"), head, *parts.values()))


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % _ALIGNED)


def _parted(data: bytearray) -> Mapping[str, memoryview]:
    whole = memoryview(data)
    size, at = int.from_bytes(whole[:8], "little"), _ALIGNED
    lengths, at = json.loads(bytes(whole[at : at + size])), at + size + -size % _ALIGNED
    parts: dict[str, memoryview] = {}
    for name, length in lengths.items():
        parts[name] = whole[at : at + length]
        at += length + -length % _ALIGNED
    return parts


def _ends(lengths: Iterable[int]) -> bytes:
    return np.array([*accumulate(lengths)], np.int64).tobytes()


def _numbers(part: memoryview) -> Sequence[int]:
    return cast("list[int]", np.frombuffer(part, np.int64).tolist())


def _row(card: Card) -> list[object]:
    return [getattr(card, name) for name in _FIELDS]


def _card(row: list[object]) -> Card:
    row[_TAGS] = tuple(cast("list[str]", row[_TAGS]))
    row[_PARAMETERS] = tuple(map(tuple, cast("list[list[str]]", row[_PARAMETERS])))
    return Card(*row)  # type: ignore[arg-type]  # as they were frozen
