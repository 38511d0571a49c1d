"""A folder built once, under a file lock."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from kiwi_mcp.domain.errors import Unavailable

COMPLETE = ".complete"
"""The file that is written last: a folder without it was left half-made and is made again."""
_LONGEST_WAIT = 900.0
_LOOK_AGAIN = 0.05


async def make_once(folder: Path, make: Callable[[Path], Awaitable[None]], *, proof: str = "") -> None:
    """Have `folder` as `make` makes it. Made already: nothing happens. Being made by another kernel: wait for it.

    `proof` is a path below the folder that must exist too, such as a link that may have lost its target.
    """
    if is_made(folder, proof):
        return
    async with _locked(folder.with_name(f"{folder.name}.lock")):
        if is_made(folder, proof):
            return
        _clear(folder)
        try:
            await make(folder)
        except BaseException:  # also when cancelled: nothing half-made stays
            shutil.rmtree(folder, ignore_errors=True)
            raise
        (folder / COMPLETE).touch()


def is_made(folder: Path, proof: str = "") -> bool:
    """Whether the folder was made to the end and still is whole."""
    return (folder / COMPLETE).exists() and (folder / proof).exists()


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


@asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    # The lock belongs to the open file, so the system lets go of it when a kernel dies. The file itself stays:
    # removing it would let two kernels hold locks on two files of one name.
    descriptor = _open(path)
    try:
        await _take(descriptor, path)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


async def _take(descriptor: int, path: Path) -> None:
    last = monotonic() + _LONGEST_WAIT
    while monotonic() < last:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await asyncio.sleep(_LOOK_AGAIN)
        else:
            return
    raise Unavailable(
        f"Another Kiwi has been making {path.stem!r} for {_LONGEST_WAIT:.0f} seconds.",
        suggestion="Look what that process waits for; end it, then try again.",
    )
