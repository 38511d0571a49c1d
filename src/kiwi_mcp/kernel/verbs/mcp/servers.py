"""mcp: the MCP servers that Kiwi uses: list, refresh, accept, diff, remove, login, logout, logs, restart, try."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, LoginRequired, NotFound, PolicyDenied, ToolNotFound
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Needs, Tool
from kiwi_mcp.domain.json import as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import MAX_DIFF, Definition, ServerRecord, State
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.times import moment
from kiwi_mcp.drivers.environments.packages import server_package
from kiwi_mcp.drivers.mcp.server import RESTART, log_path
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.mcp_servers import (
    McpServers,
    accepted,
    difference,
    find_server,
    is_owners,
    key_of,
    known_servers,
    launch_summary,
    new_record,
)
from kiwi_mcp.kernel.permission import ItemVisibility, one_of
from kiwi_mcp.kernel.tool_names import touch_server_names
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    DryRun,
    NameText,
    Option,
    ProjectRequest,
    Response,
    Where,
    filled,
    verb,
)
from kiwi_mcp.kernel.verbs.create import Author, DeleteRequest, delete_item
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, count_text, next_hint, warning_rows
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.policy.needs import needs_text
from kiwi_mcp.primitives.http.addresses import local_network_host
from kiwi_mcp.store.mcp_definitions import McpDefinitions, ServerDefinitions

MAX_ITEMS = 1_000
"""How many items of a server are shown at once."""
MARKS: Mapping[str, str] = {"accepted": "✓", "changed": "!", "new": "+", "gone": "-"}
_LINE = 200
NO_NETWORK = "no network"
ASK_OWNER = "Ask the owner to type `kiwi mcp {}`."
_ROUNDS = 3
"""How often one login may send the owner to the browser, where a server asks for more each time."""
_MAX_BYTES = 1_000_000
_SHORT = 12
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
"""What may follow a name, as NAME@DIGEST, to accept what was shown and nothing that came since."""
ServerName = Annotated[NameText, Argument("The server's name.", "SERVER")]
MaybeServer = Annotated[NameText | None, Argument("One server; all of them otherwise.", "SERVER")]
Warnings = list[AnyJson] | UnsetType


class ServerItem(Response, frozen=True, kw_only=True):
    """One thing that a server offers."""

    tool_id: str
    kind: str
    name: str
    state: str
    description: str


class ServerRow(Response, frozen=True, kw_only=True):
    """A server, and how many of its items are in each state."""

    server: str
    identity: str
    transport: str
    path: str
    needs: AnyJson | UnsetType = UNSET
    may_reach: str
    may_change: str
    states: dict[str, int]
    notice: str | UnsetType = UNSET
    status: str
    version: str | UnsetType = UNSET
    protocol_version: str | UnsetType = UNSET
    seen_at: str | UnsetType = UNSET
    fault: str | UnsetType = UNSET
    fault_at: str | UnsetType = UNSET


class ServerDetails(ServerRow, frozen=True, kw_only=True):
    """One server with what it offers."""

    action: str
    message: str | UnsetType = UNSET
    package: AnyJson | UnsetType = UNSET
    items: list[ServerItem]
    warnings: Warnings = UNSET
    next: str | UnsetType = UNSET


class ServerList(Response, frozen=True, kw_only=True):
    """Several servers."""

    action: str
    message: str | UnsetType = UNSET
    servers: list[ServerRow]
    suggestion: str | UnsetType = UNSET
    warnings: Warnings = UNSET
    next: str | UnsetType = UNSET


class ServerChange(Response, frozen=True, kw_only=True):
    """What was done with a server."""

    action: str
    server: str
    status: str
    message: str
    needs: AnyJson | UnsetType = UNSET
    trash_path: str | UnsetType = UNSET
    next: str | UnsetType = UNSET


class LoginResponse(Response, frozen=True, kw_only=True):
    """A login, with the rights it gave and what the server offers."""

    action: str
    server: str
    status: str
    message: str
    scope: str
    items: list[ServerItem]
    warnings: Warnings = UNSET


def items_view(items: Sequence[ServerItem]) -> Iterator[ViewItem]:
    """Show what a server offers."""
    width = max((len(one.tool_id) for one in items), default=0)
    for one in items:
        row = f"{MARKS[one.state]} {one.tool_id.ljust(width)}  {one.kind:<8} {one.state:<8}  {one.description}"
        yield TableRow(row.rstrip())


def details_view(path: str, package: AnyJson | UnsetType) -> Iterator[ViewItem]:
    """Show where the manifest of a server is, and the package that it is started from."""
    yield Notice(f"  path: {path}")
    if package:
        yield Notice("  package: " + " ".join(text_of(package[word]) for word in ("name", "version", "integrity")))


def _servers_view(response: ServerDetails | ServerList) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    if isinstance(response, ServerDetails):
        yield from items_view(response.items)
        yield Notice(response.message or _row_text(response))
        yield from details_view(response.path, response.package)
        for word, asked in as_object(response.needs or {}).items():
            yield Notice(f"  {word}: {', '.join(map(text_of, as_list(asked)))}")
        if response.notice:
            yield Notice(f"  {response.notice}")
    else:
        if response.servers:
            yield Notice(f"{'SERVER':<24} {'STATE':<12} {'MAY REACH':<28} {'MAY CHANGE':<28} ITEMS")
        for server in response.servers:
            yield TableRow(_row_text(server))
            if notice := server.notice or server.fault:
                yield Notice(f"  {notice.partition(chr(10))[0]}")
        if message := response.message or response.suggestion:
            yield Notice(message)
    yield from next_hint(response.next)


def _row_text(server: ServerRow) -> str:
    states = ", ".join(f"{count} {state}" for state, count in server.states.items())
    asked = as_list(as_object(server.needs or {}).get("client"))
    asks = f"  may ask clients for: {', '.join(map(text_of, asked))}" if asked else ""
    access = f"{server.may_reach:<28} {server.may_change:<28}"
    return f"{server.server:<24} {server.status:<12} {access} {states or 'nothing'}{asks}"


def open_context(request: ProjectRequest, context: VerbContext) -> Context:
    """Return what a verb about servers works with: the catalog of the request's project, the caller, its rights."""
    services = context.services
    return services.context(context.caller, services.catalogs.at(request.project_path))


class NamedServerRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which server."""

    server: ServerName


def open_server(request: NamedServerRequest, context: VerbContext) -> tuple[Context, McpServers, Tool]:
    """Return what a verb about one server works with, and the server that the request names."""
    opened = open_context(request, context)
    return opened, context.services.one(McpServers), find_server(request.server, opened.catalog)


class ServersListRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which server to show."""

    server: MaybeServer = None


@verb("list", group="mcp", access=ANYONE, records=False, needs_rules=True, shows=_servers_view)
async def list_servers(request: ServersListRequest, context: VerbContext) -> ServerDetails | ServerList:
    """List the servers, or the tools, prompts and resources of one."""
    catalogs = context.services.catalogs

    def work(catalog: Catalog) -> ServerDetails | ServerList:
        definitions = catalogs.definitions()
        permission = ItemVisibility(catalog, context.services.rights(context.caller))
        if request.server:
            return _known_server(request.server, catalog, definitions, permission)
        return all_servers(catalog, definitions, permission)

    return await catalogs.near.do(catalogs.space_if_any(request.project_path), work)


def visible_server(name: str, catalog: Catalog, permission: ItemVisibility) -> Tool:
    """Return a server that is not hidden from the caller; an error names no other servers if some are hidden."""
    if not permission.hides:
        return find_server(name, catalog)
    with suppress(KiwiError):
        server = find_server(name, catalog)
        if not permission.is_server_hidden(server):
            return server
    raise ToolNotFound(name)


def visible_items(server: str, known: Iterable[Definition], permission: ItemVisibility) -> list[Definition]:
    """Return the items of a server that are not hidden from the caller."""
    return [one for one in known if not permission.is_hidden(one_of(server, one.tool_id))]


