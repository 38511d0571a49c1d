"""Staging: what Kiwi gives out when it runs as root, laid where a user without rights can reach it.

A sandbox is never started with the rights of root, and the user it is started as cannot enter every folder on the way
to what was granted. So copies of the mounts are laid side by side in a table of mounts that one thread alone has, with
the file system that every sandbox begins with beside them: one mount instead of twenty for the launcher. What is
started from that thread sees the same. The table ends with the thread and with what it started, and leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_IFCHR

from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.kernel_calls import (
    attach_mount,
    copy_mount,
    copy_mount_at,
    detach_mount,
    leave_mounts,
    map_owners,
    mount_memory,
    mount_terminals,
    restrict_mount,
    seal_mount,
)
from kiwi_mcp.sandbox.profile import Profile

PLACE = "/tmp"  # noqa: S108 - a folder that every system has; in the table of mounts made here it is another one
ROOT = f"{PLACE}/root"
"""Where the file system lies that every sandbox begins with; its launcher still has to make it read-only."""
_RUN = f"{PLACE}/run"
_ROOM = 4_194_304
_LARGEST = 1_048_576
_NEEDED = ("/", "/proc", "/dev", PLACE)
_NEEDED_BELOW = ("/usr", "/lib", "/bin", "/sbin", "/nix", "/gnu", "/proc/", f"{PLACE}/")
"""Mounts that programs are started from, that the launcher works with, or that hide something of the kernel's."""
_DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_DEVICE_LINKS = {
    "core": "/proc/kcore",
    "fd": "/proc/self/fd",
    "ptmx": "pts/ptmx",
    "stderr": "/proc/self/fd/2",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
}


def staged_path(index: int) -> str:
    """Return where the grant of an index lies."""
    return f"{_RUN}/{index}"


def settle(profile: Profile) -> None:
    """Give the calling thread a table of mounts for good, with the file system in it that every sandbox begins with."""
    leave_mounts()
    mount_memory(PLACE, size=_ROOM)
    with _open_to_all():
        for path in profile.readable:
            _place(path)
        for path, target in profile.links.items():
            Path(f"{ROOT}{path}").symlink_to(target)
        for path, content in profile.files.items():
            _make_file(f"{ROOT}{path}", content)
        for folder in (_RUN, f"{ROOT}/proc", f"{ROOT}/tmp", f"{ROOT}/dev"):  # noqa: S108 - inside
            _make_folder(folder)
        _make_devices()
    _leave_behind()


def _make_devices() -> None:
    """Fill a mount of its own with devices, because the launcher allows none on the one that holds the root."""
    mount_memory(f"{ROOT}/dev", size=_ROOM)
    for folder in ("pts", "shm"):
        _make_folder(f"{ROOT}/dev/{folder}")
    for name in _DEVICES:
        _make_device(name)
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


def copied(grant: Opened, owner_map: int | None) -> int:
    """Return a copy of a granted mount, attached nowhere, for the caller to close.

    A thread that has the mounts of whoever opened the grant makes it. With `owner_map`, files of root are the
    unprivileged user's own there, and new ones of that user are root's.
    """
    mount = copy_mount(grant.descriptor)
    if owner_map is not None:
        # A file system that cannot map owners shows them as they are, which gives less and never more.
        with suppress(OSError):
            map_owners(mount, owner_map)
    return mount


def lay_out(grants: Sequence[Opened], mounts: Sequence[int]) -> list[str]:
    """Lay the copy of each grant under its number, and return what was made for it in the root, outermost first."""
    made: list[str] = []
    mount_memory(_RUN, size=_ROOM)
    with _open_to_all():
        for index, (grant, mount) in enumerate(zip(grants, mounts, strict=True)):
            make = _make_folder if grant.is_folder else _make_file
            make(staged_path(index))
            attach_mount(mount, staged_path(index))
            made += make(f"{ROOT}{grant.path}")
    return made


def clear(made: Sequence[str]) -> None:
    """Take away all grants, with the mount that they are on, and what was made for them in the root."""
    detach_mount(_RUN)
    for path in reversed(made):
        remove = Path.unlink if Path(path).is_file() else Path.rmdir
        remove(Path(path))


def _place(path: str) -> None:
    """Give the new root what is at a path of the machine, read-only: a folder as it is, of a file a copy."""
    if Path(path).is_dir():
        _make_folder(f"{ROOT}{path}")
        _mount(path, is_device=False)
    else:
        with Path(path).open("rb") as file:
            _make_file(f"{ROOT}{path}", file.read(_LARGEST))


def _make_device(name: str) -> None:
    """Give the new root a device: a new node for it, or the machine's own where a container may not make nodes."""
    path = f"/dev/{name}"
    try:
        os.mknod(f"{ROOT}{path}", S_IFCHR | 0o666, Path(path).stat().st_rdev)
    except OSError:
        _make_file(f"{ROOT}{path}")
        _mount(path, is_device=True)
    else:
        Path(f"{ROOT}{path}").chmod(0o666)


def _mount(path: str, *, is_device: bool) -> None:
    mount = copy_mount_at(path)
    try:
        restrict_mount(mount, is_device=is_device)
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
