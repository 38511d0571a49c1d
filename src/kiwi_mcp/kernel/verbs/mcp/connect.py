"""setup and mcp connect: Kiwi's entry in the configurations of MCP clients, and their servers in Kiwi; with undo."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Question, Space
from kiwi_mcp.domain.errors import Invalid, InvalidRequest, KiwiError, NotFound, Unavailable
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.mcp import Definition
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.domain.token_cost import cost_of_json, total
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.mcp_servers import McpServers, known_servers, launch_of, server_secrets
from kiwi_mcp.kernel.paths import no_project_space
from kiwi_mcp.kernel.token_meter import all_sent
from kiwi_mcp.kernel.verb import (
    OWNER,
    AnyJson,
    Argument,
    DryRun,
    NameText,
    Option,
    ProjectRequest,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.verbs.mcp.add import ServerAllowRequest, ServersImportRequest, allow, import_servers, shown_path
from kiwi_mcp.kernel.verbs.mcp.servers import NO_NETWORK, Warnings, may_change, may_reach
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, count_text, next_hint, warning_rows
from kiwi_mcp.manifest.mcp.clients import (
    ENTRY,
    SCOPES,
    ClientFileChange,
    Configuration,
    Scope,
    apply,
    clients,
    find_configurations,
    keep_copy,
    plan_connect,
    plan_undo,
    read_configuration,
    read_text,
)
from kiwi_mcp.manifest.mcp.launch_command import server_in
from kiwi_mcp.manifest.mcp.server_entry import ServerDraft
from kiwi_mcp.manifest.owner_file import put_file
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


class SetupRequest(ProjectRequest, frozen=True, kw_only=True):
    """Whether to ask, and whether to go back."""

    yes: Annotated[
        bool, Option("Ask nothing: servers get what Kiwi knows they need, and nothing more.", "--yes", "-y")
    ] = False
    undo: Annotated[bool, Option("Put the files of your clients back.")] = False


class SetupServer(Response, frozen=True, kw_only=True):
    """A server of the user's clients, as it is in Kiwi now."""

    server: str
    may_reach: str
    may_change: str
    tools: int
    fault: str | UnsetType = UNSET


class SetupClient(Response, frozen=True, kw_only=True):
    """A client, and what was done with its file."""

    client: str
    path: str
    status: str
    message: str
    replaced: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    put_back: list[str] = field(default_factory=list)
    diff: str = ""


class SetupResponse(Response, frozen=True, kw_only=True):
    """The servers and the clients, and what a model is sent before its first word."""

    action: str = "setup"
    status: str
    message: str
    servers: list[SetupServer] = field(default_factory=list)
    clients: list[SetupClient] = field(default_factory=list)
    project_files: dict[str, list[str]] = field(default_factory=dict)
    """Servers in files of the project, which were not imported: a clone may have brought them."""
    tokens_before: int | UnsetType = UNSET
    tokens_after: int | UnsetType = UNSET
    warnings: Warnings = UNSET
    next: str | UnsetType = UNSET


def server_table(servers: Sequence[SetupServer]) -> Iterator[str]:
    """Yield the lines of the table of servers."""
    columns = ("server", "may_reach", "may_change")
    names, reach, change = (max((len(getattr(one, name)) for one in servers), default=0) for name in columns)
    for one in servers:
        mark, state = ("✗", one.fault.partition("\n")[0]) if one.fault else ("✓", f"{one.tools} tools")
        access = f"reaches {one.may_reach:<{reach}}  changes {one.may_change:<{change}}"
        yield f"{mark} {one.server:<{names}}  {access}  {state}"


