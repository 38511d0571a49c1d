"""mcp add, import, allow: new servers and what they may use; secrets of imported entries are sealed and granted."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import UNSET, Meta, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import AlreadyExists, InvalidManifest, InvalidRequest, KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import CLIENT_REQUESTS, SOURCE_TRAITS, UNIX, Needs, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.mcp_servers import (
    McpServers,
    RefreshResult,
    find_server,
    key_of,
    known_servers,
    launch_of,
    launch_summary,
    new_record,
)
from kiwi_mcp.kernel.paths import has_project
from kiwi_mcp.kernel.verb import (
    OWNER,
    AnyJson,
    Argument,
    DryRun,
    LongText,
    NameText,
    Option,
    ProjectRequest,
    Response,
    verb,
)
from kiwi_mcp.kernel.verbs.create import Author, CreateRequest, UpdateRequest, create_item, update_item
from kiwi_mcp.kernel.verbs.init import ignore_derived
from kiwi_mcp.kernel.verbs.mcp.servers import (
    ASK_OWNER,
    NO_NETWORK,
    ServerChange,
    ServerItem,
    ServerName,
    Warnings,
    count_kinds,
    details_view,
    item_rows,
    items_view,
    may_change,
    may_reach,
    open_context,
    package_of,
)
from kiwi_mcp.kernel.view import Notice, TableRow, ViewItem, count_text, next_hint, warning_rows
from kiwi_mcp.manifest.files import writing
from kiwi_mcp.manifest.mcp.client_format import read_object
from kiwi_mcp.manifest.mcp.clients import (
    Configuration,
    Scope,
    client_of,
    find_configurations,
    project_of,
    read_configuration,
    read_text,
)
from kiwi_mcp.manifest.mcp.launch_command import ServerCommand, hosts_named, image_of, server_in
from kiwi_mcp.manifest.mcp.server_entry import EntryOrigin, ImportedServers, ImportFindings, draft_server, id_for
from kiwi_mcp.manifest.templates import variables
from kiwi_mcp.policy.needs import make_folders, needs_named, needs_text, with_needs, write_place
from kiwi_mcp.policy.secret_access import open_vault, stored_secrets
from kiwi_mcp.primitives.http.addresses import local_network_host
from kiwi_mcp.primitives.secrets.grants import SecretGrant
from kiwi_mcp.primitives.secrets.redaction import weakness
from kiwi_mcp.primitives.secrets.reveal import SecretScope, Variables
from kiwi_mcp.sandbox.command_files import is_too_wide

_REGISTRY_KEYS = frozenset({"packages", "remotes"})
"""The keys of a `server.json`, in which MCP registries describe a server."""
_CATEGORY = "mcp"

Paths = Annotated[tuple[LongText, ...], Meta(max_length=100)]
WithSecrets = Annotated[bool, Option("Seal secrets among the arguments, and grant them to the server.")]
NoAccept = Annotated[bool, Option("Leave each of its items to be accepted later.", "--no-accept", value=False)]
NoStart = Annotated[bool, Option("Do not ask the server for its tools yet.", "--no-start", value=False)]
Location = Annotated[Scope | None, Option("project or user.")]


class NeedsRequest(ProjectRequest, frozen=True, kw_only=True):
    """What the owner gives a server."""

    read: Annotated[Paths, Option("A file or folder that it may read.", metavar="PATH", kind="path")] = ()
    write: Annotated[Paths, Option("A file or folder that it may change.", metavar="PATH", kind="path")] = ()
    hosts: Annotated[
        tuple[NameText, ...],
        Meta(max_length=100),
        Option("A host that it may reach: NAME or NAME:PORT.", "--host", metavar="HOST"),
    ] = ()
    roots: Annotated[bool, Option("It may ask clients for their folders.")] = False
    sampling: Annotated[bool, Option("It may use the models of clients.")] = False
    questions: Annotated[bool, Option("It may ask the users of clients.")] = False
    unix_sockets: Annotated[bool, Option("It may make Unix sockets among its own processes, as browsers do.")] = False


class ServerAddRequest(NeedsRequest, frozen=True, kw_only=True):
    """The server to add: a command, an address or a whole manifest."""

    server: Annotated[NameText | None, Argument("Its new name.", "NAME")] = None
    command: LongText | None = None
    args: Annotated[tuple[LongText, ...], Meta(max_length=1_000)] = ()
    url: Annotated[LongText | None, Option("Its address, if it is not started here.")] = None
    headers: Annotated[
        dict[NameText, LongText],
        Option("NAME=VALUE; secrets as ${NAME}.", "--header", metavar="NAME=VALUE", kind="pairs"),
    ] = field(default_factory=dict)
    env: Annotated[
        dict[NameText, LongText], Option("NAME=VALUE; secrets as ${NAME}.", metavar="NAME=VALUE", kind="pairs")
    ] = field(default_factory=dict)
    transport: Annotated[Literal["http", "sse", "websocket"] | None, Option("http (default), sse or websocket.")] = None
    manifest: dict[str, AnyJson] | None = None
    with_secrets: WithSecrets = False
    accept: NoAccept = True
    start: NoStart = True
    location: Location = None
    dry_run: DryRun = False

    def brings(self) -> str:
        """Return the identity of the server that it adds."""
        return f"{self.location or 'project'}/local/{self.server or '*'}@*"


class ServersImportRequest(ProjectRequest, frozen=True, kw_only=True):
    """Where to import servers from."""

    paths: Annotated[Paths, Argument("Configurations; otherwise your own of known clients.", "PATH", kind="path")] = ()
    all: Annotated[bool, Option("Those of the project too.")] = False
    with_secrets: WithSecrets = False
    accept: NoAccept = True
    start: NoStart = True
    location: Location = None
    dry_run: DryRun = False

    def brings(self) -> str:
        """Return the identity of the servers that it adds."""
        return f"{self.location or 'project'}/local/*@*"


class ServerAllowRequest(NeedsRequest, frozen=True, kw_only=True):
    """What a server is to be given."""

    server: ServerName
    dry_run: DryRun = False


class ServerAddResponse(Response, frozen=True, kw_only=True):
    """A server that was added, with what it offers."""

    action: str
    server: str
    path: str
    status: str
    message: str
    items: list[ServerItem] | UnsetType = UNSET
    package: AnyJson | UnsetType = UNSET
    warnings: Warnings = UNSET
    next: str | UnsetType = UNSET


class ImportedEntry(Response, frozen=True, kw_only=True):
    """An entry of a configuration, and what became of it."""

    server: str
    name: str
    source: str = field(name="from")
    client: str | UnsetType = UNSET
    status: str
    path: str | UnsetType = UNSET
    location: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    items: int | UnsetType = UNSET
    """How many tools, prompts and resources it offers; unset where it was not asked or did not answer."""
    fault: str | UnsetType = UNSET
    may_reach: str | UnsetType = UNSET
    may_change: str | UnsetType = UNSET
    allow: str | UnsetType = UNSET
    """What to type to let it reach a host, where it starts here and reaches none."""
    note: str | UnsetType = UNSET


class ServersImportResponse(Response, frozen=True, kw_only=True):
    """The servers of other clients, and the variables that must be set for them."""

    action: str
    status: str
    message: str
    servers: list[ImportedEntry]
    variables: dict[str, str]
    empty: list[str] | UnsetType = UNSET
    warnings: Warnings = UNSET

    def exit_status(self) -> int:
        """Return 1 where a file that was named holds no server."""
        return 1 if self.empty else 0


def _add_view(response: ServerAddResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    yield from items_view(response.items or ())
    yield Notice(response.message)
    yield from details_view(response.path, response.package)
    yield from next_hint(response.next)


def _import_view(response: ServersImportResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    for server in response.servers:
        renamed = f" ← {server.name}" if server.name != server.server else ""
        place = ", ".join(filter(None, (server.client or "", server.source)))
        target = f" → {server.location}" if server.location else ""
        reason = f"; {server.reason}" if server.reason else ""
        yield TableRow(f"{server.status:<9} {server.server}{renamed} ({place}){target}{reason}")
        if server.may_reach:
            yield Notice(f"          may reach: {server.may_reach}; may change: {server.may_change}")
        for text in filter(None, (server.fault or "", server.note or "")):
            yield Notice(f"          {text.partition(chr(10))[0]}")
    for server in response.servers:
        if server.allow:
            yield Notice(f"  {server.server} has no network. To allow a host: `{server.allow}`")
    for name, about in response.variables.items():
        yield Notice(f"  ${{{name}}}: {about}")
    yield Notice(response.message)


class NewServer(Struct, frozen=True):
    """A server that is to be added: its manifest, where that goes, and the secrets that were among its words."""

    manifest: JsonObject
    location: Scope = "project"
    issues: tuple[Issue, ...] = ()
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    origin: Mapping[str, AnyJson] = field(default_factory=dict)
    """The entry, the file and the client that it came from: `name`, `source`, `client`."""
    is_here: bool = False
    """Whether a server that is reached alike is here already, under the name in the manifest."""

    @property
    def tool_id(self) -> str:
        """The name the server has here."""
        return as_text(self.manifest.get("tool_id"))


def described_server(request: ServerAddRequest, space: Space) -> NewServer:
    """Return the server that the owner's words describe."""
    location: Scope = request.location or "project"
    granted = requested_needs(request, space)
    if request.manifest is not None:
        defaults = {"tool_type": "mcp_server", "version": "1.0.0", "tool_id": request.server}
        manifest: JsonObject = {**defaults, **request.manifest}
        return NewServer(with_needs(manifest, granted), location)
    if not request.server:
        raise InvalidRequest("The request names no server.", suggestion="Name it: `kiwi mcp add NAME -- COMMAND`.")
    if request.command and request.url:
        raise InvalidRequest(
            "A server is started by a command or reached by an address, not both.",
            suggestion="Send `command` or `url`.",
        )
    name, findings = request.server, ImportFindings()
    entry: dict[str, Json] = {"url": request.url, "type": request.transport, "headers": dict(request.headers)}
    if request.command:
        entry = {"command": request.command, "args": list(request.args), "env": dict(request.env)}
    entry["description"] = f"MCP server {name}"
    origin = EntryOrigin("its owner", Path.home(), space.project)
    drafted = draft_server(name, entry, findings, origin=origin, tool_id=id_for(name, ()))
    if drafted is None:
        raise InvalidManifest(name, [issue for issue in findings.issues if issue.is_error] or findings.issues)
    implied = needs_named(as_object(drafted["config"]), findings.issues, server=as_text(drafted["tool_id"]))
    drafted = with_needs(drafted, implied, granted)
    return NewServer(drafted, location, tuple(findings.issues), dict(findings.secrets))


