"""Node environments: one `node_modules` for each set of dependencies, made by npm, linked beside each tool."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from sysconfig import get_platform

from kiwi_mcp.domain.errors import CommandMissing, InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, as_object, compact, text_of
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.drivers.process.environments import Environment, address, refuse_others, text_in
from kiwi_mcp.drivers.process.environments.indexes import Indexes
from kiwi_mcp.drivers.process.environments.install import Installer, failure, indexes_of_npm, is_done
from kiwi_mcp.drivers.process.environments.locks import keep_lock, kept_lock, lock_failure, lock_of, refuse_lock
from kiwi_mcp.drivers.process.once import make_once
from kiwi_mcp.drivers.words import texts
from kiwi_mcp.manifest.requirements import is_node_requirement
from kiwi_mcp.primitives.program import search_path

_MANIFEST = "package.json"
MODULES = "node_modules"
# Scripts of packages are not run: they would act at install time, before anybody allowed anything.
_ARGUMENTS = (
    *("--omit=dev", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier", "--prefer-offline"),
    # It tries again also where a package is not what was locked, and would wait for minutes in between.
    *("--fetch-retry-mintimeout=1000", "--fetch-retry-maxtimeout=4000"),
)
_LOCK = "package-lock.json"
_RENEW = "npm install --package-lock-only"
_NAME = r"(?:@[\w~-][\w.~-]*/)?[\w~-][\w.~-]*"
_PLACE = re.compile(rf"{MODULES}/{_NAME}(?:/{MODULES}/{_NAME})*", re.ASCII)
_PACKAGE = re.compile(_NAME, re.ASCII)
_VERSION = re.compile(r"\d+\.\d+\.\d+(?:[-+][\w.+-]*)?", re.ASCII)
_SHOWN = 80
_REPOSITORY = re.compile(
    r"https://(?:[^/]*@)?(?:www\.)?(?:(?:gist\.)?github\.com|gitlab\.com|bitbucket\.org|git\.sr\.ht)(?:[:/?#]|$)",
    re.IGNORECASE,
)
"""An address that npm does not fetch but clones, so that no hash holds."""
_HASHES = re.compile(r"sha(?:256|384|512)-[A-Za-z0-9+/]+={0,2}(?: +sha(?:256|384|512)-[A-Za-z0-9+/]+={0,2})*")


class Node:
    """Nothing where a tool depends on nothing, else a folder of modules."""

    def plan(self, tool: Tool, default_packages: Sequence[str], cache: Path) -> Environment:
        """Name the environment by platform and dependencies."""
        required = texts(tool.manifest.config.get("requires"))
        wanted = {**_by_name(default_packages), **_dependencies(tool), **_by_name(required)}
        packages = tuple(f"{name}@{versions}" for name, versions in sorted(wanted.items()))
        refuse_others(tool, packages, is_node_requirement)
        if not packages:
            return self.bare()
        lock = text_in(tool, _LOCK)
        if lock:
            _refuse_unlocked(tool, wanted, lock)
        own = (sha256(lock.encode()).hexdigest(),) if lock else ()
        folder = cache / "envs" / "node" / address(get_platform(), *packages, *own)
        modules, named = folder / MODULES, _LOCK if lock else ""
        return Environment("node", str(folder), packages, bin=str(modules / ".bin"), linked=str(modules), lock=named)

    def bare(self) -> Environment:
        """Name no folder at all: node itself is on the PATH."""
        return Environment(kind="node")

    async def make(self, environment: Environment, tool: Tool, installer: Installer) -> None:
        """Install the dependencies by their lock, unless they are there."""
        if environment.packages:
            own = text_in(tool, environment.lock) if environment.lock else ""
            build = partial(build_node, packages=environment.packages, own=own, installer=installer)
            await make_once(Path(environment.folder), build, proof=MODULES)


def _dependencies(tool: Tool) -> Mapping[str, str]:
    text = text_in(tool, _MANIFEST)
    try:
        written = as_object(json.loads(text)) if text else {}
    except (ValueError, RecursionError) as error:
        issue = Issue(_MANIFEST, f"is not JSON: {error}", "Write it as npm does.")
        raise InvalidManifest(f"{tool.id!r}", [issue]) from error
    return {name: text_of(version) for name, version in as_object(written.get("dependencies")).items()}


def _by_name(packages: Sequence[str]) -> Mapping[str, str]:
    """Return `name@range` texts as a mapping; the `@` of a scope stands first and does not count."""
    found = {}
    for package in packages:
        at = package.find("@", 1)
        found[package if at < 0 else package[:at]] = "*" if at < 0 else package[at + 1 :]
    return found


def _refuse_unlocked(tool: Tool, wanted: Mapping[str, str], lock: str) -> None:
    """Refuse a lock that leaves out a dependency, or has one that is not an index's, or has no hash."""
    try:
        entries = as_object(as_object(json.loads(lock)).get("packages"))
    except (ValueError, RecursionError) as error:
        issue = Issue(_LOCK, f"is not JSON: {error}", "Write it as npm does.")
        raise InvalidManifest(f"{tool.id!r}", [issue]) from error
    indexes = indexes_of_npm()
    faults = [fault for path, entry in entries.items() if path for fault in faults_of(path, entry, indexes)]
    missing = [name for name in wanted if f"{MODULES}/{name}" not in entries]
    refuse_lock(tool, [*faults, *(f"{name!r} is not locked" for name in missing)], _LOCK, _RENEW)


def faults_of(path: str, entry: Json, indexes: Indexes) -> Iterator[str]:
    """Give what is wrong with one package of a lock: npm takes an address wherever a name or a version may stand."""
    said = as_object(entry)
    name, resolved = said.get("name"), said.get("resolved")
    if not _PLACE.fullmatch(path) or said.get("link") or (name is not None and not _PACKAGE.fullmatch(text_of(name))):
        yield f"{path!r} is not a package of an index"
    if not _VERSION.fullmatch(text_of(said.get("version"))):
        yield f"{path!r} has no version"
    address = text_of(resolved)
    if resolved is not None and (_REPOSITORY.match(address) or not indexes.may_offer(address)):
        yield f"{path!r} is fetched from elsewhere than an index: {address[:_SHOWN]!r}"
    if not _HASHES.fullmatch(text_of(said.get("integrity"))):
        yield f"{path!r} has no hash"


async def build_node(folder: Path, *, packages: Sequence[str], installer: Installer, own: str = "") -> None:
    """Install packages of npm into a folder, by a lock: the one given, or else the one of the first time."""
    program = shutil.which("npm", path=search_path())
    if program is None:
        raise CommandMissing("npm", needed_by="node_runtime", install="Install Node.js with npm: https://nodejs.org.")
    installer.report(Progress(f"Installing {', '.join(packages)}"))
    (folder / _MANIFEST).write_text(compact({"private": True, "dependencies": _by_name(packages)}), encoding="utf-8")
    if text := own or kept_lock(folder):
        (folder / _LOCK).write_text(text, encoding="utf-8")
        result = await installer.npm((program, "ci", *_ARGUMENTS), folder)
        if not is_done(result):
            raise lock_failure(packages, result, _LOCK if own else str(lock_of(folder)))
    else:
        result = await installer.npm((program, "install", *_ARGUMENTS), folder)
        if not is_done(result):
            raise failure(packages, result)
        keep_lock(folder, folder / _LOCK)
    (folder / MODULES).mkdir(exist_ok=True)
