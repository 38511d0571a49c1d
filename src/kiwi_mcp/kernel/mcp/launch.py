"""Launching: the command line of a server as one program and its words, without the shells around it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.drivers.packages import packaged

_OPERATOR = re.compile(r"[|&;<>`\n]|\$\(|\$\w")
_ROOTED = re.compile(r"[/~\"']|[A-Za-z]:[\\/]|\\\\")
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_WINDOWS_SUFFIX = re.compile(r"\.(?:cmd|exe|bat|ps1)$", re.IGNORECASE)
_SHELLS = frozenset({"sh", "bash", "zsh", "dash", "ksh"})
_RUNNERS: Mapping[str, tuple[str, ...]] = {
    "npx": (), "bunx": (), "pnpx": (), "uvx": (), "pnpm": ("dlx",), "yarn": ("dlx",), "npm": ("exec",),
    "pipx": ("run",), "uv": ("tool", "run"), "docker": ("run",), "podman": ("run",),
}  # fmt: skip
"""Programs that fetch what they run, and the words that make them do so."""
_IMAGES = frozenset({"docker", "podman"})
_TAKES_WORD = frozenset(
    {"-p", "--package", "--from", "--with", "--python", "-c", "--registry", "--index-url", "--extra-index-url"}
    | {
        "-e",
        "--env",
        "-v",
        "--volume",
        "--mount",
        "--network",
        "--name",
        "-w",
        "--workdir",
        "-u",
        "--user",
        "--env-file",
    }
)
_NAMES_PACKAGE = frozenset({"-p", "--package", "--from"})
_PINNED = re.compile(r".+(?:@v?|==)[0-9]+(?:\.[0-9]+)+[\w.+-]*|.+@sha256:[0-9a-f]{64}|(?:\.{0,2}/|[A-Za-z]:[\\/]).*")
_PINNED_IMAGE = re.compile(r".+@sha256:[0-9a-f]{64}|.+:v?[0-9]+(?:\.[0-9]+)+[\w.-]*")
_KIWI = frozenset({"kiwi", "kiwi-mcp", "kiwi_mcp"})


@dataclass(frozen=True, slots=True)
class Launch:
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


def unwrap(launch: Launch) -> Launch:
    """Return the same start without what only stood around it: one line for a shell, `cmd /c`, `sh -c`, `env`."""
    for _ in range(4):
        inner = _unwrapped(launch)
        if inner == launch:
            break
        launch = inner
    return launch


def anchor(command: str, *, folder: Path | None) -> str:
    """Return a command that does not depend on where it is started, as far as that is known."""
    is_relative = "/" in command and not _ROOTED.match(command) and not command.startswith(("${", "{"))
    return str(folder / command) if is_relative and folder is not None else command


def unpinned(launch: Launch) -> Issue | None:
    """Return a warning where the command fetches a package in whatever version there is that day.

    What Kiwi installs itself is fetched once, and stays what it was.
    """
    if packaged(launch.command, launch.args, Path()) is not None:
        return None
    lead = _RUNNERS.get(launch.program)
    if lead is None or launch.args[: len(lead)] != lead:
        return None
    package = _package(launch.args[len(lead) :])
    pinned = _PINNED_IMAGE if launch.program in _IMAGES else _PINNED
    if not package or "${" in package or pinned.fullmatch(package):
        return None
    fix = "Name a version, such as `package@1.2.3`, so that a new release cannot change what runs."
    return Issue("config.args", f"`{package[:100]}` is fetched in whatever version there is that day", fix, "warning")


def _unwrapped(launch: Launch) -> Launch:
    command, args = launch.command, launch.args
    if not args and re.search(r"\s", command.strip()) and not _ROOTED.match(command.strip()):
        return _split(launch, command) or Launch("sh", ("-c", command), launch.env)
    if launch.program.lower() == "cmd" and args and args[0].lower() in {"/c", "/k"}:
        line = args[1:]
        return (_split(launch, line[0]) if len(line) == 1 else _start(launch, line)) or launch
    if launch.program in _SHELLS and len(args) > 1 and re.fullmatch(r"-[lic]*c", args[-2]):
        return _split(launch, args[-1]) or launch
    if launch.program == "env" and args and not args[0].startswith("-"):
        return _start(launch, args) or launch
    if command != launch.program and _WINDOWS_SUFFIX.search(command) and not re.search(r"[\\/]", command):
        return replace(launch, command=launch.program)
    return launch


def _split(launch: Launch, line: str) -> Launch | None:
    """Return a line as its words, or None where only a shell understands it."""
    if _OPERATOR.search(line):
        return None
    try:
        return _start(launch, shlex.split(line))
    except ValueError:
        return None


def _start(launch: Launch, words: Sequence[str]) -> Launch | None:
    env = dict(launch.env)
    rest = list(words)
    while rest and (assigned := _ASSIGNED.fullmatch(rest[0])):
        env[assigned[1]] = assigned[2]
        del rest[0]
    return Launch(rest[0], tuple(rest[1:]), env) if rest else None


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
