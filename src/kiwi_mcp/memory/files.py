"""The memory: which paths are allowed, reading, listing, searching, and one recorded change at a time.

No path leaves the folder: every part is opened relative to the one before it, and links are refused.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from difflib import unified_diff
from hashlib import sha256
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from msgspec import Struct

from kiwi_mcp.domain.errors import (
    Conflict,
    InvalidArguments,
    NotFound,
    PathInvalid,
    ReservedPath,
    TooLarge,
    Unavailable,
)
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_text

MAX_BYTES = 1_000_000
"""The largest file, in bytes."""
NEW = "new"
"""The expected version of a file that must not exist yet."""
OWNER_FILES = frozenset({"preferences.yaml", "policy.yaml", "config.yaml", "registry.yaml", "approvals.yaml"})
"""Files at the top of the folder that only the owner changes, with an editor."""
INSTRUCTIONS = frozenset({"agent.md", "agents.md", "agent-user.md", "skills", "directives"})
"""Files and folders at the top that models follow, in any case of letters: the owner is always asked."""
_MOST_COMPARED = 1_000
"""The most lines of a file that are compared line by line."""
_AROUND = 3
_LONGEST_PATH = 1_000
_LONGEST_NAME = 255
_MOST_FILES = 20_000
_MOST_LISTED = 1_000
_MOST_MATCHES = 50
_LONGEST_MATCH = 500
_MOST_FOUND = 20_000
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_FOLDER = _READ | os.O_DIRECTORY


class Change(Struct, frozen=True):
    """What a write, an edit or a deletion does to one file; None for a file that is not there."""

    path: str
    before: bytes | None
    after: bytes | None

    @property
    def asks_always(self) -> bool:
        """Whether models follow the file, so that no rule answers for the owner."""
        return self.path.partition("/")[0].casefold() in INSTRUCTIONS

    def diff(self) -> str:
        """Return the change as a unified diff; a long one, which takes too long to compare, as the new text."""
        # Only what every program takes for the end of a line ends one here, or a line could become a part of another.
        texts = ((data or b"").decode(errors="replace").removesuffix("\n") for data in (self.before, self.after))
        before, after = (text.split("\n") if text else [] for text in texts)
        names = "before", "after"
        if max(len(before), len(after)) > _MOST_COMPARED:  # what begins and ends alike need not be compared
            same = _alike(before, after)
            end = max(_alike(before[same:][::-1], after[same:][::-1]) - _AROUND, 0)
            start = max(same - _AROUND, 0)
            before, after = before[start : len(before) - end], after[start : len(after) - end]
            names = f"before, from line {start + 1:,}", f"after, from line {start + 1:,}"
        if max(len(before), len(after)) > _MOST_COMPARED:
            head = f"--- {names[0]}: {len(before):,} lines\n+++ {names[1]}: {len(after):,} lines"
            return "\n".join((head, *(f"+{line}" for line in after)))
        return "\n".join(unified_diff(before, after, *names, lineterm=""))


def _alike(one: Sequence[str], other: Sequence[str]) -> int:
    """Return with how many equal lines two texts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def version_of(data: bytes | None) -> str:
    """Return the version of a file: the beginning of the hash of its content."""
    return NEW if data is None else sha256(data).hexdigest()[:16]


def parts_of(path: str) -> tuple[str, ...]:
    """Return the parts of a path within the memory, where names that begin with a dot are the owner's."""
    parts = plain_parts(path)
    if any(part.startswith(".") for part in parts):
        raise ReservedPath(path)
    return parts


def plain_parts(path: str) -> tuple[str, ...]:
    """Return the parts of a path within a folder; the folder itself has none."""
    parts = tuple(path.split("/")) if path not in {"", "."} else ()
    if "\\" in path or not path.isprintable():
        raise PathInvalid(path, "has characters that no path here has")
    if len(path) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts):
        raise PathInvalid(path, "is too long")
    if path.startswith("/") or any(part in {"", ".", ".."} for part in parts):
        raise PathInvalid(path, "is not a path within the folder")
    return parts


def planned(root: Path, action: str, given: JsonObject) -> Change:
    """Return what a write, an edit or a deletion would do to a file of the memory now."""
    path = as_text(given.get("path"))
    if len(parts_of(path)) == 1 and path.casefold() in OWNER_FILES:
        raise ReservedPath(path)
    return change_of(root, action, given, f"memory_{action}")