def requested_needs(request: NeedsRequest, space: Space) -> Needs:
    """Return what the owner's request gives a server. Of a missing path only a folder to write to can be given."""
    return Needs(
        read=tuple(_granted_path(path, space) for path in request.read),
        write=tuple(_granted_path(path, space, is_writable=True) for path in request.write),
        hosts=tuple(request.hosts),
        client=tuple(name for name in CLIENT_REQUESTS if getattr(request, name)),
        sockets=(UNIX,) if request.unix_sockets else (),
    )


def _granted_path(text: str, space: Space, *, is_writable: bool = False) -> str:
    path = Path(os.path.realpath(space.project / Path(text).expanduser()))
    if is_writable and not path.exists():
        path = write_place(path)
        if is_too_wide(path):
            raise InvalidRequest(
                f"There is no {text!r}, and the folder around it is more than a server is given.",
                suggestion="Put the file into a folder of its own, set that path in the manifest, and name the folder.",
            )
    if any(path.is_relative_to(own.resolve()) for own in (space.cache, space.user, space.memory)):
        raise InvalidRequest(f"{text!r} is Kiwi's own, and given to nothing.", suggestion="Name a folder of your own.")
    if not path.exists() and not is_writable:
        raise InvalidRequest(f"There is no {text!r} to give.", suggestion="Make it first, or name another path.")
    return str(path.relative_to(space.project)) if path.is_relative_to(space.project) else str(path)


