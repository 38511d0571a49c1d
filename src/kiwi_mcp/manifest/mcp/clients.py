"""MCP clients: where each keeps its configuration, and the servers in it."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
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
from kiwi_mcp.manifest.mcp.client_format import MAX_BYTES, ClientFile, Format, format_of, plain, read_text_as
from kiwi_mcp.manifest.mcp.server_entry import (
    EntryOrigin,
    ImportedServers,
    ImportFindings,
    ServerDraft,
    draft_server,
    id_for,
    is_disabled,
)
from kiwi_mcp.manifest.yaml import read_yaml

Scope: TypeAlias = Literal["project", "user"]
SCOPES: tuple[Scope, ...] = ("project", "user")
_Places: TypeAlias = Mapping[str, tuple[str, ...]] | tuple[str, ...]
_SERVER_WORDS = frozenset({"command", "url", "serverUrl", "httpUrl"})
_KEYS = ("mcpServers", "servers", "mcp_servers", "context_servers", "amp.mcpServers", "extensions")
_BUILT_IN = frozenset({"builtin", "platform", "frontend", "inline_python"})
"""What goose calls extensions that are no servers."""
_MAX_SERVERS = 1_000


class ClientApp(Struct, frozen=True):
    """A program that uses MCP servers, as the table of clients describes it."""

    id: str
    title: str
    key: tuple[str, ...]
    format: Format = "json"
    has_comments: bool = field(name="comments", default=True)
    is_list: bool = field(name="list", default=False)
    has_argv: bool = field(name="argv", default=False)
    command_word: str = field(name="command", default="command")
    entry: JsonObject = {}
    project: _Places = ()
    """The files below a project that it reads, by platform, or the same on all."""
    user: _Places = ()
    own: Mapping[str, Mapping[Literal["add", "remove"], tuple[str, ...]]] = {}
    """Its own commands for the files that it rewrites while it runs, by scope."""
    here: str = ""
    """What stands for the project's folder in a file of the project."""

    @property
    def file(self) -> ClientFile:
        """How its file holds servers."""
        return ClientFile(self.format, self.key, self.is_list)

    def entry_of(self, command: str, args: Sequence[str]) -> JsonObject:
        """Return the entry by which it starts a program."""
        if self.has_argv:
            return {**self.entry, "command": [command, *args]}
        return {**self.entry, self.command_word: command, "args": [*args]}

    def own_command(
        self, verb: Literal["add", "remove"], scope: Scope, name: str, command: str = "", args: Sequence[str] = ()
    ) -> tuple[str, ...]:
        """Return its own command that adds or removes a server; empty if Kiwi writes its file."""
        words = self.own.get(scope, {}).get(verb, ())
        filled = {"{name}": (name,), "{command}": (command,), "{args}": tuple(args)}
        return tuple(word for one in words for word in filled.get(one, (one,)))

    def arguments(self, scope: Scope) -> list[str]:
        """Return the arguments that it starts Kiwi with: for the project of the configuration file, or for any."""
        return ["serve", "--project", self.here] if scope == "project" and self.here else ["serve"]

    def places(self, scope: Scope, platform: str = sys.platform) -> tuple[str, ...]:
        """Return the files it reads on a platform, below the home folder or a project's."""
        places = self.project if scope == "project" else self.user
        return places.get(platform, ()) if isinstance(places, Mapping) else places

    def all_places(self, scope: Scope) -> Iterator[str]:
        """Yield the files that it reads on any platform."""
        places = self.project if scope == "project" else self.user
        yield from chain(*places.values()) if isinstance(places, Mapping) else places


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
        if any(_ends_with(path, place) for scope in SCOPES for place in client.all_places(scope)):
            return client
    return None


def project_of(path: Path) -> Path | None:
    """Return the project that a path would be a configuration of, by the names it ends with."""
    places = (place for client in clients().values() for place in client.all_places("project"))
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
    imported = read_servers(text, what=str(path), origin=origin, taken=taken, kind=format_of(path.name))
    if client is None or client.has_comments or plain(text) == text:
        return imported
    reason = f"has comments or trailing commas, which {client.title} does not read"
    strange = Issue("", reason, "Remove them there, or the client uses none of its servers.", "warning")
    return replace(imported, issues=(strange, *imported.issues))


