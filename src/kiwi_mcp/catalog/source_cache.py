"""What sources found, cached on disk between processes; safe to delete at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import msgspec
from msgspec import Struct
from msgspec.structs import astuple

from kiwi_mcp import __version__
from kiwi_mcp.catalog.folder_source import FolderListing
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.manifest.files import FileStamp, write_whole
from kiwi_mcp.manifest.type_specs import TypeSpecs

_ListingRow: TypeAlias = tuple[str, int, FileStamp, tuple[str, ...], tuple[str, ...], tuple[tuple[str, str], ...]]
_FolderRows: TypeAlias = tuple[dict[str, _ListingRow], dict[str, tuple[FileStamp, Card | None]]]

_FORMAT = f"kiwi.catalog/3 {__version__}"
_MAX_BYTES = 256_000_000


class FolderSnapshot(Struct, frozen=True):
    """The folders of a source as they were listed, and for each file its stamp and the item in it, if any."""

    listings: Mapping[str, FolderListing]
    records: Mapping[str, tuple[FileStamp, Card | None]]

    def is_within(self, base: str) -> bool:
        """Whether every path in it is the base or below it, and every card is that of its own file."""
        inner = [*self.records, *(path for path in self.listings if path != base)]
        for listing in self.listings.values():
            inner += (*listing.places, *listing.folders, *(path for path, _ in listing.oddities))
        return all(_is_below(path, base) for path in inner) and all(
            card is None or card.path == path for path, (_, card) in self.records.items()
        )


class ServerSnapshot(NamedTuple):
    """What one server offered at one mark."""

    mark: str
    entries: tuple[Card, ...]


def place_for(cache: Path, base: Path, sheets: TypeSpecs) -> Path:
    """Return the cache file of a source; it is valid for one set of types."""
    name = sha256(os.fsencode(base) + b"\0" + repr(sheets.by_type).encode()).hexdigest()
    return cache / "catalog" / f"{name[:32]}.json"


def load(place: Path) -> FolderSnapshot | None:
    """Return the cached snapshot, or None if it is missing, damaged, or from another Kiwi release."""
    rows: _FolderRows | None = _read(place, _FolderRows)
    if rows is None:
        return None
    listings, records = rows
    return FolderSnapshot({path: FolderListing(*row) for path, row in listings.items()}, records)


def save(place: Path, saved: FolderSnapshot) -> None:
    """Cache a snapshot. If the file cannot be written, nothing is cached."""
    _write(place, ({path: astuple(listing) for path, listing in saved.listings.items()}, dict(saved.records)))


def load_offered(place: Path) -> Mapping[ServerKey, ServerSnapshot]:
    """Return the cached offers of servers."""
    rows: list[tuple[ServerKey, ServerSnapshot]] | None = _read(place, list[tuple[ServerKey, ServerSnapshot]])
    return dict(rows or ())


def save_offered(place: Path, offered: Mapping[ServerKey, ServerSnapshot]) -> None:
    """Cache what servers offered. If the file cannot be written, nothing is cached."""
    _write(place, [*offered.items()])


def _read(place: Path, rows: Any) -> Any:  # of the type `rows`
    try:
        if place.stat().st_size > _MAX_BYTES:
            return None
        seal, _, body = place.read_bytes().partition(b"\n")
        # The json module: a path may hold bytes that are not UTF-8, which msgspec's own decoder refuses.
        return msgspec.convert(json.loads(body), rows) if seal.decode(errors="replace") == _seal(body) else None
    except (OSError, ValueError):
        return None


def _write(place: Path, rows: object) -> None:
    body = json.dumps(msgspec.to_builtins(rows), separators=(",", ":")).encode()
    with suppress(OSError):
        write_whole(place, f"{_seal(body)}\n".encode(), body)


def _is_below(path: str, base: str) -> bool:
    rest = path.removeprefix(base)
    return path.startswith(f"{base}/") and os.path.normpath(f"base{rest}") == f"base{rest}"


def _seal(body: bytes) -> str:
    return f"{_FORMAT} {sha256(body).hexdigest()}"