def all_servers(catalog: Catalog, definitions: McpDefinitions, permission: ItemVisibility) -> ServerList:
    """Return the servers that are known here and not hidden from the caller. No server is asked."""
    rows = [
        ServerRow(**server_fields(server, definitions.find(key), definitions.states(key)))
        for server, key in known_servers(catalog, definitions)
        if not permission.is_server_hidden(server)
    ]
    suggestion = "`kiwi mcp add NAME -- COMMAND` adds a server, `kiwi mcp import` those of your clients."
    return ServerList(action="list", servers=rows, suggestion=UNSET if rows else suggestion)


def _known_server(
    name: str, catalog: Catalog, definitions: McpDefinitions, permission: ItemVisibility
) -> ServerDetails:
    """Return one server with what it offered last. It is not asked."""
    server = visible_server(name, catalog, permission)
    key = key_of(server, catalog.space)
    return ServerDetails(
        action="list",
        **server_fields(server, definitions.find(key), definitions.states(key)),
        package=package_of(server, catalog.space),
        items=item_rows(visible_items(server.id, definitions.first(key, MAX_ITEMS), permission)),
    )


class ServersRefreshRequest(ServersListRequest, frozen=True, kw_only=True):
    """Which server to ask."""

    yes: Annotated[bool, Option("Start it although it was never accepted.")] = False


@verb("refresh", group="mcp", access=ANYONE, needs_rules=True, shows=_servers_view)
async def refresh(request: ServersRefreshRequest, context: VerbContext) -> ServerDetails | ServerList:
    """Ask servers for their current tools, prompts and resources."""
    opened, servers = open_context(request, context), context.services.one(McpServers)
    with servers.changing():
        if request.server:
            return await _refresh_one(request.server, opened, servers, may_start=request.yes)
        return await _refresh_all(opened, servers)


async def _refresh_one(name: str, context: Context, servers: McpServers, *, may_start: bool) -> ServerDetails:
    catalog, permission = context.catalog, ItemVisibility(context.catalog, lambda: context.rights)
    server = visible_server(name, catalog, permission)
    if not context.is_owner and not is_owners(server, catalog, servers.definitions()):
        raise PolicyDenied(
            f"The owner has not added {server.id!r} as its manifest is now, so it is not started.",
            suggestion=f"Ask the owner to look at it and type `kiwi mcp refresh {server.id}` and "
            f"`kiwi mcp accept {server.id}`.",
            tool_id=server.id,
        )
    if not may_start and not _may_start(server, catalog, servers.definitions()):
        config = server.manifest.config
        command = shlex.join(map(text_of, (config.get("command"), *as_list(config.get("args")))))
        raise PolicyDenied(  # which shows the owner all there is to see
            f"{server.id!r} was never accepted as its manifest ({server.origin.path}) is now. To ask it starts "
            f"`{strip_controls(command)}`{needs_text(server.manifest.needs)}.",
            suggestion=f"If that is right, `kiwi mcp refresh {server.id} --yes` starts it.",
            tool_id=server.id,
        )
    if not context.is_owner and not servers.is_due(server, catalog):
        message = f"{server.id} was asked less than a minute ago; this is what it offered then"
        known = _known_server(name, catalog, servers.definitions(), permission)
        return replace(known, action="refresh", message=message)
    context.caller.report(Progress(f"asking {server.id}"))
    result = await servers.refresh(server, catalog, context.rights)
    visible = visible_items(server.id, result.definitions, permission)
    return ServerDetails(
        action="refresh",
        message=f"{server.id}: {count_kinds(visible)}{unaccepted_items(visible)}",
        **server_fields(server, result.server, result.states),
        items=item_rows(visible),
        warnings=[*map(Issue.to_json, result.issues)] or UNSET,
        next=next_step(server.id, visible),
    )


