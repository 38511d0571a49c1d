"""Wishes for servers: from the owner's words or other clients' configurations to manifests, and secrets put aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.kernel.mcp.clients import Configuration, Scope, client_of, find_configurations, read_text
from kiwi_mcp.kernel.mcp.configurations import read_configuration
from kiwi_mcp.kernel.mcp.drafts import Imported, ServerDraft, Setting, draft_server, id_for
from kiwi_mcp.kernel.mcp.jsonc import read_object
from kiwi_mcp.kernel.mcp.needs import needs_said, with_needs
from kiwi_mcp.kernel.mcp.references import Gathered
from kiwi_mcp.kernel.mcp.server_json import read_server_json
from kiwi_mcp.kernel.mcp.words import launch_of
from kiwi_mcp.kernel.places import has_project
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.primitives.secret_lines import are_same
from kiwi_mcp.primitives.secrets import Secret, names_in

_SERVER_JSON = frozenset({"packages", "remotes"})


@dataclass(frozen=True, slots=True)
class Wish:
    """A server that is to be added: its manifest, where that goes, and the secrets that were among its words."""

    manifest: JsonObject
    location: Scope = "project"
    issues: tuple[Issue, ...] = ()
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    origin: JsonObject = field(default_factory=dict)
    """Which entry of whose file it was, in the words of an answer."""
    is_here: bool = False
    """Whether a server that is reached alike is here already, under the name in the manifest."""

    @property
    def tool_id(self) -> str:
        """The name the server has here."""
        return as_text(self.manifest.get("tool_id"))


@dataclass(frozen=True, slots=True)
class Wishes:
    """The servers of some configurations, those that are left out and why, and the variables that must be set."""

    wishes: tuple[Wish, ...]
    left_out: tuple[JsonObject, ...]
    issues: tuple[Issue, ...]
    variables: Mapping[str, str]
    empty: tuple[str, ...]
    """The files that were named and hold no server."""


def wished_server(request: McpRequest, space: Space) -> Wish:
    """Return the server that the owner's words describe."""
    location: Scope = request.location or "project"
    said = needs_said(request.read, request.write, request.hosts, space)
    if request.manifest is not None:
        given: JsonObject = request.manifest  # type: ignore[assignment]  # JSON came in, so JSON it is
        manifest = {"tool_type": "mcp_server", "version": "1.0.0", "tool_id": request.server, **given}
        return Wish(with_needs(manifest, said), location)
    if not request.server:
        raise InvalidRequest("The request names no server.", suggestion="Send `server`, what to call it.")
    if request.command and request.url:
        raise InvalidRequest(
            "A server is started by a command or reached by an address, not both.",
            suggestion="Send `command` or `url`.",
        )
    name, gathered = request.server, Gathered()
    words: JsonObject = (
        {"command": request.command, "args": list(request.args), "env": dict(request.env)}
        if request.command
        else {"url": request.url, "type": request.transport, "headers": dict(request.headers)}
    )
    setting = Setting("its owner", Path.home(), space.project)
    tool_id = id_for(name, ())
    drafted = draft_server(
        name, {**words, "description": f"MCP server {name}"}, gathered, setting=setting, tool_id=tool_id
    )
    if drafted is None:
        raise InvalidManifest(name, [issue for issue in gathered.issues if issue.is_error] or gathered.issues)
    return Wish(with_needs(drafted, said), location, tuple(gathered.issues), dict(gathered.secrets))


