"""Limits of a process tree where Kiwi can make no control groups: a watchdog for memory, one set of processors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from math import ceil
from random import sample
from time import sleep

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.domain.process import T

DENIED_CALLS = ("memfd_create", "shmget", "sched_setaffinity")
"""Memory that belongs to no process, and the way out of the chosen processors."""
_AGAIN = 0.01
"""A process that is about to start a program shares its memory with the child, which is counted twice for a moment."""
_EXACT_EVERY, _EXACT_EVERY_WIDE = 20, 4
"""How many looks there are to an exact one; fewer if more addresses than the limit are mapped and not resident."""
_KB = 1_024
_SHARED_NAME = b" /dev/zero (deleted)\n"
"""How the kernel names shared anonymous memory in the mappings of a process."""


def start_pinned(limits: ResourceLimits, start: Callable[[], T]) -> T:
    """Start a process that runs, with all that it starts, on as many processors as it may use."""
    allowed = os.sched_getaffinity(0)
    count = min(len(allowed), ceil(limits.cpus))
    os.sched_setaffinity(0, sample(sorted(allowed), count))
    try:
        return start()
    finally:
        os.sched_setaffinity(0, allowed)


class MemoryWatch:
    """Sums the memory of all processes of a sandbox.

    Resident memory counts shared pages in every process and is quick to read. Only if it is over the limit, and now and
    then for what was swapped out, the proportional share is summed, which counts them once. Shared anonymous memory
    stays allocated when a process drops it from its resident memory, so it counts by the size of its mappings.
    """

    def __init__(self, first: Callable[[], int], limits: ResourceLimits) -> None:
        self._first = first
        self._limit = limits.memory_bytes
        self._looks = 0

    def exceeded(self) -> str:
        """Return why the process has to be stopped; an empty text while it is within its limit."""
        try:
            processes = os.open(f"/proc/{self._first()}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # it has not begun, or it has ended
            return ""
        try:
            with suppress(OSError):
                os.readlink("self", dir_fd=processes)
                return ""  # the list of this machine: the launcher has not left it yet
            self._looks += 1
            resident = _used(processes, is_exact=False)
            is_wide = _total(processes, ("VmSize:",)) - resident > self._limit
            is_due = self._looks % (_EXACT_EVERY_WIDE if is_wide else _EXACT_EVERY) == 0
            if (resident > self._limit or is_due) and _used(processes, is_exact=True) > self._limit:
                sleep(_AGAIN)
                if _used(processes, is_exact=True) > self._limit:
                    return f"used more than {self._limit:,} bytes of memory, all its processes together"
            return ""
        finally:
            os.close(processes)


def _used(processes: int, *, is_exact: bool) -> int:
    """Return the memory of all processes in a list, with their page tables."""
    if not is_exact:
        return _total(processes, ("VmPTE:", "VmRSS:", "VmSwap:"))
    total, resident = _total(processes, ("VmPTE:",)), 0
    shared: dict[str, int] = {}
    for pid in filter(str.isdigit, os.listdir(processes)):
        share = _sum(processes, f"{pid}/smaps_rollup", ("Pss:", "SwapPss:"))
        total += _sum(processes, f"{pid}/status", ("VmRSS:", "VmSwap:")) or 0 if share is None else share
        resident += _sum(processes, f"{pid}/smaps_rollup", ("Pss_Shmem:",)) or 0
        for inode, size in _shared_anonymous(processes, pid):
            shared[inode] = max(size, shared.get(inode, 0))
    return total + max(0, sum(shared.values()) - resident)


def _total(processes: int, fields: tuple[str, ...]) -> int:
    """Return the sum of some lines of the status of all processes, in bytes."""
    return sum(_sum(processes, f"{pid}/status", fields) or 0 for pid in os.listdir(processes) if pid.isdigit())


def _shared_anonymous(processes: int, pid: str) -> Iterator[tuple[str, int]]:
    """Yield the inode of each shared anonymous mapping of a process, and how far into it the mapping reaches."""
    with suppress(OSError):  # the process has ended, or this user may not read it
        file = os.open(f"{pid}/maps", os.O_RDONLY | os.O_CLOEXEC, dir_fd=processes)
        with os.fdopen(file, "rb") as lines:
            for line in lines:
                if line.endswith(_SHARED_NAME):
                    addresses, _, offset, _, inode, *_ = line.decode(errors="replace").split()
                    start, _, end = addresses.partition("-")
                    yield inode, int(offset, 16) + int(end, 16) - int(start, 16)


def _sum(processes: int, path: str, fields: tuple[str, ...]) -> int | None:
    """Return the sum of some lines of a file, in bytes; None if this user may not read it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=processes)
    except PermissionError:
        return None
    except OSError:  # the process has ended
        return 0
    try:
        lines = os.read(file, 8_192).decode(errors="replace").splitlines()
    except PermissionError:
        return None
    except OSError:
        return 0
    finally:
        os.close(file)
    return sum(int(line.split()[1]) * _KB for line in lines if line.startswith(fields))
