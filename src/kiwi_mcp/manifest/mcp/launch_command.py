"""The command line of a server without the shells around it, the package that it fetches, and well-known servers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_data
from kiwi_mcp.manifest.formats import is_node_requirement, is_python_requirement

_OPERATOR = lazy_pattern(r"[|&;<>`\n]|\$\(|\$\w")
_ROOTED = lazy_pattern(r"[/~\"']|[A-Za-z]:[\\/]|\\\\")
_ASSIGNED = lazy_pattern(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_WINDOWS_SUFFIX = lazy_pattern(r"\.(?:cmd|exe|bat|ps1)$", re.IGNORECASE)
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ksh"})
_FETCHERS: Mapping[str, tuple[str, ...]] = {
    "npx": (), "bunx": (), "pnpx": (), "uvx": (), "pnpm": ("dlx",), "yarn": ("dlx",), "npm": ("exec",),
    "pipx": ("run",), "uv": ("tool", "run"), "docker": ("run",), "podman": ("run",),
}  # fmt: skip
"""Programs that fetch what they run, and the words that make them do so."""
_IMAGES = frozenset({"docker", "podman"})
_TAKES_WORD = frozenset({
    "-p", "--package", "--from", "--with", "--python", "-c", "--registry", "--index-url", "--extra-index-url",
    "-e", "--env", "-v", "--volume", "--mount", "--network", "--name", "-w", "--workdir", "-u", "--user", "--env-file",
})  # fmt: skip
_NAMES_PACKAGE = frozenset({"-p", "--package", "--from"})
_PINNED = lazy_pattern(r".+(?:@v?|==)[0-9]+(?:\.[0-9]+)+[\w.+-]*|.+@sha256:[0-9a-f]{64}|(?:\.{0,2}/|[A-Za-z]:[\\/]).*")
_PINNED_IMAGE = lazy_pattern(r".+@sha256:[0-9a-f]{64}|.+:v?[0-9]+(?:\.[0-9]+)+[\w.-]*")
_KIWI = frozenset({"kiwi", "kiwi-mcp", "kiwi_mcp"})
_TAGGED = lazy_pattern(r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@[a-z][a-z0-9-]*")
_VERSION = lazy_pattern(r"([^@]+?)@(?:v?([0-9][\w.!+-]*)|latest)")
_QUIET = frozenset({"-y", "--yes", "-q", "--quiet", "--silent", "--prefer-offline", "--no-install", "--no-cache"})
_QUIET |= {"-n", "--refresh", "--isolated", "-U", "--upgrade", "--offline", "--no-progress", "--"}


class _Runner(Struct, frozen=True):
    """The command line of one program that fetches and runs packages."""

    kind: Literal["node", "python"]
    lead: tuple[str, ...] = ()
    """The words that make it one."""
    package: frozenset[str] = frozenset()
    """Options with the package, where it is not called like its program."""
    others: frozenset[str] = frozenset()
    """Options with further packages."""
    ignored: frozenset[str] = frozenset()
    """Options with a word that does not matter here."""


_UVX = _Runner("python", (), frozenset({"--from"}), frozenset({"--with"}), frozenset({"-p", "--python"}))
_NPX = _Runner("node", (), frozenset({"-p", "--package"}))
_RUNNERS: Mapping[str, tuple[_Runner, ...]] = {
    "npx": (_NPX,),
    "npm": (_Runner("node", ("exec",), _NPX.package), _Runner("node", ("x",), _NPX.package)),
    "uvx": (_UVX,),
    "uv": (_Runner("python", ("tool", "run"), _UVX.package, _UVX.others, _UVX.ignored),),
    "pipx": (_Runner("python", ("run",), frozenset({"--spec"}), frozenset(), frozenset({"--python"})),),
}


class ServerCommand(Struct, frozen=True):
    """A program, its words and the variables it is started with."""

    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def program(self) -> str:
        """The program's bare name: `npx` for `/usr/bin/npx` and for `npx.cmd`."""
        return _WINDOWS_SUFFIX.sub("", PurePosixPath(self.command.replace("\\", "/")).name)

    @property
    def is_kiwi(self) -> bool:
        """Whether it starts Kiwi's own server."""
        words = {self.program, *(word.partition("@")[0].partition("==")[0] for word in self.args)}
        return "serve" in self.args and not _KIWI.isdisjoint(words)