def found_servers(request: ServersImportRequest, space: Space, present: Mapping[str, Tool]) -> ServerImport:
    """Return the servers of the named configurations, or of the user's own; with `all`, also the project's.

    A project may come from anyone, and the user did not choose what its files start. Servers of the user's own
    configurations are meant for every project, and go to the user's space unless the owner says otherwise.
    """
    found = find_configurations(Path.home(), space.project)
    paths = [space.project / path for path in request.paths] or [
        one.path for one in found if request.all or one.scope == "user"
    ]
    if not paths:
        raise InvalidRequest(
            "No configuration of a known client is among your own files.",
            suggestion="Name a file: `kiwi mcp import PATH`; or take the project's too: `kiwi mcp import --all`.",
        )
    taken = ServerImport({name: launch_of(tool.manifest.config) for name, tool in present.items()}, space)
    for path in paths:
        text = read_text(path)
        if text is not None and _REGISTRY_KEYS & read_object(text, what=str(path)).keys():
            raise InvalidRequest(
                f"{path} is a server.json of an MCP registry, which Kiwi does not import. Nothing was imported.",
                suggestion="Add it by its package (`kiwi mcp add NAME -- npx -y PACKAGE@VERSION`, `uvx` for PyPI) "
                "or by its address (`kiwi mcp add NAME --url URL`).",
            )
        location = request.location or scope_of(path, found, space)
        taken.take(path, read_configuration(path), location, project=_project_of_file(path, found, space))
    return taken


