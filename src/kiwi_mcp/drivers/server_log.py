"""What is stored about the process of an MCP server: its last output, and when its owner asked for a restart."""

from __future__ import annotations

import os
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

from kiwi_mcp.domain.calls import Space

RESTART = "restart"


@lru_cache(maxsize=256)
def log_path(space: Space, identity: str) -> Path:
    """Return where the last output of a server's process is stored."""
    name = sha256(identity.partition("@")[0].encode()).hexdigest()[:16]
    return space.user / "state" / "mcp" / name / "stderr.log"


def restarted_at(space: Space, identity: str) -> int:
    """Return when the owner last asked for a restart of a server, in nanoseconds; 0 if never."""
    try:
        return os.stat(log_path(space, identity).with_name(RESTART)).st_mtime_ns  # noqa: PTH116 - at every call
    except OSError:
        return 0