def imported_servers(request: McpRequest, space: Space, present: Mapping[str, Tool]) -> Wishes:
    """Return the servers of the configurations that are named, or of the user's own; with `all`, of the project's too.

    A project may come from anybody, and what its files start is not what the user chose. What is the user's own is
    meant for every project, and goes to the user's space unless the owner says otherwise.
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
    gathering = _Gathering({name: launch_of(tool.manifest.config) for name, tool in present.items()}, space)
    for path in paths:
        gathering.take(path, _read(path), request.location or scope_of(path, found, space))
    return Wishes(
        tuple(gathering.wishes),
        tuple(gathering.left_out),
        tuple(gathering.issues),
        dict(gathering.variables),
        tuple(gathering.empty) if request.paths else (),
    )


def scope_of(path: Path, found: Sequence[Configuration], space: Space) -> Scope:
    """Return whose servers a file holds: the project's, if it is one of its files, else the user's."""
    known = {one.path: one.scope for one in found}
    if not has_project(space):
        return "user"
    return known.get(path) or ("project" if path.is_relative_to(space.project) else "user")


def shown_path(path: Path, space: Space) -> str:
    """Return a path as its owner would write it."""
    if path.is_relative_to(space.project) and space.project != Path.home():
        return str(path.relative_to(space.project))
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


class _Gathering:
    """The servers of several configurations, each taken once."""

    def __init__(self, present: Mapping[str, JsonObject], space: Space) -> None:
        self._here = dict(present)
        self._taken = dict(present)
        self._space = space
        self._secrets: dict[str, Secret] = {}
        self.wishes: list[Wish] = []
        self.left_out: list[JsonObject] = []
        self.issues: list[Issue] = []
        self.variables: dict[str, str] = {}
        self.empty: list[str] = []

    def take(self, path: Path, imported: Imported, location: Scope) -> None:
        """Take the servers of one configuration."""
        for issue in imported.issues:
            self.issues.append(replace(issue, place=": ".join(filter(None, (path.name, issue.place)))))
        if not imported.servers:
            self.empty.append(shown_path(path, self._space))
        for draft in imported.servers:
            origin = self._origin(path, draft)
            if reason := self._reason_against(draft):
                self.left_out.append({"server": draft.name, "status": "left out", "reason": reason, **origin})
                continue
            config = as_object(draft.manifest.get("config"))
            names = {name for text in _texts(config) for name in names_in(text)}
            mine = {name: secret for name, secret in imported.secrets.items() if name in names}
            self._compare(path, mine)
            same = _named(self._taken, launch_of(config))
            tool_id = same or id_for(draft.name, self._taken)
            if same and same not in self._here:
                reason = f"it is the same as {same}"
                self.left_out.append({"server": draft.name, "status": "left out", "reason": reason, **origin})
                continue
            self._taken[tool_id] = launch_of(config)
            if not same:
                needed = {name: about for name, about in imported.variables.items() if name in names}
                self.variables |= {name: _about(about, tool_id) for name, about in needed.items()}
            manifest = {**draft.manifest, "tool_id": tool_id}
            self.wishes.append(Wish(manifest, location, secrets=mine, origin=origin, is_here=bool(same)))

    def _origin(self, path: Path, draft: ServerDraft) -> JsonObject:
        client = client_of(path)
        told = {"name": draft.name, "from": shown_path(path, self._space)}
        return {**told, "client": client.title} if client else told

    def _reason_against(self, draft: ServerDraft) -> str:
        if draft.is_disabled:
            return "it is disabled there"
        if draft.project and draft.project != str(self._space.project):
            return f"it is meant for {draft.project} alone"
        return ""

    def _compare(self, path: Path, secrets: Mapping[str, Secret]) -> None:
        for name, secret in secrets.items():
            if not are_same(self._secrets.setdefault(name, secret), secret):
                reason = f"has another value in {path.name} than in a configuration before it"
                self.issues.append(Issue(name, reason, "Rename the variable in one of the manifests.", "warning"))


def _named(known: Mapping[str, JsonObject], launch: JsonObject) -> str:
    return next((name for name, words in known.items() if words == launch), "")


def _about(about: str, tool_id: str) -> str:
    """Return what a variable is for, with the name that its server has here."""
    return about if tool_id in about.split() else f"{about}, for {tool_id}"


def _read(path: Path) -> Imported:
    text = read_text(path)
    if text is not None and _SERVER_JSON & read_object(text, what=str(path)).keys():
        return read_server_json(text)
    return read_configuration(path)


def _texts(value: Json) -> Sequence[str]:
    match value:
        case str():
            return [value]
        case Mapping():
            return [text for inner in value.values() for text in _texts(inner)]
        case list() | tuple():
            return [text for inner in value for text in _texts(inner)]
        case _:
            return []
