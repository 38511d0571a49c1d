"""Locks: the versions and hashes that an environment is made of, its tool's own or those of the first time.

What an index offers under a name may be another's tomorrow. So a tool can bring the lock of its dependencies, which is
signed and published with it; for any other the first installation resolves them, and what it found is kept apart from
the environment: a folder that was lost is made of the same files again, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex

from kiwi_mcp.domain.errors import EnvironmentFailed, InvalidManifest, PackageChanged
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.drivers.process.environments.install import failure
from kiwi_mcp.primitives.subprocess import ProcessResult

_LARGEST = 8_388_608
_CHANGED = re.compile(rb"hash mismatch|EINTEGRITY|hashes?\b[^\n]*\bdo(?:es)? not match", re.IGNORECASE)
"""What uv and npm say where an index offers other bytes than those that were locked."""


def lock_of(folder: Path) -> Path:
    """Return where the lock of an environment is kept, beside all environments of the cache."""
    kind, environments = folder.parent, folder.parent.parent
    return environments.parent / "locks" / kind.name / folder.name


def kept_lock(folder: Path) -> str:
    """Return what an environment was made of the first time; nothing where it never was."""
    with suppress(OSError), lock_of(folder).open("rb") as file:
        return file.read(_LARGEST).decode(errors="replace")
    return ""


def keep_lock(folder: Path, made: Path) -> None:
    """Keep the lock that an installer wrote."""
    path = lock_of(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{token_hex(8)}")
    try:
        draft.write_bytes(made.read_bytes())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def refuse_lock(tool: Tool, faults: Sequence[str], lock: str, renew: str) -> None:
    """Refuse a lock of a tool's that leaves something open."""
    if faults:
        raise InvalidManifest(f"{tool.id!r}", [Issue(lock, fault, f"Renew it: `{renew}`.") for fault in faults])


def lock_failure(packages: Sequence[str], result: ProcessResult, lock: str) -> EnvironmentFailed | PackageChanged:
    """Return why packages could not be installed by a lock; `lock` is where it is, to be told."""
    said = failure(packages, result)
    if _CHANGED.search(result.stderr) or _CHANGED.search(result.stdout):
        return PackageChanged(packages, lock=lock, said=said.message)
    said.suggestion = f"{said.suggestion} Versions that the index no longer has: renew or remove {lock}."
    return said