def change_of(root: Path, action: str, given: JsonObject, tool_id: str) -> Change:
    """Return what a write, an edit or a deletion would do to a file below a folder now.

    With `expected_version`, a file that is another one by now is a conflict.
    """
    path = as_text(given.get("path"))
    if not plain_parts(path):
        raise PathInvalid(path, "is the folder itself")
    before = None
    with suppress(NotFound):
        before = read_bytes(root, path)
    expected = given.get("expected_version")
    if expected is not None and expected != (found := version_of(before)):
        raise Conflict(
            f"{path!r} is version {found} by now, and not {as_text(expected)!r:.40}.",
            suggestion="Read it again, and change what it holds now.",
            path=path,
            version=found,
        )
    after = None
    if action == "write":
        after = as_text(given.get("content")).encode()
    elif before is None:
        raise _missing(path)
    elif action == "edit":
        find, replacement = as_text(given.get("find")).encode(), as_text(given.get("replace")).encode()
        if (count := before.count(find) if find else 0) != 1:
            reason = f"occurs {count} times in the file" if find else "is empty"
            fix = "Read the file, and send text that occurs exactly once, with the lines around it."
            raise InvalidArguments(tool_id, [Issue("parameters.find", reason, fix)])
        after = before.replace(find, replacement)
    elif action != "delete":
        raise ValueError(action)
    if after is not None and len(after) > MAX_BYTES:
        raise TooLarge(f"{path!r}", size=len(after), limit=MAX_BYTES)
    return Change(path, before, after)


def apply(root: Path, change: Change) -> None:
    """Make a change: the whole file or nothing, also if the machine stops meanwhile."""
    *folders, name = parts_of(change.path)
    if change.after is None:
        with _folder(root, folders) as folder:
            os.unlink(name, dir_fd=folder)
            os.fsync(folder)
        for depth in range(len(folders), 0, -1):
            with suppress(OSError), _folder(root, folders[: depth - 1]) as folder:
                os.rmdir(folders[depth - 1], dir_fd=folder)
        return
    draft = f".{token_hex(8)}"
    with _folder(root, folders, makes=True) as folder:
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with open(file, "wb") as stream:  # noqa: PTH123 - a descriptor
                stream.write(change.after)
                stream.flush()
                os.fsync(file)
            os.rename(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft, dir_fd=folder)
            raise
        os.fsync(folder)


def read_bytes(root: Path, path: str) -> bytes:
    """Return the content of a file."""
    return _read(root, path)[0]


def _read(root: Path, path: str) -> tuple[bytes, os.stat_result]:
    *folders, name = plain_parts(path) or ("",)
    with _folder(root, folders, path=path) as folder, _opened(name, folder, path) as file:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise PathInvalid(path, "is not a plain file")
        if found.st_size > MAX_BYTES:
            raise TooLarge(f"{path!r}", size=found.st_size, limit=MAX_BYTES)
        with open(os.dup(file), "rb") as stream:  # noqa: PTH123 - a descriptor
            return stream.read(MAX_BYTES), found


def read_text(root: Path, path: str) -> JsonObject:
    """Return a file with its version and the time of its last change."""
    parts_of(path)
    data, found = _read(root, path)
    try:
        content = data.decode()
    except UnicodeDecodeError as error:
        raise PathInvalid(path, "is not text") from error
    return {"path": path, "content": content, "version": version_of(data), "modified_at": _changed(found)}


def list_files(root: Path, path: str, *, is_recursive: bool) -> JsonObject:
    """Return the entries of a folder."""
    parts_of(path)
    entries: list[Json] = []
    for one, found in _below(root, path, is_recursive=is_recursive):
        if stat.S_ISDIR(found.st_mode):
            entries.append({"path": one, "type": "folder"})
        else:
            entries.append({"path": one, "type": "file", "size": found.st_size, "modified_at": _changed(found)})
    left = {"omitted_entries": len(entries) - _MOST_LISTED} if len(entries) > _MOST_LISTED else {}
    return {"path": path or ".", "entries": entries[:_MOST_LISTED], **left}


def search_files(root: Path, query: str, path: str, *, in_names: bool) -> JsonObject:
    """Return the lines, or the paths, that contain a text in any case of letters."""
    wanted, room, omitted = query.casefold(), _MOST_FOUND, 0
    matches: list[Json] = []
    for one, found in _below(root, path, is_recursive=True):
        for number, line in [(0, one)] if in_names else _lines(root, one, found):
            if wanted not in line.casefold():
                continue
            text = line.strip()[:_LONGEST_MATCH]
            if len(matches) >= _MOST_MATCHES or len(text) > room:
                omitted += 1
                continue
            room -= len(text)
            matches.append({"path": one} if in_names else {"path": one, "line": number, "text": text})
    return {"query": query, "matches": matches, "omitted_matches": omitted}


def _lines(root: Path, path: str, found: os.stat_result) -> Iterator[tuple[int, str]]:
    if stat.S_ISREG(found.st_mode):
        with suppress(PathInvalid, TooLarge, NotFound):
            yield from enumerate(read_bytes(root, path).decode(errors="replace").splitlines(), 1)


