"""mcp connect: Kiwi's entry in the configuration of a client, with undo; servers that Kiwi has too."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import Invalid, KiwiError, NotFound, Unavailable
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import as_object
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.mcp_definitions import launch_of
from kiwi_mcp.kernel.mcp_servers import known_servers, server_secrets
from kiwi_mcp.kernel.paths import no_project_space
from kiwi_mcp.kernel.verb import OWNER, Argument, DryRun, NameText, Option, ProjectRequest, Response, verb
from kiwi_mcp.kernel.verbs.mcp.add import shown_path
from kiwi_mcp.kernel.verbs.mcp.servers import NO_NETWORK, may_reach
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, count_text, next_hint
from kiwi_mcp.manifest.mcp.client_entry import ENTRY, ClientFileChange, apply, keep_copy, plan_connect, plan_undo
from kiwi_mcp.manifest.mcp.clients import SCOPES, Scope, clients, find_configurations, read_configuration, read_text
from kiwi_mcp.manifest.mcp.launch_command import server_in
from kiwi_mcp.manifest.mcp.server_entry import ServerDraft
from kiwi_mcp.manifest.templates import variables
from kiwi_mcp.policy.isolation import default_isolation
from kiwi_mcp.policy.secret_access import stored_secrets
from kiwi_mcp.primitives.process.run import run
from kiwi_mcp.primitives.process.spawn import find_program, search_path
from kiwi_mcp.primitives.secrets.reveal import Variables
from kiwi_mcp.store.mcp_definitions import McpDefinitions

_OWN_TIMEOUT = 60.0
"""How long a client's own command may take, in seconds."""


class ConnectRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which client is to use Kiwi."""

    client: Annotated[NameText | None, Argument("The client; none: list those found here.", "CLIENT")] = None
    undo: Annotated[bool, Option("Take Kiwi out again.")] = False
    replace: Annotated[bool, Option("Take the servers out of the file that Kiwi has too.")] = False
    location: Annotated[Scope | None, Option("Which file: project or user.")] = None
    dry_run: DryRun = False


class ConnectResponse(Response, frozen=True, kw_only=True):
    """How the configuration of a client changed."""

    action: str
    client: str
    status: str
    message: str
    path: str
    diff: str
    replaced: list[str] | UnsetType = UNSET
    put_back: list[str] | UnsetType = UNSET
    backup: str | UnsetType = UNSET
    kept: dict[str, str] | UnsetType = UNSET
    without_network: list[str] | UnsetType = UNSET
    """The servers that leave the file and, in Kiwi, reach no host."""
    next: str | UnsetType = UNSET


class ClientRow(Response, frozen=True, kw_only=True):
    """A file of a client that is here."""

    client: str
    title: str
    location: str
    path: str
    servers: list[str]
    connected: bool
    fault: str | UnsetType = UNSET


class ClientList(Response, frozen=True, kw_only=True):
    """The clients that are found here."""

    action: str
    clients: list[ClientRow]
    known: list[str]
    next: str | UnsetType = UNSET


def _connect_view(response: ConnectResponse | ClientList) -> Iterator[ViewItem]:
    if isinstance(response, ConnectResponse):
        if difference := response.diff.rstrip("\n"):
            yield Data(difference)
        yield Data(response.message)
        yield Notice(f"  path: {response.path}")
        for name in response.replaced or ():
            yield Notice(f"  - {name}")
        for name in response.without_network or ():
            yield Notice(f"  ! {name} has no network in Kiwi; if it needs one: `kiwi mcp allow {name} --host HOST`")
        for name in response.put_back or ():
            yield Notice(f"  + {name}")
        for name, reason in (response.kept or {}).items():
            yield Notice(f"  {name} stays: {reason}")
        if response.backup:
            yield Notice(f"  backup: {response.backup}")
        yield from next_hint(response.next)
        return
    for row in response.clients:
        state = "connected" if row.connected else "not connected"
        has = row.fault or f"{count_text(len(row.servers), 'server')}: {', '.join(row.servers)}"
        yield TableRow(f"{row.client:<16} {row.location:<8} {state:<14} {row.path}  {has.removesuffix(': ')}")
    if not response.clients:
        yield Notice(f"No client is found here. Known are {', '.join(response.known)}.")
    yield from next_hint(response.next)


@verb(
    "connect",
    group="mcp",
    access=OWNER,
    hint="Ask the owner to type `kiwi connect CLIENT`.",
    is_local=True,
    aliases=("connect",),
    shows=_connect_view,
)
async def connect(request: ConnectRequest, context: VerbContext) -> ConnectResponse | ClientList:
    """Write Kiwi into a client's configuration, with a backup; --undo takes it out again."""
    catalogs = context.services.catalogs
    catalog, definitions = catalogs.at(request.project_path), catalogs.definitions()
    client, home, space = request.client, Path.home(), catalog.space
    if client is None:
        return list_clients(space)
    scope = request.location or _scopes(client)[0]
    # What others share through git is no place for what only this machine needs.
    keep_in = space.user / "state" / "backups" if scope == "project" else None
    if request.undo:
        change = plan_undo(client, scope, home=home, project=space.project, keep_in=keep_in)
        return await _write(request, change, scope)
    command = _own_command()
    plan = partial(plan_connect, client, scope, home=home, project=space.project, command=command, keep_in=keep_in)
    change = plan()
    kept: dict[str, str] = {}
    offline: dict[str, str] = {}
    if change.before is not None:
        kept, offline = find_duplicates(change.path, scope, catalog, definitions)
    replaceable = tuple(name for name, reason in kept.items() if not reason)
    if request.replace and replaceable:
        change = plan(without=replaceable)
    response = await _write(request, change, scope, command)
    hints = []
    if scope == "project":
        hints.append(f"This file starts Kiwi as {command}, which others that share the project may not have.")
    if not request.replace:
        where = f" --location {request.location}" if request.location else ""
        if replaceable:
            hints.append(_offer(len(replaceable), "here", f"{request.client}{where}", "this file"))
        else:
            hints += _elsewhere(client, scope, catalog, definitions)
    return replace(
        response,
        kept={name: reason for name, reason in kept.items() if reason} or UNSET,
        without_network=[offline[name] for name in change.taken_out if name in offline] or UNSET,
        next=" ".join(hints) or UNSET,
    )


