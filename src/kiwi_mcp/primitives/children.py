"""Children: what starting a process, and waiting for its end, takes, whether it is run or talked to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from contextlib import ExitStack
from subprocess import Popen

from kiwi_mcp.domain.isolation import Handover


async def completed(work: Coroutine[object, object, None]) -> None:
    """Wait for work that must be done, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            is_cancelled = True
    task.result()
    if is_cancelled:
        raise asyncio.CancelledError


def pipe(readers: ExitStack, writers: ExitStack) -> tuple[int, int]:
    """Return both ends of a new pipe, each closed with its side."""
    reading, writing = os.pipe()
    readers.callback(os.close, reading)
    writers.callback(os.close, writing)
    return reading, writing


def give_away(handover: Handover, *ends: int) -> None:
    """Make ends of pipes belong to the user that a process will be, who could not open them by name otherwise."""
    if handover.owner is not None:
        for end in ends:
            os.fchown(end, handover.owner, -1)


def abandon(process: Popen[bytes]) -> None:
    """End a process that could not be taken charge of."""
    process.kill()
    process.wait()


def exit_of(handle: int) -> asyncio.Future[None]:
    """Return a future that is done when the process has ended; it is not waited for, so its number stays its own."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()

    def gone(_: object) -> None:
        loop.remove_reader(handle)
        os.close(handle)

    exited.add_done_callback(gone)
    loop.add_reader(handle, _settle, exited)
    return exited


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
