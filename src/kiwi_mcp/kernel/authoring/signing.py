"""Signing: the one line that says when an item was validated, as what, and by whose key."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from kiwi_mcp.domain.items import Tool
from kiwi_mcp.kernel.keys.signer import Signer, signed_files
from kiwi_mcp.manifest.signature import sidecar
from kiwi_mcp.manifest.trust import LOCAL


def sign_item(tool: Tool, timestamp: str, signer: Signer | None = None) -> None:
    """Write the signature line into the file that holds the item's manifest, the rest of it untouched."""
    path = tool.origin.path
    data = path.read_bytes()
    made = signed_files(tool, data, namespace=LOCAL, timestamp=timestamp, signer=signer)
    beside = path.with_name(sidecar(path.name))
    if beside.name not in made:
        beside.unlink(missing_ok=True)
    # The file beside it comes first: until the line is there as well, it says nothing.
    for name in sorted(made, key=lambda name: name == path.name):
        if name != path.name or made[name] != data:
            _replace(path.with_name(name), made[name], like=path)


def _replace(path: Path, data: bytes, *, like: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    temporary.write_bytes(data)
    shutil.copymode(like, temporary)
    temporary.replace(path)
