"""Scratch folders: each is shared by the tools of one source, between their calls.

The group of a tool is where it was found, and who is proved to have written it: no manifest can name another group.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from time import time

from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import PolicyDenied, TooLarge, Unavailable
from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.sandbox.limits import quota

VARIABLE = "KIWI_SCRATCH"
_MOST_BYTES, _MOST_FILES = 268_435_456, 10_000
_UNUSED = 86_400.0
"""How long a folder stays when no tool of its group is called, in seconds: as long as a call may take."""


def refuse_unknown(chain: Chain, profile: SandboxProfile) -> None:
    """Refuse an item of unknown origin: it belongs to no group."""
    if profile.provenance == "unknown":
        raise PolicyDenied(
            f"{chain.tool.id!r} shares a scratch folder with other tools of its source, and is not signed.",
            suggestion=f"Read it, then `kiwi sign {chain.tool.id}`.",
            tool_id=chain.tool.id,
        )


def with_scratch(
    chain: Chain, profile: SandboxProfile, space: Space
) -> tuple[SandboxProfile, Callable[[], str] | None]:
    """Return a profile with the folder of a tool's group, and what watches its size."""
    refuse_unknown(chain, profile)
    origin = chain.tool.origin
    project = str(space.project) if origin.is_in_project else ""
    group = "\0".join((origin.source, origin.namespace, project, profile.provenance, chain.tool.signer))
    folder = space.cache / "scratch" / sha256(group.encode()).hexdigest()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if time() - folder.stat().st_mtime > _UNUSED:
            shutil.rmtree(folder)
            folder.mkdir(mode=0o700)
        os.utime(folder)
        size, count = _used(folder)
    except OSError as fault:
        raise Unavailable(
            f"The scratch folder {str(folder)!r} cannot be used: {fault.strerror or fault}.",
            suggestion="Make it writable, or delete it: tools keep nothing of value there.",
        ) from fault
    if size >= _MOST_BYTES or count >= _MOST_FILES:
        raise TooLarge(f"The scratch folder {str(folder)!r} of {chain.tool.id!r}", size=size, limit=_MOST_BYTES)
    rest = replace(ResourceLimits(), workspace_bytes=_MOST_BYTES - size, workspace_files=_MOST_FILES - count)
    shared = replace(profile, writable=(*profile.writable, str(folder)), scratch=str(folder))
    return shared, quota((str(folder),), rest)


def _used(folder: Path) -> tuple[int, int]:
    """Return the bytes and the number of files in a folder; no links are followed, and it ends at the limits."""
    size, count, waiting = 0, 0, [str(folder)]
    while waiting and size < _MOST_BYTES and count < _MOST_FILES:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                count += 1
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)
                with suppress(FileNotFoundError):  # another tool of the group deleted it meanwhile
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                if count >= _MOST_FILES:
                    break
    return size, count
