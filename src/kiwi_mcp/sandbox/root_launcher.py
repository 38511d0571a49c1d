"""Start sandboxes as an unprivileged user when Kiwi runs as root."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from stat import S_IFCHR
from threading import Lock, Thread
from typing import TypeVar, cast

from kiwi_mcp.domain.isolation import ResourceLimits, T
from kiwi_mcp.sandbox.backend import failed
from kiwi_mcp.sandbox.levels import BaseFileSystem, base_profile
from kiwi_mcp.sandbox.limits import ALL, Cgroup, CgroupParent, quota_of, start_limited
from kiwi_mcp.sandbox.linux import (
    IDMAP,
    NODEV,
    NOSUID,
    RDONLY,
    as_user,
    attach_mount,
    copy_mount,
    detach_mount,
    leave_host,
    mount_memory,
    mount_terminals,
    seal_mount,
    set_attributes,
)
from kiwi_mcp.sandbox.process_setup import OpenedGrant

PLACE = "/tmp"  # noqa: S108 - a folder that every system has; in the table of mounts made here it is another one
ROOT = f"{PLACE}/root"
"""The path of the base file system of every sandbox. Its launcher still has to make it read-only."""
STAGED = f"{PLACE}/run"
"""The folder in which each grant has the name of its index."""
_ROOM = 4_194_304
_NEEDED = ("/", "/proc", "/dev", PLACE)
_NEEDED_BELOW = ("/usr", "/lib", "/bin", "/sbin", "/nix", "/gnu", "/proc/", f"{PLACE}/")
"""Mounts that programs are started from, that the launcher works with, or that hide something of the kernel's."""
_DEVICE_LINKS = {
    "core": "/proc/kcore",
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    "stderr": "/proc/self/fd/2",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
}
R = TypeVar("R")
_MOST_IDLE = 4
_lock = Lock()
_idle: list[RootLauncher] = []


def settle(profile: BaseFileSystem, group: Cgroup | None) -> None:
    """Give the calling thread an empty network and its own mount table, with the base file system of every sandbox."""
    if group is not None:
        group.join()
    leave_host()
    mount_memory(PLACE, size=_ROOM)
    with _open_to_all():
        for path in profile.readable:
            if Path(path).is_dir():
                _make_folder(f"{ROOT}{path}")
                _mount(path, is_device=False)
            else:
                with Path(path).open("rb") as file:
                    _make_file(f"{ROOT}{path}", file.read(1_048_576))
        for path, target in profile.links.items():
            Path(f"{ROOT}{path}").symlink_to(target)
        for path, content in profile.files.items():
            _make_file(f"{ROOT}{path}", content)
        for folder in (STAGED, f"{ROOT}/proc", f"{ROOT}/tmp", f"{ROOT}/dev"):  # noqa: S108 - inside
            _make_folder(folder)
        _make_devices()
    _leave_behind()


def _make_devices() -> None:
    """Fill a mount of its own with devices, because the launcher allows none on the one that holds the root."""
    mount_memory(f"{ROOT}/dev", size=_ROOM)
    for folder in ("pts", "shm"):
        _make_folder(f"{ROOT}/dev/{folder}")
    for name in ("full", "null", "random", "tty", "urandom", "zero"):
        path = f"/dev/{name}"
        try:
            os.mknod(f"{ROOT}{path}", S_IFCHR | 0o666, Path(path).stat().st_rdev)
        except OSError:  # a container may not create nodes: the machine's own is used
            _make_file(f"{ROOT}{path}")
            _mount(path, is_device=True)
        else:
            Path(f"{ROOT}{path}").chmod(0o666)
    for name, target in _DEVICE_LINKS.items():
        Path(ROOT, "dev", name).symlink_to(target)
    mount_terminals(f"{ROOT}/dev/pts")
    seal_mount(f"{ROOT}/dev")


