"""A frozen index: all that searches know of many cards, as bytes that are read at once at the next start.

What a search does not look at costs nothing but its bytes: a card is made of its line when somebody first looks at it.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TypedDict, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.search.index import Index, Key, Place
from kiwi_mcp.search.port import Card
from kiwi_mcp.search.segment import Parts, Segment
from kiwi_mcp.search.sheet import is_sound

_GONE = bytes(16)
"""The digest of a card that is gone."""
_ALIGNED = 64
_HERE = Path(__file__).parent
_CODE = ("port.py", "words.py", "sheet.py", "segment.py", "frozen.py")
_FIELDS = tuple(Card.__dataclass_fields__)
_TAGS, _PARAMETERS = _FIELDS.index("tags"), _FIELDS.index("parameters")
_SHAPES = tuple(
    [{"tags": list, "parameters": list, "modified": number}.get(name, str) for name in _FIELDS]
    for number in (float, int)
)
"""Of what types the line of a card is."""
_POSTINGS = ("slots", "impacts", "in_name")
"""The arrays that have a row for each word of each card; others have one for each card."""
_EMPTY = Segment.of((), ()).parts
Read = TypeVar("Read")


class DamagedIndex(Exception):
    """Bytes that an index was thawed from are not what one is frozen to: it has to be made again."""


@cache
def recipe_of(encoder: str) -> str:
    """Return what changes whenever the same cards would give another index: the code that makes it counts as well."""
    code = b"\0".join((_HERE / name).read_bytes() for name in _CODE)
    return sha256(encoder.encode() + b"\0" + code).hexdigest()


class _Said(TypedDict):
    """What is told of a segment beside its arrays and rows."""

    shapes: Mapping[str, tuple[str, Sequence[int]]]
    stems: Sequence[str]
    names: Sequence[str]
    """The names of the items of cards that are not gone, in order; `named` are their slots."""


class _Rows(Sequence[Read]):
    """Rows of bytes, each read when it is first looked at."""

    def __init__(self, rows: memoryview, ends: memoryview, read: Callable[[bytes], Read]) -> None:
        self._rows = rows
        self._ends = _numbers(ends)
        self._read = read
        self._made: list[Read | None] = [None] * len(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> Read: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Read]: ...
    def __getitem__(self, place: int | slice) -> Read | Sequence[Read]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        made = self._made[place]
        if made is None:
            start = self._ends[place - 1] if place else 0
            try:
                made = self._made[place] = self._read(bytes(self._rows[start : self._ends[place]]))
            except (ValueError, TypeError, RecursionError) as error:
                raise DamagedIndex from error
        return made


class _Places(MutableMapping[Key, Place]):
    """Where each of so many cards is: a look at all of them, taken when somebody first asks for more than a count."""

    def __init__(self, count: int, segments: Sequence[Segment], digests: Sequence[bytes]) -> None:
        self._segments, self._digests = segments, digests
        self._made: dict[Key, Place] | None = None
        self._count = count

    @property
    def _all(self) -> dict[Key, Place]:
        if self._made is None:
            made: dict[Key, Place] = {}
            for segment, digests in zip(self._segments, self._digests, strict=True):
                for slot, card in enumerate(segment.cards):
                    digest = digests[slot * len(_GONE) : (slot + 1) * len(_GONE)]
                    if digest != _GONE:
                        made[card.identity, card.path] = Place(segment, slot, digest)
            self._made = made
        return self._made

    def __len__(self) -> int:
        return self._count if self._made is None else len(self._made)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._all)

    def __getitem__(self, key: Key) -> Place:
        return self._all[key]

    def __setitem__(self, key: Key, place: Place) -> None:
        self._all[key] = place

    def __delitem__(self, key: Key) -> None:
        del self._all[key]


class _Named(Mapping[str, Sequence[Card]]):
    """Cards by the names of their items, which each segment has in order."""

    def __init__(self, named: Sequence[tuple[Sequence[str], Sequence[int], Segment]]) -> None:
        self._named = named

    def __getitem__(self, name: str) -> Sequence[Card]:
        found = []
        for names, slots, segment in self._named:
            begin, end = bisect_left(names, name), bisect_right(names, name)
            found += [segment.cards[slot] for slot in slots[begin:end]]
        if not found:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter({name for names, _, _ in self._named for name in names})

    def __len__(self) -> int:
        return len([*self])


def freeze(index: Index) -> bytes:
    """Return an index as bytes, its segments as they are."""
    parts: dict[str, bytes] = {}
    said: list[_Said] = []
    digests = {(id(place.segment), place.slot): place.digest for place in index.places.values()}
    for number, segment in enumerate(index.segments):
        arrays, ranges = _arrays(segment.parts), segment.parts.ranges
        living = [slot for slot in range(len(segment.cards)) if (id(segment), slot) in digests]
        named = sorted((segment.cards[slot].tool_id, slot) for slot in living)
        own = {
            **_rows("lines", [json.dumps(_row(card), separators=(",", ":")).encode() for card in segment.cards]),
            **_rows("words", segment.words),
            **_rows("identities", [json.dumps(card.identity).encode() for card in segment.cards]),
            "stem_ends": _ends(end - begin for begin, end in ranges.values()),
            "named": np.array([slot for _, slot in named], np.int64).tobytes(),
            "digests": b"".join(digests.get((id(segment), slot), _GONE) for slot in range(len(segment.cards))),
            **{name: value.tobytes() for name, value in arrays.items()},
        }
        parts |= {f"{number} {name}": part for name, part in own.items()}
        shapes = {name: (value.dtype.str, value.shape) for name, value in arrays.items()}
        said.append({"shapes": shapes, "stems": [*ranges], "names": [name for name, _ in named]})
    return _joined({"said": json.dumps(said, separators=(",", ":")).encode(), **parts})


def thaw(data: memoryview, encoder: str) -> Index:
    """Return the index that was frozen, which goes on using these bytes."""
    parts = _parted(data)
    every: Sequence[_Said] = json.loads(bytes(parts["said"]))
    segments, digests, named = [], [], []
    for number, said in enumerate(every):
        own = {name.partition(" ")[2]: part for name, part in parts.items() if name.startswith(f"{number} ")}
        segments.append(_segment(said, own))
        digests.append(bytes(own["digests"]))
        named.append((_texts(said["names"]), _numbers(own["named"]), segments[-1]))
        slots = np.frombuffer(own["named"], np.int64)
        if len(slots) != len(said["names"]) or not _are_slots(slots, len(segments[-1].cards)):
            raise DamagedIndex
    count = sum(len(names) for names, _, _ in named)
    return Index.of(encoder, segments, _Places(count, segments, digests), _Named(named))


def _segment(said: _Said, parts: Mapping[str, memoryview]) -> Segment:
    shapes = said["shapes"].items()
    arrays = {name: np.frombuffer(parts[name], np.dtype(kind)).reshape(shape) for name, (kind, shape) in shapes}
    bounds = [0, *_numbers(parts["stem_ends"]), len(arrays["slots"])]
    ranges = dict(zip(_texts(said["stems"]), pairwise(bounds[:-1]), strict=True))
    cards = _Rows(parts["lines"], parts["lines_ends"], _card)
    words = _Rows(parts["words"], parts["words_ends"], _words)
    identities = _Rows(parts["identities"], parts["identities_ends"], _identity)
    digests = np.frombuffer(parts["digests"], np.uint8).reshape(-1, len(_GONE))
    is_whole = (
        {len(words), len(identities), len(digests)} == {len(cards)}
        and _do_fit(arrays, len(cards))
        and np.array_equal(arrays["is_alive"], digests.any(axis=1))
        and sorted(bounds) == bounds
    )
    if not is_whole:
        raise DamagedIndex
    return Segment(cards, words, Parts(ranges=ranges, **arrays), identities)


def _do_fit(arrays: Mapping[str, NDArray[np.generic]], count: int) -> bool:
    """Whether arrays are those of so many cards, and point at no other."""
    for name, empty in _arrays(_EMPTY).items():
        length = len(arrays["slots"]) if name in _POSTINGS else count
        if (arrays[name].dtype, arrays[name].shape) != (empty.dtype, tuple(size or length for size in empty.shape)):
            return False
    return _are_slots(arrays["slots"], count)


def _are_slots(numbers: NDArray[np.generic], count: int) -> bool:
    return not len(numbers) or bool(np.min(numbers) >= 0 and np.max(numbers) < count)


def _arrays(parts: Parts) -> Mapping[str, NDArray[np.generic]]:
    return {name: part for name, part in parts._asdict().items() if isinstance(part, np.ndarray)}


def _texts(texts: Sequence[str]) -> Sequence[str]:
    "".join(texts)  # refuses what is no text
    return texts


def _rows(name: str, rows: Sequence[bytes]) -> Mapping[str, bytes]:
    return {name: b"".join(rows), f"{name}_ends": _ends(map(len, rows))}


def _joined(parts: Mapping[str, bytes]) -> bytes:
    head = json.dumps({name: len(part) for name, part in parts.items()}).encode()
    return b"".join(_padded(part) for part in (len(head).to_bytes(8, "little"), head, *parts.values()))


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % _ALIGNED)


def _parted(whole: memoryview) -> Mapping[str, memoryview]:
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


def _card(line: bytes) -> Card:
    row: list[object] = json.loads(line)
    if [*map(type, row)] not in _SHAPES:
        raise TypeError
    row[_TAGS] = tags = tuple(cast("list[str]", row[_TAGS]))
    row[_PARAMETERS] = pairs = tuple((name, text) for name, text in cast("list[list[str]]", row[_PARAMETERS]))
    _texts([*tags, *chain.from_iterable(pairs)])
    return Card(*row)  # type: ignore[arg-type]  # their types were looked at


def _words(row: bytes) -> bytes:
    if not is_sound(Kept(row, b"")):
        raise ValueError
    return row


def _identity(row: bytes) -> str:
    identity: object = json.loads(row)
    if not isinstance(identity, str):
        raise TypeError
    return identity
