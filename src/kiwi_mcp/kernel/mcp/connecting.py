"""Connecting clients as the owner asks for it: in which file, by which command, and instead of which servers."""

from __future__ import annotations

import os
import shutil
import sys
from functools import partial
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import NotFound
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.mcp.clients import SCOPES, Scope, clients
from kiwi_mcp.kernel.mcp.connect import ENTRY, Change, apply, plan_connect, plan_undo
from kiwi_mcp.kernel.mcp.importing import shown_path
from kiwi_mcp.kernel.mcp.twins import Twins, twins
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.store.definitions import Definitions


def connect_client(request: McpRequest, catalog: Catalog, remembered: Definitions) -> JsonObject:
    """Write Kiwi into a client's configuration, perhaps in the place of servers that it has, or take it out again."""
    client, home, space = request.client or "", Path.home(), catalog.space
    scope = request.location or _scopes(client)[0]
    # What others share through git is no place for what only this machine needs.
    keep_in = space.user / "state" / "backups" if scope == "project" else None
    if request.undo:
        change = plan_undo(client, scope, home=home, project=space.project, keep_in=keep_in)
        return _told(request, change, _written(change, request))
    command = _own_command(scope)
    plan = partial(plan_connect, client, scope, home=home, project=space.project, command=command, keep_in=keep_in)
    change = plan()
    found = twins(change.path, scope, catalog, remembered) if change.before is not None else Twins()
    if request.replace and found.names:
        change = plan(without=found.names)
    return {
        **_told(request, change, _written(change, request)),
        **({"kept": dict(found.others)} if found.others else {}),
        **_hints(request, scope, command, found, catalog, remembered),
    }


def _written(change: Change, request: McpRequest) -> Path | None:
    """Write a change unless only its plan is wanted, and return the backup of what was there, if one was made."""
    return None if request.dry_run else apply(change)


def _told(request: McpRequest, change: Change, backup: Path | None) -> JsonObject:
    client = request.client or ""
    word = "disconnected from" if request.undo else "connected to"
    done = "would be " if request.dry_run else "is " if change.is_needed else "was already "
    moved = change.put_back or change.taken_out
    count = f"{len(moved)} server{'s' * (len(moved) != 1)}"
    also = f", and {count} {'put back' if change.put_back else 'taken out of its file'}" if moved else ""
    told: dict[str, Json] = {
        "action": "connect",
        "client": client,
        "status": "planned" if request.dry_run else "done" if change.is_needed else "same",
        "message": f"Kiwi {done}{word} {client}{also}",
        "path": str(change.path),
        "diff": change.diff,
    }
    if change.taken_out:
        told["replaced"] = list(change.taken_out)
    if change.put_back:
        told["put_back"] = list(change.put_back)
    return {**told, "backup": str(backup)} if backup else told


def _hints(
    request: McpRequest, scope: Scope, command: str, found: Twins, catalog: Catalog, remembered: Definitions
) -> JsonObject:
    hints = []
    if scope == "project" and command != ENTRY:
        hints.append(
            f"This file starts Kiwi as {command}, which others may not have: put `kiwi` on your PATH and connect again."
        )
    if not request.replace:
        where = f" --location {request.location}" if request.location else ""
        if found.names:
            hints.append(_offer(len(found.names), "here", f"{request.client}{where}", "this file"))
        else:
            hints += _elsewhere(request, scope, catalog, remembered)
    return {"next": " ".join(hints)} if hints else {}


def _elsewhere(request: McpRequest, scope: Scope, catalog: Catalog, remembered: Definitions) -> list[str]:
    """Return what could be replaced in the client's other file."""
    client = request.client or ""
    for other in _scopes(client):
        path = Path.home() / clients()[client].places(other)[0]
        if other == "user" != scope and path.is_file() and (found := twins(path, other, catalog, remembered)).names:
            name = shown_path(path, catalog.space)
            return [_offer(len(found.names), f"in {name}", f"{client} --location user", "that file")]
    return []


def _offer(count: int, where: str, words: str, file: str) -> str:
    are = "1 server {} is" if count == 1 else f"{count} servers {{}} are"
    them = "it" if count == 1 else "them"
    return f"{are.format(where)} in Kiwi too: `kiwi connect {words} --replace` takes {them} out of {file}."


def _scopes(client: str) -> list[Scope]:
    """Return whose files of a client Kiwi can be written into: the project's first, where there is one."""
    known = clients().get(client)
    return [scope for scope in SCOPES if known and known.places(scope) and scope not in known.by_hand] or ["project"]


def _own_command(scope: Scope) -> str:
    """Return by which command a client starts Kiwi: in a file that others share its name, where that finds this one."""
    beside, found = Path(sys.executable).parent / ENTRY, shutil.which(ENTRY)
    own = str(beside) if beside.exists() else found
    if own is None:
        raise NotFound("The program `kiwi` is not found.", suggestion="Install Kiwi so that `kiwi` is on the PATH.")
    is_named = found is not None and os.path.realpath(found) == os.path.realpath(own)
    return ENTRY if scope == "project" and is_named else str(Path(own).absolute())