def read_servers(
    text: str, *, what: str, origin: EntryOrigin, taken: Collection[str] = (), kind: Format = "json"
) -> ImportedServers:
    """Return the servers in the text of a configuration, whichever client's shape it has."""
    root = read_text_as(kind, text, what=what)
    listed = (*as_list(root.get("inputs")), *as_list(as_object(root.get("mcp")).get("inputs")))
    findings = ImportFindings(inputs={as_text(as_object(words).get("id")): as_object(words) for words in listed})
    used = set(taken)
    servers: list[ServerDraft] = []
    entries = list(_entries(root))
    for name, words, project, is_off in entries[:_MAX_SERVERS]:
        if not words:
            findings.issues.append(Issue(name, "is not an object", "Write the server as `{ … }`."))
            continue
        local = EntryOrigin(origin.title, origin.home, Path(project)) if project else origin
        tool_id = id_for(name, used)
        if (manifest := draft_server(name, words, findings, origin=local, tool_id=tool_id)) is not None:
            used.add(tool_id)
            servers.append(ServerDraft(name, manifest, is_off or is_disabled(words), project))
    if len(entries) > _MAX_SERVERS:
        findings.issues.append(Issue("", f"more than {_MAX_SERVERS:,} servers", "Import them in parts."))
    if not entries:
        fix = "Name a file with `mcpServers` or `servers` in it."
        findings.warn("", "no MCP servers are described here", fix)
    return ImportedServers(tuple(servers), tuple(findings.issues), dict(findings.secrets), dict(findings.variables))


def _entries(root: JsonObject) -> Iterator[tuple[str, JsonObject, str, bool]]:
    """Yield every server: name, words, the one project that has it, and whether the client has it switched off.

    Those of the user come first, then those that the client keeps for single projects.
    """
    disabled = _disabled(root)
    tables = [("", _table(root), disabled)]
    for project, words in as_object(root.get("projects")).items():
        inner = as_object(words)
        tables.append((project, inner.get("mcpServers"), disabled | _disabled(inner)))
    for project, table, off in tables:
        # In a list each server has a `name`.
        listed = [(as_text(as_object(words).get("name")) or "server", words) for words in as_list(table)]
        for name, words in listed or as_object(table).items():
            if as_text(as_object(words).get("type")) not in _BUILT_IN:
                yield name, _usual_words(as_object(words)), project, name in off


def _usual_words(words: JsonObject) -> JsonObject:
    """Return an entry in the words that most clients use."""
    command, env = words.get("command"), {**as_object(words.get("env")), **as_object(words.get("environment"))}
    usual: dict[str, Json] = {word: value for word, value in words.items() if word not in _OTHER_WORDS}
    for word, other in _SAME_WORDS.items():
        if other in words:
            usual[word] = words[other]
    if isinstance(command, list | tuple) and command:  # opencode
        usual |= {"command": command[0], "args": [*command[1:]]}
    elif isinstance(command, Mapping):  # Zed, in earlier versions
        usual |= {"command": command.get("path"), "args": command.get("args") or []}
        env = {**as_object(command.get("env")), **env}
    env |= as_object(words.get("envs"))
    passed = (*as_list(words.get("env_keys")), *as_list(words.get("env_vars")))
    env |= {text_of(name): f"${{{text_of(name)}}}" for name in passed}
    headers = {**as_object(words.get("headers")), **as_object(words.get("http_headers"))}
    headers |= as_object(as_object(words.get("requestOptions")).get("headers"))
    headers |= {name: f"${{{text_of(value)}}}" for name, value in as_object(words.get("env_http_headers")).items()}
    if token := as_text(words.get("bearer_token_env_var")):
        headers["Authorization"] = f"Bearer ${{{token}}}"
    usual |= {word: _referred(values) for word, values in (("env", env), ("headers", headers)) if values}
    return usual


_SAME_WORDS: Mapping[str, str] = {"command": "cmd", "url": "uri", "cwd": "working_directory"}
_OTHER_WORDS = frozenset({
    *_SAME_WORDS.values(), "environment", "envs", "env_keys", "env_vars", "http_headers", "env_http_headers",
    "bearer_token_env_var", "requestOptions", "source", "settings", "timeout", "bundled", "display_name",
    "startup_timeout_sec", "tool_timeout_sec", "startup_timeout_ms", "available_tools",
})  # fmt: skip
"""Words that are read under another name, or that say how the client itself goes about it."""
_REFERENCE = re.compile(r"^\$([A-Z][A-Z0-9_]*)$|(?<!\$)\{env:([A-Za-z_][A-Za-z0-9_]*)\}")


def _referred(values: Mapping[str, Json]) -> JsonObject:
    """Return values in which the variables of Gemini CLI (`$NAME`) and opencode (`{env:NAME}`) are `${NAME}`."""
    return {
        name: _REFERENCE.sub(lambda found: f"${{{found[1] or found[2]}}}", value) if isinstance(value, str) else value
        for name, value in values.items()
    }


def _table(root: JsonObject) -> Json:
    for holder in (root, as_object(root.get("mcp"))):
        for key in _KEYS:
            if isinstance(holder.get(key), Mapping | list | tuple):
                return holder[key]
    if (inner := as_object(root.get("mcp"))) and all("type" in as_object(words) for words in inner.values()):
        return inner  # opencode
    # A part of a configuration, as pages of servers show it: names and servers, and nothing around them.
    looks_bare = root and all(not _SERVER_WORDS.isdisjoint(as_object(words)) for words in root.values())
    return root if looks_bare else None


def _disabled(words: JsonObject) -> set[str]:
    listed = (*as_list(words.get("disabledMcpServers")), *as_list(words.get("disabledMcpjsonServers")))
    return {text_of(name) for name in listed}
