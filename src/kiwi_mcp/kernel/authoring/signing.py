"""Signing: the one line that says when an item was validated, and as what."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from kiwi_mcp.domain.items import Tool
from kiwi_mcp.manifest.signature import DETACHED, line, sidecar, sign


def sign_item(tool: Tool, timestamp: str) -> None:
    """Write the signature line into the file that holds the item's manifest, the rest of it untouched."""
    path = tool.origin.path
    if path.suffix in DETACHED:
        _replace(path.with_name(sidecar(path.name)), f"{line(timestamp, tool.digest)}\n", like=path)
    else:
        text = path.read_bytes().decode("utf-8")
        _replace(path, sign(text, path.suffix, timestamp=timestamp, digest=tool.digest), like=path)


def _replace(path: Path, text: str, *, like: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_bytes(text.encode("utf-8"))
    shutil.copymode(like, temporary)
    temporary.replace(path)
