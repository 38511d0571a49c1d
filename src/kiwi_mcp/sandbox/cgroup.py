"""Control groups: limits that the kernel holds for all processes of a run together."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep

from msgspec import Struct

from kiwi_mcp.domain.isolation import ResourceLimits

CONTROLLERS = ("memory", "cpu", "pids")
ROOT = Path("/sys/fs/cgroup")
PREFIX = "kiwi-"
"""What the name of every group of Kiwi's begins with; the number of the process that made it comes next."""
_PERIOD = 100_000
_QUOTA = "cpu.cfs_quota_us"
ALL = str(_PERIOD * 10_000)
"""More than there is, and not no quota: with the first one of a machine, and without the last, the kernel changes its
own code."""
_PATIENCE = 1.0
"""How long the kernel may take to release an ended process, in seconds."""


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
                    sleep(0.001)


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
    folders = {controller: _older(root, controller, places) for controller in CONTROLLERS}
    if found := {controller: folder for controller, folder in folders.items() if folder is not None}:
        return CgroupParent(found, is_unified=False) if len(found) == len(CONTROLLERS) else None
    unified = _newer(root, places.get("", "/"))
    return CgroupParent(dict.fromkeys(CONTROLLERS, unified), is_unified=True) if unified is not None else None


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


def _older(root: Path, controller: str, places: Mapping[str, str]) -> Path | None:
    folder = root / controller / places.get(controller, "/").lstrip("/")
    is_one = (folder / "cgroup.procs").exists() and controller in places
    return folder if is_one and os.access(folder, os.W_OK) else None


def _newer(root: Path, place: str) -> Path | None:
    """Return the nearest group around this process below which the controllers are handed out."""
    own = root / place.lstrip("/")
    for folder in (own, *own.parents):
        if not folder.is_relative_to(root):
            return None
        with suppress(OSError):
            given = (folder / "cgroup.subtree_control").read_text().split()
            if {*CONTROLLERS} <= {*given}:
                writable = os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK)
                return folder if writable else None
    return None
