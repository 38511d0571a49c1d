"""Quarantine: protected names that appeared in writable folders are moved to a private folder of the owner.

A sandbox cannot keep a process from creating a protected name (see `protected`) deep in a folder that it may write to.
So the folders are searched before and after, and what is new is moved away. For a server, that lives for long, this is
done around each call: what appears between two calls may be the owner's work, and is reported instead of moved.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from shlex import quote
from stat import S_IMODE, S_IRWXU, S_ISDIR
from threading import Lock
from time import monotonic

from msgspec import Struct

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.sandbox.levels import base_profile
from kiwi_mcp.sandbox.linux import open_beneath
from kiwi_mcp.sandbox.process_setup import is_placeholder

_ORIGINS = "origins.json"
_MOST = 1_000_000
"""How many files of one folder are looked at."""
_SHARE = 20
"""A search is repeated at once only if the last one took a small share of the time since then."""
_SHOWN = 3


class _Entry(Struct, frozen=True):
    """A protected name that was found."""

    identity: tuple[int, int, str] | None
    """Its device, its inode and, of a link, where it leads; None where this cannot be read."""
    is_fixed: bool
    """Whether the sandbox keeps what has this name as it is, so that another identity means another file."""
    is_top: bool


class Moved(Struct, frozen=True):
    """What was moved away: where it was, and where it is now; nothing where it could not be moved."""

    origin: str
    place: str


class Findings(Struct, frozen=True):
    """What a search found: what was moved, what was left in place, and folders too large to search to the end."""

    moved: tuple[Moved, ...] = ()
    unclaimed: tuple[str, ...] = ()
    unsearched: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What else the owner should know."""

    def __add__(self, other: Findings) -> Findings:
        """Return both together, each path once."""
        unclaimed = tuple(dict.fromkeys((*self.unclaimed, *other.unclaimed)))
        unsearched = tuple(dict.fromkeys((*self.unsearched, *other.unsearched)))
        return Findings((*self.moved, *other.moved), unclaimed, unsearched, (*self.notes, *other.notes))

    def to_json(self) -> JsonObject:
        """Return what results and records show; empty if no file was moved."""
        if not self.moved:
            return {}
        rows = [{"from": _shown(one.origin), "to": _shown(one.place)} for one in self.moved[:20]]
        return {"quarantine": {"count": len(self.moved), "moved": [*rows]}}

    def warnings(self) -> Iterator[str]:
        """Yield the warnings for the owner, with the command that restores a file."""
        yield from self.notes
        moved = [one for one in self.moved if one.place]
        if moved:
            back = ", ".join(
                f"`mv -nT {quote(one.place)} {quote(one.origin)}`"
                for one in moved[:_SHOWN]
                if one.origin.isprintable() and one.place.isprintable()
            )
            folder = _shown(str(Path(moved[0].place).parent.parent))
            more = f" {folder}/{_ORIGINS} says where each was." if len(moved) > _SHOWN else ""
            yield (
                "New, and moved to quarantine because other programs run or read it as configuration: "
                f"{_listing([one.origin for one in moved])}. To release: {back or f'move it back from {folder}'}.{more}"
            )
        if stuck := [one.origin for one in self.moved if not one.place]:
            yield (
                f"New, could not be moved to quarantine, and other programs may run or read it as configuration: "
                f"{_listing(stuck)}. Look at it, and delete it unless you want it."
            )
        if self.unclaimed:
            yield (
                "Appeared between two calls in a folder that the server can change, and was left in place: "
                f"{_listing(self.unclaimed)}. Other programs run or read it as configuration: if you did not make it, "
                "delete it."
            )
        for folder in self.unsearched:
            yield f"{_shown(folder)} holds more than {_MOST:,} files, and was not searched to its end for new settings."


