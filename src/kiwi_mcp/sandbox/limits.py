"""Limits that every process carries by itself: set from outside while its launcher waits, or by a small program."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from contextlib import suppress

from kiwi_mcp.domain.isolation import Limits

_ADDRESSES = 64
"""How many times its memory a process may reserve of addresses: interpreters reserve far more than they use."""


def limit_process(pid: int, limits: Limits) -> None:
    """Put a process that waits for its launcher, and all that it will start, under its limits."""
    with suppress(ProcessLookupError):  # it has been ended, and nothing of it will run
        for name, most in _limits(limits).items():
            resource.prlimit(pid, getattr(resource, f"RLIMIT_{name.upper()}"), (most, most))


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