def list_clients(space: Space) -> ClientList:
    """Return the clients whose files are here, with the servers in each."""
    rows = []
    for found in find_configurations(Path.home(), space.project):
        fault, names = "", []
        try:
            names = [one.name for one in read_configuration(found.path).servers]
            table = found.client.file.servers(read_text(found.path) or "", what=str(found.path))
        except Invalid as error:
            fault, table = error.message, {}
        rows.append(
            ClientRow(
                client=found.client.id,
                title=found.client.title,
                location=found.scope,
                path=shown_path(found.path, space),
                servers=names,
                connected=ENTRY in table,
                fault=fault or UNSET,
            )
        )
    hint = "`kiwi connect CLIENT` lets a client use Kiwi; `kiwi mcp import` takes over its servers."
    return ClientList(action="connect", clients=rows, known=[*clients()], next=hint)


async def _by_own_command(change: ClientFileChange, client: str, scope: Scope, command: str) -> Path | None:
    """Let a client change its file itself, if it rewrites that file while it runs; a copy of the file is kept.

    Kiwi's entry is changed before other servers are removed: an undo finds the copy only if the entry is there.
    """
    known = clients()[client]
    before, after = (
        known.file.servers(text or "", what=str(change.path)).get(ENTRY) for text in (change.before, change.after)
    )
    lines = [known.own_command("remove", scope, ENTRY)] if before is not None and before != after else []
    if command and before != after:
        lines.append(known.own_command("add", scope, ENTRY, command, known.arguments(scope)))
    lines += [known.own_command("remove", scope, name) for name in change.taken_out]
    backup = keep_copy(change)
    for line in lines:
        try:
            program = find_program(line[0], search_path(), needed_by=known.title)
            env = {"HOME": str(Path.home()), "PATH": search_path()}
            result = await run(ProcessSpec((program, *line[1:]), cwd=str(Path.home()), env=env, timeout=_OWN_TIMEOUT))
        except KiwiError as fault:
            fault.suggestion = f"Type it yourself: {'; '.join(f'`{shlex.join(one)}`' for one in lines)}."
            raise
        if result.exit_code:
            raise Unavailable(
                f"`{shlex.join(line)}` failed: {strip_controls(result.stderr.decode(errors='replace'))[-300:].strip()}",
                suggestion="Fix what it reports, then run the command again.",
            )
    return backup


async def _write(request: ConnectRequest, change: ClientFileChange, scope: Scope, command: str = "") -> ConnectResponse:
    """Write a change unless only its plan is wanted."""
    client = request.client or ""
    if request.dry_run or not change.is_needed:
        backup = None
    elif scope in clients()[client].own and not change.put_back:
        backup = await _by_own_command(change, client, scope, command)
    else:
        backup = apply(change)
    verb = "disconnected from" if request.undo else "connected to"
    done = "would be " if request.dry_run else "is " if change.is_needed else "was already "
    moved = change.put_back or change.taken_out
    where = "put back" if change.put_back else "taken out of its file"
    also = f", and {count_text(len(moved), 'server')} {where}" if moved else ""
    return ConnectResponse(
        action="connect",
        client=client,
        status="planned" if request.dry_run else "done" if change.is_needed else "same",
        message=f"Kiwi {done}{verb} {request.client}{also}",
        path=str(change.path),
        diff=change.diff,
        replaced=list(change.taken_out) or UNSET,
        put_back=list(change.put_back) or UNSET,
        backup=str(backup) if backup else UNSET,
    )


