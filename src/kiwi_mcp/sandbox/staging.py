"""Staging: what Kiwi gives out when it runs as root, laid where a user without rights can reach it.

A sandbox is never started with the rights of root, and the user it is started as cannot enter every folder on the way
to what was granted. So copies of the mounts are laid side by side in a table of mounts of their own, made by a thread
that ends right away. The table lives as long as the descriptor that is returned, and leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

from kiwi_mcp.sandbox.grants import Opened
from kiwi_mcp.sandbox.kernel_calls import attach_mount, copy_mount, leave_mounts, map_owners, mount_memory

PLACE = "/tmp"  # noqa: S108 - a folder that every system has; in the table of mounts made here it is another one
_ROOM = 1_048_576
_OPEN = os.O_RDONLY | os.O_CLOEXEC


def stage(grants: Sequence[Opened], owner_map: int | None) -> int:
    """Return a table of mounts in which each grant lies under its number in `PLACE`; the caller closes it.

    With `owner_map`, files of root are the unprivileged user's own there, and new ones of that user are root's.
    """
    # A table of mounts belongs to a thread for good, so the thread is one that ends.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_staged, grants, owner_map).result()


def staged_path(index: int) -> str:
    """Return where the grant of an index lies."""
    return f"{PLACE}/{index}"


def _staged(grants: Sequence[Opened], owner_map: int | None) -> int:
    with ExitStack() as copies:
        mounts = [_copy(grant, owner_map, copies) for grant in grants]
        leave_mounts()
        mount_memory(PLACE, size=_ROOM)
        for index, (grant, mount) in enumerate(zip(grants, mounts, strict=True)):
            place = Path(staged_path(index))
            if grant.is_folder:
                place.mkdir()
            else:
                place.touch()
            attach_mount(mount, str(place))
    return os.open("/proc/thread-self/ns/mnt", _OPEN)


def _copy(grant: Opened, owner_map: int | None, copies: ExitStack) -> int:
    mount = copy_mount(grant.descriptor)
    copies.callback(os.close, mount)
    if owner_map is not None:
        # A file system that cannot map owners shows them as they are, which gives less and never more.
        with suppress(OSError):
            map_owners(mount, owner_map)
    return mount
