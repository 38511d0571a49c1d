"""Connecting clients as the owner asks for it: which file of a client, and by which command it starts Kiwi."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.mcp.clients import SCOPES, Scope, clients
from kiwi_mcp.kernel.mcp.connect import apply, plan_connect, plan_undo
from kiwi_mcp.kernel.requests import McpRequest


def connect_client(request: McpRequest, catalog: Catalog) -> JsonObject:
    """Write Kiwi into a client's configuration, or take it out again."""
    client = request.client or ""
    home, project = Path.home(), catalog.space.project
    scope = request.location or _scope(client)
    if request.undo:
        change = plan_undo(client, scope, home=home, project=project)
    else:
        change = plan_connect(client, scope, home=home, project=project, command=_own_command())
    backup = None if request.dry_run else apply(change)
    word = "disconnected from" if request.undo else "connected to"
    done = "would be " if request.dry_run else "is " if change.is_needed else "was already "
    told: dict[str, Json] = {
        "action": "connect",
        "client": client,
        "status": "planned" if request.dry_run else "done" if change.is_needed else "same",
        "message": f"Kiwi {done}{word} {client}",
        "path": str(change.path),
        "diff": change.diff,
    }
    return {**told, "backup": str(backup)} if backup else told


def _scope(client: str) -> Scope:
    """Return whose file of a client Kiwi can be written into: the project's, where there is one."""
    known = clients().get(client)
    usable = [scope for scope in SCOPES if known and known.places(scope) and scope not in known.by_hand]
    return usable[0] if usable else "project"


def _own_command() -> str:
    beside = Path(sys.executable).parent / "kiwi"
    found = str(beside) if beside.exists() else shutil.which("kiwi")
    if found is None:
        raise NotFound("The program `kiwi` is not found.", suggestion="Install Kiwi so that `kiwi` is on the PATH.")
    return str(Path(found).absolute())