def scope_of(path: Path, found: Sequence[Configuration], space: Space) -> Scope:
    """Return the scope of a file's servers: the project, if it is one of the project's files, else the user."""
    known = {one.path: one.scope for one in found}
    if not has_project(space):
        return "user"
    return known.get(path) or ("project" if path.is_relative_to(space.project) else "user")


def _project_of_file(path: Path, found: Sequence[Configuration], space: Space) -> Path | None:
    """Return the project that a configuration is a file of; None for the user's own."""
    real = os.path.realpath(path)
    if any(one.scope == "user" and os.path.realpath(one.path) == real for one in found):
        return None
    return space.project if Path(real).is_relative_to(os.path.realpath(space.project)) else project_of(Path(real))


def shown_path(path: Path, space: Space) -> str:
    """Return a path as its owner would write it."""
    if path.is_relative_to(space.project) and space.project != Path.home():
        return str(path.relative_to(space.project))
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


class ServerImport:
    """The servers of several configurations, each taken once, and the reasons why others are left out."""

    def __init__(self, present: Mapping[str, JsonObject], space: Space) -> None:
        self._here, self._taken = present, dict(present)
        self._space = space
        self._secrets: dict[str, Secret] = {}
        self.servers: list[NewServer] = []
        self.left_out: list[ImportedEntry] = []
        self.issues: list[Issue] = []
        self.variables: dict[str, str] = {}
        """The variables that must be set, each with its purpose."""
        self.empty: list[str] = []
        """The files that hold no server."""

    def take(self, path: Path, imported: ImportedServers, location: Scope, *, project: Path | None) -> None:
        """Take the servers of one configuration, which may be a file of a project."""
        self._note(path, imported.issues)
        if not imported.servers:
            self.empty.append(shown_path(path, self._space))
        source: dict[str, AnyJson] = {"source": shown_path(path, self._space)}
        if client := client_of(path):
            source["client"] = client.title
        for draft in imported.servers:
            config = as_object(draft.manifest.get("config"))
            origin = {"name": draft.name, **source}
            names = {*variables(config)}
            mine = {name: secret for name, secret in imported.secrets.items() if name in names}
            same = next((name for name, words in self._taken.items() if words == launch_of(config)), "")
            reason = ""
            if draft.is_disabled:
                reason = "it is disabled there"
            elif draft.project and draft.project != str(self._space.project):
                reason = f"it is meant for {draft.project} alone"
            else:
                self._compare(path, mine)
                if same and same not in self._here:
                    reason = f"it is the same as {same}"
            if reason:
                self.left_out.append(ImportedEntry(server=draft.name, status="left out", reason=reason, **origin))
                continue
            tool_id = same or id_for(draft.name, self._taken)
            self._taken[tool_id] = launch_of(config)
            issues: list[Issue] = []
            needs = needs_named(config, issues, server=tool_id, project=project)
            manifest = with_needs({**draft.manifest, "tool_id": tool_id}, needs)
            if not same:
                for name, about in imported.variables.items():
                    if name in names:
                        self.variables[name] = about if tool_id in about.split() else f"{about}, for {tool_id}"
                self._note(path, issues)
            self.servers.append(NewServer(manifest, location, secrets=mine, origin=origin, is_here=bool(same)))

    def _note(self, path: Path, issues: Sequence[Issue]) -> None:
        self.issues += [replace(one, place=": ".join(filter(None, (path.name, one.place)))) for one in issues]

    def _compare(self, path: Path, secrets: Mapping[str, Secret]) -> None:
        for name, secret in secrets.items():
            if not secret.is_same(self._secrets.setdefault(name, secret)):
                reason = f"has another value in {path.name} than in a configuration before it"
                self.issues.append(Issue(name, reason, "Rename the variable in one of the manifests.", "warning"))


