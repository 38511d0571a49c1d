"""MCP servers that are packages (`npx`, `uvx`), installed once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from sysconfig import get_platform
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.errors import EnvironmentFailed
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.drivers.environments.environment import address, make_once
from kiwi_mcp.drivers.environments.installer import Installer
from kiwi_mcp.drivers.environments.package_manager import MODULES, base_interpreter, build_environment
from kiwi_mcp.manifest.formats import package_name
from kiwi_mcp.manifest.mcp.launch_command import package_command
from kiwi_mcp.manifest.packages import shipped_packages

_LOCK = "server.lock"
_NODE_LOCK = "package-lock.json"
_SERVER = "server"
"""The link to a node package's program; the program's name is known only after the install."""
_PINNED = re.compile(r"^(\S+)==(\S+) *\\\n +--hash=(\S+)", re.MULTILINE)


class Package(Struct, frozen=True):
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


def server_package(command: str, args: Sequence[str], cache: Path) -> tuple[Package, tuple[str, ...]] | None:
    """Return the package that a command would fetch, and the arguments for its program; None if it fetches none."""
    found = package_command(command, args)
    if found is None:
        return None
    name = address(_SERVER, sys.version, get_platform(), base_interpreter(), found.program, *found.wanted)
    return Package(found.kind, found.wanted, found.program, str(cache / "envs" / found.kind / name)), found.args


async def have_package(package: Package, installer: Installer) -> None:
    """Have a package installed; where another kernel does so, wait for it."""
    make, proof = (_make_node, _SERVER) if package.kind == "node" else (_make_python, str(Path("bin", package.program)))
    await make_once(Path(package.folder), partial(make, package=package, installer=installer), proof=proof)


async def _make_node(folder: Path, *, package: Package, installer: Installer) -> None:
    config = shipped_packages(package.kind).config
    await build_environment(config, folder, packages=package.wanted, installer=installer)
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
    config = shipped_packages(package.kind).config
    await build_environment(config, folder, packages=package.wanted, installer=installer)
    (folder / "requirements.lock").rename(folder / _LOCK)
    if not (folder / "bin" / package.program).is_file():
        raise _no_program(package)


def _no_program(package: Package) -> EnvironmentFailed:
    name = package.program or "of its own"
    return EnvironmentFailed(
        f"{package.wanted[0]} has no program {name} that could be the server.",
        suggestion="See how its author starts it: `npx --package NAME` and `uvx --from NAME` name the package.",
        packages=list(package.wanted),
    )
