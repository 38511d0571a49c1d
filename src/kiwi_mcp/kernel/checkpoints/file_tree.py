"""Look at and restore files by descriptor, following no link."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from hashlib import new
from itertools import groupby
from pathlib import Path
from stat import S_IFLNK, S_IFREG, S_ISDIR, S_ISLNK, S_ISREG
from typing import TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.errors import TooLarge, Unavailable
from kiwi_mcp.store.folder import below, make_below, opened, read_file

MOST_FILES = 50_000
MOST_BYTES = 512_000_000
"""How much of files that were not read before is read for one checkpoint."""
LARGEST = 64_000_000
"""The size of the largest file that is saved; larger files are left out and reported."""
SECONDS = 60.0
"""How long one checkpoint may take before a run, and again after it."""

_CREATED = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SETTLED_NS = 3_000_000_000
"""How long ago a file must have changed so that another change would show: some disks keep time in steps of seconds."""
_SEEN_KEPT = 200_000
_seen: dict[tuple[object, ...], str] = {}


class FileState(Struct, frozen=True):
    """The state of a path: a file with its permissions, or a link, and the id of its content."""

    mode: int
    id: str
    size: int

    @property
    def is_link(self) -> bool:
        """Whether it is a symbolic link; the content of a link is its target."""
        return S_ISLNK(self.mode)


Snapshot: TypeAlias = Mapping[str, FileState]
"""The state of some paths below a project; a path without an entry does not exist."""


class Survey(Struct):
    """What was found at some paths, and what was not looked into."""

    entries: dict[str, FileState] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    """Files that are too large or not ours to read, and what is neither file, link nor folder."""


def blob_id(algorithm: str, data: bytes) -> str:
    """Return the id of a content, as git gives it."""
    return new(algorithm, b"blob %d\0" % len(data) + data).hexdigest()


def survey(root: Path, paths: Iterable[str], algorithm: str) -> Survey:
    """Look at some paths of a project; too many files, bytes or seconds are an error."""
    listed = sorted(set(paths), key=lambda path: (path.rpartition("/")[0], path))
    if len(listed) > MOST_FILES:
        raise TooLarge("What a checkpoint would save", size=len(listed), limit=MOST_FILES, unit="files")
    found, budget = Survey(), _Budget()
    with opened(root) as top:
        for parent, group in groupby(listed, key=lambda path: path.rpartition("/")[0]):
            # A folder that is gone, or is a link now, holds nothing of the project.
            with suppress(OSError), _within(top, parent) as folder:
                for path in group:
                    _look(folder, path, algorithm, found, budget)
    return found


class _Budget(Struct):
    left: int = MOST_BYTES
    until: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def spend(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooLarge("What a checkpoint would read", size=None, limit=MOST_BYTES)
        if time.monotonic() > self.until:
            raise Unavailable(
                f"Looking at the project's files took more than {SECONDS:.0f} seconds.",
                suggestion="Let git ignore what need not be saved, or run without a checkpoint.",
            )


def _within(top: int, parent: str) -> AbstractContextManager[int]:
    return below(top, *filter(None, parent.split("/")))


def _look(folder: int, path: str, algorithm: str, found: Survey, budget: _Budget) -> None:
    name = path.rpartition("/")[2]
    try:
        state = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except OSError:
        return
    if S_ISLNK(state.st_mode):
        target = os.fsencode(os.readlink(name, dir_fd=folder))
        found.entries[path] = FileState(S_IFLNK, blob_id(algorithm, target), len(target))
    elif S_ISREG(state.st_mode) and state.st_size <= LARGEST:
        entry = _file(folder, name, state, algorithm, budget)
        if entry:
            found.entries[path] = entry
        else:
            found.left_out.append(path)
    elif not S_ISDIR(state.st_mode):
        found.left_out.append(path)


def _file(folder: int, name: str, state: os.stat_result, algorithm: str, budget: _Budget) -> FileState | None:
    mode = S_IFREG | (state.st_mode & 0o777)
    key = (algorithm, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    if (known := _seen.get(key)) is not None:
        budget.spend(0)
        return FileState(mode, known, state.st_size)
    budget.spend(state.st_size)
    try:
        data = read_file(folder, name, limit=LARGEST)
    except LookupError:
        return None
    found = FileState(mode, blob_id(algorithm, data), len(data))
    if time.time_ns() - max(state.st_ctime_ns, state.st_mtime_ns) > _SETTLED_NS and len(data) == state.st_size:
        if len(_seen) >= _SEEN_KEPT:
            _seen.clear()
        _seen[key] = found.id
    return found


def content(root: Path, path: str, entry: FileState) -> bytes | None:
    """Return what a path holds now; None where it is no longer of the same kind."""
    parent, _, name = path.rpartition("/")
    with opened(root) as top, suppress(LookupError, OSError), _within(top, parent) as folder:
        if entry.is_link:
            return os.fsencode(os.readlink(name, dir_fd=folder))
        return read_file(folder, name, limit=LARGEST)
    return None


def names_in(folder: int) -> list[str]:
    """Return the names in an open folder."""
    return os.listdir(folder)


def remove(root: Path, path: str) -> None:
    """Remove a file or link, and the folders that are empty without it."""
    parts = path.split("/")
    with opened(root) as top:
        with _within(top, "/".join(parts[:-1])) as folder:
            os.unlink(parts[-1], dir_fd=folder)
        for depth in range(len(parts) - 1, 0, -1):
            with _within(top, "/".join(parts[: depth - 1])) as folder:
                try:
                    os.rmdir(parts[depth - 1], dir_fd=folder)
                except OSError:
                    return


def put(root: Path, path: str, entry: FileState, data: bytes) -> None:
    """Put a file or link in its place, whole or not at all; an empty folder there gives way."""
    parent, _, name = path.rpartition("/")
    draft = f".kiwi-undo-{secrets.token_hex(6)}"
    with opened(root) as top:
        make_below(top, *filter(None, parent.split("/")))
        with _within(top, parent) as folder:
            with suppress(OSError):
                if S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    os.rmdir(name, dir_fd=folder)
            try:
                _make(folder, draft, entry, data)
                os.replace(draft, name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(draft, dir_fd=folder)
                raise


def _make(folder: int, name: str, entry: FileState, data: bytes) -> None:
    if entry.is_link:
        os.symlink(os.fsdecode(data), name, dir_fd=folder)
        return
    descriptor = os.open(name, _CREATED, 0o600, dir_fd=folder)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, entry.mode & 0o777)
        os.fsync(descriptor)
