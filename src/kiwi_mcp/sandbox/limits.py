"""Limits of processes: of each one, of the folders that they write to, and of all of a run together."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import ceil
from pathlib import Path
from random import sample
from secrets import token_hex
from signal import SIGKILL
from stat import S_ISDIR
from time import monotonic, sleep

from msgspec import Struct

from kiwi_mcp.domain.isolation import ResourceLimits, T

_PATIENCE = 1.0
"""How long a process may take to become its user, and the kernel to release an ended one, in seconds."""
_ADDRESSES = 64
"""How many times its memory a process may reserve of addresses: interpreters reserve far more than they use."""
_BLOCK = 512
"""The unit of `st_blocks`, regardless of the block size of the file system."""
_MOST_SEEN = 1_000_000
"""How many files are gone through before what cannot be counted is taken for too much."""
_PAUSE, _SHARE = 1.0, 20
"""The pause between two scans of the folders: a second, or `_SHARE` times the duration of a scan if that is longer."""
_STEPS = 4
"""If other processes used the free space, scan again after a further `1 / _STEPS` of the quota is used."""
CONTROLLERS = ("memory", "cpu", "pids")
ROOT = Path("/sys/fs/cgroup")
PREFIX = "kiwi-"
"""What the name of every group of Kiwi's begins with; the number of the process that made it comes next."""
_PERIOD = 100_000
_QUOTA = "cpu.cfs_quota_us"
ALL = str(_PERIOD * 10_000)
"""More than there is, and not no quota: with the first one of a machine, and without the last, the kernel changes its
own code."""
DENIED_CALLS = ("memfd_create", "shmget", "sched_setaffinity")
"""Memory that belongs to no process, and the way out of the chosen processors."""
_AGAIN = 0.01
"""A process that is about to start a program shares its memory with the child, which is counted twice for a moment."""
_EXACT_EVERY, _EXACT_EVERY_WIDE = 20, 4
"""How many looks there are to an exact one; fewer if more addresses than the limit are mapped and not resident."""
_SHARED_NAME = b" /dev/zero (deleted)\n"
"""How the kernel names shared anonymous memory in the mappings of a process."""


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
        most_bytes, most_files = self._limits.workspace_bytes, self._limits.workspace_files
        (had_bytes, had_files), (free_bytes, free_files) = self._rooms[index], _room(self._folders[index])
        if had_bytes - free_bytes <= most_bytes and had_files - free_files <= most_files:
            return False
        self._rooms[index] = (
            free_bytes + most_bytes - most_bytes // _STEPS,
            free_files + most_files - most_files // _STEPS,
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


def _room(folder: str) -> tuple[int, int]:
    """Return how many bytes and how many files a file system has room for."""
    try:
        state = os.statvfs(folder)
    except OSError:  # it is gone, and nothing is added to it
        return 0, 0
    return state.f_bavail * state.f_frsize, state.f_favail


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


class CgroupParent(Struct, frozen=True):
    """Where groups can be made, one folder for each controller; with the newer interface they are one and the same."""

    folders: Mapping[str, Path]
    is_unified: bool

    @contextmanager
    def limited(self, limits: ResourceLimits) -> Iterator[Cgroup]:
        """Make a group with limits, and remove it with the block."""
        group = self.make()
        try:
            group.limit(limits)
            yield group
        finally:
            group.remove()

    def make(self) -> Cgroup:
        """Return a new group without limits, for the caller to remove."""
        name = f"{PREFIX}{os.getpid()}-{token_hex(8)}"
        group = Cgroup({controller: folder / name for controller, folder in self.folders.items()}, self.is_unified)
        try:
            for folder in group.folders:
                folder.mkdir()
        except OSError:
            group.remove()
            raise
        return group


class Cgroup(Struct, frozen=True):
    """The group of a run, one folder for each controller; with the newer interface they are one and the same."""

    places: Mapping[str, Path]
    is_unified: bool

    @property
    def folders(self) -> tuple[Path, ...]:
        """Its folders."""
        return tuple(dict.fromkeys(self.places.values()))

    def limit(self, limits: ResourceLimits, *, besides: int = 0) -> None:
        """Set its limits; `besides` is how many of its processes and threads are not the run's own."""
        quota = quota_of(limits)
        memory, pids = str(limits.memory_bytes), str(limits.pids + besides)
        if self.is_unified:
            _set(self.places["memory"], "memory.max", memory)
            _set(self.places["memory"], "memory.swap.max", "0")
            _set(self.places["cpu"], "cpu.max", f"{quota} {_PERIOD}")
        else:
            _set(self.places["memory"], "memory.limit_in_bytes", memory)
            _set(self.places["cpu"], "cpu.cfs_period_us", str(_PERIOD))
            _set(self.places["cpu"], _QUOTA, quota)
        _set(self.places["pids"], "pids.max", pids)

    def share(self, quota: str) -> None:
        """Set the share of the processors: `quota_of` limits, or `ALL`; cgroup v2 does not need this."""
        _set(self.places["cpu"], _QUOTA, quota)

    def throttle_count(self) -> int:
        """Return how often its processes had used up their share of the processors."""
        rows = (self.places["cpu"] / "cpu.stat").read_text().splitlines()
        return next((int(row.split()[1]) for row in rows if row.startswith("nr_throttled ")), 0)

    def add(self, pid: int) -> None:
        """Put a process, and all it will start, under the limits."""
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))

    def join(self) -> None:
        """Put the calling thread alone, and all it will start, under the limits; the newer interface cannot."""
        for folder in self.folders:
            (folder / "tasks").write_text("0")

    def remove(self) -> None:
        """Remove the group; its processes have ended, and the kernel may take a moment to know."""
        end = monotonic() + _PATIENCE
        for folder in self.folders:
            while folder.is_dir():
                try:
                    folder.rmdir()
                except OSError:
                    if monotonic() > end:
                        break
                    sleep(0.0002)


