"""The process that sleeps while something is due later: at that time, or when it is woken, it becomes the worker.

It imports nothing but the standard library, so that a home with a schedule costs next to no memory.
"""

from __future__ import annotations

import fcntl
import os
import select
import sys
import time
from pathlib import Path

LOCK, BELL, DUE = "state/worker.lock", "state/worker.bell", "state/worker.due"
"""Below the folder of the user: who serves the home, how to wake it, and when something is due next."""
_LONGEST = 60.0
"""How many seconds pass at most before the clock is read again: it may be set, and the machine may sleep."""


def sleep_until(user: Path, due_at: int) -> bool:
    """Sleep until a time in milliseconds since 1970, or the bell; False if another process serves the home, or none."""
    try:
        lock = os.open(user / LOCK, os.O_RDWR | os.O_CLOEXEC)
        # The bell comes before the lock: who finds the lock taken can ring.
        if not (user / BELL).exists():
            os.mkfifo(user / BELL, 0o600)
        # Also for writing: then it never reads as closed.
        bell = os.open(user / BELL, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (user / DUE).write_text(str(due_at))
    except OSError:
        return False
    while (rest := due_at / 1_000 - time.time()) > 0:
        if select.select([bell], [], [], min(rest, _LONGEST))[0]:
            break
        if not (user / LOCK).exists():
            return False
    (user / DUE).unlink(missing_ok=True)
    return True


def main() -> None:
    """Sleep, then become the worker."""
    if sleep_until(Path(sys.argv[1]), int(sys.argv[2])):
        os.execv(sys.executable, [sys.executable, "-m", "kiwi_mcp", "worker", "--while-pending"])


if __name__ == "__main__":
    main()
