"""The family of a process: everything it started, also what left its group, found and ended without fail.

While a run lives, Kiwi is the process that orphans of its children are handed to. When the leader has ended, whatever
it left behind is therefore in Kiwi's own list of children, one generation at a time. A child belongs to a run by its
group or session, by the variable `KIWI_RUN`, or by a stamp in a resource limit, which is inherited even where the
environment is wiped and every descriptor closed. Only children are ever signalled, and only Kiwi can free their
numbers by waiting for them, so a signal cannot reach a stranger that was given an old number.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from threading import Lock
from time import monotonic

from kiwi_mcp.primitives.children import exit_of

MARK = "KIWI_RUN"
"""The variable that names the run in the environment of everything it starts."""
_SWEEP = 5.0
"""How long the killed may take to be gone, in seconds."""
_MOMENT = 0.05
_ROUNDS = 100
_SET_CHILD_SUBREAPER = 36
# Only realtime processes are bound by this limit, and the numbers are days, so it is free to carry a stamp.
_STAMPED = resource.RLIMIT_RTTIME
_random = SystemRandom()
_libc = ctypes.CDLL(None)
_lock = Lock()
_living = 0


@contextmanager
def adopting() -> Iterator[None]:
    """Let orphans of Kiwi's children become Kiwi's children within the block."""
    _count(1)
    try:
        yield
    finally:
        _count(-1)


def _count(change: int) -> None:
    global _living
    with _lock:
        was, _living = _living, _living + change
        if bool(was) != bool(_living):
            _libc.prctl(_SET_CHILD_SUBREAPER, int(bool(_living)), 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Mark:
    """What tells the processes of one run from all others."""

    name: str
    stamp: int

    @classmethod
    def new(cls) -> Mark:
        """Return a mark that no other run has; inside another run, its name goes on from that one's."""
        outer = os.environ.get(MARK, "")
        own = f"{_random.getrandbits(64):016x}"
        ceiling = resource.getrlimit(_STAMPED)[1]
        top = 1 << 62 if ceiling == resource.RLIM_INFINITY else ceiling
        return cls(f"{outer}.{own}" if outer else own, top - _random.randrange(1, min(top, 1 << 44)))

    @contextmanager
    def pressed(self) -> Iterator[None]:
        """Give what is started within the block the stamp, and no core dumps, from its first instruction.

        A limit set on the child after its start may come too late: it can have children of its own by then. So it
        is Kiwi's own limit for the moment of the start, and only the soft one, which can be put back.
        """
        with _lock, _soft(resource.RLIMIT_CORE, 0), _soft(_STAMPED, self.stamp):
            yield

    def seal(self, pid: int) -> None:
        """Make the limits of a process that was started with the stamp ones that it cannot raise again."""
        with suppress(OSError, ValueError):  # it has ended already, or it is another user's by now
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            resource.prlimit(pid, _STAMPED, (self.stamp, self.stamp))


@contextmanager
def _soft(limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@dataclass(frozen=True, slots=True)
class Family:
    """A leader that is not yet waited for, and all that came of it."""

    leader: int
    mark: Mark

    def signal_group(self, number: int) -> None:
        """Send a signal to the leader's group."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.leader, number)

    async def sweep(self) -> None:
        """End what the leader left behind; it must have ended, and must not have been waited for."""
        self.signal_group(signal.SIGKILL)
        end = monotonic() + _SWEEP
        while (members := self.kill()) and monotonic() < end:
            await _end_of(members)

    def kill(self) -> list[int]:
        """Kill and wait for the members that are Kiwi's children now; return which there were."""
        members = self._living()
        for pid in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return members

    def _living(self) -> list[int]:
        """Return the members that have not ended, after those that have were waited for.

        The first process of a sandbox ends a moment after its launcher, and has nothing left to be ended.
        """
        living: list[int] = []
        for _ in range(_ROUNDS):
            members = [pid for pid in _children() if pid != self.leader and self._is_member(pid)]
            living = [pid for pid in members if not _has_ended(pid)]
            if len(living) == len(members):  # otherwise the children of those that ended may have come since
                break
        return living

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


async def _end_of(members: list[int]) -> None:
    """Wait for some killed children to end, and a moment at most: others may have come by then."""
    handles: list[int] = []
    for pid in members:
        with suppress(ProcessLookupError):  # it has been waited for
            handles.append(os.pidfd_open(pid))
    exits = [exit_of(handle) for handle in handles]
    if exits:
        await asyncio.wait(exits, timeout=_MOMENT)
    for exited in exits:
        exited.cancel()


def _has_ended(pid: int) -> bool:
    """Whether a child has ended; it is waited for then."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return True


def _stamps(pid: int) -> tuple[int, ...]:
    try:
        return resource.prlimit(pid, _STAMPED)
    except PermissionError:
        # Another user's by now, whose limits even root may lack the right to ask for; everybody may read them.
        rows = Path(f"/proc/{pid}/limits").read_text().splitlines()
        told = [word for row in rows if row.startswith("Max realtime timeout") for word in row.split()]
        return tuple(int(word) for word in told if word.isdigit())


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
