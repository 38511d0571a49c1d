"""Per-process limits, quota on written folders."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL
from stat import S_ISDIR
from time import monotonic, sleep

from msgspec import Struct

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.domain.process import T

_PATIENCE = 1.0
"""How long a process may take to become the user that it is started as, in seconds."""
_ADDRESSES = 64
"""How many times its memory a process may reserve of addresses: interpreters reserve far more than they use."""


def start_limited(limits: ResourceLimits, spawn: Callable[[], T], /) -> T:
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


def limiting(prlimit: str, limits: ResourceLimits) -> tuple[str, ...]:
    """Return the words that go before a command, so that it is started with limits."""
    return (prlimit, *(f"--{name}={most}:{most}" for name, most in _limits(limits).items()), "--")


def counting(prlimit: str, limits: ResourceLimits) -> tuple[str, ...]:
    """Return the words that go before a command inside a sandbox, so that its processes are counted.

    Elsewhere all processes of the user would be, so that it cannot be done from outside.
    """
    return (prlimit, f"--nproc={limits.pids}:{limits.pids}", "--")


def _limits(limits: ResourceLimits) -> Mapping[str, int]:
    return {
        "core": 0,
        "data": limits.memory_bytes,
        "as": limits.memory_bytes * _ADDRESSES,
        "fsize": limits.file_bytes,
        "nofile": limits.open_files,
        "cpu": limits.cpu_seconds,
    }


def limit_process(pid: int, limits: ResourceLimits) -> None:
    """Put a process that waits under limits."""
    with suppress(ProcessLookupError):  # it has been ended, and nothing of it will run
        for name, most in _limits(limits).items():
            kind = getattr(resource, f"RLIMIT_{name.upper()}")
            ceiling = resource.prlimit(pid, kind)[1]
            # One that is stricter already cannot be raised, and need not be.
            least = most if ceiling == resource.RLIM_INFINITY else min(most, ceiling)
            resource.prlimit(pid, kind, (least, least))


_BLOCK = 512
"""The unit of `st_blocks`, regardless of the block size of the file system."""
_MOST_SEEN = 1_000_000
"""How many files are gone through before what cannot be counted is taken for too much."""
_PAUSE, _SHARE = 1.0, 20
"""The pause between two scans of the folders: a second, or `_SHARE` times the duration of a scan if that is longer."""
_STEPS = 4
"""If other processes used the free space, scan again after a further `1 / _STEPS` of the quota is used."""


class _Room(Struct, frozen=True):
    free_bytes: int
    free_files: int


def quota(folders: Sequence[str], limits: ResourceLimits) -> Callable[[], str] | None:
    """Return a function that says why a process has to be stopped, if it has to; None without writable folders."""
    return _Quota(folders, limits).exceeded if folders else None


class _Quota:
    """The folders that one process writes to, from the moment it begins."""

    def __init__(self, folders: Sequence[str], limits: ResourceLimits) -> None:
        self._folders = folders
        self._limits = limits
        # A file system may keep time in steps as long as the system's clock takes from tick to tick.
        self._began_ns = time.time_ns() - 20_000_000
        self._rooms = [_room(folder) for folder in folders]
        self._next = time.monotonic() + _PAUSE

    def exceeded(self) -> str:
        """Return why the process has to be stopped; nothing while it keeps to its quota."""
        began = time.monotonic()
        have_shrunk = [self._has_shrunk(index) for index in range(len(self._folders))]
        if not any(have_shrunk) and began < self._next:
            return ""
        size, count = self._added()
        ended = time.monotonic()
        self._next = ended + max(_PAUSE, _SHARE * (ended - began))
        if size > self._limits.workspace_bytes:
            return f"wrote more than {self._limits.workspace_bytes:,} bytes into the folders it was given"
        if count > self._limits.workspace_files:
            return f"made more than {self._limits.workspace_files:,} files in the folders it was given"
        return ""

    def _has_shrunk(self, index: int) -> bool:
        """Whether the room at a folder shrank by the quota; if so, the next look is after a part of it."""
        before, now = self._rooms[index], _room(self._folders[index])
        taken = before.free_bytes - now.free_bytes
        made = before.free_files - now.free_files
        if taken <= self._limits.workspace_bytes and made <= self._limits.workspace_files:
            return False
        parts = self._limits.workspace_bytes // _STEPS, self._limits.workspace_files // _STEPS
        self._rooms[index] = _Room(
            now.free_bytes + self._limits.workspace_bytes - parts[0],
            now.free_files + self._limits.workspace_files - parts[1],
        )
        return True

    def _added(self) -> tuple[int, int]:
        """Return the bytes and the number of what was changed since the process began, each file once."""
        size, seen = 0, set[tuple[int, int]]()
        for count, state in enumerate(_states(self._folders)):
            if count > _MOST_SEEN or len(seen) > self._limits.workspace_files or size > self._limits.workspace_bytes:
                return max(size, self._limits.workspace_bytes + 1 if count > _MOST_SEEN else 0), len(seen)
            if state.st_ctime_ns >= self._began_ns and (state.st_dev, state.st_ino) not in seen:
                seen.add((state.st_dev, state.st_ino))
                size += state.st_blocks * _BLOCK
        return size, len(seen)


def _room(folder: str) -> _Room:
    try:
        state = os.statvfs(folder)
    except OSError:  # it is gone, and nothing is added to it
        return _Room(0, 0)
    return _Room(state.f_bavail * state.f_frsize, state.f_favail)


def _states(paths: Sequence[str]) -> Iterator[os.stat_result]:
    """Yield the status of every file and folder at and below some paths, without following links."""
    waiting = [*map(Path, paths)]
    while waiting:
        path = waiting.pop()
        with suppress(OSError):  # it is gone, or went while we looked
            state = path.stat(follow_symlinks=False)
            yield state
            if S_ISDIR(state.st_mode):
                waiting += path.iterdir()
