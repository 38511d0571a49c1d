"""This machine: the backends it may have, made of the launchers that are found on it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kiwi_mcp.sandbox import landlock
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap
from kiwi_mcp.sandbox.cgroup import ROOT, find_groups, sweep, tops
from kiwi_mcp.sandbox.none import Unconfined
from kiwi_mcp.sandbox.podman import Podman
from kiwi_mcp.sandbox.port import Backend
from kiwi_mcp.sandbox.programs import FOLDERS, find_launcher
from kiwi_mcp.sandbox.rlimits import Rlimits


def backends(*, folders: Sequence[str] = FOLDERS, owner_map: int | None = None) -> tuple[Backend, ...]:
    """Return every backend, in order of what it costs; which of them works here, a self-test shows.

    `owner_map` is a user namespace in which root is the unprivileged user, for what root grants to be written to.
    """
    groups, is_root = find_groups(), os.geteuid() == 0
    if groups is not None:
        sweep(groups.folders.values())
    prlimit, setpriv, podman = (find_launcher(name, folders) for name in ("prlimit", "setpriv", "podman"))
    if podman is not None and is_root:
        sweep(tops())
    return (
        Unconfined(),
        Rlimits(prlimit, landlock.is_there()),
        Bubblewrap(
            find_launcher("bwrap", folders),
            prlimit,
            setpriv,
            is_root=is_root,
            groups=groups,
            owner_map=owner_map,
        ),
        Podman(podman, _runtime(folders), is_root=is_root),
    )


def _runtime(folders: Sequence[str]) -> str | None:
    """Return what containers are started with, where podman's own choice is not to be relied on."""
    # crun gives up where groups of both interfaces are mounted.
    is_mixed = (ROOT / "unified").exists()
    return find_launcher("runc", folders) if is_mixed else None
