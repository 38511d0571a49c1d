"""Files of the catalog: opened without following links, and stamped so that a change is noticed."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path
from typing import TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidManifest, TooLarge, Unavailable
from kiwi_mcp.domain.issues import Issue

OwnerStamp: TypeAlias = tuple[int, int, int] | None
"""Tells one version of an owner's file from another; None if it cannot be read."""
FileStamp: TypeAlias = tuple[int, int, int, int]
"""Times of content and of inode, size and inode number: equal stamps mean that nothing was written in between."""

Stamps: TypeAlias = tuple[tuple[str, FileStamp], ...]

MISSING: FileStamp = (0, 0, 0, 0)
"""The stamp of a path at which nothing is."""

RACY: FileStamp = (-1, 0, 0, 0)
"""A stamp that no file has: what was read under it is read again."""

_RACY_NS = 50_000_000
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Content(Struct, frozen=True):
    """The bytes of one regular file as they were at one moment."""

    data: bytes
    stamp: FileStamp
    is_executable: bool
    modified: float


def stamp_of(path: str) -> FileStamp:
    """Return the stamp of the file at a path now, without following links."""
    try:
        found = os.lstat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return MISSING
    # As `_stamp`, without the call: every call of every tool comes by here a score of times.
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


def are_fresh(stamps: Iterable[tuple[str, FileStamp]]) -> bool:
    """Whether every path still has the stamp it was read under."""
    for path, stamp in stamps:  # noqa: SIM110 - a generator costs half as much again
        if stamp_of(path) != stamp:
            return False
    return True


def settled(stamp: FileStamp) -> FileStamp:
    """Return the stamp, or RACY for a file so young that another write could leave the same stamp."""
    return stamp if time.time_ns() - stamp[1] > _RACY_NS else RACY


def read_file(path: Path, *, limit: int) -> Content:
    """Return a regular file's bytes; links, pipes, devices and files over the limit are refused unread."""
    try:
        descriptor = os.open(path, _OPEN)
    except (OSError, ValueError) as error:
        raise unreadable(path, str(getattr(error, "strerror", None) or error)) from error
    with open(descriptor, "rb", buffering=0, closefd=True) as file:  # noqa: PTH123 - a descriptor, not a path
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise unreadable(path, "it is not a regular file")
        if found.st_size > limit:
            raise TooLarge(str(path), size=found.st_size, limit=limit)
        parts, left = [], limit + 1
        while left > 0 and (part := os.read(file.fileno(), min(left, 1 << 20))):
            parts.append(part)
            left -= len(part)
        if left <= 0:
            raise TooLarge(str(path), size=None, limit=limit)
        is_steady = _stamp(os.fstat(descriptor)) == _stamp(found)
    stamp = settled(_stamp(found)) if is_steady else RACY
    return Content(b"".join(parts), stamp, bool(found.st_mode & stat.S_IXUSR), found.st_mtime)


def write_whole(path: Path, *parts: bytes) -> None:
    """Replace a file of a cache: other processes see the old content or the new one, and never a part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(parts)
        os.replace(draft, path)  # noqa: PTH105 - text from mkstemp
    except OSError:
        os.unlink(draft)  # noqa: PTH108 - text from mkstemp
        raise


def unreadable(path: Path, reason: str) -> InvalidManifest:
    """Return the error for a file that cannot be read as part of an item."""
    fix = "Put a regular, readable file there; symbolic links are not followed."
    return InvalidManifest(str(path), [Issue("", f"{path.name} cannot be read: {reason}", fix)])


def owner_stamp(path: str) -> OwnerStamp:
    """Return the stamp of an owner's file now; links are followed."""
    try:
        found = os.stat(path)  # noqa: PTH116 - faster, on the path of every call
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _stamp(found: os.stat_result) -> FileStamp:
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)


_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn every error of the operating system into `unavailable`, while the block writes below a folder."""
    try:
        yield
    except OSError as error:
        fix = f"Free some space for {folder}" if error.errno in _FULL else f"Give yourself write access to {folder}"
        raise Unavailable(
            f"{folder} cannot be written: {error.strerror or error}.", suggestion=f"{fix}, then try again."
        ) from error
