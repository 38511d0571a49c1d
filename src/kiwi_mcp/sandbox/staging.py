"""Staging: what Kiwi gives out when it runs as root, laid where a user without rights can reach it.

A sandbox is never started with the rights of root, and the user it is started as cannot enter every folder on the way
to what was granted. So copies of the mounts are laid side by side in a table of mounts that one thread alone has, with
the file system that every sandbox begins with beside them: one mount instead of twenty for the launcher. What is
started from that thread sees the same. The table ends with the thread and with what it started, and leaves nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import PurePosixPath

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
)
from kiwi_mcp.sandbox.profile import Profile

PLACE = "/tmp"  # noqa: S108 - a folder that every system has; in the table of mounts made here it is another one
ROOT = f"{PLACE}/root"
"""Where the file system lies that every sandbox begins with; its launcher still has to make it read-only."""
_ROOM = 1_048_576
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
    return f"{PLACE}/{index}"


def settle(profile: Profile) -> None:
    """Give the calling thread a table of mounts for good, with the file system in it that every sandbox begins with."""
    leave_mounts()
    mount_memory(PLACE, size=_ROOM)
    for path in profile.readable:
        _place(path, is_device=False)
    for path, target in profile.links.items():
        os.symlink(target, f"{ROOT}{path}")
    for path, content in profile.files.items():
        _write(f"{ROOT}{path}", content)
    for name in _DEVICES:
        _place(f"/dev/{name}", is_device=True)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"{ROOT}/dev/{name}")
    for folder in ("/proc", "/tmp", "/dev/pts", "/dev/shm"):  # noqa: S108 - inside
        _make_folders(f"{ROOT}{folder}")
    mount_terminals(f"{ROOT}/dev/pts")


def lay_out(grants: Sequence[Opened], owner_map: int | None) -> tuple[str, ...]:
    """Lay each grant under its number, and return what was made for that, outermost first.

    With `owner_map`, files of root are the unprivileged user's own there, and new ones of that user are root's.
    """
    made: list[str] = []
    for index, grant in enumerate(grants):
        for place in (staged_path(index), f"{ROOT}{grant.path}"):
            made += _make_folders(place) if grant.is_folder else _make_file(place)
        _attach(grant, owner_map, staged_path(index))
    return tuple(made)


def clear(made: Sequence[str], count: int) -> None:
    """Take away so many grants, and what was made for them."""
    for index in range(count):
        detach_mount(staged_path(index))
    for path in reversed(made):
        os.unlink(path) if os.path.isfile(path) else os.rmdir(path)


def _attach(grant: Opened, owner_map: int | None, place: str) -> None:
    mount = copy_mount(grant.descriptor)
    try:
        if owner_map is not None:
            # A file system that cannot map owners shows them as they are, which gives less and never more.
            with suppress(OSError):
                map_owners(mount, owner_map)
        attach_mount(mount, place)
    finally:
        os.close(mount)


def _place(path: str, *, is_device: bool) -> None:
    """Lay what is at a path of the machine at the same path of the new root, read-only unless it is a device."""
    [*(_make_folders if os.path.isdir(path) else _make_file)(f"{ROOT}{path}")]
    with ExitStack() as keep:
        mount = copy_mount_at(path)
        keep.callback(os.close, mount)
        restrict_mount(mount, is_device=is_device)
        attach_mount(mount, f"{ROOT}{path}")


def _make_folders(path: str) -> Iterator[str]:
    """Make the folders on the way to a path and at it, and yield those that were not there."""
    for folder in (*reversed(PurePosixPath(path).parents), path):
        with suppress(FileExistsError):
            os.mkdir(folder, 0o755)
            yield str(folder)


def _make_file(path: str) -> Iterator[str]:
    yield from _make_folders(str(PurePosixPath(path).parent))
    with suppress(FileExistsError):
        _write(path, b"")
        yield path


def _write(path: str, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)