_HOW = "Set them, or say `with_secrets` (`--with-secrets`) to have them sealed and granted to the server."


async def save_secrets(
    servers: Sequence[NewServer], request: ServerAddRequest | ServersImportRequest, catalog: Catalog
) -> tuple[AbstractSet[str], list[Issue]]:
    """Seal the secrets of servers and grant them to each if the request asks for that; otherwise report them.

    For servers that already exist, only secrets that are not set are reported. Return the names of those that were
    sealed, and what the owner must know.
    """
    space, issues, written = catalog.space, list[Issue](), set[str]()
    if request.with_secrets and not request.dry_run:
        for new in servers:
            for name, value in new.secrets.items():
                if issue := await _seal(name, value, new, catalog, written):
                    issues.append(issue)
        return written, issues
    for new in servers:
        names = list(new.secrets)
        if new.is_here:
            found = Variables().locate(names, project=space.project, user=space.user)
            stored = stored_secrets(names, space.user)
            names = [name for name in names if found.get(name) is None and name not in stored]
        if names:
            what = f"{', '.join(names)} held {'secrets' if len(names) > 1 else 'a secret'}"
            issues.append(Issue(new.tool_id, f"{what}, which is not in the manifest", _HOW, "warning"))
    return written, issues


async def _seal(name: str, value: Secret, new: NewServer, catalog: Catalog, written: set[str]) -> Issue | None:
    """Store a secret and grant it to a server; return why that was not done, if it was not.

    A variable that a file sets stays there: other tools may use it, and a stored one needs a grant for each.
    """
    space, store = catalog.space, open_vault(catalog.space.user)
    place = Variables().locate([name], project=space.project, user=space.user, environ={})[name]
    if place is not None:
        here = Variables().resolve([name], project=space.project, user=space.user, environ={}, needed_by=new.tool_id)
        is_same, place = here[name].value.is_same(value), f"set in {place}"
    else:
        stored = (await asyncio.to_thread(store.all)).get(name)
        is_same, place = stored is None or store.value(stored).is_same(value), "stored"
        fault = weakness(name, value)
        if fault and fault.is_unusable:
            return Issue(name, fault.reason, f"Set {name} yourself.", "warning")
        if stored is None:
            await store.put(name, value, _scope(new.manifest), is_weak=fault is not None)
            written.add(name)
        if is_same:
            source = catalog.find(new.tool_id).origin.source if new.is_here else new.location
            # Nothing of a server runs with a manifest that the owner did not accept, so no digest is needed here.
            project = str(space.project) if SOURCE_TRAITS[source].is_in_project else ""
            await store.grant(name, SecretGrant(f"{source}/local/{new.tool_id}", project))
    return None if is_same else Issue(name, f"is {place} with another value", "Decide which one holds.", "warning")