def unwrap(launch: ServerCommand) -> ServerCommand:
    """Return the same command without its wrappers: one line for a shell, `cmd /c`, `sh -c`, `env`."""
    for _ in range(4):
        command, args, program = launch.command, launch.args, launch.program
        inner: ServerCommand | None = None
        if not args and re.search(r"\s", command.strip()) and not _ROOTED.match(command.strip()):
            inner = _split(launch, command) or ServerCommand("sh", ("-c", command), launch.env)
        elif program.lower() == "cmd" and args and args[0].lower() in {"/c", "/k"}:
            inner = _split(launch, args[1]) if len(args) == 2 else _start(launch, args[1:])  # noqa: PLR2004 - one line
        elif program in _SHELLS and len(args) > 1 and re.fullmatch(r"-[lic]*c", args[-2]):
            inner = _split(launch, args[-1])
        elif program == "env" and args and not args[0].startswith("-"):
            inner = _start(launch, args)
        elif command != program and _WINDOWS_SUFFIX.search(command) and not re.search(r"[\\/]", command):
            inner = replace(launch, command=program)
        if inner is None or inner == launch:
            break
        launch = inner
    return launch


def anchor(command: str, *, folder: Path | None) -> str:
    """Return a command that does not depend on where it is started, as far as that is known."""
    is_relative = "/" in command and not _ROOTED.match(command) and not command.startswith(("${", "{"))
    return str(folder / command) if is_relative and folder is not None else command


def unpinned(launch: ServerCommand) -> Issue | None:
    """Return a warning if the command fetches any version of a package; Kiwi installs its own packages once."""
    if package_command(launch.command, launch.args) is not None:
        return None
    lead = _FETCHERS.get(launch.program)
    if lead is None or launch.args[: len(lead)] != lead:
        return None
    package = _package(launch.args[len(lead) :])
    pinned = _PINNED_IMAGE if launch.program in _IMAGES else _PINNED
    if not package or "${" in package or pinned.fullmatch(package):
        return None
    fix = "Name a version, such as `package@1.2.3`, so that a new release cannot change what runs."
    return Issue("config.args", f"`{package[:100]}` is fetched in whatever version there is that day", fix, "warning")


def image_of(launch: ServerCommand) -> str:
    """Return the container image that a command runs; empty if it starts no container."""
    lead = _FETCHERS.get(launch.program)
    is_container = lead is not None and launch.program in _IMAGES and launch.args[: len(lead)] == lead
    return _package(launch.args[1:]) if is_container else ""


def _split(launch: ServerCommand, line: str) -> ServerCommand | None:
    """Return a line as its words, or None where only a shell understands it."""
    if _OPERATOR.search(line):
        return None
    try:
        return _start(launch, shlex.split(line))
    except ValueError:
        return None


def _start(launch: ServerCommand, words: Sequence[str]) -> ServerCommand | None:
    env = dict(launch.env)
    rest = list(words)
    while rest and (assigned := _ASSIGNED.fullmatch(rest[0])):
        env[assigned[1]] = assigned[2]
        del rest[0]
    return ServerCommand(rest[0], tuple(rest[1:]), env) if rest else None


def _package(words: Sequence[str]) -> str:
    """Return the package among the words of a program that fetches packages."""
    at = 0
    while at < len(words):
        word = words[at]
        if word in _NAMES_PACKAGE and at + 1 < len(words):
            return words[at + 1]
        if not word.startswith("-"):
            return word
        at += 2 if word in _TAKES_WORD else 1
    return ""


class PackageCommand(Struct, frozen=True):
    """A command that fetches a package and runs one of its programs."""

    kind: Literal["node", "python"]
    wanted: tuple[str, ...]
    """The package's requirement, then those of others that it is run with."""
    program: str
    """Which of its programs is the server; empty where it has only one."""
    args: tuple[str, ...]
    """The arguments of that program."""


