"""A process that continues after this one has ended."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path


def start_background(argv: Sequence[str], *, cwd: Path, env: Mapping[str, str]) -> int:
    """Start a program in a session of its own, without input or output, and return its process id.

    It gets the variables of this process, and those in `env`.
    """
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=True,
    )
    process.returncode = 0  # nobody waits for it here, and that is no fault
    return process.pid
