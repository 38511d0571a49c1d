"""Starting the worker of a home on demand. It is apart from the worker, so that a verb need not load the agent loop."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from kiwi_mcp.kernel.context import Services
from kiwi_mcp.primitives.process.spawn import start_background
from kiwi_mcp.store.threads import ThreadFilter, Threads

_LOCK = ("state", "worker.lock")
_MOST = 1_000


def start_worker(user: Path) -> None:
    """Start the worker of a home, unless one runs: it will see what was written before this."""
    lock = worker_lock(user)
    if lock is None:
        return
    os.close(lock)
    argv = [sys.executable, "-m", "kiwi_mcp", "worker"]
    start_background(argv, cwd=user, env={"USER_SPACE": str(user)})


def wake_threads(services: Services) -> None:
    """Start the worker if a thread waits for an approval: one was given or refused."""
    registry = services.store.registry()
    waiting = Threads(registry.database, registry.actor.name).list(ThreadFilter(status="waiting", limit=_MOST))
    if any(thread.waits_for == "approval" for thread in waiting):
        start_worker(services.user)


def worker_lock(user: Path) -> int | None:
    """Return the lock of the worker, or None where another process has it."""
    return file_lock(user.joinpath(*_LOCK))


def file_lock(path: Path) -> int | None:
    """Return the open file of a lock, which closing it releases, or None where somebody else has it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
