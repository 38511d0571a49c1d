"""The sandbox backends of this machine, and the search for launchers."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kiwi_mcp.sandbox import linux
from kiwi_mcp.sandbox.backend import Backend, NoSandbox
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap
from kiwi_mcp.sandbox.cgroup import find_groups, sweep
from kiwi_mcp.sandbox.command_files import FOLDERS, find_launcher
from kiwi_mcp.sandbox.rlimits import Rlimits


def backends(*, folders: Sequence[str] = FOLDERS, owner_map: int | None = None) -> tuple[Backend, ...]:
    """Return every backend, in order of what it costs; which of them works here, a self-test shows.

    `owner_map` is a user namespace in which root is the unprivileged user, for what root grants to be written to.
    """
    groups, prlimit = find_groups(), find_launcher("prlimit", folders)
    if groups is not None:
        sweep(groups.folders.values())
    return (
        NoSandbox(),
        Rlimits(prlimit, linux.is_there()),
        Bubblewrap(
            find_launcher("bwrap", folders),
            prlimit,
            find_launcher("setpriv", folders),
            is_root=os.geteuid() == 0,
            groups=groups,
            owner_map=owner_map,
        ),
    )