async def _refresh_all(context: Context, servers: McpServers) -> ServerList:
    catalog, definitions = context.catalog, servers.definitions()
    permission = ItemVisibility(catalog, lambda: context.rights)
    wanted: list[Tool] = []
    warnings: list[AnyJson] = []
    for server, _ in known_servers(catalog, definitions):
        if permission.is_server_hidden(server):
            continue
        is_accepted = is_owners(server, catalog, definitions)
        # A server of a project could lead to any address.
        is_permitted = is_accepted or not server.origin.is_in_project
        if is_permitted and _may_start(server, catalog, definitions):
            if context.is_owner or (is_accepted and servers.is_due(server, catalog)):
                wanted.append(server)
        elif context.is_owner:
            verb, shows = ("started", "shows what would be started") if _is_process(server) else ("asked", "asks it")
            fix = f"`kiwi mcp refresh {server.id}` {shows}."
            issue = Issue(server.id, f"was never accepted as it is, and was not {verb}", fix, "warning")
            warnings.append(issue.to_json())
    results = await servers.refresh_all(wanted, catalog, warnings, context.caller.report, context.rights)
    by_id = {one.server.key.server: one for one in results}
    changed = [one for one in results if unaccepted_items(one.definitions)]
    name = changed[0].server.key.server if len(changed) == 1 else "SERVER"
    return ServerList(
        action="refresh",
        message=f"{len(results)} of {len(wanted)} servers answered",
        servers=[
            ServerRow(**server_fields(one, by_id[one.id].server, by_id[one.id].states))
            for one in wanted
            if one.id in by_id
        ],
        warnings=warnings or UNSET,
        next=next_step(name, [one for each in changed for one in each.definitions]),
    )


class ServerLogResponse(Response, frozen=True, kw_only=True):
    """The last output of a server's process."""

    action: str
    server: str
    path: str
    log: str
    fault: str | UnsetType = UNSET


def _log_view(response: ServerLogResponse) -> Iterator[ViewItem]:
    if response.log:
        yield Data(response.log.rstrip("\n"))
    yield Notice(f"  path: {response.path}")
    if response.fault:
        yield Notice(f"last failure: {response.fault}")


@verb("logs", group="mcp", access=OWNER, records=False, hint=ASK_OWNER.format("logs SERVER"), shows=_log_view)
async def logs(request: NamedServerRequest, context: VerbContext) -> ServerLogResponse:
    """Show what the process of a server last wrote to standard error, without secrets."""
    opened, servers, server = open_server(request, context)
    record = servers.definitions().find(key_of(server, opened.space))
    path = log_path(opened.space, server.identity)
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    fault = record.fault if record else ""
    return ServerLogResponse(action="logs", server=server.id, path=str(path), log=text, fault=fault or UNSET)


@verb("restart", group="mcp", access=OWNER, hint=ASK_OWNER.format("restart SERVER"))
async def restart(request: NamedServerRequest, context: VerbContext) -> ServerChange:
    """End the processes of a server, also those of other running Kiwis; the next call starts it anew."""
    opened, servers, server = open_server(request, context)
    await _restart(server, opened, servers)
    message = f"{server.id} starts anew at its next call"
    return ServerChange(action="restart", server=server.id, status="restarted", message=message)


async def _restart(server: Tool, context: Context, servers: McpServers) -> None:
    mark = log_path(context.space, server.identity).with_name(RESTART)
    mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mark.touch()
    await servers.driver().restart(server.identity)


@verb("try", group="mcp", access=OWNER, hint=ASK_OWNER.format("try SERVER"), shows=_servers_view)
async def try_server(request: NamedServerRequest, context: VerbContext) -> ServerDetails:
    """Start a server anew and list what it offers."""
    opened, servers, server = open_server(request, context)
    with servers.changing():
        await _restart(server, opened, servers)
        details = await _refresh_one(request.server, opened, servers, may_start=False)
    return replace(details, action="try")


class ServerRemoveRequest(NamedServerRequest, frozen=True, kw_only=True):
    """Which server to remove."""

    dry_run: DryRun = False