def _scope(manifest: JsonObject) -> SecretScope:
    """Return what holds a secret of a server: its process, or the host of its address."""
    url = as_text(as_object(manifest.get("config")).get("url"))
    return SecretScope((urlsplit(url).netloc.rpartition("@")[2].lower(),), "any") if url else SecretScope()


@verb("add", group="mcp", access=OWNER, hint=ASK_OWNER.format("add NAME -- COMMAND"), shows=_add_view)
async def add(request: ServerAddRequest, context: VerbContext) -> ServerAddResponse:
    """Add a server: kiwi mcp add NAME -- COMMAND ARGS…, or kiwi mcp add NAME --url URL."""
    opened, servers = open_context(request, context), context.services.one(McpServers)
    catalog = opened.catalog
    with servers.changing(is_planned=request.dry_run):
        new = described_server(request, catalog.space)
        tool_id, path = await _create(new, opened, is_planned=request.dry_run)
        _, faults = await save_secrets([replace(new, manifest={**new.manifest, "tool_id": tool_id})], request, catalog)
        warnings: list[AnyJson] = [*map(Issue.to_json, (*new.issues, *faults))]
        if request.dry_run:
            return ServerAddResponse(
                action="add",
                server=tool_id,
                path=path,
                status="planned",
                message=f"{tool_id} would be added",
                warnings=warnings or UNSET,
            )
        server = _trust(tool_id, new, opened, accepts_first=request.accept)
        context.caller.report(Progress(f"starting {tool_id}"))
        offered = await servers.try_refresh(server, catalog, warnings, opened.rights) if request.start else None
    state = "accepted" if request.accept else "to be accepted"
    items = f": {count_kinds(offered.definitions)}, {state}" if offered else ""
    warnings += map(Issue.to_json, offered.issues) if offered else ()
    return ServerAddResponse(
        action="add",
        server=tool_id,
        path=path,
        status="added",
        message=f"{tool_id} was added{items}{_reached([server])}{needs_text(server.manifest.needs)}",
        items=item_rows(offered.definitions) if offered else [],
        package=package_of(server, catalog.space),
        warnings=warnings or UNSET,
        next=_next(tool_id, offered, is_accepted=request.accept),
    )


@verb("allow", group="mcp", access=OWNER, needs_receipt=True, hint=ASK_OWNER.format("allow SERVER --read PATH"))
async def allow(request: ServerAllowRequest, context: VerbContext) -> ServerChange:
    """Let a server read, change or reach more, or ask something of the clients that call it."""
    opened, definitions = open_context(request, context), context.services.catalogs.definitions
    catalog = opened.catalog
    server = find_server(request.server, catalog)
    granted = requested_needs(request, catalog.space)
    if not granted.to_json():
        raise InvalidRequest(
            f"The request does not say what {server.id!r} may have.",
            suggestion=f"`kiwi mcp allow {server.id} --read PATH`, `--write PATH`, `--host HOST`, `--roots`, "
            "`--sampling`, `--questions` or `--unix-sockets`.",
        )
    if not server.origin.is_editable:
        raise InvalidRequest(
            f"{server.id!r} comes from a registry, so its manifest is not changed here.",
            suggestion=f"Copy it first: `kiwi load {server.id} --to user`, then say this again.",
        )
    was_accepted = catalog.is_meant(server)
    needs = with_needs({"needs": server.manifest.needs.to_json()}, granted)["needs"]
    words: dict[str, object] = {"needs": needs, "location": server.origin.source}
    if not request.dry_run:
        make_folders(granted, catalog.space.project)
    change = UpdateRequest(item_id=server.id, parameters=words, dry_run=request.dry_run)
    await update_item(change, Author(opened, authorship=None))
    if request.dry_run:
        message = f"{server.id} would be given more"
        return ServerChange(action="allow", server=server.id, status="planned", message=message, needs=needs)
    changed = catalog.find(server.id, source=server.origin.source)
    unaccepted = f"; nothing of it runs before `kiwi mcp accept {server.id}`"
    if was_accepted:
        key = key_of(changed, catalog.space)
        unaccepted = ""
        now = {"digest": changed.digest, "words": launch_summary(changed)}
        definitions().change(
            key, lambda record, known: (replace(record or new_record(changed, key), **now), tuple(known))
        )
    asks = changed.manifest.needs.write or changed.manifest.needs.hosts
    rule = f"`kiwi approvals rules add 'mcp/{server.id}/*'` says yes beforehand"
    return ServerChange(
        action="allow",
        server=server.id,
        status="allowed",
        message=f"{server.id} was given more{needs_text(changed.manifest.needs)}{unaccepted}",
        needs=needs,
        next=f"Its tools ask you from now on; {rule}." if asks else UNSET,
    )


