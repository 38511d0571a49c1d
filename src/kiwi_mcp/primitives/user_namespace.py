"""A user namespace in which root is a user without rights, so that what root owns can be given to one.

It has no process: one is started to make it, and ended when the descriptor is open that keeps it.
"""

from __future__ import annotations

import os
import select
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen

from kiwi_mcp.primitives.children import abandon

_PATIENCE = 5.0
_UNSHARE = ("/usr/bin/unshare", "--user", "/bin/cat")


def owner_map(user: int) -> int | None:
    """Return a namespace in which root is a user, for the caller to close; None where this process cannot make one."""
    if os.geteuid() != 0:
        return None
    try:
        return _made(user)
    except OSError:
        return None


def _made(user: int) -> int:
    with ExitStack() as ending:
        process = Popen(_UNSHARE, stdin=PIPE, stdout=PIPE, env={})
        ending.callback(abandon, process)
        assert process.stdin is not None  # asked for above
        assert process.stdout is not None  # likewise
        ending.enter_context(process.stdin)
        ending.enter_context(process.stdout)
        process.stdin.write(b"\n")
        process.stdin.flush()
        # An answer means that it has entered the namespace and become `cat`.
        if not select.select([process.stdout], [], [], _PATIENCE)[0] or not os.read(process.stdout.fileno(), 1):
            raise OSError("no user namespace was made")
        for kind in ("uid_map", "gid_map"):
            Path(f"/proc/{process.pid}/{kind}").write_text(f"0 {user} 1")
        return os.open(f"/proc/{process.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
