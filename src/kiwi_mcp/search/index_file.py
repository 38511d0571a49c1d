"""An index as bytes, and as a file that the next process maps into memory; the file can be deleted at any time.

The file is: the name of its content (32 bytes), a seal (32 bytes), the number of blocks (8 bytes), the digest of each
block, padding, and the data in blocks of one megabyte. The seal covers the digests. What is read at once is checked at
once; the large rest (rows of cards, vectors) is checked in the background, since it takes part of a second.
"""

from __future__ import annotations

import json
import mmap
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from itertools import accumulate, pairwise
from pathlib import Path
from stat import S_ISREG
from time import monotonic, time
from typing import TypedDict, TypeVar, cast, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

import kiwi_mcp
from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.manifest.files import write_whole
from kiwi_mcp.search.index import CardIndex, Key, Place, Segment, SegmentArrays, is_sound

MIN_CARDS, MAX_CARDS = 1_000, 500_000  # how many cards are worth a file, and how many are too many for one
_MAX_BYTES = 1_200_000_000
_MAX_AGE = 30 * 86_400
"""After how many seconds a file is made again from the stored features, which would count as unused otherwise."""
_DIGEST = 32
_BLOCK = 1_000_000
_GONE = bytes(16)  # the digest of a card that was removed
_ALIGNED = 64
_PACKAGE = Path(kiwi_mcp.__file__).parent
_CODE = ("domain/cards.py", "search/index_file.py", "search/port.py", "search/index.py", "search/tokens.py")
_POSTINGS = ("slots", "impacts", "in_name")
"""The arrays that have a row for each word of each card; others have one for each card."""
_LARGE = ("lines", "words", "identities", "impacts", "in_name", "packed", "coarse")
"""The parts that are checked in the background."""
_EMPTY = Segment.of((), ()).parts
Read = TypeVar("Read")
_Block = tuple[int, int, bytes]  # where a block of a file begins, its size, and its digest


class DamagedIndex(Exception):
    """The bytes of a serialized index are damaged: the index has to be made again."""


@cache
def format_id(encoder: str) -> str:
    """Return a text that changes whenever the same cards would give another index; it covers the code that makes it."""
    code = b"\0".join((_PACKAGE / name).read_bytes() for name in _CODE)
    return sha256(encoder.encode() + b"\0" + code).hexdigest()


class FileCheck:
    """The blocks of an index file that are not checked yet. They are read from the file, not from the mapped copy."""

    def __init__(self, file: int) -> None:
        self._file = file
        self.blocks: list[_Block] = []

    def run(self, *, seconds: float) -> bool:
        """Check blocks for about `seconds`; return whether more are left. A damaged block raises `DamagedIndex`."""
        until = monotonic() + seconds
        while self.blocks and monotonic() < until:
            start, size, digest = self.blocks.pop()
            if sha256(os.pread(self._file, size, start)).digest() != digest:
                raise DamagedIndex
        return bool(self.blocks)

    def __del__(self) -> None:
        os.close(self._file)


def load_index(path: Path, etag: str, encoder: str) -> tuple[CardIndex, FileCheck] | None:
    """Return the saved index at an etag, if it is sound and of this release, and the check that is left to do."""
    try:
        # Without O_NONBLOCK, a pipe in its place would block until a writer opens it.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    check = FileCheck(file)  # it closes the file
    try:
        state = os.fstat(file)
        if not S_ISREG(state.st_mode) or state.st_size > _MAX_BYTES or time() - state.st_mtime > _MAX_AGE:
            return None
        # A private copy: an index marks removed cards and adds vectors. Only changed pages take memory of their own.
        whole = memoryview(mmap.mmap(file, 0, access=mmap.ACCESS_COPY))
        if whole[:_DIGEST] != _content_name(etag, encoder):
            return None
        blocks = _sealed_blocks(whole)
        start = blocks[0][0]
        _check(whole, blocks[:1])
        parts, eager = split(whole[start:])
        count = -(-eager // _BLOCK)
        _check(whole, blocks[1:count])
        check.blocks = blocks[max(count, 1) :]
        return deserialize(parts, encoder), check
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DamagedIndex):
        return None


def save_index(path: Path, etag: str, encoder: str, index: CardIndex) -> None:
    """Save an index. If the file cannot be written, nothing is saved."""
    data = b"".join(serialize(index))
    with suppress(OSError):
        write_whole(path, _content_name(etag, encoder), seal(data), data)


