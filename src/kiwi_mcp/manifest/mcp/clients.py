"""MCP clients: where each keeps its configuration, the servers in it, and Kiwi's own entry.

The entry is planned first, then written with a backup, and undone from it.
"""

from __future__ import annotations

import glob
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from difflib import unified_diff
from errno import ENXIO
from functools import cache
from hashlib import sha256
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Conflict, Invalid, InvalidRequest, NotFound, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.manifest.document import read_data, refuse
from kiwi_mcp.manifest.mcp.client_format import (
    MAX_BYTES,
    ClientFile,
    Format,
    format_of,
    masked,
    plain,
    read_text_as,
    with_member,
)
from kiwi_mcp.manifest.mcp.server_entry import (
    EntryOrigin,
    ImportedServers,
    ImportFindings,
    ServerDraft,
    draft_server,
    id_for,
)
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.owner_file import put_file

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
        own = {"command": [command, *args]} if self.has_argv else {self.command_word: command, "args": [*args]}
        return {**self.entry, **own}

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
    table = as_object(read_data("clients.yaml"))
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
    places = (
        (client, place) for client in clients().values() for scope in SCOPES for place in client.all_places(scope)
    )
    return next((client for client, place in places if _ends_with(path, place)), None)


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
            is_disabled = is_off or words.get("disabled") is True or words.get("enabled") is False
            servers.append(ServerDraft(name, manifest, is_disabled, project))
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


ENTRY = "kiwi"
"""The name under which clients know Kiwi."""
BACKUP, REPLACED = ".kiwi-backup-", ".kiwi-replaced-"
"""What follows on the name of a file in that of its backup; the second where servers were taken out of the file."""
_MAX_BACKUPS = 20
_PRIVATE, _SHARED = 0o600, 0o644


class ClientFileChange(Struct, frozen=True):
    """The new text of a client's file, None for no file; only `diff` is shown, as the texts may hold secrets."""

    path: Path
    before: str | None
    after: str | None
    mode: int = _PRIVATE
    spent: Path | None = None
    """The backup that an undo puts back, which is then no longer needed."""
    shown: frozenset[str] = frozenset()
    keep_in: Path | None = None
    """Where the backup goes; beside the file otherwise."""
    taken_out: tuple[str, ...] = ()
    """The servers that the file loses."""
    put_back: tuple[str, ...] = ()
    """The servers that the file has again."""

    def __repr__(self) -> str:
        return f"ClientFileChange(path={self.path!r})"

    @property
    def is_needed(self) -> bool:
        """Whether anything would change."""
        return self.before != self.after

    @property
    def diff(self) -> str:
        """The change as a person reads it, with every value masked that is not Kiwi's own."""
        kind = format_of(self.path.name)
        texts = [plain(text or "") if kind == "json" else text or "" for text in (self.before, self.after)]
        before, after = (masked(text, kind, self.shown).splitlines(keepends=True) for text in texts)
        return "".join(unified_diff(before, after, str(self.path), str(self.path)))


def plan_connect(
    client: str,
    scope: Scope,
    *,
    home: Path,
    project: Path,
    command: str,
    without: Collection[str] = (),
    keep_in: Path | None = None,
) -> ClientFileChange:
    """Return the change that lets a client start Kiwi by the command, `without` servers that Kiwi stands for.

    The command is an absolute path: programs with windows do not have the PATH of a shell.
    """
    known, path = target_of(client, scope, home, project)
    if not Path(command).is_absolute():
        raise InvalidRequest(f"{command!r} is not an absolute path.", suggestion="Name the program by its whole path.")
    before = _read(path, known)
    entry = known.entry_of(command, known.arguments(scope))
    gone = tuple(name for name in known.file.servers(before or "", what=str(path)) if name in without)
    after = _with_entry(_without(before or "", known, gone, what=str(path)), known, entry, what=str(path))
    mode = _PRIVATE if scope == "user" else _SHARED
    shown = frozenset(_texts(entry))
    return ClientFileChange(path, before, after, mode, shown=shown, keep_in=keep_in, taken_out=gone)


def plan_undo(client: str, scope: Scope, *, home: Path, project: Path, keep_in: Path | None = None) -> ClientFileChange:
    """Return the change that takes Kiwi's entry out again and puts back the servers that Kiwi had replaced."""
    known, path = target_of(client, scope, home, project)
    before = _read(path, known)
    table = known.file.servers(before or "", what=str(path))
    if before is None or ENTRY not in table:
        return ClientFileChange(path, before, before)
    entry = table[ENTRY]
    own = {word: entry[word] for word in known.entry_of("", ()) if word in entry}
    shown = frozenset(_texts(own))
    backups = _backups_since_connect(path, keep_in, known)
    # The servers that were taken out since Kiwi was written into the file, and are not there again.
    replaced = [known.file.servers(text, what=str(backup)) for backup, text in backups if REPLACED in backup.name]
    lost = {name: words for one in replaced for name, words in one.items() if name not in {*table, ENTRY}}
    for backup, text in backups[:1]:
        # Written here and not touched since: what was there before is put back to the byte.
        try:
            missing = tuple(name for name in known.file.servers(text, what="the backup") if name not in table)
            bare = _without(text, known, missing, what="the backup")
            is_untouched = _with_entry(bare, known, own, what="the backup") == before
        except Invalid:
            continue
        if is_untouched and {*lost} <= {*missing}:
            return ClientFileChange(path, before, text, spent=backup, shown=shown, put_back=missing)
    if not lost and _with_entry("", known, own, what=str(path)) == before:
        return ClientFileChange(path, before, None, shown=shown)
    after = known.file.without_server(before, ENTRY, what=str(path))
    for name, words in lost.items():
        after = known.file.with_server(after, name, words, what=str(path))
    return ClientFileChange(path, before, after, shown=shown, keep_in=keep_in, put_back=tuple(lost))


