"""Starting the worker of a home on demand. It is apart from the worker, so that a verb need not load the agent loop."""

from __future__ import annotations

import fcntl
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.kernel.context import Services
from kiwi_mcp.primitives.process.sleeper import BELL, DUE, LOCK
from kiwi_mcp.primitives.process.spawn import start_background


def start_worker(user: Path) -> None:
    """Start the worker of a home, or wake it: it will see what was written before this."""
    if is_worker_running(user):
        ring(user)
        return
    _start(user, "kiwi_mcp", "worker", "--while-pending")


def start_sleeper(user: Path, due_at: int) -> None:
    """Start the small process that starts the worker again at a time."""
    _start(user, "kiwi_mcp.primitives.process.sleeper", str(user), str(due_at))


def _start(user: Path, module: str, *words: str) -> None:
    start_background([sys.executable, "-m", module, *words], cwd=user, env={"USER_SPACE": str(user)})


def start_if_due(user: Path) -> None:
    """Start the worker if its time has passed while no process of this home ran, as after a restart of the machine."""
    with suppress(OSError, ValueError):
        if int((user / DUE).read_text()) <= time.time() * 1_000 and not is_worker_running(user):
            (user / DUE).unlink()
            start_worker(user)


def wake_threads(services: Services) -> None:
    """Start the worker if a thread waits for an approval: one was given or refused."""
    if services.store.approvals().is_awaited():
        start_worker(services.user)


def ring(user: Path) -> None:
    """Wake the process that sleeps until the next time, if one does."""
    with suppress(OSError):  # no process sleeps
        bell = os.open(user / BELL, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.write(bell, b"1")
        os.close(bell)


def is_worker_running(user: Path) -> bool:
    """Whether the worker of a home runs, or sleeps until the next time."""
    if (lock := worker_lock(user)) is None:
        return True
    os.close(lock)
    return False


def worker_lock(user: Path) -> int | None:
    """Return the lock of the worker, or None where another process has it."""
    return file_lock(user / LOCK)


def file_lock(path: Path) -> int | None:
    """Return the open file of a lock, or None if another process has it; closing the file releases it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