def _below(root: Path, path: str, *, is_recursive: bool) -> list[tuple[str, os.stat_result]]:
    """Return the files and folders below a folder, in the order of their paths; links and hidden names are left out."""
    found: list[tuple[str, os.stat_result]] = []
    waiting = [list(parts_of(path))]
    while waiting and len(found) < _MOST_FILES:
        parts = waiting.pop()
        with _folder(root, parts) as folder, os.scandir(folder) as entries:
            for entry in entries:
                one = entry.stat(follow_symlinks=False)
                is_folder = stat.S_ISDIR(one.st_mode)
                if entry.name.startswith(".") or not (is_folder or stat.S_ISREG(one.st_mode)):
                    continue
                found.append(("/".join((*parts, entry.name)), one))
                if is_recursive and is_folder:
                    waiting.append([*parts, entry.name])
    return sorted(found, key=itemgetter(0))


@contextmanager
def _folder(root: Path, parts: Sequence[str], *, path: str = "", makes: bool = False) -> Iterator[int]:
    """Open a folder part by part, so that no link and no rename leads out of the root."""
    path = path or "/".join(parts)
    try:
        here = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:  # nothing was written yet
        raise _missing(path) from error
    except OSError as error:
        raise cannot_open(root, error) from error
    try:
        for part in parts:
            if makes:
                with suppress(FileExistsError):
                    os.mkdir(part, 0o700, dir_fd=here)
            with _opened(part, here, path, _OPEN_FOLDER) as below:
                os.close(here)
                here = os.dup(below)
        yield here
    finally:
        os.close(here)


@contextmanager
def _opened(name: str, folder: int, path: str, flags: int = _READ | os.O_NONBLOCK) -> Iterator[int]:
    try:
        file = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError as error:
        raise _missing(path) from error
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENOTDIR}:
            raise PathInvalid(path, "is a link, or leads through something that is not a folder") from error
        raise cannot_open(Path(path), error) from error
    try:
        yield file
    finally:
        os.close(file)


def cannot_open(path: Path, error: OSError) -> Unavailable:
    """Return the error for a file or folder that the system does not let Kiwi use."""
    return Unavailable(
        f"Kiwi cannot use {str(path)!r:.200}: {error.strerror}.",
        suggestion="Check the permissions of the folder and the free space.",
    )


def _missing(path: str) -> NotFound:
    return NotFound(f"There is no {path or '.'!r}.", suggestion="List the folder to see what there is.", path=path)


def _changed(found: os.stat_result) -> str:
    at = datetime.fromtimestamp(found.st_mtime, UTC)
    return at.isoformat(timespec="seconds").replace("+00:00", "Z")


_PATIENCE = 10.0
_PAUSE = 0.02


class History(Protocol):
    """The record of every change; the kernel provides it, because it starts `git`."""

    async def open(self) -> None:
        """Make the record if there is none; raise `Unavailable` if it cannot be kept."""

    async def record(self, path: str, message: str) -> None:
        """Record how a file, or the whole folder, is now; nothing if it is as it was recorded last."""

    async def versions(self, path: str, limit: int) -> Sequence[JsonObject]:
        """Return the changes of a file or a folder, the latest first."""

    async def content(self, path: str, commit: str) -> bytes:
        """Return a file as it was after a change."""


class Memory(Struct, frozen=True):
    """One memory folder and its history."""

    root: Path
    history: History

    async def change(self, action: str, given: JsonObject, by: str) -> JsonObject:
        """Write, edit or delete a file and record it; a change that cannot be recorded is taken back."""
        async with self.opened():
            change = await asyncio.to_thread(planned, self.root, action, given)
            if change.before != change.after:
                # What was changed with an editor, or by a process that was killed, gets an entry of its own.
                await self.history.record(change.path, f"Changed outside Kiwi: {change.path}")
                await self._apply(change)
                try:
                    await self.history.record(change.path, f"{action.capitalize()} {change.path}\n\nBy: {by}")
                except (Exception, asyncio.CancelledError):
                    await self._apply(Change(change.path, change.after, change.before))
                    raise
        if change.after is None:
            return {"path": change.path, "deleted": True}
        return {"path": change.path, "bytes_written": len(change.after), "version": version_of(change.after)}

    async def _apply(self, change: Change) -> None:
        try:
            await asyncio.to_thread(apply, self.root, change)
        except OSError as error:
            raise cannot_open(self.root / change.path, error) from error

    async def versions(self, path: str, limit: int, commit: str) -> JsonObject:
        """Return the history of a path, or a file as it was after one change."""
        parts_of(path)
        async with self.opened():
            await self.history.record(path or ".", f"Changed outside Kiwi: {path or 'memory'}")
            if commit:
                data = await self.history.content(path, commit)
                return {"path": path, "commit": commit, "content": data.decode(errors="replace")}
            return {"path": path or ".", "changes": [*await self.history.versions(path, limit)]}

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep other processes from changing the memory meanwhile; its folder and its history are made if need be."""
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise cannot_open(self.root, error) from error
        try:
            for _ in range(round(_PATIENCE / _PAUSE)):
                with suppress(BlockingIOError):
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                await asyncio.sleep(_PAUSE)
            else:
                reason = "Another process has been changing the memory for ten seconds."
                raise Unavailable(reason, suggestion="Try again.")
            await self.history.open()
            yield
        finally:
            os.close(folder)
