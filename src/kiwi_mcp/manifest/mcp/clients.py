"""MCP clients: where each keeps its configuration, and the servers in it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from errno import ENXIO
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from msgspec import Struct, convert, field
from msgspec.structs import replace

import kiwi_mcp.data
from kiwi_mcp.domain.errors import InvalidRequest, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.manifest.mcp.jsonc import MAX_BYTES, plain, read_object
from kiwi_mcp.manifest.mcp.references import ImportFindings
from kiwi_mcp.manifest.mcp.server_entry import (
    EntryOrigin,
    ImportedServers,
    ServerDraft,
    draft_server,
    id_for,
    is_disabled,
)
from kiwi_mcp.manifest.yaml import read_yaml

Scope: TypeAlias = Literal["project", "user"]
SCOPES: tuple[Scope, ...] = ("project", "user")
_SERVER_WORDS = frozenset({"command", "url", "serverUrl", "httpUrl"})
_KEYS = ("mcpServers", "servers")
_MAX_SERVERS = 1_000


class ClientApp(Struct, frozen=True):
    """A program that uses MCP servers, as the table of clients describes it."""

    id: str
    title: str
    key: tuple[str, ...]
    has_comments: bool = field(name="comments")
    entry: JsonObject = {}
    project: Mapping[str, tuple[str, ...]] = {}
    """The files below a project that it reads, by platform."""
    user: Mapping[str, tuple[str, ...]] = {}
    by_hand: Mapping[str, str] = {}
    here: str = ""
    """What stands for the project's folder in a file of the project."""

    def arguments(self, scope: Scope) -> list[str]:
        """Return the arguments that it starts Kiwi with: for the project of the configuration file, or for any."""
        return ["serve", "--project", self.here] if scope == "project" and self.here else ["serve"]

    def places(self, scope: Scope, platform: str = sys.platform) -> tuple[str, ...]:
        """Return the files it reads on a platform, below the home folder or a project's."""
        return (self.project if scope == "project" else self.user).get(platform, ())


class Configuration(Struct, frozen=True):
    """A file in which a client keeps its servers."""

    client: ClientApp
    scope: Scope
    path: Path


@cache
def clients() -> Mapping[str, ClientApp]:
    """Return every client that is known, by its name."""
    path = Path(kiwi_mcp.data.__file__).parent / "clients.yaml"
    table = as_object(read_yaml(path.read_text(encoding="utf-8"), what=path.name).value)
    return {name: convert({"id": name, **as_object(words)}, ClientApp) for name, words in table.items()}


def find_configurations(home: Path, project: Path, *, platform: str = sys.platform) -> tuple[Configuration, ...]:
    """Return the files of known clients that exist here, the project's before the user's."""
    roots: Mapping[Scope, Path] = {"project": project, "user": home}
    found: dict[Path, Configuration] = {}
    for scope in SCOPES:
        for client in clients().values():
            for place in client.places(scope, platform):
                path = roots[scope] / place
                if os.path.isfile(path):  # noqa: PTH113 - pathlib raises for folders that are not ours to see
                    known = found.get(path)
                    # In the home folder a file may be both: then it is the user's own.
                    if known is None or known.scope != scope:
                        found[path] = Configuration(client, scope, path)
    return tuple(found.values())


def client_of(path: Path) -> ClientApp | None:
    """Return the client that a path is a configuration of, by the names it ends with."""
    for client in clients().values():
        if any(_ends_with(path, place) for files in (client.project, client.user) for place in chain(*files.values())):
            return client
    return None


def project_of(path: Path) -> Path | None:
    """Return the project that a path would be a configuration of, by the names it ends with."""
    places = (place for client in clients().values() for place in chain(*client.project.values()))
    found = next((place for place in places if _ends_with(path, place)), None)
    return path.parents[len(PurePosixPath(found).parts) - 1] if found else None


def read_text(path: Path) -> str | None:
    """Return the text of a configuration; None where there is no such file."""
    try:
        # Without blocking, so that a FIFO of this name cannot hold Kiwi up.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as fault:
        if isinstance(fault, OSError) and fault.errno == ENXIO:
            return None  # a socket: the placeholder that keeps the name free while a sandbox is running
        raise unusable(path, getattr(fault, "strerror", None) or "it has no usable name") from fault
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it is open already
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise unusable(path, "it is not a regular file")
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise TooLarge(f"{path}", size=None, limit=MAX_BYTES)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise unusable(path, "it is not UTF-8") from fault


