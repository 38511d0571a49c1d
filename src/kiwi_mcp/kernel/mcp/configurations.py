"""Configurations of other clients: the MCP servers they have, read into drafts of items."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.kernel.mcp.clients import Client, client_of, project_of, read_text, unusable
from kiwi_mcp.kernel.mcp.drafts import Imported, ServerDraft, Setting, draft_server, id_for, is_disabled
from kiwi_mcp.kernel.mcp.jsonc import plain, read_object
from kiwi_mcp.kernel.mcp.references import Gathered

_SERVER_WORDS = frozenset({"command", "url", "serverUrl", "httpUrl"})
_KEYS = ("mcpServers", "servers")
_MAX_SERVERS = 1_000


@dataclass(frozen=True, slots=True)
class _Entry:
    """A server as it stands in a configuration."""

    name: str
    words: JsonObject
    project: str = ""
    is_disabled: bool = False


def read_configuration(
    path: Path, *, home: Path | None = None, project: Path | None = None, taken: Collection[str] = ()
) -> Imported:
    """Return the servers of a client's configuration; `taken` are names that items have already."""
    text = read_text(path)
    if text is None:
        raise unusable(path, "there is no such file")
    home = home or Path.home()
    found = project or project_of(path.absolute())
    setting = Setting(_title(client_of(path)), home, None if found == home else found)
    imported = read_servers(text, what=str(path), setting=setting, taken=taken)
    strange = _strange_syntax(text, client_of(path))
    return imported if strange is None else replace(imported, issues=(strange, *imported.issues))


def read_servers(text: str, *, what: str, setting: Setting, taken: Collection[str] = ()) -> Imported:
    """Return the servers in the text of a configuration, whichever client's shape it has."""
    root = read_object(text, what=what)
    gathered = Gathered(inputs=_inputs(root))
    used = set(taken)
    servers: list[ServerDraft] = []
    entries = list(_entries(root))
    for entry in entries[:_MAX_SERVERS]:
        if (draft := _draft(entry, gathered, setting, used)) is not None:
            used.add(draft.tool_id)
            servers.append(draft)
    if len(entries) > _MAX_SERVERS:
        gathered.issues.append(Issue("", f"more than {_MAX_SERVERS:,} servers", "Import them in parts."))
    if not entries:
        fix = "Name a file with `mcpServers` or `servers` in it."
        gathered.warn("", "no MCP servers are described here", fix)
    return Imported(tuple(servers), tuple(gathered.issues), dict(gathered.secrets), dict(gathered.variables))


def _draft(entry: _Entry, gathered: Gathered, setting: Setting, used: Collection[str]) -> ServerDraft | None:
    if not entry.words:
        gathered.issues.append(Issue(entry.name, "is not an object", "Write the server as `{ … }`."))
        return None
    local = setting if not entry.project else Setting(setting.title, setting.home, Path(entry.project))
    tool_id = id_for(entry.name, used)
    manifest = draft_server(entry.name, entry.words, gathered, setting=local, tool_id=tool_id)
    if manifest is None:
        return None
    return ServerDraft(entry.name, manifest, entry.is_disabled or is_disabled(entry.words), entry.project)


def _entries(root: JsonObject) -> Iterator[_Entry]:
    """Give every server of a configuration: the user's, then those the client keeps for single projects."""
    disabled = _disabled(root)
    yield from _servers(_table(root), disabled=disabled)
    for project, words in as_object(root.get("projects")).items():
        inner = as_object(words)
        yield from _servers(inner.get("mcpServers"), project=project, disabled=disabled | _disabled(inner))


def _table(root: JsonObject) -> Json:
    for holder in (root, as_object(root.get("mcp"))):
        for key in _KEYS:
            if key in holder:
                return holder[key]
    # A part of a configuration, as pages of servers show it: names and servers, and nothing around them.
    looks_bare = root and all(not _SERVER_WORDS.isdisjoint(as_object(words)) for words in root.values())
    return root if looks_bare else None


def _servers(table: Json, *, project: str = "", disabled: Collection[str] = ()) -> Iterator[_Entry]:
    for name, words in as_object(table).items():
        yield _Entry(name, as_object(words), project, name in disabled)


def _disabled(words: JsonObject) -> set[str]:
    listed = (*as_list(words.get("disabledMcpServers")), *as_list(words.get("disabledMcpjsonServers")))
    return {text_of(name) for name in listed}


def _inputs(root: JsonObject) -> Mapping[str, JsonObject]:
    listed = (*as_list(root.get("inputs")), *as_list(as_object(root.get("mcp")).get("inputs")))
    return {as_text(as_object(words).get("id")): as_object(words) for words in listed}


def _strange_syntax(text: str, client: Client | None) -> Issue | None:
    if client is None or client.has_comments or plain(text) == text:
        return None
    reason = f"has comments or trailing commas, which {client.title} does not read"
    return Issue("", reason, "Remove them there, or the client uses none of its servers.", "warning")


def _title(client: Client | None) -> str:
    return client.title if client else "its configuration"
