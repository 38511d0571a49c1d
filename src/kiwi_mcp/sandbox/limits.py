"""Limits that every process carries by itself, set by a small program in front of the one that is confined."""

from __future__ import annotations

from kiwi_mcp.domain.isolation import Limits

_ADDRESSES = 64
"""How many times its memory a process may reserve of addresses: interpreters reserve far more than they use."""


def limiting(prlimit: str, limits: Limits, *, counts_processes: bool) -> tuple[str, ...]:
    """Return the words that go before a command, so that it is started with limits.

    Processes can be counted only where the count is the sandbox's own: elsewhere all of the user's are in it.
    """
    return (
        prlimit,
        "--core=0:0",
        f"--data={limits.memory_bytes}:{limits.memory_bytes}",
        f"--as={limits.memory_bytes * _ADDRESSES}:{limits.memory_bytes * _ADDRESSES}",
        f"--fsize={limits.file_bytes}:{limits.file_bytes}",
        f"--nofile={limits.open_files}:{limits.open_files}",
        f"--cpu={limits.cpu_seconds}:{limits.cpu_seconds}",
        *([f"--nproc={limits.pids}:{limits.pids}"] if counts_processes else []),
        "--",
    )
