"""Packages that are servers: what `npx`, `uvx` and their like would fetch at every start, installed once and locked.

A package is resolved when its server is first started. From then on it is started from a folder of Kiwi's own, by the
versions and hashes of its lock, and no index is asked again.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from sysconfig import get_platform
from typing import Literal

from kiwi_mcp.domain.errors import EnvironmentFailed
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.drivers.process.environments import address
from kiwi_mcp.drivers.process.environments.install import Installer
from kiwi_mcp.drivers.process.environments.node import MODULES, build_node
from kiwi_mcp.drivers.process.environments.python import base_interpreter, install_locked, make_venv
from kiwi_mcp.drivers.process.once import make_once
from kiwi_mcp.manifest.requirements import is_node_requirement, is_python_requirement, package_name

_LOCK = "server.lock"
_NODE_LOCK = "package-lock.json"
_SERVER = "server"
"""The link to a node package's program, whose name is known only when it is installed."""
_TAGGED = re.compile(r"(?:@[a-z0-9][a-z0-9._-]*/)?[a-z0-9][a-z0-9._-]*@[a-z][a-z0-9-]*")
_VERSION = re.compile(r"([^@]+?)@(?:v?([0-9][\w.!+-]*)|latest)")
_PINNED = re.compile(r"^(\S+)==(\S+) *\\\n +--hash=(\S+)", re.MULTILINE)
_QUIET = frozenset({"-y", "--yes", "-q", "--quiet", "--silent", "--prefer-offline", "--no-install", "--no-cache"})
_QUIET |= {"-n", "--refresh", "--isolated", "-U", "--upgrade", "--offline", "--no-progress", "--"}


@dataclass(frozen=True, slots=True)
class _Runner:
    """How one program that fetches packages is told what to run."""

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


@dataclass(frozen=True, slots=True)
class Package:
    """The package of a server, and the folder that it is installed to."""

    kind: Literal["node", "python"]
    wanted: tuple[str, ...]
    """Its requirement, then those of others that it is run with."""
    program: str
    """Which of its programs is the server; empty where it is the one that it has."""
    folder: str

    @property
    def command(self) -> tuple[str, ...]:
        """The words that start it, before its own: programs by their names are those of this machine."""
        if self.kind == "python":
            return (str(Path(self.folder, "bin", self.program)),)
        return ("node", str(Path(self.folder, _SERVER)))

    @property
    def pin(self) -> JsonObject:
        """The version that was installed, and its hash; nothing before that."""
        with suppress(OSError, ValueError, RecursionError):
            return self._pin()
        return {}

    def _pin(self) -> JsonObject:
        folder = Path(self.folder)
        if self.kind == "node":
            name = self.wanted[0][: self.wanted[0].rindex("@")]
            entry = as_object(
                as_object(json.loads((folder / _NODE_LOCK).read_text())["packages"]).get(f"{MODULES}/{name}")
            )
            return {
                "name": name,
                "version": as_text(entry.get("version")),
                "integrity": as_text(entry.get("integrity")),
            }
        name = package_name(self.wanted[0])
        found = {
            package_name(one): (version, text) for one, version, text in _PINNED.findall((folder / _LOCK).read_text())
        }
        return {"name": name, "version": found[name][0], "integrity": found[name][1]} if name in found else {}


def packaged(command: str, args: Sequence[str], cache: Path) -> tuple[Package, tuple[str, ...]] | None:
    """Return the package that a command would fetch, and the words for its program; None where it fetches none.

    A command that fetches otherwise than from an index, or from another one than the user's, is left as it is.
    """
    for runner in _RUNNERS.get(PurePosixPath(command).name, ()):
        if tuple(args[: len(runner.lead)]) == runner.lead:
            return _read(runner, args[len(runner.lead) :], cache)
    return None


def _read(runner: _Runner, words: Sequence[str], cache: Path) -> tuple[Package, tuple[str, ...]] | None:
    found: list[str] = []
    others: list[str] = []
    rest = list(words)
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
    packages = [_requirement(runner.kind, text) for text in (*(found or [program]), *others)]
    if not all(packages):
        return None
    wanted = tuple(map(str, packages))
    own = program if found else "" if runner.kind == "node" else _bare(program)
    name = address(_SERVER, sys.version, get_platform(), base_interpreter(), own, *wanted)
    return Package(runner.kind, wanted, own, str(cache / "envs" / runner.kind / name)), tuple(arguments)


def _requirement(kind: str, text: str) -> str:
    """Return a package as its installer writes it; nothing where it is none of an index."""
    if kind == "node":
        whole = text if "@" in text[1:] else f"{text}@latest"
        return whole if is_node_requirement(text) or _TAGGED.fullmatch(whole) else ""
    if at := _VERSION.fullmatch(text):
        text = f"{at[1]}=={at[2]}" if at[2] else at[1]
    return text if is_python_requirement(text) else ""


def _bare(text: str) -> str:
    return re.split(r"[@=<>!~\[ ]", text, maxsplit=1)[0]


async def have_package(package: Package, installer: Installer) -> None:
    """Have a package installed; where another kernel does so, wait for it."""
    make, proof = (_make_node, _SERVER) if package.kind == "node" else (_make_python, str(Path("bin", package.program)))
    await make_once(Path(package.folder), partial(make, package=package, installer=installer), proof=proof)


async def _make_node(folder: Path, *, package: Package, installer: Installer) -> None:
    await build_node(folder, packages=package.wanted, installer=installer)
    (folder / _SERVER).symlink_to(_node_program(folder, package).relative_to(folder))


def _node_program(folder: Path, package: Package) -> Path:
    """Return the file of a package's program: the one that is meant, the only one, or the one called like it."""
    if package.program:
        link = folder / MODULES / ".bin" / package.program
        found = link.resolve() if link.exists() else None
    else:
        name = package.wanted[0][: package.wanted[0].rindex("@")]
        home = folder / MODULES / name
        written = json.loads((home / "package.json").read_text(encoding="utf-8")).get("bin")
        programs = {name.rpartition("/")[2]: written} if isinstance(written, str) else as_object(written)
        chosen = programs.get(name.rpartition("/")[2]) or (next(iter(programs.values())) if len(programs) == 1 else "")
        found = (home / as_text(chosen)).resolve() if chosen else None
    if found is None or not found.is_file() or not found.is_relative_to(folder.resolve()):
        raise _no_program(package)
    return folder / found.relative_to(folder.resolve())


async def _make_python(folder: Path, *, package: Package, installer: Installer) -> None:
    installer.report(Progress(f"Installing {', '.join(package.wanted)}"))
    await make_venv(folder, package.wanted, installer)
    lock = await install_locked(folder, package.wanted, "", installer)
    lock.rename(folder / _LOCK)
    if not (folder / "bin" / package.program).is_file():
        raise _no_program(package)


def _no_program(package: Package) -> EnvironmentFailed:
    name = package.program or "of its own"
    return EnvironmentFailed(
        f"{package.wanted[0]} has no program {name} that could be the server.",
        suggestion="Look how its author starts it: `npx --package NAME` and `uvx --from NAME` say whose a program is.",
        packages=list(package.wanted),
    )
