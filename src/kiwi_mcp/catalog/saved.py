"""What a source found, kept on disk between processes; derived, and safe to delete at any time."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple, TypeAlias, cast

from kiwi_mcp import __version__
from kiwi_mcp.catalog.entry import Entry
from kiwi_mcp.catalog.files import Stamp
from kiwi_mcp.catalog.folder import Listing
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.manifest.sheets import Sheets

_ListingRow: TypeAlias = tuple[str, int, list[int], list[str], list[str], list[tuple[str, str]]]
_RecordRow: TypeAlias = tuple[list[int], list[object] | None]

_FORMAT = f"kiwi.catalog/2 {__version__}"
_MAX_BYTES = 256_000_000


@dataclass(frozen=True, slots=True)
class Saved:
    """The folders of a source as they were listed, and for each file its stamp and the item in it, if any."""

    listings: Mapping[str, Listing]
    records: Mapping[str, tuple[Stamp, Entry | None]]


class Offered(NamedTuple):
    """What one server offered at one mark."""

    mark: str
    entries: tuple[Entry, ...]


def place_for(cache: Path, base: Path, sheets: Sheets) -> Path:
    """Return where the findings of a source are kept; they hold for one set of types."""
    name = sha256(os.fsencode(base) + b"\0" + repr(sheets.by_type).encode()).hexdigest()
    return cache / "catalog" / f"{name[:32]}.json"


def load(place: Path) -> Saved | None:
    """Return what was kept, or None where that is missing, damaged, or from another Kiwi."""
    rows = cast("tuple[dict[str, _ListingRow], dict[str, _RecordRow]] | None", _read(place))
    if rows is None:
        return None
    listings, records = rows
    return Saved(
        {path: _listing(row) for path, row in listings.items()},
        {path: (_stamp(stamp), _entry(row) if row else None) for path, (stamp, row) in records.items()},
    )


def save(place: Path, saved: Saved) -> None:
    """Keep what was found; where nothing can be written, nothing is kept."""
    _write(place, ({path: astuple(listing) for path, listing in saved.listings.items()}, dict(saved.records)))


def load_offered(place: Path) -> Mapping[ServerKey, Offered]:
    """Return what servers offered, as far as it was kept."""
    rows = cast("list[tuple[str, str, str, list[list[object]]]] | None", _read(place))
    return {
        ServerKey(space, server): Offered(mark, tuple(map(_entry, entries)))
        for space, server, mark, entries in rows or ()
    }


def save_offered(place: Path, offered: Mapping[ServerKey, Offered]) -> None:
    """Keep what servers offered; where nothing can be written, nothing is kept."""
    _write(place, [(*key, *one) for key, one in offered.items()])


def _read(place: Path) -> object:
    try:
        if place.stat().st_size > _MAX_BYTES:
            return None
        seal, _, body = place.read_bytes().partition(b"\n")
        # The seal shows that this Kiwi wrote it whole, so that its shape needs no second look.
        return json.loads(body) if seal.decode(errors="replace") == _seal(body) else None
    except (OSError, ValueError):
        return None


def _write(place: Path, rows: object) -> None:
    body = json.dumps(rows, separators=(",", ":")).encode()
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(f"{_seal(body)}\n".encode() + body)
            os.replace(name, place)  # noqa: PTH105 - text from mkstemp
        except OSError:
            os.unlink(name)  # noqa: PTH108 - text from mkstemp
            raise


def _seal(body: bytes) -> str:
    return f"{_FORMAT} {sha256(body).hexdigest()}"


def _listing(row: _ListingRow) -> Listing:
    kind, depth, stamp, places, folders, oddities = row
    odd = tuple((path, reason) for path, reason in oddities)
    return Listing(kind, depth, _stamp(stamp), tuple(places), tuple(folders), odd)


def _stamp(row: list[int]) -> Stamp:
    changed, touched, size, inode = row
    return (changed, touched, size, inode)


def _entry(row: list[object]) -> Entry:
    *words, tags, parameters, modified = row
    pairs = tuple(map(tuple, cast("list[list[str]]", parameters)))
    return Entry._make((*words, tuple(cast("list[str]", tags)), pairs, modified))
