"""Wishes for servers: from the owner's words or other clients' configurations to manifests, and secrets put aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.kernel.mcp.clients import find_configurations, read_text
from kiwi_mcp.kernel.mcp.configurations import read_configuration
from kiwi_mcp.kernel.mcp.drafts import Imported, ServerDraft, Setting, draft_server, id_for
from kiwi_mcp.kernel.mcp.jsonc import read_object
from kiwi_mcp.kernel.mcp.references import Gathered
from kiwi_mcp.kernel.mcp.server_json import read_server_json
from kiwi_mcp.kernel.private_file import changing
from kiwi_mcp.kernel.requests import McpRequest
from kiwi_mcp.primitives import dotenv
from kiwi_mcp.primitives.secret_lines import are_same, with_secrets
from kiwi_mcp.primitives.secrets import Secret, names_in

_SERVER_JSON = frozenset({"packages", "remotes"})


@dataclass(frozen=True, slots=True)
class Wish:
    """A server that is to be added: its manifest, and the secrets that were among its words."""

    manifest: JsonObject
    issues: tuple[Issue, ...] = ()
    secrets: Mapping[str, Secret] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The servers of some configurations, those that are left out and why, and the variables that must be set."""

    wishes: tuple[Wish, ...]
    left_out: tuple[JsonObject, ...]
    issues: tuple[Issue, ...]
    variables: Mapping[str, str]


def wished_server(request: McpRequest, space: Space) -> Wish:
    """Return the server that the owner's words describe."""
    if request.manifest is not None:
        given: JsonObject = request.manifest  # type: ignore[assignment]  # JSON came in, so JSON it is
        return Wish({"tool_type": "mcp_server", "version": "1.0.0", "tool_id": request.server, **given})
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
    manifest = draft_server(
        name, {**words, "description": f"MCP server {name}"}, gathered, setting=setting, tool_id=tool_id
    )
    if manifest is None:
        raise InvalidManifest(name, [issue for issue in gathered.issues if issue.is_error] or gathered.issues)
    return Wish(manifest, tuple(gathered.issues), dict(gathered.secrets))


def imported_servers(request: McpRequest, space: Space, present: Mapping[str, Tool]) -> Wishes:
    """Return the servers of the configurations that are named, or of the user's own; with `all`, of the project's too.

    A project may come from anybody, and what its files start is not what the user chose.
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
    gathering = _Gathering({name: tool.manifest.config for name, tool in present.items()}, str(space.project))
    for path in paths:
        gathering.take(path, _read(path))
    return Wishes(
        tuple(gathering.wishes), tuple(gathering.left_out), tuple(gathering.issues), dict(gathering.variables)
    )


def keep_secrets(secrets: Mapping[str, Secret], path: Path) -> Sequence[Issue]:
    """Write secrets into the owner's own file of variables, and return why some were not."""
    with changing(path) as put:
        dotenv.read(path)  # refuses what is no text file of the owner's
        before = path.read_bytes() if path.exists() else b""
        added = with_secrets(before, secrets)
        if added.data != before:
            put(added.data)
            path.chmod(0o600)
    return [
        *(
            Issue(name, f"is in {path} with another value", "Decide which one holds.", "warning")
            for name in added.differing
        ),
        *(
            Issue(name, "cannot be written as one line", f"Set {name} yourself.", "warning")
            for name in added.unwritable
        ),
    ]


class _Gathering:
    """The servers of several configurations, each taken once."""

    def __init__(self, present: Mapping[str, JsonObject], project: str) -> None:
        self._present = dict(present)
        self._project = project
        self._secrets: dict[str, Secret] = {}
        self.wishes: list[Wish] = []
        self.left_out: list[JsonObject] = []
        self.issues: list[Issue] = []
        self.variables: dict[str, str] = {}

    def take(self, path: Path, imported: Imported) -> None:
        """Take the servers of one configuration."""
        self.issues += [replace(issue, place=f"{path.name}: {issue.place}") for issue in imported.issues]
        for draft in imported.servers:
            if reason := self._reason_against(draft):
                self.left_out.append({"server": draft.name, "status": "left out", "reason": reason, "from": str(path)})
                continue
            tool_id = id_for(draft.name, self._present)
            config = as_object(draft.manifest.get("config"))
            self._present[tool_id] = config
            names = {name for text in _texts(config) for name in names_in(text)}
            mine = {name: secret for name, secret in imported.secrets.items() if name in names}
            self._compare(path, mine)
            self.variables |= {name: about for name, about in imported.variables.items() if name in names}
            self.wishes.append(Wish({**draft.manifest, "tool_id": tool_id}, secrets=mine))

    def _reason_against(self, draft: ServerDraft) -> str:
        if draft.is_disabled:
            return "it is disabled there"
        if draft.project and draft.project != self._project:
            return f"it is meant for {draft.project} alone"
        config = as_object(draft.manifest.get("config"))
        same = next((name for name, known in self._present.items() if known == config), "")
        return f"it is here already, as {same}" if same else ""

    def _compare(self, path: Path, secrets: Mapping[str, Secret]) -> None:
        for name, secret in secrets.items():
            if not are_same(self._secrets.setdefault(name, secret), secret):
                reason = f"has another value in {path.name} than in a configuration before it"
                self.issues.append(Issue(name, reason, "Rename the variable in one of the manifests.", "warning"))


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
