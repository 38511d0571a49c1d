"""Cells: threads of Kiwi's from which sandboxes are started when Kiwi runs as root, kept from one run to the next.

A cell has a table of mounts with the file system that every sandbox begins with, a network in which there is nothing,
and a group whose limits are set for each run. What it starts has all of them from its first moment, so that no process
ever has to be moved and no network made, which the kernel takes milliseconds for. One run at a time has a cell, and
none of its processes can make a socket or has any right over that network, so that nothing of them stays in it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Lock

from kiwi_mcp.domain.isolation import Limits, T
from kiwi_mcp.sandbox import staging
from kiwi_mcp.sandbox.cgroup import Group, Groups
from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.kernel_calls import as_user, leave_network
from kiwi_mcp.sandbox.limits import start_limited
from kiwi_mcp.sandbox.profile import Profile, base_profile
from kiwi_mcp.sandbox.refusals import unlaid

_MOST_IDLE = 4
_Key = tuple[object, ...]
_lock = Lock()
_idle: list[Cell] = []


class Cell:
    """A thread that sees what is granted to one run, alone, and starts its processes."""

    def __init__(self, profile: Profile, groups: Groups | None, key: _Key) -> None:
        self.key = key
        self._cleared: Future[None] | None = None
        self._waiting: tuple[Sequence[Opened], Sequence[int]] = ((), ())
        self._made: Sequence[str] | None = None
        self._limits: Limits | None = None
        self._thread = ThreadPoolExecutor(max_workers=1)
        # Only the older interface has groups of threads; elsewhere each run has a group of its own.
        self.group = groups.make() if groups is not None and not groups.is_unified else None
        try:
            self._thread.submit(_settle, profile, self.group).result()
        except OSError:
            self.end()
            raise

    @property
    def is_clear(self) -> bool:
        """Whether what was granted before is gone; where it could not be taken away, the cell is not used again."""
        return self._cleared is None or (self._cleared.done() and self._cleared.exception() is None)

    def take(self, grants: Sequence[Opened], owner_map: int | None, keep: ExitStack) -> None:
        """Copy what is granted, to be laid out with the start; the thread itself sees none of it."""
        mounts: list[int] = []
        for grant in grants:
            mounts.append(staging.copied(grant, owner_map))
            keep.callback(os.close, mounts[-1])
        self._waiting = (grants, mounts)

    def clear(self) -> None:
        """Take it away again, and lift the limits first: a thread of Kiwi's must never wait for its share of time."""
        made, self._made = self._made, None
        if self.group is not None:
            self.group.lift()
        if made is not None:
            self._cleared = self._thread.submit(staging.clear, made)

    def limit(self, limits: Limits, _: int) -> None:
        """Set the limits of all that was started here, and of this thread; most runs have those of the run before."""
        if self.group is None:
            return
        if limits == self._limits:
            self.group.share(limits)
        else:
            self.group.limit(limits, besides=1)
            self._limits = limits

    def start(self, spawn: Callable[[], T], /) -> T:
        """Start a process here as root."""
        return self._thread.submit(self._started, spawn).result()

    def start_as(self, user: int, limits: Limits, spawn: Callable[[], T], /) -> T:
        """Start a process here as a user, and under limits of its own."""
        return self._thread.submit(self._started, partial(_started_as, user, limits, spawn)).result()

    def _started(self, spawn: Callable[[], T]) -> T:
        if self._made is None:
            try:
                self._made = staging.lay_out(*self._waiting)
            except OSError as fault:
                raise unlaid(fault) from fault
        return spawn()

    def end(self) -> None:
        """End the thread, and remove its group."""
        if self.group is not None:
            with suppress(OSError):
                self.group.lift()
        self._thread.shutdown()
        if self.group is not None:
            self.group.remove()


@contextmanager
def laid_out(grants: Sequence[Opened], owner_map: int | None, groups: Groups | None) -> Iterator[Cell]:
    """Give a cell in which each grant lies under its number once something is started there, for one run."""
    cell = _taken(groups)
    try:
        with ExitStack() as keep:
            cell.take(grants, owner_map, keep)
            yield cell
        cell.clear()
    except BaseException:
        cell.end()
        raise
    _give_back(cell)


def _taken(groups: Groups | None) -> Cell:
    profile = base_profile()
    # What was laid out is what was there then: where a system file has been replaced since, a new cell is made. The
    # number of this process is part of it because threads stay behind where a process is forked.
    states = [Path(path).stat() for path in profile.readable]
    key = (os.getpid(), groups is None, *((state.st_dev, state.st_ino, state.st_mtime_ns) for state in states))
    with _lock:
        _idle[:] = [cell for cell in _idle if cell.key[0] == key[0]]
        # One from which the last grants are still being taken away would have to be waited for.
        found = next((cell for cell in reversed(_idle) if cell.key == key and cell.is_clear), None)
        if found is not None:
            _idle.remove(found)
    return found or Cell(profile, groups, key)


def _give_back(cell: Cell) -> None:
    with _lock:
        _idle.append(cell)
        oldest = _idle.pop(0) if len(_idle) > _MOST_IDLE else None
    if oldest is not None:
        oldest.end()


def _settle(profile: Profile, group: Group | None) -> None:
    if group is not None:
        group.join()
    leave_network()
    staging.settle(profile)


def _started_as(user: int, limits: Limits, spawn: Callable[[], T]) -> T:
    with as_user(user):
        return start_limited(limits, spawn)


@atexit.register
def _end_all() -> None:
    for cell in _idle:
        if cell.key[0] == os.getpid():
            cell.end()