class NameWatch:
    """Finds protected names that appear in some folders while a process can write to them."""

    def __init__(
        self, folders: Sequence[str], place: Path, skipped: Sequence[str], projects: Sequence[str] = ()
    ) -> None:
        """`place` is where found files are moved to; `skipped` are Kiwi's own folders, which no process can read.

        `projects` inside one of the folders are protected like the top of that folder.
        """
        self.folders = tuple(folders)
        self._place = place
        self._skipped = frozenset(skipped)
        self._tops = frozenset((*folders, *projects))
        self._before: Mapping[str, _Entry] = {}
        self._news = Findings()
        self._calls = 0
        self._is_starting = True
        self._next = 0.0
        self._lock = Lock()

    def begin(self) -> None:
        """Record the protected names that exist before a process starts."""
        with self._lock:
            self._before = self._found()

    def open_call(self) -> None:
        """Record the protected names before a call of a server. Changes during its start count to the first call."""
        with self._lock:
            self._calls += 1
            if self._calls == 1 and not self._is_starting and self.is_due():
                self._set_apart(self._found())

    def is_due(self) -> bool:
        """Whether the last search is long enough ago for another one that is not needed at once."""
        return monotonic() > self._next

    def close_call(self) -> None:
        """Move away what appeared during a call."""
        with self._lock:
            self._calls -= 1
            self._is_starting = False
            self._sweep()

    def end(self) -> Findings:
        """Move away what appeared while a process ran that answers one call; its result names it."""
        with self._lock:
            self._sweep()
        return Findings()

    def leave(self) -> Findings:
        """Search once more after a server has ended, and return the findings that no call has reported."""
        with self._lock:
            if self._calls or self._is_starting:
                self._sweep()
            else:
                self._set_apart(self._found())
            if self._calls:
                return Findings()
        return self.take_news()

    def note(self, text: str) -> None:
        """Add something that the owner should know."""
        with self._lock:
            self._news += Findings(notes=(text,))

    def take_news(self) -> Findings:
        """Return the findings since the last call of this method."""
        with self._lock:
            news, self._news = self._news, Findings()
        return news

    def _set_apart(self, after: Mapping[str, _Entry]) -> None:
        """Report what appeared, and take it for the owner's."""
        self._news += Findings(unclaimed=tuple(_appeared(self._before, after)))
        self._before = after

    def _sweep(self) -> None:
        after = self._found()
        new = [*_appeared(self._before, after)]
        if new:
            self._news += Findings(moved=tuple(_move(new, self._place)))
        for path, entry in self._before.items():
            if entry.is_top and entry.identity is not None and entry.identity[2]:
                with suppress(OSError):  # the link is still there
                    Path(path).symlink_to(entry.identity[2])

    def _found(self) -> Mapping[str, _Entry]:
        began = monotonic()
        found: dict[str, _Entry] = {}
        for folder in self.folders:
            if not _search(folder, self._tops, self._skipped, found):
                self._news += Findings(unsearched=(folder,))
        ended = monotonic()
        self._next = ended + _SHARE * (ended - began)
        return found


def _search(folder: str, tops: frozenset[str], skipped: frozenset[str], found: dict[str, _Entry]) -> bool:
    """Add the protected names in a folder, at its top and below, and return whether all of it was searched."""
    profile, waiting, count = base_profile(), [folder], 0
    while waiting:
        where = waiting.pop()
        is_top = where in tops
        for entry in entries_of(where):
            count += 1
            path = entry.path
            if profile.is_protected(entry.name) and not is_placeholder(path):
                is_fixed = is_top or profile.stays_below(entry.name)
                found[path] = _Entry(_identity(path), is_fixed, is_top)
                if is_fixed:  # what is in it is read-only or, where it is new, moved away with it
                    continue
            if entry.is_dir(follow_symlinks=False) and path not in skipped:
                waiting.append(path)
        if count > _MOST:
            return False
    return True


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """Return the entries of a folder; none where this user, and so any process that they start, cannot read it."""
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:  # once it can be read, what is in it counts as new
        return []


def _identity(path: str) -> tuple[int, int, str] | None:
    try:
        state = os.lstat(path)
        return state.st_dev, state.st_ino, os.readlink(path) if os.path.islink(path) else ""  # noqa: PTH114, PTH115 - text
    except OSError:
        return None