@verb("remove", group="mcp", access=OWNER, hint=ASK_OWNER.format("remove SERVER"))
async def remove(request: ServerRemoveRequest, context: VerbContext) -> ServerChange:
    """Remove a server and its items; its manifest is moved to the trash."""
    opened, servers, server = open_server(request, context)
    with servers.changing(is_planned=request.dry_run):
        trash_path: str | UnsetType = UNSET
        if server.origin.is_editable:
            location: Where = "user" if server.origin.is_in_user_space else "project"
            removal = DeleteRequest(item_id=server.identity, location=location, dry_run=request.dry_run)
            trash_path = delete_item(removal, Author(opened, authorship=None)).trash_path
        if request.dry_run:
            message = f"{server.id} would be removed"
            return ServerChange(action="remove", server=server.id, status="planned", message=message)
        servers.definitions().remove(key_of(server, opened.space))
        with suppress(KiwiError):  # a server that cannot even be read has no login either
            await servers.driver().log_out(server, opened.space)
    return ServerChange(
        action="remove",
        server=server.id,
        status="removed",
        message=f"{server.id} was removed, with all that it offers",
        trash_path=trash_path,
    )


class LoginRequest(NamedServerRequest, frozen=True, kw_only=True):
    """Which server to log in to."""

    scopes: Annotated[
        tuple[NameText, ...],
        Meta(max_length=100),
        Option("A right to ask for, instead of those the server asks for.", "--scope", metavar="SCOPE"),
    ] = ()