def quota_of(limits: ResourceLimits) -> str:
    """Return the share of the processors that limits allow."""
    return str(max(int(limits.cpus * _PERIOD), 1_000))


def _set(folder: Path, word: str, value: str) -> None:
    file = os.open(f"{folder}/{word}", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(file, value.encode())
    finally:
        os.close(file)


def find_groups(root: Path = ROOT, own: Path = Path("/proc/self/cgroup")) -> CgroupParent | None:
    """Return where this user can make groups that bound memory, processors and processes; None where it is nowhere."""
    places = _places(own)
    found: dict[str, Path] = {}
    for controller in CONTROLLERS:
        folder = root / controller / places.get(controller, "/").lstrip("/")
        if controller in places and (folder / "cgroup.procs").exists() and os.access(folder, os.W_OK):
            found[controller] = folder
    if found:
        return CgroupParent(found, is_unified=False) if len(found) == len(CONTROLLERS) else None
    here = root / places.get("", "/").lstrip("/")
    for folder in (here, *here.parents):  # the nearest group around this process below which controllers are handed out
        if not folder.is_relative_to(root):
            return None
        with suppress(OSError):
            given = (folder / "cgroup.subtree_control").read_text().split()
            if {*CONTROLLERS} <= {*given}:
                is_writable = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
                return CgroupParent(dict.fromkeys(CONTROLLERS, folder), is_unified=True) if is_writable else None
    return None


def sweep(folders: Iterable[Path]) -> None:
    """Remove the empty groups that a killed Kiwi process left behind. Their names contain the id of that process."""
    for folder in dict.fromkeys(folders):
        for left in _inside(folder):
            maker = left.name.removeprefix(PREFIX).partition("-")[0] if left.name.startswith(PREFIX) else ""
            if maker.isdigit() and not Path(f"/proc/{maker}").exists():
                for one in (*_inside(left), left):
                    with suppress(OSError):
                        one.rmdir()


def _inside(folder: Path) -> Sequence[Path]:
    """Return the groups in a group; none where another process has removed it."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return ()


def _places(own: Path) -> Mapping[str, str]:
    """Return where this process stands, by controller; the newer interface has an empty name."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return {}
    rows = (line.split(":", 2) for line in lines if line.count(":") > 1)
    return {controller: path for _, controllers, path in rows for controller in controllers.split(",")}


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
    return sum(int(line.split()[1]) * 1_024 for line in lines if line.startswith(fields))
