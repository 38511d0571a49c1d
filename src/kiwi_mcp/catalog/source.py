"""Sources of items and their caches on disk. A folder is walked once, and afterwards only checked for changes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct

from kiwi_mcp import __version__
from kiwi_mcp.catalog.item_reader import (
    MANIFESTS,
    FolderListing,
    OpenedItem,
    card_of,
    kind_of,
    list_folder,
    open_tool,
    read_head,
    stem_of,
)
from kiwi_mcp.catalog.references import Ref
from kiwi_mcp.domain.cards import Card
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Source, Tool
from kiwi_mcp.domain.registry import Pin
from kiwi_mcp.manifest.files import MISSING, FileStamp, settled, stamp_of, unreadable, write_whole
from kiwi_mcp.manifest.type_specs import TypeSpecs
from kiwi_mcp.store.registry.registry import Registry

_FORMAT = f"kiwi.catalog/4 {__version__}"
_MAX_BYTES = 256_000_000
_KEPT_OPEN = 4_096
_WATCHED = 200
"""How many files that hold no item are looked at again by every call."""
_SAVE_SHARE = 200
T = TypeVar("T")


class FolderSnapshot(Struct, frozen=True, array_like=True):
    """The folders of a source as they were listed, and for each file its stamp and the item in it, if any."""

    listings: Mapping[str, FolderListing]
    records: Mapping[str, tuple[FileStamp, Card | None]]

    def is_within(self, base: str) -> bool:
        """Whether every path in it is the base or below it, and every card is that of its own file."""

        def is_below(path: str) -> bool:
            rest = path.removeprefix(base)
            return path.startswith(f"{base}/") and os.path.normpath(f"base{rest}") == f"base{rest}"

        inner = [*self.records, *(path for path in self.listings if path != base)]
        for listing in self.listings.values():
            inner += (*listing.places, *listing.folders, *(path for path, _ in listing.oddities))
        return all(map(is_below, inner)) and all(
            card is None or card.path == path for path, (_, card) in self.records.items()
        )


class ServerSnapshot(NamedTuple):
    """What one server offered at one mark."""

    mark: str
    entries: tuple[Card, ...]


def read_cache(place: Path, kind: type[T]) -> T | None:
    """Return what is cached; None if it is missing, damaged, or from another Kiwi release."""
    try:
        if place.stat().st_size > _MAX_BYTES:
            return None
        seal, _, body = place.read_bytes().partition(b"\n")
        # The json module: a path may hold bytes that are not UTF-8, which msgspec's own decoder refuses.
        return msgspec.convert(json.loads(body), kind) if seal.decode(errors="replace") == _seal(body) else None
    except (OSError, ValueError):
        return None


def write_cache(place: Path, rows: object) -> None:
    """Cache rows. If the file cannot be written, nothing is cached."""
    body = json.dumps(msgspec.to_builtins(rows), separators=(",", ":")).encode()
    with suppress(OSError):
        write_whole(place, f"{_seal(body)}\n".encode(), body)


def _seal(body: bytes) -> str:
    return f"{_FORMAT} {sha256(body).hexdigest()}"


class BrokenFile(Struct, frozen=True):
    """A file that looks like an item and cannot be read as one, and why."""

    source: Source
    namespace: str
    path: str
    kind: str
    """The folder it was found under, as that of a `Card`."""
    stem: str
    error: KiwiError


class ItemSource(Protocol):
    """A place that holds items, asked for them by name. What most sources do not have is empty here."""

    name: Source
    """Which of the sources it is."""
    home: str
    """Where that is: sources of one name and one home hold the same items."""
    fault: KiwiError | None = None
    """Why nothing can be found here now, if so."""

    @property
    def mark(self) -> str:
        """A text that changes with the items and is the same in every process; empty if that is not known."""
        return ""

    def registry(self) -> Registry | None:
        """Return the registry that the items are published in, if they are and it can be opened."""
        return None

    def sync(self, sheets: TypeSpecs) -> int:
        """Notice what was added or removed, and return a number that changes when an entry does."""

    def refresh(self, sheets: TypeSpecs) -> int:
        """Notice every change, and return the same number."""
        return self.sync(sheets)

    def entries(self) -> Sequence[Card]:
        """Return every item, as of the last refresh."""

    def broken(self) -> Sequence[BrokenFile]:
        """Return the files that could not be read, as of the last refresh."""
        return ()

    def named(self, ref: Ref) -> Sequence[Card]:
        """Return the items that a reference may mean as they are now, the one it means first."""

    def withdrawn(self, ref: Ref) -> Sequence[str]:  # noqa: ARG002 - for sources with versions
        """Return the versions that a reference would mean had they not been taken out of use."""
        return ()

    def names(self) -> Iterable[str]:
        """Return the names to suggest for a misspelt name."""

    def pin(self, tool: Tool, ref: str = "") -> Pin | None:  # noqa: ARG002 - as above
        """Return which executor an item was published on, or what a name in it meant; None where none is recorded."""
        return None

    def notes(self, tool: Tool) -> Sequence[str]:  # noqa: ARG002 - as above
        """Return the publisher's later notes about an item, a sentence each."""
        return ()

    def stamp(self, entry: Card) -> FileStamp:  # noqa: ARG002 - for sources with files
        """Return the stamp of the file of an entry."""
        return MISSING

    def open(self, entry: Card) -> OpenedItem | None:
        """Return an item in full, or None where its file no longer holds that item."""

    def looks_at(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the files and the folders that `sync` looks at."""
        return (), ()


class FolderSource(ItemSource):
    """The items in one `.ai` folder.

    A call checks the stamps of the folders that hold items, and of the files of the requested item; a miss or a search
    checks every file. Only changed files are read again. If only an installer writes to the folder, a call looks for
    added and removed files only after `rest` seconds, and still checks the files of its item.
    """

    def __init__(
        self,
        name: Source,
        base: Path,
        *,
        namespace: str = "local",
        cache: Path | None = None,
        rest: float = 0.0,
        trust_file: Path | None = None,
        only: Collection[str] = (),
    ) -> None:
        """Make the source of a folder; with `only`, other folders of items in it are not looked at."""
        self._only = only
        self.name = name
        self.home = str(base)
        self._trust_file = trust_file
        self._base = base
        self._namespace = namespace
        self._cache = cache
        self._rest = rest
        self._next_look = 0.0
        self._sheets: TypeSpecs | None = None
        self._place: Path | None = None
        self._listings: dict[str, FolderListing] = {}
        self._records: dict[str, tuple[FileStamp, Card | None]] = {}
        self._itemless: dict[str, None] = {}
        self._names: dict[str, dict[str, Card]] = {}
        self._broken: dict[str, BrokenFile] = {}
        self._opened: dict[str, OpenedItem] = {}
        self._generation = 0
        self._unsaved = 0

    def sync(self, sheets: TypeSpecs) -> int:
        """Notice files and folders that came or went."""
        if sheets is not self._sheets:
            self._start(sheets)
        elif self._rest and monotonic() < self._next_look:
            return self._generation
        self._next_look = monotonic() + self._rest
        for path in tuple(islice(self._itemless, _WATCHED)):
            self._look(path)  # a file that holds no item, or a broken one, may hold one by now
        stale = [path for path, listing in self._listings.items() if stamp_of(path) != listing.stamp]
        for path in stale:
            if path in self._listings:  # it may have gone with the folder above it
                self._list(path)
        if self._unsaved:
            self._save()
        return self._generation

    def refresh(self, sheets: TypeSpecs) -> int:
        """Notice every change: the stamp of every file is looked at."""
        self._next_look = 0.0
        self.sync(sheets)
        for path in [path for path, (stamp, _) in self._records.items() if stamp_of(path) != stamp]:
            self._look(path)
        self._save()
        return self._generation

    def entries(self) -> Sequence[Card]:
        """Return every item, as of the last refresh."""
        return [entry for _, entry in self._records.values() if entry is not None]

    def broken(self) -> Sequence[BrokenFile]:
        """Return the files that could not be read, as of the last refresh."""
        return tuple(self._broken.values())

    def named(self, ref: Ref) -> Sequence[Card]:
        """Return the items that a reference may mean as they are now, the newest version first."""
        for path in tuple(self._names.get(ref.name, ())):
            self._look(path)
        entries = sorted(self._names.get(ref.name, {}).values(), key=lambda entry: entry.path)
        entries.sort(key=lambda entry: entry.semver, reverse=True)
        return entries

    def names(self) -> Iterable[str]:
        """Return every name."""
        return self._names

    def stamp(self, entry: Card) -> FileStamp:
        """Return the stamp under which an entry was read."""
        return self._records[entry.path][0]

    def open(self, entry: Card) -> OpenedItem | None:
        """Return an item in full, or None where its file no longer holds that item."""
        known = self._opened.get(entry.path)
        if known is None or not known.is_fresh:
            if len(self._opened) >= _KEPT_OPEN:
                self._opened.clear()
            known = open_tool(
                Path(entry.path),
                source=self.name,
                base=self._base,
                namespace=self._namespace,
                sheets=self._sheets,
                trust_file=self._trust_file,
            )
            self._opened[entry.path] = known
        if known.tool.identity == entry.identity:
            return known
        self._read(entry.path)
        return None

    def looks_at(self) -> tuple[Iterable[str], Iterable[str]]:
        """Return the files without an item and the folders that `sync` looks at."""
        return tuple(islice(self._itemless, _WATCHED)), tuple(self._listings)

    def _start(self, sheets: TypeSpecs) -> None:
        # Another set of types reads every manifest anew.
        self._sheets = sheets
        if self._cache:  # its file is valid for one set of types
            name = sha256(os.fsencode(self._base) + b"\0" + repr(sheets.by_type).encode()).hexdigest()
            self._place = self._cache / "catalog" / f"{name[:32]}.json"
        for known in (self._listings, self._records, self._itemless, self._names, self._broken, self._opened):
            known.clear()
        self._generation += 1
        saved = read_cache(self._place, FolderSnapshot) if self._place else None
        if saved is None or not saved.is_within(str(self._base)):
            self._list(str(self._base))
            return
        self._listings.update(saved.listings)
        for path, (stamp, entry) in saved.records.items():
            self._records[path] = (stamp, entry)
            self._enter(path, entry)
        # Broken files are not cached: they are read again, so that the error can be shown.
        for listing in saved.listings.values():
            self._report(listing)
            for path in listing.places:
                if path not in self._records:
                    self._read(path)

    def _list(self, path: str, kind: str = "", depth: int = 0) -> None:
        old = self._listings.get(path) or FolderListing(kind, depth, MISSING)
        folders = self._sheets.folders_of(self.name) if self._sheets else {}
        if self._only:
            folders = {name: folder for name, folder in folders.items() if name in self._only}
        home = folders.get(old.kind)
        if home:
            new = list_folder(path, home=home, depth=old.depth)
        else:
            stamp = settled(stamp_of(path))
            below = (f"{path}/{name}" for name in folders)
            new = FolderListing("", 0, stamp, folders=tuple(folder for folder in below if os.path.lexists(folder)))
        self._unsaved += new != old
        self._listings[path] = new
        for gone in {*old.places, *(where for where, _ in old.oddities)} - {*new.places}:
            self._forget(gone)
        for gone in {*old.folders} - {*new.folders}:
            self._drop(gone)
        if old.depth and any(where.endswith(MANIFESTS) for where, _ in new.oddities):
            self._list(path.rpartition("/")[0])  # a folder that got a manifest is an item
            return
        self._report(new)
        for place in new.places:
            self._look(place)
        for folder in new.folders:
            if folder not in self._listings:
                self._list(folder, new.kind or folder.rpartition("/")[2], new.depth + 1 if new.kind else 0)

    def _drop(self, folder: str) -> None:
        listing = self._listings.pop(folder, None)
        if listing is not None:
            for path in (*listing.places, *(where for where, _ in listing.oddities)):
                self._forget(path)
            for inner in listing.folders:
                self._drop(inner)

    def _report(self, listing: FolderListing) -> None:
        for path, reason in listing.oddities:
            self._broken[path] = self._broken_of(path, unreadable(Path(path), reason))

    def _look(self, path: str) -> None:
        record = self._records.get(path)
        stamp = stamp_of(path)
        if record is not None and record[0] == stamp:
            return
        above = path.rsplit("/", 2)[0]
        if stamp == MISSING and path.endswith(MANIFESTS) and above in self._listings:
            self._list(above)  # a folder that lost its manifest may hold items of its own
        else:
            self._read(path)

    def _read(self, path: str) -> None:
        stamp = settled(stamp_of(path))  # before reading: a write in between leaves another stamp
        entry = broken = None
        try:
            if head := read_head(Path(path), base=self._base, sheets=self._sheets):
                entry = card_of(head, Path(path), base=self._base, source=self.name, namespace=self._namespace)
        except KiwiError as error:
            broken = self._broken_of(path, error)
        old = self._records.get(path, (MISSING, None))
        self._unsaved += old[0] != stamp
        if old[1] == entry and broken is None and path not in self._broken:
            self._records[path] = (stamp, entry)
            return
        self._forget(path)
        self._records[path] = (stamp, entry)
        if broken is not None:
            self._broken[path] = broken
        self._enter(path, entry)

    def _broken_of(self, path: str, error: KiwiError) -> BrokenFile:
        place = Path(path)
        return BrokenFile(self.name, self._namespace, path, kind_of(place, self._base), stem_of(place), error)

    def _enter(self, path: str, entry: Card | None) -> None:
        if entry is None:
            self._itemless[path] = None
        else:
            self._names.setdefault(entry.tool_id, {})[path] = entry

    def _forget(self, path: str) -> None:
        _, entry = self._records.pop(path, (MISSING, None))
        self._broken.pop(path, None)
        self._itemless.pop(path, None)
        self._opened.pop(path, None)
        if entry is not None:
            self._names[entry.tool_id].pop(path, None)
            if not self._names[entry.tool_id]:
                del self._names[entry.tool_id]
        self._generation += 1

    def _save(self) -> None:
        # Writing costs as much as there are items, so a change or two among thousands is read again instead.
        if self._place and self._unsaved * _SAVE_SHARE > len(self._records):
            kept = {path: record for path, record in self._records.items() if path not in self._broken}
            write_cache(self._place, FolderSnapshot(self._listings, kept))
            self._unsaved = 0
