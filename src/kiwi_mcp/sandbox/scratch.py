"""Scratch: a temporary folder for one process, which is gone afterwards whatever was put into it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from tempfile import mkdtemp

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MOST_ROUNDS = 100_000


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Give a new folder that is the user's alone, and remove it with the block."""
    folder = Path(mkdtemp(prefix="kiwi-run-"))
    try:
        yield folder
    finally:
        with suppress(OSError):  # what cannot be removed is left to whoever tidies temporary folders
            _empty(folder)
            folder.rmdir()


def _empty(folder: Path) -> None:
    """Remove what is in a folder, however deep: inner folders are moved up, one level at a time, and never followed."""
    top, names = os.open(folder, _FOLDER), (f"{token_hex(8)}-{number}" for number in count())
    try:
        for _ in range(_MOST_ROUNDS):
            if not (found := os.listdir(top)):  # noqa: PTH208 - by descriptor
                return
            for name in found:
                if not _is_unlinked(name, top):
                    _remove(name, top, names)
    finally:
        os.close(top)


def _remove(name: str, top: int, names: Iterator[str]) -> None:
    """Remove one folder, after the folders in it have been moved beside it."""
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, _FOLDER, dir_fd=top)
    try:
        for inside in os.listdir(inner):  # noqa: PTH208 - by descriptor
            if not _is_unlinked(inside, inner):
                os.chmod(inside, 0o700, dir_fd=inner)  # a folder that cannot be written to cannot be moved
                os.rename(inside, next(names), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def _is_unlinked(name: str, folder: int) -> bool:
    """Remove what has a name, unless it is a folder; whether it was none."""
    try:
        os.unlink(name, dir_fd=folder)
    except IsADirectoryError:
        return False
    return True