@verb("import", group="mcp", access=OWNER, hint=ASK_OWNER.format("import"), shows=_import_view)
async def import_servers(request: ServersImportRequest, context: VerbContext) -> ServersImportResponse:
    """Add the servers of other clients; secrets become references."""
    opened, servers = open_context(request, context), context.services.one(McpServers)
    catalog = opened.catalog
    with servers.changing(is_planned=request.dry_run):
        present = {server.id: server for server, _ in known_servers(catalog, servers.definitions())}
        found = found_servers(request, catalog.space, present)
        added: list[Tool] = []
        rows = [*found.left_out]
        rows += [await _import(new, request, opened, added) for new in found.servers if not new.is_here]
        sealed, issues = await save_secrets(found.servers, request, catalog)
        here = [new for new in found.servers if new.is_here]
        rows += [_here(new, present[new.tool_id], sealed) for new in here]
        wanted = [*added, *(present[new.tool_id] for new in here if sealed & new.secrets.keys())]
        report = context.caller.report
        faults: list[AnyJson] = []
        offered = await servers.refresh_all(wanted, catalog, faults, report, opened.rights) if request.start else []
    rows = [_with_result(row, offered, faults) for row in rows]
    empty = found.empty if request.paths else []
    return ServersImportResponse(
        action="import",
        status="planned" if request.dry_run else "imported",
        message=_message(rows, offered, empty, is_planned=request.dry_run) + _reached(added),
        servers=rows,
        variables=found.variables,
        empty=empty or UNSET,
        warnings=[*map(Issue.to_json, (*found.issues, *issues))] or UNSET,
    )


async def _import(new: NewServer, request: ServersImportRequest, context: Context, added: list[Tool]) -> ImportedEntry:
    try:
        _, path = await _create(new, context, is_planned=request.dry_run)
    except KiwiError as fault:
        return ImportedEntry(server=new.tool_id, status="refused", reason=fault.message, **new.origin)
    access: dict[str, AnyJson] = {}
    if not request.dry_run:
        server = _trust(new.tool_id, new, context, accepts_first=request.accept)
        added.append(server)
        access = _access(server)
    is_renamed = new.tool_id != id_for(new.origin["name"], ())
    return ImportedEntry(
        server=new.tool_id,
        status="planned" if request.dry_run else "added",
        path=path,
        location=new.location,
        reason="the name is taken" if is_renamed else UNSET,
        **access,
        **new.origin,
    )


def _access(server: Tool) -> dict[str, AnyJson]:
    """Return what an imported server may reach and change, and how to let it reach a host if it reaches none."""
    config, reached = server.manifest.config, may_reach(server)
    access: dict[str, AnyJson] = {"may_reach": reached, "may_change": may_change(server)}
    known = server_in(config)
    command = ServerCommand(as_text(config.get("command")), tuple(map(text_of, as_list(config.get("args")))))
    if image_of(command):
        return access | {"note": f"It starts a container, which no sandbox can: `kiwi relax {server.id} --to trusted`."}
    if known and known.note:
        access["note"] = known.note
    if reached == NO_NETWORK and known is None:
        env = {name: text_of(value) for name, value in as_object(config.get("env")).items()}
        hosts = " ".join(f"--host {host}" for host in hosts_named(command.args, env)) or "--host HOST"
        access["allow"] = f"kiwi mcp allow {server.id} {hosts}"
    return access