def package_command(command: str, args: Sequence[str]) -> PackageCommand | None:
    """Return the package that a command fetches from the user's index; None if it fetches none."""
    runners = _RUNNERS.get(PurePosixPath(command).name, ())
    runner = next((one for one in runners if tuple(args[: len(one.lead)]) == one.lead), None)
    if runner is None:
        return None
    found: list[str] = []
    others: list[str] = []
    rest = list(args[len(runner.lead) :])
    while rest and rest[0].startswith("-"):
        option, mark, value = rest.pop(0).partition("=")
        if option in _QUIET:
            continue
        if option not in runner.package | runner.others | runner.ignored:
            return None
        value = value if mark else rest.pop(0) if rest else ""
        if option not in runner.ignored:
            (found if option in runner.package else others).append(value)
    if not rest:
        return None
    program, *arguments = rest
    wanted = tuple(_requirement(runner.kind, text) for text in (*(found or [program]), *others))
    if not all(wanted):
        return None
    own = program if found else "" if runner.kind == "node" else re.split(r"[@=<>!~\[ ]", program, maxsplit=1)[0]
    return PackageCommand(runner.kind, wanted, own, tuple(arguments))


def _requirement(kind: str, text: str) -> str:
    """Return a package as its installer writes it; empty if it does not come from an index."""
    if kind == "node":
        whole = text if "@" in text[1:] else f"{text}@latest"
        return whole if is_node_requirement(text) or _TAGGED.fullmatch(whole) else ""
    if at := _VERSION.fullmatch(text):
        text = f"{at[1]}=={at[2]}" if at[2] else at[1]
    return text if is_python_requirement(text) else ""


_PACKAGE_VERSION = lazy_pattern(r"(?<=.)@.*|\s*(?:\[|[=<>!~]=|[<>]).*")
_ADDRESS = lazy_pattern(r"[a-z][a-z0-9+.-]*://[^\s'\"]+", re.IGNORECASE)
_PORTS: Mapping[str, int] = {
    "postgres": 5432, "postgresql": 5432, "redis": 6379, "rediss": 6379, "mongodb": 27017, "mysql": 3306,
}  # fmt: skip


class KnownServer(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the table of well-known servers."""

    packages: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    urls: bool = False
    folders: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    sockets: tuple[str, ...] = ()
    note: str = ""


@cache
def known_servers_table() -> Mapping[str, KnownServer]:
    """Return the well-known servers, by package."""
    table = convert(read_data("servers.yaml"), dict[str, KnownServer])
    return {package: row for row in table.values() for package in row.packages}


def known_server(command: str, args: Sequence[str]) -> KnownServer | None:
    """Return the well-known server that a command starts; None if it starts another one."""
    if image := image_of(ServerCommand(command, tuple(args))):
        return known_servers_table().get(f"image:{image.partition('@')[0].rpartition(':')[0] or image}")
    found = package_command(command, args)
    return known_package(found.kind, found.wanted[0]) if found else None


def known_package(kind: str, requirement: str) -> KnownServer | None:
    """Return the well-known server of a package for node or Python."""
    return known_servers_table().get(f"{'npm' if kind == 'node' else 'pypi'}:{_PACKAGE_VERSION.sub('', requirement)}")


def server_in(config: JsonObject) -> KnownServer | None:
    """Return the well-known server that a manifest's `config` starts."""
    return known_server(as_text(config.get("command")), [text_of(word) for word in as_list(config.get("args"))])


def hosts_named(args: Iterable[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the addresses among a server's arguments and variables."""
    hosts: dict[str, None] = {}
    for found in (found for word in (*args, *env.values()) for found in _ADDRESS.findall(word)):
        try:
            address = urlsplit(found)
            host, port = address.hostname, address.port or _PORTS.get(address.scheme.lower())
        except ValueError:
            continue
        if host and "$" not in host:
            hosts[f"{host}:{port}" if port else host] = None
    return tuple(hosts)
