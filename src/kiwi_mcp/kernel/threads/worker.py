"""The worker: one background process per home that runs the threads nobody waits for, and ends when none is due."""

from __future__ import annotations

import asyncio
import fcntl
import os
import sys
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.threads import Thread
from kiwi_mcp.kernel.threads.runner import ThreadRunner, starter_of
from kiwi_mcp.primitives.process.background import start_background

_LOCK = ("state", "worker.lock")
_IDLE = 0.3
"""How many seconds pass between two looks for threads that can continue."""


def start_worker(user: Path) -> None:
    """Start the worker of a home, unless one runs: it will see what was written before this."""
    lock = _locked(user)
    if lock is None:
        return
    os.close(lock)
    argv = [sys.executable, "-m", "kiwi_mcp", "worker"]
    start_background(argv, cwd=user, env={**os.environ, "USER_SPACE": str(user)})


async def run_worker(runner: ThreadRunner, user: Path) -> int:
    """Run every thread that is due until none is left; return how many ran. A second worker ends at once."""
    ran = 0
    # What another process wrote while this one gave the lock back is looked for once more.
    while (lock := _locked(user)) is not None:
        try:
            ran += await _run_all(runner)
        finally:
            os.close(lock)
        if not await runner.due():
            break
    return ran


async def _run_all(runner: ThreadRunner) -> int:
    ran: set[str] = set()
    running: set[asyncio.Task[object]] = set()
    while True:
        due = await runner.due()
        for thread in due:
            ran.add(thread.id)
            running.add(asyncio.create_task(_run_one(runner, thread)))
        if not running:
            return len(ran)
        _, running = await asyncio.wait(running, timeout=_IDLE, return_when=asyncio.FIRST_COMPLETED)


async def _run_one(runner: ThreadRunner, thread: Thread) -> None:
    with suppress(KiwiError):  # another process took it, or it has ended
        await runner.run(thread.id, starter_of(thread))


def _locked(user: Path) -> int | None:
    """Return the lock of the worker, or None where another process has it."""
    path = user.joinpath(*_LOCK)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