def _leave_behind() -> None:
    """Take away what no launcher needs: it reads the whole table for every mount it makes, and copies all of it."""
    with Path("/proc/thread-self/mountinfo").open("rb") as table:
        points = [line.split()[4].decode(errors="surrogateescape") for line in table]
    for point in sorted(points):
        if point not in _NEEDED and not point.startswith(_NEEDED_BELOW):
            with suppress(OSError):  # it went with the one around it, or its name cannot be written plainly
                detach_mount(point)


def lay_out(grants: Sequence[OpenedGrant], mounts: Sequence[int]) -> list[str]:
    """Mount the copy of each grant under its number, and return the paths created in the root, outermost first."""
    made: list[str] = []
    mount_memory(STAGED, size=_ROOM)
    with _open_to_all():
        for index, (grant, mount) in enumerate(zip(grants, mounts, strict=True)):
            make = _make_folder if grant.is_folder else _make_file
            make(f"{STAGED}/{index}")
            attach_mount(mount, f"{STAGED}/{index}")
            made += make(f"{ROOT}{grant.path}")
    return made


def clear(made: Sequence[str]) -> None:
    """Take away all grants, with the mount that they are on, and what was made for them in the root."""
    detach_mount(STAGED)
    for path in reversed(made):
        remove = Path.unlink if Path(path).is_file() else Path.rmdir
        remove(Path(path))


def _mount(path: str, *, is_device: bool) -> None:
    mount = copy_mount(path=path)
    try:
        set_attributes(mount, NOSUID if is_device else RDONLY | NOSUID | NODEV)
        attach_mount(mount, f"{ROOT}{path}")
    finally:
        os.close(mount)


@contextmanager
def _open_to_all() -> Iterator[None]:
    """Let what is made within the block be readable by the user that sandboxes run as; the mask is the thread's own."""
    mask = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(mask)


def _make_folder(path: str) -> list[str]:
    """Make a folder and those on the way, and return which of them were not there."""
    if Path(path).is_dir():
        return []
    made = _make_folder(str(Path(path).parent))
    Path(path).mkdir()
    return [*made, path]


def _make_file(path: str, content: bytes = b"") -> list[str]:
    """Make a file and the folders on the way, and return which of them were not there."""
    if Path(path).is_file():
        return []
    made = _make_folder(str(Path(path).parent))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
    return [*made, path]


class _Worker(Thread):
    """A thread that does one piece of work after the other."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="kiwi-sandbox")
        self._work: SimpleQueue[tuple[Callable[[], object], bool] | None] = SimpleQueue()
        self._results: SimpleQueue[tuple[object, BaseException | None]] = SimpleQueue()
        self.start()

    def do(self, work: Callable[[], R]) -> R:
        """Do some work there, wait for it and return its result; what it raises is raised here."""
        self._work.put((work, True))
        result, fault = self._results.get()
        if fault is not None:
            raise fault
        return cast("R", result)

    def do_later(self, work: Callable[[], None]) -> None:
        """Do some work that returns nothing and raises nothing, without waiting for it."""
        self._work.put((work, False))

    def end(self) -> None:
        """End the thread after the work that it has."""
        self._work.put(None)
        self.join()

    def run(self) -> None:
        """Do what comes."""
        while (asked := self._work.get()) is not None:
            work, is_awaited = asked
            result, error = None, None
            try:
                result = work()
            except BaseException as fault:  # noqa: BLE001 - it is raised where the work was asked for
                error = fault
            if is_awaited:
                self._results.put((result, error))


class RootLauncher:
    """A thread that sees what is granted to one run, alone, and starts its processes."""

    def __init__(self, profile: BaseFileSystem, groups: CgroupParent | None, key: tuple[object, ...]) -> None:
        self.key = key
        self.is_clear = True
        """Whether what was granted before is gone; where it could not be taken away, this is not used again."""
        self.waiting: tuple[Sequence[OpenedGrant], Sequence[int]] = ((), ())
        """What is granted to the run, and the copies of it that are laid out with the start."""
        self._made: Sequence[str] | None = None
        self._limits: ResourceLimits | None = None
        self._quota = ALL
        self._thread = _Worker()
        # Only the older interface has groups of threads; elsewhere each run has a group of its own.
        self.group = groups.make() if groups is not None and not groups.is_unified else None
        try:
            self._thread.do(partial(settle, profile, self.group))
        except OSError:
            self.end()
            raise

    def clear(self) -> None:
        """Take it away again, and lift the limits first: a thread of Kiwi's must never wait for its share of time."""
        made, self._made = self._made, None
        if self.group is not None:
            self.group.share(ALL)
        if made is not None:
            self.is_clear = False
            self._thread.do_later(partial(self._clear, made))

    def _clear(self, made: Sequence[str]) -> None:
        with suppress(OSError):  # then it is not used again
            clear(made)
            self.is_clear = True

    def limit(self, limits: ResourceLimits, _: int) -> None:
        """Set the limits of all that was started here, and of this thread; most runs have those of the run before."""
        if self.group is None:
            return
        if limits == self._limits:
            self.group.share(self._quota)
        else:
            self.group.limit(limits, besides=1)
            self._limits, self._quota = limits, quota_of(limits)

    def start(self, spawn: Callable[[], T], /) -> T:
        """Start a process here as root."""
        return self._thread.do(partial(self._started, spawn))

    def start_as(self, user: int, limits: ResourceLimits, spawn: Callable[[], T], /) -> T:
        """Start a process here as a user, and under limits of its own."""

        def started() -> T:
            with as_user(user):
                return start_limited(limits, spawn)

        return self._thread.do(partial(self._started, started))

    def _started(self, spawn: Callable[[], T]) -> T:
        if self._made is None:
            try:
                self._made = lay_out(*self.waiting)
            except OSError as fault:
                raise failed("bubblewrap", f"what was granted cannot be laid out: {fault}".encode()) from fault
        return spawn()

    def end(self) -> None:
        """End the thread, and remove its group."""
        if self.group is not None:
            with suppress(OSError):
                self.group.share(ALL)
        self._thread.end()
        if self.group is not None:
            self.group.remove()