def unusable(path: Path, reason: str) -> InvalidRequest:
    """Return the refusal of a configuration that is not read or written."""
    return InvalidRequest(
        f"{path} cannot be used: {reason}.",
        suggestion="Name a configuration that is a UTF-8 text file of your own.",
        path=str(path),
    )


def _ends_with(path: Path, place: str) -> bool:
    parts = PurePosixPath(place).parts
    return path.parts[-len(parts) :] == parts


class _Entry(Struct, frozen=True):
    """A server as a configuration describes it."""

    name: str
    words: JsonObject
    project: str = ""
    is_disabled: bool = False


def read_configuration(
    path: Path, *, home: Path | None = None, project: Path | None = None, taken: Collection[str] = ()
) -> ImportedServers:
    """Return the servers of a client's configuration; `taken` are names that items have already."""
    text = read_text(path)
    if text is None:
        raise unusable(path, "there is no such file")
    home = home or Path.home()
    found = project or project_of(path.absolute())
    client = client_of(path)
    origin = EntryOrigin(client.title if client else "its configuration", home, None if found == home else found)
    imported = read_servers(text, what=str(path), origin=origin, taken=taken)
    if client is None or client.has_comments or plain(text) == text:
        return imported
    reason = f"has comments or trailing commas, which {client.title} does not read"
    strange = Issue("", reason, "Remove them there, or the client uses none of its servers.", "warning")
    return replace(imported, issues=(strange, *imported.issues))


def read_servers(text: str, *, what: str, origin: EntryOrigin, taken: Collection[str] = ()) -> ImportedServers:
    """Return the servers in the text of a configuration, whichever client's shape it has."""
    root = read_object(text, what=what)
    findings = ImportFindings(inputs=_inputs(root))
    used = set(taken)
    servers: list[ServerDraft] = []
    entries = list(_entries(root))
    for entry in entries[:_MAX_SERVERS]:
        if (draft := _draft(entry, findings, origin, used)) is not None:
            used.add(draft.tool_id)
            servers.append(draft)
    if len(entries) > _MAX_SERVERS:
        findings.issues.append(Issue("", f"more than {_MAX_SERVERS:,} servers", "Import them in parts."))
    if not entries:
        fix = "Name a file with `mcpServers` or `servers` in it."
        findings.warn("", "no MCP servers are described here", fix)
    return ImportedServers(tuple(servers), tuple(findings.issues), dict(findings.secrets), dict(findings.variables))


def _draft(entry: _Entry, findings: ImportFindings, origin: EntryOrigin, used: Collection[str]) -> ServerDraft | None:
    if not entry.words:
        findings.issues.append(Issue(entry.name, "is not an object", "Write the server as `{ … }`."))
        return None
    local = origin if not entry.project else EntryOrigin(origin.title, origin.home, Path(entry.project))
    tool_id = id_for(entry.name, used)
    manifest = draft_server(entry.name, entry.words, findings, origin=local, tool_id=tool_id)
    if manifest is None:
        return None
    return ServerDraft(entry.name, manifest, entry.is_disabled or is_disabled(entry.words), entry.project)


def _entries(root: JsonObject) -> Iterator[_Entry]:
    """Give every server of a configuration: the user's, then those the client keeps for single projects."""
    disabled = _disabled(root)
    tables = [("", _table(root), disabled)]
    for project, words in as_object(root.get("projects")).items():
        inner = as_object(words)
        tables.append((project, inner.get("mcpServers"), disabled | _disabled(inner)))
    for project, table, off in tables:
        for name, words in as_object(table).items():
            yield _Entry(name, as_object(words), project, name in off)


def _table(root: JsonObject) -> Json:
    for holder in (root, as_object(root.get("mcp"))):
        for key in _KEYS:
            if key in holder:
                return holder[key]
    # A part of a configuration, as pages of servers show it: names and servers, and nothing around them.
    looks_bare = root and all(not _SERVER_WORDS.isdisjoint(as_object(words)) for words in root.values())
    return root if looks_bare else None


def _disabled(words: JsonObject) -> set[str]:
    listed = (*as_list(words.get("disabledMcpServers")), *as_list(words.get("disabledMcpjsonServers")))
    return {text_of(name) for name in listed}


def _inputs(root: JsonObject) -> Mapping[str, JsonObject]:
    listed = (*as_list(root.get("inputs")), *as_list(as_object(root.get("mcp")).get("inputs")))
    return {as_text(as_object(words).get("id")): as_object(words) for words in listed}
