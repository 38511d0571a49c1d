"""Snapshots: the exact bytes that were verified, in a folder of their own, from which they run.

An edit between verification and run has no effect, because the author's files themselves are never run.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from uuid import uuid4

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.items import Tool

_LINK = "node_modules"
_REMEMBERED = 10_000
_verified: OrderedDict[tuple[str, int, int, int, int], str] = OrderedDict()
"""The hash of each snapshot file read so far, for as long as its inode, size and times stay as they were."""


def snapshot_folder(tool: Tool, cache: Path, *, linked: str = "") -> Path:
    """Return where a link's snapshot is, or will be: a folder named by its whole content."""
    # Not by the tool's digest alone: that one does not change when a file is signed, and the file does.
    listed = "\n".join(f"{file.sha256} {file.is_executable} {file.path}" for file in tool.files)
    return cache / "tools" / sha256(f"{linked}\n{listed}".encode()).hexdigest()


def take_snapshot(tool: Tool, cache: Path, *, linked: str = "") -> Path:
    """Have a link's files as they were verified, and return their folder."""
    folder = snapshot_folder(tool, cache, linked=linked)
    have_snapshot(tool, str(folder), linked=linked)
    return folder


def have_snapshot(tool: Tool, path: str, *, linked: str = "") -> None:
    """Have a link's files, as they were verified, in the folder that is named by them."""
    if _is_exact(tool, path):
        return
    folder = Path(path)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        _write(tool, fresh, linked)
        _publish(fresh, folder, tool)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _write(tool: Tool, folder: Path, linked: str) -> None:
    folder.mkdir()
    for file in tool.files:
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(load_bytes(tool, file))
        target.chmod(0o555 if file.is_executable else 0o444)
    if linked and not (folder / _LINK).exists():
        (folder / _LINK).symlink_to(linked)


def _publish(fresh: Path, folder: Path, tool: Tool) -> None:
    try:
        fresh.rename(folder)
    except OSError:
        # Another kernel was faster, which is fine; or the existing folder was tampered with.
        if _is_exact(tool, str(folder)):
            return
        spoiled = fresh.with_name(f"{fresh.name}.spoiled")
        folder.rename(spoiled)
        fresh.rename(folder)
        shutil.rmtree(spoiled, ignore_errors=True)


def _is_exact(tool: Tool, folder: str) -> bool:
    try:
        for file in tool.files:
            path = f"{folder}/{file.path}"
            state = os.lstat(path)
            key = (path, state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
            if key not in _verified and S_ISREG(state.st_mode):
                _verified[key] = sha256(Path(path).read_bytes()).hexdigest()
                if len(_verified) > _REMEMBERED:
                    _verified.popitem(last=False)
            if _verified.get(key) != file.sha256:
                return False
    except OSError:
        return False
    return bool(tool.files) or os.path.isdir(folder)  # noqa: PTH112 - on the way of every run