@contextmanager
def open_root_launcher(
    grants: Sequence[OpenedGrant], owner_map: int | None, groups: CgroupParent | None
) -> Iterator[RootLauncher]:
    """Yield a launcher in which each grant is mounted under its number once a process is started there, for one run.

    Call this from a thread with the same mounts as the thread that opened the grants; the thread of the cell sees none
    of them. With `owner_map`, files of root belong to the unprivileged user inside, and new files of that user belong
    to root outside.
    """
    cell = _taken(groups)
    mounts: list[int] = []
    try:
        try:
            for grant in grants:
                mounts.append(mount := copy_mount(grant.descriptor))
                if owner_map is not None:
                    # A file system that cannot map owners shows them as they are, which gives less and never more.
                    with suppress(OSError):
                        set_attributes(mount, IDMAP, owner_map)
            cell.waiting = (grants, mounts)
            yield cell
        finally:
            for mount in mounts:
                os.close(mount)
        cell.clear()
    except BaseException:
        cell.end()
        raise
    with _lock:
        _idle.append(cell)
        oldest = _idle.pop(0) if len(_idle) > _MOST_IDLE else None
    if oldest is not None:
        oldest.end()


def _taken(groups: CgroupParent | None) -> RootLauncher:
    profile = base_profile()
    # What was laid out is what was there then: where a system file has been replaced since, a new cell is made. The
    # number of this process is part of it because threads stay behind where a process is forked.
    states: list[object] = [os.getpid(), groups is None]
    for path in profile.readable:
        state = os.stat(path)  # noqa: PTH116 - at every start
        states.append((state.st_dev, state.st_ino, state.st_mtime_ns))
    key = tuple(states)
    with _lock:
        while _idle and _idle[0].key[0] != key[0]:  # those of the process that was forked are the oldest
            del _idle[0]
        for cell in reversed(_idle):
            # One from which the last grants are still being taken away would have to be waited for.
            if cell.key == key and cell.is_clear:
                _idle.remove(cell)
                return cell
    return RootLauncher(profile, groups, key)


@atexit.register
def _end_all() -> None:
    for cell in _idle:
        if cell.key[0] == os.getpid():
            cell.end()