def index_path(cache: Path, name: str, home: str) -> Path:
    """Return the file of the index of a source."""
    return cache / "search" / f"{sha256(os.fsencode(f'{name} {home}')).hexdigest()[:32]}.index"


def seal(data: bytes) -> bytes:
    """Return what comes between the name and the data of a file: the seal, and the digests of the blocks."""
    view = memoryview(data)
    digests = [sha256(view[start : start + _BLOCK]).digest() for start in range(0, len(data), _BLOCK)]
    table = len(digests).to_bytes(8, "little") + b"".join(digests)
    return sha256(table).digest() + table + bytes(-(2 * _DIGEST + len(table)) % _ALIGNED)


def _sealed_blocks(whole: memoryview) -> list[_Block]:
    """Return the blocks of a file."""
    at = 2 * _DIGEST + 8
    count = int.from_bytes(whole[2 * _DIGEST : at], "little")
    end = at + count * _DIGEST
    start = end + -end % _ALIGNED
    size = len(whole) - start
    if count != -(-size // _BLOCK) or sha256(whole[2 * _DIGEST : end]).digest() != whole[_DIGEST : 2 * _DIGEST]:
        raise DamagedIndex
    return [
        (start + number * _BLOCK, min(_BLOCK, size - number * _BLOCK), bytes(whole[at : at + _DIGEST]))
        for number, at in enumerate(range(at, end, _DIGEST))
    ]


def _check(whole: memoryview, blocks: Iterable[_Block]) -> None:
    if any(sha256(whole[start : start + size]).digest() != digest for start, size, digest in blocks):
        raise DamagedIndex


def _content_name(etag: str, encoder: str) -> bytes:
    return sha256(f"{kiwi_mcp.__version__} {format_id(encoder)} {etag}".encode()).digest()


class _Facts(TypedDict):
    """The metadata of a segment, besides its arrays and rows."""

    shapes: Mapping[str, tuple[str, Sequence[int]]]
    stems: Sequence[str]
    names: Sequence[str]  # the names of the items that are not removed, in order; `named` holds their slots


class _Rows(Sequence[Read]):
    """Rows of bytes, each parsed when it is first used."""

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
    """The places of `count` cards: the mapping is built at the first use that needs more than the count."""

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
    """Cards by the names of their items, which each segment holds in order."""

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


def serialize(index: CardIndex) -> Sequence[bytes]:
    """Return an index as bytes, its segments as they are: a head with the sizes of all parts, then the parts.

    Those that are checked at once come first.
    """
    parts: dict[str, bytes] = {}
    facts: list[_Facts] = []
    digests = {(id(place.segment), place.slot): place.digest for place in index.places.values()}
    for number, segment in enumerate(index.segments):
        arrays, ranges = _arrays(segment.parts), segment.parts.ranges
        active = [slot for slot in range(len(segment.cards)) if (id(segment), slot) in digests]
        named = sorted((segment.cards[slot].tool_id, slot) for slot in active)
        rows = {
            "lines": [_line(card) for card in segment.cards],
            "words": segment.words,
            "identities": [json.dumps(card.identity).encode() for card in segment.cards],
        }
        own = {
            **{name: b"".join(some) for name, some in rows.items()},
            **{f"{name}_ends": _ends(map(len, some)) for name, some in rows.items()},
            "stem_ends": _ends(end - begin for begin, end in ranges.values()),
            "named": np.array([slot for _, slot in named], np.int64).tobytes(),
            "digests": b"".join(digests.get((id(segment), slot), _GONE) for slot in range(len(segment.cards))),
            **{name: value.tobytes() for name, value in arrays.items()},
        }
        parts |= {f"{number} {name}": part for name, part in own.items()}
        shapes = {name: (value.dtype.str, value.shape) for name, value in arrays.items()}
        facts.append({"shapes": shapes, "stems": [*ranges], "names": [name for name, _ in named]})
    parts = {"facts": json.dumps(facts, separators=(",", ":")).encode(), **parts}
    ordered = {name: parts[name] for name in sorted(parts, key=_is_large)}
    head = json.dumps({name: len(part) for name, part in ordered.items()}).encode()
    every = (len(head).to_bytes(8, "little"), head, *ordered.values())
    return [part + b"\0" * (-len(part) % _ALIGNED) for part in every]


def deserialize(parts: Mapping[str, memoryview], encoder: str) -> CardIndex:
    """Return the index that was serialized; it continues to use the bytes of its parts."""
    every: Sequence[_Facts] = json.loads(bytes(parts["facts"]))
    segments, digests, named = [], [], []
    for number, facts in enumerate(every):
        own = {name.partition(" ")[2]: part for name, part in parts.items() if name.startswith(f"{number} ")}
        segments.append(_segment(facts, own))
        digests.append(bytes(own["digests"]))
        named.append((_texts(facts["names"]), _numbers(own["named"]), segments[-1]))
        slots = np.frombuffer(own["named"], np.int64)
        if len(slots) != len(facts["names"]) or not _are_slots(slots, len(segments[-1].cards)):
            raise DamagedIndex
    count = sum(len(names) for names, _, _ in named)
    return CardIndex.of(encoder, segments, _Places(count, segments, digests), _Named(named))


def _segment(facts: _Facts, parts: Mapping[str, memoryview]) -> Segment:
    shapes = facts["shapes"].items()
    arrays = {name: np.frombuffer(parts[name], np.dtype(kind)).reshape(shape) for name, (kind, shape) in shapes}
    bounds = [0, *_numbers(parts["stem_ends"]), len(arrays["slots"])]
    ranges = dict(zip(_texts(facts["stems"]), pairwise(bounds[:-1]), strict=True))
    cards = _Rows(parts["lines"], parts["lines_ends"], lambda line: msgspec.convert(json.loads(line), Card))
    words = _Rows(parts["words"], parts["words_ends"], _words)
    identities = _Rows(
        parts["identities"], parts["identities_ends"], lambda line: msgspec.convert(json.loads(line), str)
    )
    digests = np.frombuffer(parts["digests"], np.uint8).reshape(-1, len(_GONE))
    is_whole = (
        {len(words), len(identities), len(digests)} == {len(cards)}
        and _have_sizes(arrays, len(cards))
        and _are_slots(arrays["slots"], len(cards))
        and np.array_equal(arrays["is_alive"], digests.any(axis=1))
        and sorted(bounds) == bounds
    )
    if not is_whole:
        raise DamagedIndex
    return Segment(cards, words, SegmentArrays(ranges=ranges, **arrays), identities)


def _have_sizes(arrays: Mapping[str, NDArray[np.generic]], count: int) -> bool:
    """Whether arrays have the sizes and types for `count` cards."""
    for name, empty in _arrays(_EMPTY).items():
        length = len(arrays["slots"]) if name in _POSTINGS else count
        if (arrays[name].dtype, arrays[name].shape) != (empty.dtype, tuple(size or length for size in empty.shape)):
            return False
    return True


def _are_slots(numbers: NDArray[np.generic], count: int) -> bool:
    return not len(numbers) or bool(np.min(numbers) >= 0 and np.max(numbers) < count)


def _arrays(parts: SegmentArrays) -> Mapping[str, NDArray[np.generic]]:
    return {name: part for name, part in parts._asdict().items() if isinstance(part, np.ndarray)}


def _texts(texts: Sequence[str]) -> Sequence[str]:
    "".join(texts)  # raises a TypeError if one is not a text
    return texts


def split(whole: memoryview) -> tuple[Mapping[str, memoryview], int]:
    """Return the parts, and where those begin that are checked later."""
    size, at = int.from_bytes(whole[:8], "little"), _ALIGNED
    lengths, at = json.loads(bytes(whole[at : at + size])), at + size + -size % _ALIGNED
    parts: dict[str, memoryview] = {}
    eager = at
    for name, length in lengths.items():
        parts[name] = whole[at : at + length]
        at += length + -length % _ALIGNED
        eager = eager if _is_large(name) else at
    return parts, eager


def _is_large(name: str) -> bool:
    """Whether a part is checked in the background."""
    return name.rpartition(" ")[2] in _LARGE


def _ends(lengths: Iterable[int]) -> bytes:
    return np.array([*accumulate(lengths)], np.int64).tobytes()


def _numbers(part: memoryview) -> Sequence[int]:
    return cast("list[int]", np.frombuffer(part, np.int64).tolist())


def _line(card: Card) -> bytes:
    try:
        return msgspec.json.encode(card)
    except UnicodeEncodeError:  # a path may hold bytes that are not UTF-8
        return json.dumps(msgspec.to_builtins(card), separators=(",", ":")).encode()


def _words(row: bytes) -> bytes:
    if not is_sound(CardFeatures(row, b"")):
        raise ValueError
    return row