def _with_result(row: ImportedEntry, offered: Sequence[RefreshResult], faults: Sequence[AnyJson]) -> ImportedEntry:
    """Return an entry with what came of asking its server."""
    if row.status != "added":
        return row
    for one in offered:
        if one.server.key.server == row.server:
            return replace(row, items=len(one.definitions))
    for fault in map(as_object, faults):
        if fault.get("place") == row.server:
            return replace(row, status="failed", fault=f"{as_text(fault.get('reason'))} {as_text(fault.get('fix'))}")
    return row


async def _create(new: NewServer, context: Context, *, is_planned: bool) -> tuple[str, str]:
    """Write the manifest of a server; return its name and its path."""
    catalog, project_ai = context.catalog, context.space.project_ai
    words: dict[str, object] = {"manifest": new.manifest, "category": _CATEGORY, "location": new.location}
    creation = CreateRequest(parameters=words, dry_run=is_planned)
    is_first = new.location == "project" and not project_ai.is_dir()
    if not is_planned:
        make_folders(Needs.from_json(new.manifest.get("needs")), catalog.space.project)
    try:
        created = await create_item(creation, Author(context, authorship=None))
    except AlreadyExists as fault:
        is_server = catalog.sheets.is_server(catalog.find(new.tool_id).manifest.tool_type)
        fault.suggestion = (
            f"`kiwi mcp remove {new.tool_id}` first, or choose another name." if is_server else "Choose another name."
        )
        raise
    if is_first and not is_planned:
        with writing(project_ai):
            ignore_derived(project_ai)
    return created.tool_id or "", created.path or ""


def _trust(tool_id: str, new: NewServer, context: Context, *, accepts_first: bool) -> Tool:
    """Store that the owner trusts the server that was just added as it is; return the server."""
    definitions = context.services.catalogs.definitions()
    server = context.catalog.find(tool_id, source=new.location)
    key = key_of(server, context.space)
    record = replace(new_record(server, key), accepts_first=accepts_first, words=launch_summary(server))
    # What an older server of this name offered was accepted of that one, not of this one.
    definitions.remove(key)
    definitions.change(key, lambda *_: (record, ()))
    return server


def _here(new: NewServer, server: Tool, sealed: AbstractSet[str]) -> ImportedEntry:
    """Return the report about an entry for a server that already exists."""
    place = "" if server.origin.source == new.location else f" ({server.origin.source})"
    reason = f"it is here already, as {server.id}{place}"
    if written := sorted(sealed & new.secrets.keys()):
        reason += f"; {', '.join(written)} sealed and granted to it"
    return ImportedEntry(server=new.origin["name"], status="left out", reason=reason, **new.origin)


def _message(
    rows: Sequence[ImportedEntry], offered: Sequence[RefreshResult], empty: Sequence[str], *, is_planned: bool
) -> str:
    number = sum(row.status in {"planned", "added", "failed"} for row in rows)
    failed = sum(row.status == "failed" for row in rows)
    if not rows and empty:
        return f"{', '.join(empty)} {'holds' if len(empty) == 1 else 'hold'} no MCP server"
    done = "would be imported" if is_planned else "imported"
    items = f", with {count_text(sum(len(one.definitions) for one in offered), 'item')}" if offered else ""
    not_started = f"; {failed} of them did not start" if failed else ""
    return f"{count_text(number, 'server')} {done}{items}{not_started}"


def _reached(servers: Sequence[Tool]) -> str:
    """Return at which addresses nearby servers may be reached from now on, because their owner named them."""
    hosts = [local_network_host(as_text(server.manifest.config.get("url"))) for server in servers]
    listed = ", ".join(dict.fromkeys(filter(None, hosts)))
    return f"; Kiwi may reach {listed} for {'it' if len(servers) == 1 else 'them'}" if listed else ""


def _next(tool_id: str, offered: RefreshResult | None, *, is_accepted: bool) -> str:
    if offered is None:
        return f"`kiwi mcp refresh {tool_id}` asks it what it offers."
    return "`kiwi search` finds what it offers." if is_accepted else f"`kiwi mcp accept {tool_id}` lets it be used."