def _elsewhere(client: str, scope: Scope, catalog: Catalog, definitions: McpDefinitions) -> list[str]:
    """Return what could be replaced in the client's other file."""
    if scope == "user" or "user" not in _scopes(client):
        return []
    path = Path.home() / clients()[client].places("user")[0]
    reasons = find_duplicates(path, "user", catalog, definitions)[0].values() if path.is_file() else ()
    count = sum(not reason for reason in reasons)
    where = f"in {shown_path(path, catalog.space)}"
    return [_offer(count, where, f"{client} --location user", "that file")] if count else []


def _offer(count: int, where: str, words: str, file: str) -> str:
    are = "1 server {} is" if count == 1 else f"{count} servers {{}} are"
    them = "it" if count == 1 else "them"
    return f"{are.format(where)} in Kiwi too: `kiwi connect {words} --replace` takes {them} out of {file}."


def _scopes(client: str) -> list[Scope]:
    """Return the scopes of a client's files that Kiwi can be written into: the project first, if there is one."""
    known = clients().get(client)
    return [scope for scope in SCOPES if known and known.places(scope)] or ["project"]


def _own_command() -> str:
    """Return by which command a client starts Kiwi: absolute, since programs with windows have another PATH."""
    beside, found = Path(sys.executable).parent / ENTRY, shutil.which(ENTRY)
    own = str(beside) if beside.exists() else found
    if own is None:
        raise NotFound("The program `kiwi` is not found.", suggestion="Install Kiwi so that `kiwi` is on the PATH.")
    return str(Path(own).absolute())


def find_duplicates(
    path: Path, scope: Scope, catalog: Catalog, definitions: McpDefinitions
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the entries of a file that are servers of Kiwi, and those of them that are offline in Kiwi.

    The first says of each entry why Kiwi cannot replace it; empty if it can: reached alike, seen by that client, and
    accepted. The second has the names in Kiwi of servers that reach no host and are not known to need none.
    """
    judged: dict[str, str] = {}
    offline: dict[str, str] = {}
    try:
        imported = read_configuration(path)
    except Invalid:  # the code that writes the file reports what is wrong with it
        return judged, offline
    space = catalog.space if scope == "project" else no_project_space(catalog.space.user, catalog.space.cache)
    known = known_servers(catalog, definitions)
    for draft in imported.servers:
        if draft.project or draft.is_disabled:
            continue
        launch = launch_of(as_object(draft.manifest.get("config")))
        for server, key in known:
            if launch_of(server.manifest.config) == launch:
                if may_reach(server) == NO_NETWORK and server_in(server.manifest.config) is None:
                    offline[draft.name] = server.id
                is_for_all = server.origin.path.is_relative_to(space.user) or server.origin.is_published
                record = definitions.find(key)
                if scope != "project" and not is_for_all:
                    reason = f"{server.id} is in one project, and this file is for all"
                elif record is None or record.digest != server.digest:
                    reason = f"the manifest of {server.id} is not accepted as it is"
                elif not any(one.state == "accepted" for one in definitions.of(key)):
                    reason = f"nothing of {server.id} is accepted"
                else:
                    reason = _other_secrets(draft, imported.secrets, server, catalog, space)
                judged[draft.name] = reason
    return judged, offline


def _other_secrets(
    draft: ServerDraft, secrets: Mapping[str, Secret], server: Tool, catalog: Catalog, space: Space
) -> str:
    """Return that Kiwi would not reach a server with the same secrets, from wherever the client starts it."""
    mine = [name for name in variables(as_object(draft.manifest.get("config"))) if name in secrets]
    lasting = Variables().locate(mine, project=space.project, user=space.user, environ={})
    stored = stored_secrets(mine, space.user)
    if missing := [name for name in mine if lasting[name] is None and name not in stored]:
        return f"{', '.join(missing)} is not kept here: import it with `--with-secrets`"
    try:
        chain = catalog.resolve(server.identity)
        values = server_secrets(chain, space, default_isolation, is_accepted=catalog.is_meant(server))
    except KiwiError as fault:
        return fault.message
    other = [name for name in mine if not secrets[name].is_same(Secret(values[name]))]
    return f"{', '.join(other)} is another one here" if other else ""
