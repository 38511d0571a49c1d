"""This machine: the backends it may have, made of the launchers that are found on it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kiwi_mcp.sandbox import landlock
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap
from kiwi_mcp.sandbox.cgroup import find_groups, sweep
from kiwi_mcp.sandbox.none import Unconfined
from kiwi_mcp.sandbox.port import Backend
from kiwi_mcp.sandbox.programs import FOLDERS, find_launcher
from kiwi_mcp.sandbox.rlimits import Rlimits


def backends(*, folders: Sequence[str] = FOLDERS, owner_map: int | None = None) -> tuple[Backend, ...]:
    """Return every backend, in order of what it costs; which of them works here, a self-test shows.

    `owner_map` is a user namespace in which root is the unprivileged user, for what root grants to be written to.
    """
    groups = find_groups()
    if groups is not None:
        sweep(groups)
    prlimit, setpriv = find_launcher("prlimit", folders), find_launcher("setpriv", folders)
    return (
        Unconfined(),
        Rlimits(prlimit, landlock.is_there()),
        Bubblewrap(
            find_launcher("bwrap", folders),
            prlimit,
            setpriv,
            is_root=os.geteuid() == 0,
            groups=groups,
            owner_map=owner_map,
        ),
    )
