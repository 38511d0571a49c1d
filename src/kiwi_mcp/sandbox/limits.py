"""Limits that every process carries by itself: set from outside while its launcher waits, or by a small program."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from signal import SIGKILL
from time import monotonic, sleep

from kiwi_mcp.domain.isolation import Limits, T

_PATIENCE = 1.0
"""How long a process may take to become the user that it is started as, in seconds."""
_ADDRESSES = 64
"""How many times its memory a process may reserve of addresses: interpreters reserve far more than they use."""


def start_limited(limits: Limits, spawn: Callable[[], T], /) -> T:
    """Start a process under limits; it must be a launcher that waits for its instructions."""
    process = spawn()
    end = monotonic() + _PATIENCE
    while True:
        try:
            limit_process(process.pid, limits)
        except PermissionError:
            # It counts as started a moment before it has shed the last of the user that started it.
            if monotonic() > end:
                os.kill(process.pid, SIGKILL)
                raise
            sleep(0.0001)
        else:
            return process


def limiting(prlimit: str, limits: Limits) -> tuple[str, ...]:
    """Return the words that go before a command, so that it is started with limits."""
    return (prlimit, *(f"--{name}={most}:{most}" for name, most in _limits(limits).items()), "--")


def counting(prlimit: str, limits: Limits) -> tuple[str, ...]:
    """Return the words that go before a command inside a sandbox, so that its processes are counted.

    Elsewhere all processes of the user would be, so that it cannot be done from outside.
    """
    return (prlimit, f"--nproc={limits.pids}:{limits.pids}", "--")


def _limits(limits: Limits) -> Mapping[str, int]:
    return {
        "core": 0,
        "data": limits.memory_bytes,
        "as": limits.memory_bytes * _ADDRESSES,
        "fsize": limits.file_bytes,
        "nofile": limits.open_files,
        "cpu": limits.cpu_seconds,
    }


def limit_process(pid: int, limits: Limits) -> None:
    """Put a process that waits under limits."""
    with suppress(ProcessLookupError):  # it has been ended, and nothing of it will run
        for name, most in _limits(limits).items():
            kind = getattr(resource, f"RLIMIT_{name.upper()}")
            ceiling = resource.prlimit(pid, kind)[1]
            # One that is stricter already cannot be raised, and need not be.
            least = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
            resource.prlimit(pid, kind, (least, least))
