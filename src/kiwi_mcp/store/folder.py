"""Untrusted folders, read and written by descriptor without following a link."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ELOOP
from pathlib import Path
from stat import S_ISREG

from kiwi_mcp.domain.errors import Conflict, StoreUnavailable

NEW = ".kiwi-new"
"""The name of a file while it is written. Only one process writes at a time, so that one name is enough."""

_WAIT = 30.0
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATED = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Yield the descriptor of a folder, and raise every disk error as one kind of error."""
    try:
        descriptor = os.open(folder, _FOLDER)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unusable(folder, error) from error


def unusable(folder: Path, error: OSError) -> StoreUnavailable:
    """Return the error for a folder that the disk does not let us use."""
    return StoreUnavailable(
        f"{folder} cannot be used: {error.strerror or error}.",
        suggestion="See that the disk has room and that you may read and write there, then do it again: "
        "what was written whole stays, and nothing else counts.",
    )


@contextmanager
def below(folder: int, *names: str) -> Iterator[int]:
    """Yield the descriptor of a folder below another. A link on the way is refused."""
    descriptor = os.dup(folder)
    try:
        for name in names:
            inner = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def make_below(folder: int, *names: str) -> None:
    """Make the folders that are missing below another."""
    for depth in range(len(names)):
        with below(folder, *names[:depth]) as parent, suppress(FileExistsError):
            os.mkdir(names[depth], dir_fd=parent)


def read_file(folder: int, name: str, *, limit: int) -> bytes:
    """Return a regular file's bytes; LookupError says why something else is not read."""
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except FileNotFoundError:
        raise LookupError("it is missing") from None
    except OSError as error:
        raise LookupError("it is a link" if error.errno == ELOOP else f"{error.strerror}") from None
    try:
        state = os.fstat(descriptor)
        if not S_ISREG(state.st_mode):
            raise LookupError("it is not a regular file")
        if state.st_size > limit:
            raise LookupError(f"it is larger than {limit:,} bytes")
        parts: list[bytes] = []
        rest = limit + 1
        while rest > 0 and (part := os.read(descriptor, min(rest, 1 << 20))):
            parts.append(part)
            rest -= len(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def put_file(folder: int, name: str, data: bytes, *, is_durable: bool = False) -> None:
    """Write a file in a folder atomically, replacing any file with that name."""
    try:
        descriptor = os.open(NEW, _CREATED, 0o644, dir_fd=folder)
    except FileExistsError:  # a writer was ended in the middle
        os.unlink(NEW, dir_fd=folder)
        descriptor = os.open(NEW, _CREATED, 0o644, dir_fd=folder)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(NEW, name, src_dir_fd=folder, dst_dir_fd=folder)
    if is_durable:
        os.fsync(folder)


def lock(folder: int, path: Path) -> None:
    """Become the only writer of a folder until its descriptor is closed."""
    limit = time.monotonic() + _WAIT
    while True:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                raise Conflict(
                    f"Another process has been writing to {path} for {_WAIT:.0f} seconds.",
                    suggestion="Wait for it to end, then do it again.",
                ) from None
            time.sleep(0.005)
        else:
            return