def _appeared(before: Mapping[str, _Entry], after: Mapping[str, _Entry]) -> Iterator[str]:
    """Yield the new paths: those with a name that was free, and those that replaced a protected file."""
    fixed = {entry.identity for entry in before.values() if entry.is_fixed and entry.identity is not None}
    for path, entry in after.items():
        if path not in before:
            # What the sandbox keeps as it is may move together with a folder around it, and stays what it was.
            if not (entry.is_fixed and not entry.is_top and entry.identity in fixed):
                yield path
        elif entry.is_fixed and entry.identity != before[path].identity:
            yield path


def _move(paths: Sequence[str], place: Path) -> Iterator[Moved]:
    """Move paths into a new folder, each under a number of its own, so that nothing is ever overwritten."""
    made = place / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{token_hex(4)}"
    folder: Path | None = made
    try:
        made.mkdir(mode=0o700, parents=True)
        place.chmod(0o700)
    except OSError:
        folder = None
    numbered = [(f"{number}", path) for number, path in enumerate(paths, start=1)]
    if folder is not None:
        origins = {f"{number}/{_shown(Path(path).name)}": _shown(path) for number, path in numbered}
        with suppress(OSError):  # where the disk is full, the results still name what was moved
            (folder / _ORIGINS).write_text(json.dumps(origins, indent=1), encoding="utf-8")
    for number, path in numbered:
        try:
            yield Moved(path, _moved(path, folder / number if folder is not None else None))
        except FileNotFoundError:  # it is gone since, or another run has moved it
            continue
        except OSError:
            yield Moved(path, "")


def _moved(path: str, target: Path | None) -> str:
    """Move one path, and return where it is now; where it cannot leave its folder, it gets a harmless name there.

    The folder around it is opened without following links, so that nothing else is moved in its place.
    """
    around, name = os.path.split(path)
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        parent = open_beneath(root, around[1:], os.O_PATH | os.O_DIRECTORY)
    finally:
        os.close(root)
    with ExitStack() as keep:
        keep.callback(os.close, parent)
        harmless = f"{name.lstrip('.')}.quarantined-{token_hex(4)}"
        # A process can take the right to change away, and what cannot be changed cannot be moved.
        _allow(parent, keep)
        opened = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        keep.callback(os.close, opened)
        _allow(opened, keep)
        if target is not None:
            with suppress(OSError):
                target.mkdir(mode=0o700)
                os.rename(name, target / name, src_dir_fd=parent)
                return str(target / name)
        # The quarantine is on another file system, or cannot be written to.
        os.rename(name, harmless, src_dir_fd=parent, dst_dir_fd=parent)
        is_copied = target is not None and _copied(Path(f"/proc/self/fd/{parent}/{harmless}"), target / name)
    return str(target / name) if target is not None and is_copied else f"{around}/{harmless}"


def _allow(descriptor: int, keep: ExitStack) -> None:
    """Let the owner change what is open until `keep` ends, if it is a folder. Links are left alone."""
    mode, itself = os.fstat(descriptor).st_mode, Path(f"/proc/self/fd/{descriptor}")
    if S_ISDIR(mode) and mode & S_IRWXU != S_IRWXU:
        with suppress(OSError):
            itself.chmod(S_IMODE(mode) | S_IRWXU)
            keep.callback(itself.chmod, S_IMODE(mode))


def _copied(source: Path, target: Path) -> bool:
    """Copy what cannot be renamed across file systems, without following links, and remove it once that is done."""
    try:
        if source.is_dir() and not source.is_symlink():
            shutil.copytree(source, target, symlinks=True)
            shutil.rmtree(source)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
            source.unlink()
    except (OSError, shutil.Error):
        return False
    return True


def _listing(paths: Iterable[str]) -> str:
    named = [*map(_shown, paths)]
    more = f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more


def _shown(path: str) -> str:
    """Return a path for people; one with control characters is escaped."""
    return path if path.isprintable() else ascii(path)
