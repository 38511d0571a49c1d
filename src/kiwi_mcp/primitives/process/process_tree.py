"""Find and end everything a process started."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from time import monotonic

from msgspec import Struct

MARK = "KIWI_RUN"
"""The variable that names the run in the environment of everything it starts."""
_SWEEP = 5.0
"""How long the killed may take to be gone, in seconds."""
_SET_CHILD_SUBREAPER = 36
STAMPED = resource.RLIMIT_RTTIME
"""The limit that carries the stamp: only realtime processes are bound by it, and the numbers are days."""
_libc = ctypes.CDLL(None)
_lock = Lock()
_adopting: set[object] = set()
"""The blocks in which orphans become Kiwi's children."""


@contextmanager
def adopting() -> Iterator[None]:
    """Let orphans of Kiwi's children become Kiwi's children within the block; blocks may overlap."""
    block = object()
    with _lock:
        if not _adopting:
            _libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        _adopting.add(block)
    try:
        yield
    finally:
        with _lock:
            _adopting.remove(block)
            if not _adopting:
                _libc.prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class TreeMarker(Struct, frozen=True):
    """What tells the processes of one run from all others."""

    name: str
    stamp: int

    @classmethod
    def new(cls) -> TreeMarker:
        """Return a marker that no other run has. Inside another run, its name extends the name of that run."""
        outer = os.environ.get(MARK, "")
        own = os.urandom(8).hex()
        ceiling = resource.getrlimit(STAMPED)[1]
        top = 1 << 62 if ceiling == resource.RLIM_INFINITY else ceiling
        below = 1 + int.from_bytes(os.urandom(8)) % (min(top, 1 << 44) - 1)
        return cls(f"{outer}.{own}" if outer else own, top - below)


@contextmanager
def stamping(mark: TreeMarker) -> Iterator[None]:
    """Give processes that are started within the block the stamp, and no core dumps, from their first instruction.

    A limit set on the child after its start may come too late: it can already have children. So Kiwi sets its own limit
    during the start, and only the soft one, which can be restored; one start at a time.
    """
    with _lock:
        core, stamped = resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(STAMPED)
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, core[1]))
            resource.setrlimit(STAMPED, (mark.stamp, stamped[1]))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, core)
            resource.setrlimit(STAMPED, stamped)


class ProcessTree(Struct, frozen=True):
    """A leader that is not yet waited for, and all that came of it."""

    leader: int
    mark: TreeMarker
    first: Callable[[], int] | None = None
    """Returns the first process of the leader's own pid namespace, once it is known, else 0.

    With it the whole namespace ends, so no other child of Kiwi has to be looked at.
    """

    def signal_group(self, number: int) -> None:
        """Send a signal to the leader's group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.leader, number)

    async def sweep(self) -> None:
        """End what the leader left behind; it must have ended, and must not have been waited for."""
        self.signal_group(signal.SIGKILL)
        end = monotonic() + _SWEEP
        while (members := self.kill()) and monotonic() < end:
            handles: list[int] = []
            for pid in members:
                with suppress(ProcessLookupError):  # it has been waited for
                    handles.append(os.pidfd_open(pid))
            exits = [exit_of(handle) for handle in handles]
            if exits:  # for a moment at most: others may have come by then
                await asyncio.wait(exits, timeout=0.05)
            for exited in exits:
                exited.cancel()

    def kill(self) -> list[int]:
        """Kill and wait for the members that are Kiwi's children now; return which there were."""
        if self.first is not None and (first := self.first()):
            # Of its own namespace, the kernel ends all others before the first one. That one is waited for once, when
            # it has ended: afterwards its number may belong to another child.
            if _has_ended(first):
                return []
            with suppress(ProcessLookupError, PermissionError):
                os.kill(first, signal.SIGKILL)
            return [] if _ends_at_once(first) else [first]
        members: list[int] = []
        for _ in range(100):
            found = [pid for pid in _children() if pid != self.leader and self._is_member(pid)]
            # One that has ended is waited for: the first process of a sandbox ends a moment after its launcher.
            members = [pid for pid in found if not _has_ended(pid)]
            if len(members) == len(found):  # otherwise the children of those that ended may have come since
                break
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return members

    def _is_member(self, pid: int) -> bool:
        with suppress(ProcessLookupError):
            if self.leader in {os.getpgid(pid), os.getsid(pid)}:
                return True
        with suppress(OSError, ValueError):
            if self.mark.stamp in _stamps(pid):
                return True
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return any(one.startswith(f"{MARK}={self.mark.name}".encode()) for one in variables)
        return False


def _ends_at_once(pid: int) -> bool:
    """Whether a killed child ends within a moment so short that the event loop may wait for it."""
    with suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            poll = select.poll()  # not `select`, which takes no descriptor above 1,023
            poll.register(handle, select.POLLIN)
            poll.poll(1)
        finally:
            os.close(handle)
    return _has_ended(pid)


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is waited for then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _stamps(pid: int) -> tuple[int, ...]:
    try:
        return resource.prlimit(pid, STAMPED)
    except PermissionError:
        # The process now belongs to another user. Even root may lack the right to query its limits, but /proc shows
        # them.
        rows = Path(f"/proc/{pid}/limits").read_text().splitlines()
        response = [word for row in rows if row.startswith("Max realtime timeout") for word in row.split()]
        return tuple(int(word) for word in response if word.isdigit())


def _children() -> list[int]:
    me = os.getpid()
    try:
        # Orphans are handed to the first thread, so its list is the one that holds them.
        listed = os.open(f"/proc/{me}/task/{me}/children", os.O_RDONLY)
    except FileNotFoundError:  # a kernel without these lists
        return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _parent(entry) == me]
    try:
        return [int(pid) for pid in b"".join(iter(lambda: os.read(listed, 65_536), b"")).split()]
    finally:
        os.close(listed)


def _parent(entry: Path) -> int:
    with suppress(OSError):
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def exit_of(handle: int) -> asyncio.Future[None]:
    """Return a future that is done when the process has ended; it is not waited for, so its number stays its own."""
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()

    def gone(_: object) -> None:
        loop.remove_reader(handle)
        os.close(handle)

    exited.add_done_callback(gone)
    loop.add_reader(handle, settle, exited)
    return exited


def settle(future: asyncio.Future[None]) -> None:
    """Mark a future as done, unless it is."""
    if not future.done():
        future.set_result(None)