def _setup_view(response: SetupResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield from map(TableRow, server_table(response.servers))
    for one in response.clients:
        if response.action == "undo" and one.diff:
            yield Data(one.diff.rstrip("\n"))
        mark = {"failed": "✗", "by hand": "!"}.get(one.status, "✓")
        yield Data(f"{mark} {one.message} ({one.path})")
        for name, reason in one.kept.items():
            yield Notice(f"  ! {name} stays: {reason}")
    for path, names in response.project_files.items():
        yield Notice(f"! {path} of this project has {', '.join(names)}: `kiwi mcp import {path}` takes them")
    if response.tokens_before:
        yield Data(
            f"tokens before the first word of a conversation: {response.tokens_before:,} → {response.tokens_after:,}"
        )
    yield Data(response.message)
    yield from next_hint(response.next)


_ASK = "Ask the owner to type `kiwi setup`."


@verb("setup", access=OWNER, everyday="setup", hint=_ASK, is_local=True, asks=True, shows=_setup_view)
async def setup(request: SetupRequest, context: VerbContext) -> SetupResponse:
    """Use the MCP servers of your clients through Kiwi: import them, and put Kiwi in their place; --undo goes back."""
    work = _Setup(request, context)
    return await work.undo() if request.undo else await work.run()


class _Change(Struct, frozen=True):
    """What setup did to the file of a client."""

    client: str
    path: str
    after: str
    """The hash of the file after it."""
    backup: str
    """The file as it was before; empty if there was none, or others changed it between two setups."""


class _Setup:
    """One run of setup: the folders it is about, and what it has found so far."""

    def __init__(self, request: SetupRequest, context: VerbContext) -> None:
        self._request, self._context = request, context
        self._catalog: Catalog = context.services.catalogs.at(request.project_path)
        self._definitions = context.services.catalogs.definitions()
        self._record = self._catalog.space.user / "state" / "setup.json"
        self._warnings: list[AnyJson] = []

    async def run(self) -> SetupResponse:
        found = find_configurations(Path.home(), self._catalog.space.project)
        mine = [one for one in found if one.scope == "user"]
        projects = {
            self._shown(one.path): names for one in found if one.scope == "project" if (names := self._names(one))
        }
        if not mine:
            message = "No MCP client has a configuration in your home folder."
            following = "`kiwi mcp add NAME -- COMMAND` adds a server, `kiwi connect CLIENT` connects a client."
            return SetupResponse(status="nothing", message=message, project_files=projects, next=following)
        if paths := tuple(str(one.path) for one in mine if self._names(one)):
            project = self._request.project_path
            wanted = ServersImportRequest(project_path=project, paths=paths, with_secrets=True, location="user")
            imported = await import_servers(wanted, self._context)
            self._warnings += [*(imported.warnings or ())]
            self._warnings += [f"{one.server}: {one.reason}" for one in imported.servers if one.status == "refused"]
        servers = self._servers()
        if not self._request.yes:
            hosts = await self._asked(servers, mine)
            if hosts is None:
                message = "Your servers are in Kiwi; the files of your clients are as they were."
                return SetupResponse(status="stopped", message=message, servers=servers, project_files=projects)
            await self._grant(hosts)
            servers = self._servers()
        done = [await self._connected(client) for client in dict.fromkeys(one.client.id for one in mine)]
        replaced = f"{sum(len(one.replaced) for one in done)} replaced in {count_text(len(done), 'client')}"
        return SetupResponse(
            status="done",
            message=f"{count_text(len(servers), 'server')} in Kiwi, {replaced}.",
            servers=servers,
            clients=done,
            project_files=projects,
            tokens_before=total(cost_of_json(one.shown) for _, _, tools in self._known() for one in tools).tokens,
            tokens_after=total(one.cost for one in all_sent(await self._context.services.offers(None))).tokens,
            warnings=self._warnings or UNSET,
            next="Start your clients again. `kiwi setup --undo` puts their files back.",
        )

    async def undo(self) -> SetupResponse:
        done = [await self._taken_back(change) for change in self._changes()]
        if not done:
            raise NotFound("`kiwi setup` changed no file here.", suggestion="`kiwi connect CLIENT --undo` undoes one.")
        failed = {one.client for one in done if one.status == "failed"}
        self._write([change for change in self._changes() if change.client in failed])
        following = "The servers stay in Kiwi: `kiwi mcp list` shows them, `kiwi mcp remove SERVER` removes one."
        message = f"{count_text(len(done) - len(failed), 'file')} of {count_text(len(done), 'client')} put back."
        status = "failed" if failed else "done"
        return SetupResponse(action="undo", status=status, message=message, clients=done, next=following)

    def _shown(self, path: Path) -> str:
        return shown_path(path, self._catalog.space)

    def _names(self, one: Configuration) -> list[str]:
        """Return the servers of a file; one that cannot be read has none, with a warning."""
        try:
            return [draft.name for draft in read_configuration(one.path).servers if not draft.project]
        except KiwiError as fault:
            if fault.message not in self._warnings:
                self._warnings.append(fault.message)
            return []

    def _known(self) -> Iterator[tuple[Tool, str, list[Definition]]]:
        """Yield the servers of the user, with what is wrong and the tools of each."""
        for server, key in known_servers(self._catalog, self._definitions):
            if server.origin.is_in_user_space:
                record = self._definitions.find(key)
                fault = record.fault if record else "it was not asked yet"
                yield server, fault, [one for one in self._definitions.of(key) if one.kind == "tool"]

    def _servers(self) -> list[SetupServer]:
        return [
            SetupServer(
                server=server.id,
                may_reach=may_reach(server),
                may_change=may_change(server),
                tools=len(tools),
                fault=fault or UNSET,
            )
            for server, fault, tools in self._known()
        ]

    async def _asked(
        self, servers: Sequence[SetupServer], mine: Sequence[Configuration]
    ) -> dict[str, list[str]] | None:
        """Return the hosts that the owner grants, by server; None where the owner wants to stop here."""
        offline = [
            server.id
            for server, _, _ in self._known()
            if may_reach(server) == NO_NETWORK and server_in(server.manifest.config) is None
        ]
        files = ", ".join(dict.fromkeys(self._shown(one.path) for one in mine))
        lines = [*server_table(servers), "", f"Next, Kiwi takes the place of these servers in {files}."]
        if offline:
            lines.append(
                f"Without network: {', '.join(offline)}. Give hosts as SERVER=HOST, or SERVER=* for any public host."
            )
        lines.append("Enter continues, `no` stops here.")
        form: JsonObject = {"type": "object", "properties": {"hosts": {"type": "string"}}}
        question = Question("elicitation/create", {"message": "\n".join(lines), "requestedSchema": form}, is_own=True)
        answer = as_object((await self._context.caller.ask({"hosts": question}))["hosts"])
        text = as_text(as_object(answer.get("content")).get("hosts")).strip()
        if answer.get("action") != "accept" or text.lower() in {"n", "no"}:
            return None
        granted: dict[str, list[str]] = {}
        for word in text.replace(",", " ").split():
            name, _, host = word.partition("=")
            if name not in offline or not host:
                raise InvalidRequest(
                    f"{word[:100]!r} is not SERVER=HOST.", suggestion=f"Name one of: {', '.join(offline)}."
                )
            granted.setdefault(name, []).append("*" if host == "any" else host)
        return granted

    async def _grant(self, hosts: Mapping[str, Sequence[str]]) -> None:
        servers, project = self._context.services.one(McpServers), self._request.project_path
        for name, given in hosts.items():
            await allow(ServerAllowRequest(server=name, hosts=tuple(given), project_path=project), self._context)
        again = [server for server, _, _ in self._known() if server.id in hosts]
        rights = self._context.services.context(self._context.caller, self._catalog).rights
        with servers.changing():
            await servers.refresh_all(again, self._catalog, self._warnings, self._context.caller.report, rights)

    async def _connected(self, client: str, *, undo: bool = False) -> SetupClient:
        """Put Kiwi into the file of a client, or take it out again, and return what came of it."""
        known = clients()[client]
        project = self._request.project_path
        path = Path.home() / known.places("user")[0]
        request = ConnectRequest(client=client, replace=not undo, undo=undo, location="user", project_path=project)
        try:
            was = "" if undo else _hash(read_text(path) or "")
            done = await connect(request, self._context)
        except KiwiError as fault:
            message = f"{known.title}: {fault.message} {fault.suggestion}"
            return SetupClient(client=client, path=self._shown(path), status="failed", message=message)
        assert isinstance(done, ConnectResponse)  # noqa: S101 - a client was named
        if done.status == "done" and not undo:
            self._note(client, Path(done.path), done.backup or "", was)
        return filled(SetupClient, done, path=self._shown(Path(done.path)))

    async def _taken_back(self, change: _Change) -> SetupClient:
        """Put a file back: to the byte if nothing changed it since, else only the entries that setup changed."""
        path, backup = Path(change.path), Path(change.backup)
        now, before = read_text(path), read_text(backup) if change.backup else None
        if now is not None and before is not None and _hash(now) == change.after:
            put_file(path, before.encode(), os.stat(path).st_mode & 0o777)  # noqa: PTH116 - of one file
            backup.unlink()  # noqa: ASYNC240 - the same
            message = f"The file of {clients()[change.client].title} is as it was before setup"
            return SetupClient(client=change.client, path=self._shown(path), status="done", message=message)
        return await self._connected(change.client, undo=True)

    def _changes(self) -> list[_Change]:
        if not self._record.is_file():
            return []
        return msgspec.json.decode(self._record.read_bytes(), type=list[_Change])

    def _note(self, client: str, path: Path, backup: str, was: str) -> None:
        """Remember the change of a file; after an earlier setup, the backup of that one is the file to go back to."""
        known = {one.client: one for one in self._changes()}
        change = _Change(client, str(path), _hash(read_text(path) or ""), backup)
        if (earlier := known.get(client)) is not None:
            change = replace(change, backup=earlier.backup if earlier.after == was else "")
        self._write([*{**known, client: change}.values()])

    def _write(self, changes: Sequence[_Change]) -> None:
        self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if changes:
            put_file(self._record, msgspec.json.encode(changes), 0o600)
        else:
            self._record.unlink(missing_ok=True)


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()