def apply(change: ClientFileChange, *, now: datetime | None = None) -> Path | None:
    """Write a change, whole or not at all, and return the backup of what was there, if one was made."""
    if not change.is_needed:
        return None
    if os.path.realpath(change.path) != str(change.path) or read_text(change.path) != change.before:
        raise Conflict(
            f"{change.path} was changed by another program meanwhile; nothing was written.",
            suggestion="Look at it, then ask for the change again.",
        )
    try:
        return _write(change, now or datetime.now(UTC))
    except OSError as fault:
        raise unusable(change.path, fault.strerror or "it cannot be written") from fault


def keep_copy(change: ClientFileChange) -> Path | None:
    """Keep a copy of a file that its client is about to change itself, and return it; None where there is no file."""
    if change.before is None:
        return None
    backup = _free_name(change, datetime.now(UTC))
    put_file(backup, change.before.encode(), _PRIVATE)
    return backup


def _write(change: ClientFileChange, now: datetime) -> Path | None:
    if change.after is None:
        change.path.unlink()
        return None
    backup, mode = None, change.mode
    if change.before is not None:
        mode = change.path.stat().st_mode & 0o777
        if change.spent is None:
            backup = _free_name(change, now)
            put_file(backup, change.before.encode(), mode)
    try:
        change.path.parent.mkdir(parents=True, exist_ok=True)
        put_file(change.path, change.after.encode(), mode)
    except BaseException:
        if backup is not None:
            backup.unlink(missing_ok=True)
        raise
    if change.spent is not None:
        change.spent.unlink(missing_ok=True)
    return backup


def _free_name(change: ClientFileChange, now: datetime) -> Path:
    folder, stem = _backup_folder(change.path, change.keep_in)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = f"{stem}{REPLACED if change.taken_out else BACKUP}{now.astimezone(UTC):%Y%m%dT%H%M%SZ}"
    for number in range(1, 1_000):
        name = folder / (base if number == 1 else f"{base}-{number:03}")
        if not os.path.lexists(name):
            return name
    raise unusable(change.path, "it has a thousand backups of this second")


def _backup_folder(path: Path, keep_in: Path | None) -> tuple[Path, str]:
    """Return the folder in which backups of a file are, and how their names begin."""
    if keep_in is None:
        return path.parent, path.name
    return keep_in, f"{sha256(str(path).encode(errors='surrogatepass')).hexdigest()[:16]}-{path.name}"


def target_of(client: str, scope: Scope, home: Path, project: Path) -> tuple[ClientApp, Path]:
    """Return a client and its file, every link followed, which must stay below the home folder or the project.

    It is the first of its files that is there, and the first of all where none is.
    """
    known = clients().get(client)
    if known is None:
        raise NotFound(
            f"No client {client!r} is known.",
            suggestion=f"{did_you_mean(client, clients())}Choose one of {', '.join(clients())}.",
        )
    places = known.places(scope) if scope in SCOPES else ()
    if not places:
        raise InvalidRequest(
            f"{known.title} has no file for the scope {scope!r}.",
            suggestion=f"Choose the other of {' and '.join(SCOPES)}.",
        )
    root = Path(os.path.realpath(home if scope == "user" else project))
    same = [place for place in places if Path(place).stem == Path(places[0]).stem]
    place = next((one for one in same if os.path.lexists(root / one)), places[0])
    path = Path(os.path.realpath(root / place))
    if not path.is_relative_to(root):
        raise unusable(root / place, f"it is a link that leads out of {root}")
    return known, path


def _read(path: Path, client: ClientApp) -> str | None:
    text = read_text(path)
    if text is not None and client.format == "json" and not client.has_comments and plain(text) != text:
        raise refuse(str(path), f"has comments or trailing commas, which {client.title} does not read", "Remove them.")
    return text


def _without(text: str, client: ClientApp, names: Sequence[str], *, what: str) -> str:
    for name in names:
        text = client.file.without_server(text, name, what=what)
    return text


def _backups_since_connect(path: Path, keep_in: Path | None, client: ClientApp) -> list[tuple[Path, str]]:
    """Return the backups since Kiwi was connected, the oldest first; only the first lacks Kiwi's entry."""
    folders = dict.fromkeys((_backup_folder(path, keep_in), _backup_folder(path, None)))
    backups = [
        one
        for folder, stem in folders
        for mark in (BACKUP, REPLACED)
        for one in folder.glob(f"{glob.escape(stem)}{mark}*")
        if one.is_file() and not one.is_symlink()
    ]
    backups.sort(key=lambda one: re.split(f"{BACKUP}|{REPLACED}", one.name)[-1], reverse=True)
    found: list[tuple[Path, str]] = []
    for backup in backups[:_MAX_BACKUPS]:
        try:
            text = read_text(backup) or ""
            has_entry = ENTRY in client.file.servers(text, what=str(backup))
        except Invalid:
            continue
        found.insert(0, (backup, text))
        if not has_entry:
            break
    return found


def _with_entry(text: str, client: ClientApp, entry: JsonObject, *, what: str) -> str:
    known = client.file.servers(text, what=what).get(ENTRY, {})
    if client.format != "json" or client.command_word not in known:
        return client.file.with_server(text, ENTRY, {**known, **entry}, what=what)
    for word, value in entry.items():  # one by one, so that the order and the comments in it stay
        text = with_member(text, (*client.key, ENTRY, word), value, what=what)
    return text


def _texts(entry: JsonObject) -> Iterator[str]:
    for value in entry.values():
        yield from [as_text(value)] if isinstance(value, str) else map(text_of, as_list(value))
