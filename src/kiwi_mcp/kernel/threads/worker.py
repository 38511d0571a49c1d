"""The worker: one background process per home that runs the threads nobody waits for, and ends when none is due."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.threads import Thread
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.wake import worker_lock

_IDLE = 0.3
"""How many seconds pass between two looks for threads that can continue."""


async def run_worker(runner: ThreadRunner, user: Path) -> int:
    """Run every thread that is due until none is left; return how many ran. A second worker ends at once."""
    ran, runner.is_background = 0, True
    # What another process wrote while this one gave the lock back is looked for once more.
    while (lock := worker_lock(user)) is not None:
        try:
            ran += await _run_all(runner)
        finally:
            os.close(lock)
        if not (await runner.due())[0]:
            break
    return ran


async def _run_all(runner: ThreadRunner) -> int:
    ran: set[str] = set()
    running: set[asyncio.Task[object]] = set()
    beats: dict[str, int] = {}
    while True:
        due, leased = await runner.due()
        for thread in due:
            ran.add(thread.id)
            running.add(asyncio.create_task(_run_one(runner, thread)))
        if running:
            _, running = await asyncio.wait(running, timeout=_IDLE, return_when=asyncio.FIRST_COMPLETED)
        elif any(beats.setdefault(one.id, one.beat_at) == one.beat_at for one in leased):
            await asyncio.sleep(_IDLE)  # its process may have died: then its lease ends soon
        else:
            return len(ran)


async def _run_one(runner: ThreadRunner, thread: Thread) -> None:
    with suppress(KiwiError):  # another process took it, or it has ended
        await runner.run(thread.id, NO_CALLER)