def _login_view(response: LoginResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield from items_view(response.items)
    yield Notice(response.message)


@verb("login", group="mcp", access=OWNER, hint=ASK_OWNER.format("login SERVER"), shows=_login_view)
async def log_in(request: LoginRequest, context: VerbContext) -> LoginResponse:
    """Log in to a server in your browser."""
    opened, servers, server = open_server(request, context)
    known: Sequence[Definition] = ()
    scope, items, warnings = "", "", list[AnyJson]()
    for left in reversed(range(_ROUNDS)):
        # Judged anew in each round: the owner may take minutes in the browser.
        run, secrets = servers.plan(server, opened.catalog, opened.rights)
        ask, driver = context.caller.ask, servers.driver()
        scope = await driver.log_in(run.plan, run.chain, opened.space, secrets, ask, request.scopes)
        try:
            known = (await servers.refresh(server, opened.catalog, opened.rights)).definitions
            items = f": {count_kinds(known)}{unaccepted_items(known)}"
        except LoginRequired:
            if not left:
                raise
            continue
        except KiwiError as fault:
            unlisted = Issue(server.id, f"could not be asked: {fault.message}", fault.suggestion, "warning")
            warnings.append(unlisted.to_json())
        break
    return LoginResponse(
        action="login",
        server=server.id,
        status="logged in",
        message=f"You are logged in to {server.id}{items}",
        scope=scope,
        items=item_rows(known),
        warnings=warnings or UNSET,
    )


@verb("logout", group="mcp", access=OWNER, hint=ASK_OWNER.format("logout SERVER"))
async def log_out(request: NamedServerRequest, context: VerbContext) -> ServerChange:
    """Forget a login to a server."""
    opened, servers, server = open_server(request, context)
    had_tokens = await servers.driver().log_out(server, opened.space)
    message = f"You are logged out of {server.id}" if had_tokens else f"You were not logged in to {server.id}"
    return ServerChange(action="logout", server=server.id, status="logged out", message=message)


def server_fields(server: Tool, record: ServerRecord | None, counts: Mapping[State, int]) -> dict[str, AnyJson]:
    """Return the fields of a `ServerRow`."""
    states: tuple[State, ...] = ("accepted", "changed", "new", "gone")
    is_changed = record is not None and record.digest != server.digest
    fields: dict[str, AnyJson] = {
        "server": server.id,
        "identity": server.identity,
        "transport": as_text(server.manifest.config.get("transport")),
        "path": str(server.origin.path),
        "needs": server.manifest.needs.to_json() or UNSET,
        "may_reach": may_reach(server),
        "may_change": may_change(server),
        "states": {state: counts[state] for state in states if counts.get(state)},
        "notice": unaccepted_notice(server) if is_changed else UNSET,
    }
    if record is None or not (record.seen_at or record.fault):
        return {**fields, "status": "never asked"}
    return {
        **fields,
        "status": "changed" if is_changed else "down" if record.fault else "known",
        "version": record.version,
        "protocol_version": record.protocol_version,
        "seen_at": record.seen_at,
        "fault": record.fault or UNSET,
        "fault_at": record.fault_at if record.fault else UNSET,
    }


def may_reach(server: Tool) -> str:
    """Return which hosts a server reaches, in words: for a process those that it may reach, else where it is."""
    if not _is_process(server):
        return urlsplit(as_text(server.manifest.config.get("url"))).netloc.rpartition("@")[2] or "?"
    hosts = server.manifest.needs.hosts
    reached = "any public host" if "*" in hosts else ", ".join(hosts) or NO_NETWORK
    return f"{reached}; makes Unix sockets" if server.manifest.needs.sockets else reached


def may_change(server: Tool) -> str:
    """Return which files of this machine a server may change, in words."""
    home = str(Path.home())
    paths = [f"~{path[len(home) :]}" if path.startswith(f"{home}/") else path for path in server.manifest.needs.write]
    return ", ".join(paths) or "no files"


def package_of(server: Tool, space: Space) -> AnyJson | UnsetType:
    """Return which version of a package a server is started from; unset where it is from none, or not yet."""
    config = server.manifest.config
    words = [text_of(word) for word in as_list(config.get("args"))]
    found = server_package(as_text(config.get("command")), words, space.cache)
    return (found[0].pin if found else {}) or UNSET


def unaccepted_notice(server: Tool) -> str:
    """Return that a server's manifest is not the one that was accepted, and what follows from that."""
    return (
        f"the manifest of {server.id} changed since it was accepted: nothing of it runs before "
        f"`kiwi mcp accept {server.id}` (`kiwi mcp diff {server.id}` shows what changed)"
    )


def next_step(server: str, known: Sequence[Definition]) -> str | UnsetType:
    """Return what to type next where things have to be accepted."""
    return f"`kiwi mcp diff {server}` shows what they are." if unaccepted_items(known) else UNSET


def item_rows(known: Sequence[Definition]) -> list[ServerItem]:
    """Return the items of a server as responses show them."""
    texts = (strip_controls(as_text(one.shown.get("description"))) for one in known)
    return [
        filled(ServerItem, one, description=text.partition("\n")[0][:_LINE])
        for one, text in zip(known[:MAX_ITEMS], texts, strict=False)
    ]


def count_kinds(known: Sequence[Definition]) -> str:
    """Return how many things of each kind are offered, in words."""
    counts = Counter(one.kind for one in known if one.state != "gone")
    return ", ".join(count_text(count, kind) for kind, count in counts.items()) or "nothing is offered"


def unaccepted_items(known: Sequence[Definition]) -> str:
    """Return how many things must be accepted before use, in words; nothing where none must."""
    counts = Counter(one.state for one in known)
    found = [f"{counts[state]} {state}" for state in ("changed", "new") if counts[state]]
    return f"; not usable before they are accepted: {', '.join(found)}" if found else ""


def _may_start(server: Tool, catalog: Catalog, definitions: McpDefinitions) -> bool:
    """Whether asking a server starts no program that its owner has not accepted."""
    return not _is_process(server) or server.origin.is_built_in or is_owners(server, catalog, definitions)


def _is_process(server: Tool) -> bool:
    return server.manifest.config.get("transport") == "stdio"


class ServerAcceptResponse(Response, frozen=True, kw_only=True):
    """The items that were accepted."""

    action: str
    server: str
    status: str
    message: str
    accepted: list[str]


class ServerDiffRequest(NamedServerRequest, frozen=True, kw_only=True):
    """What of a server to compare."""

    tool: Annotated[
        NameText | None, Argument("One item of it, or TOOL@DIGEST as shown; all of them otherwise.", "TOOL")
    ] = None


class ServerAcceptRequest(ServerDiffRequest, frozen=True, kw_only=True):
    """What of a server to accept."""

    dry_run: DryRun = False


class DefinitionDiff(Response, frozen=True, kw_only=True):
    """One definition that is not as it was accepted."""

    tool_id: str
    kind: str
    state: str
    digest: str
    diff: str


class ServerDiffResponse(Response, frozen=True, kw_only=True):
    """What a server offers that is not as it was accepted."""

    action: str
    server: str
    status: str
    changes: list[DefinitionDiff]
    gone: list[str]
    warnings: Warnings = UNSET
    manifest: str | UnsetType = UNSET
    next: str | UnsetType = UNSET


def _accept_view(response: ServerAcceptResponse) -> Iterator[ViewItem]:
    yield Data(response.message)
    for name in response.accepted:
        yield Notice(f"  {MARKS['accepted']} {name}")


def _diff_view(response: ServerDiffResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    for change in response.changes:
        yield Data(f"{change.tool_id} ({change.state})")
        yield Data(change.diff)
    for name in response.gone:
        yield Data(f"{name} (gone)")
    if response.manifest:
        yield Data(f"manifest of {response.server}")
        yield Data(response.manifest)
    if response.status == "same":
        yield Notice("Nothing differs.")
    yield from next_hint(response.next)


@verb(
    "accept", group="mcp", access=OWNER, needs_receipt=True, hint=ASK_OWNER.format("accept SERVER"), shows=_accept_view
)
async def accept(request: ServerAcceptRequest, context: VerbContext) -> ServerAcceptResponse:
    """Allow the use of a server's items as it describes them now."""
    catalogs = context.services.catalogs
    space = catalogs.space_if_any(request.project_path)
    return await catalogs.near.do(space, lambda catalog: _accept(request, catalog, catalogs.definitions()))


@verb("diff", group="mcp", access=ANYONE, records=False, needs_rules=True, shows=_diff_view)
async def diff(request: ServerDiffRequest, context: VerbContext) -> ServerDiffResponse:
    """Show the descriptions that changed since the server was accepted."""
    catalogs = context.services.catalogs
    space = catalogs.space_if_any(request.project_path)
    rights = context.services.rights(context.caller)
    return await catalogs.near.do(
        space, lambda catalog: _diff(request, catalog, catalogs.definitions(), ItemVisibility(catalog, rights))
    )


def _accept(request: ServerAcceptRequest, catalog: Catalog, definitions: McpDefinitions) -> ServerAcceptResponse:
    # NAME@DIGEST names what the owner looked at.
    name, _, expected = request.server.rpartition("@")
    if not (name and _DIGEST.fullmatch(expected)):
        name, expected = request.server, ""
    server = find_server(name, catalog)
    key = key_of(server, catalog.space)
    before, known = definitions.find(key), definitions.of(key)
    if request.tool:
        known = _named(server, request.tool, known)
    if expected and not state_digest(server, known).startswith(expected):
        raise InvalidRequest(
            f"{server.id!r} offers something else than you looked at.",
            suggestion=f"Look at it again: `kiwi mcp diff {server.id}`.",
        )
    if request.tool and before is not None and before.digest != server.digest:
        raise InvalidRequest(
            f"The manifest of {server.id!r} changed, which concerns all that it offers.",
            suggestion=f"Look at it (`kiwi mcp diff {server.id}`). If it is right, `kiwi mcp accept {server.id}`.",
        )
    wanted = [one for one in known if one.state in {"new", "changed"}]
    names = frozenset(one.tool_id for one in wanted)

    def work(record: ServerRecord | None, current: Sequence[Definition]) -> ServerDefinitions:
        # Items that were added since are not what the owner looked at.
        seen = {(one.kind, one.name): one.digest for one in wanted}
        same = {one.tool_id for one in current if seen.get((one.kind, one.name)) == one.digest}
        stored = record or new_record(server, key)
        after = accepted(current, same, now=moment())
        if request.tool:  # accepting one item does not accept the manifest
            return stored, after
        stored = replace(stored, digest=server.digest, accepts_first=False, words=launch_summary(server))
        return stored, tuple(one for one in after if one.state != "gone" or (one.kind, one.name) not in gone)

    gone = {(one.kind, one.name) for one in known if one.state == "gone"}
    is_changed = before is not None and before.digest != server.digest
    is_unrecorded = not request.tool and (before is None or before.words != launch_summary(server))
    if (names or gone or is_changed or is_unrecorded) and not request.dry_run:
        definitions.change(key, work)
    if not request.dry_run:
        touch_server_names(catalog.space.user)
    also = f"the manifest of {server.id} and " if is_changed else ""
    return ServerAcceptResponse(
        action="accept",
        server=server.id,
        status="planned" if request.dry_run else "accepted",
        message=f"{also}{count_text(len(wanted), 'item')} of {server.id} {_acceptance(request, server)}",
        accepted=sorted(names),
    )


def _acceptance(request: ServerAcceptRequest, server: Tool) -> str:
    """Return what is done, where the server may be reached from now on, and what it may ask of clients."""
    done = "would be accepted" if request.dry_run else "accepted"
    if request.tool:
        return done
    host = local_network_host(as_text(server.manifest.config.get("url")))
    reach = f"; Kiwi may reach it at {host}" if host else ""
    return f"{done}{reach}{needs_text(Needs(client=server.manifest.needs.client))}"


def _diff(
    request: ServerDiffRequest, catalog: Catalog, definitions: McpDefinitions, permission: ItemVisibility
) -> ServerDiffResponse:
    server = visible_server(request.server, catalog, permission)
    key = key_of(server, catalog.space)
    record, known = definitions.find(key), visible_items(server.id, definitions.of(key), permission)
    if request.tool:
        known = _named(server, request.tool, known)
    limit = _MAX_BYTES if request.tool else MAX_DIFF
    changes = [
        filled(DefinitionDiff, one, diff=one.difference_within(limit, "name the item to see them"))
        for one in known
        if one.state in {"new", "changed"}
    ]
    gone = [one.tool_id for one in known if one.state == "gone"]
    is_changed = record is not None and record.digest != server.digest
    name = f"{server.id}@{state_digest(server, known)[:_SHORT]}"
    if request.tool:
        name = f"{server.id} {known[0].tool_id}@{known[0].digest[:_SHORT]}"
    return ServerDiffResponse(
        action="diff",
        server=server.id,
        status="differs" if changes or gone or is_changed else "same",
        changes=changes[:MAX_ITEMS],
        gone=gone[:MAX_ITEMS],
        warnings=[unaccepted_notice(server)] if is_changed else UNSET,
        manifest=difference(server, record) if record is not None and is_changed else UNSET,
        next=f"`kiwi mcp accept {name}` accepts what is shown here." if changes or is_changed else UNSET,
    )


def _named(server: Tool, tool: str, known: Sequence[Definition]) -> list[Definition]:
    """Return the definitions of the one item that is named."""
    wanted, _, expected = tool.rpartition("/")[2].partition("@")
    mine = [one for one in known if wanted == one.tool_id or tool == one.name]
    if mine and _DIGEST.fullmatch(expected) and not mine[0].digest.startswith(expected):
        raise InvalidRequest(
            f"{server.id!r} offers {wanted!r} otherwise than you looked at.",
            suggestion=f"Look at it again: `kiwi mcp diff {server.id} {wanted}`.",
        )
    if not mine:
        near = did_you_mean(wanted, [one.tool_id for one in known])
        raise NotFound(
            f"{server.id!r} offers no {tool!r}.", suggestion=f"{near}`kiwi mcp list {server.id}` shows what it offers."
        )
    return mine


def state_digest(server: Tool, known: Sequence[Definition]) -> str:
    """Return the digest of a server's manifest and of everything that waits to be accepted, as they are now."""
    waits = sorted(one.digest for one in known if one.state in {"new", "changed"})
    return sha256(" ".join((server.digest, *waits)).encode()).hexdigest()
