"""Packages that tools require, installed once into a folder, as the `packages` of their runtime say."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache as remembered
from functools import partial
from hashlib import sha256
from pathlib import Path
from sysconfig import get_platform
from typing import Literal

import uv
from msgspec import Struct

from kiwi_mcp.domain.errors import CommandMissing, EnvironmentFailed, InvalidManifest, PackageChanged
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.drivers.environments.environment import Environment, address, make_once, refuse_others, text_in
from kiwi_mcp.drivers.environments.installer import Indexes, Installer, failure, indexes_of, is_done
from kiwi_mcp.manifest.files import write_whole
from kiwi_mcp.manifest.formats import is_requirement_of, package_name
from kiwi_mcp.manifest.mcp.launch_command import package_command
from kiwi_mcp.manifest.runtime import InstallTry, PackageConfig, PackageLock, Packages, shipped_packages, texts
from kiwi_mcp.manifest.templates import render
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.sandbox.command_files import program_at
from kiwi_mcp.sandbox.levels import base_profile

MODULES = "node_modules"
_SHOWN = 80
_COMMENT = lazy_pattern(r"^[ \t\f]*#.*$", re.MULTILINE)
_PYTHON_NAME = lazy_pattern(r"^[A-Za-z0-9._-]+")
_NAME = r"(?:@[\w~-][\w.~-]*/)?[\w~-][\w.~-]*"
_PLACE = lazy_pattern(rf"{MODULES}/{_NAME}(?:/{MODULES}/{_NAME})*", re.ASCII)
_PACKAGE = lazy_pattern(_NAME, re.ASCII)
_VERSION = lazy_pattern(r"\d+\.\d+\.\d+(?:[-+][\w.+-]*)?", re.ASCII)
_REPOSITORY = lazy_pattern(
    r"https://(?:[^/]*@)?(?:www\.)?(?:(?:gist\.)?github\.com|gitlab\.com|bitbucket\.org|git\.sr\.ht)(?:[:/?#]|$)",
    re.IGNORECASE,
)
"""An address that npm does not fetch but clones, so that no hash holds."""
_HASHES = lazy_pattern(r"sha(?:256|384|512)-[A-Za-z0-9+/]+={0,2}(?: +sha(?:256|384|512)-[A-Za-z0-9+/]+={0,2})*")
_LARGEST = 8_388_608
_CHANGED = lazy_pattern(rb"hash mismatch|EINTEGRITY|hashes?\b[^\n]*\bdo(?:es)? not match", re.IGNORECASE)
"""What uv and npm say where an index offers other bytes than those that were locked."""


class PackageManager:
    """Plans and makes the environments of one runtime."""

    def __init__(self, packages: Packages, runtime: Tool) -> None:
        self._kind = packages.kind if packages.is_shipped else "other"
        self._config = packages.config
        # A runtime that does not ship with Kiwi shares no folder with others.
        self._own = () if packages.is_shipped else (runtime.digest,)

    def plan(self, tool: Tool, default_packages: Sequence[str], cache: Path) -> Environment:
        """Name the environment that a tool needs, by all that decides about its content; nothing is installed."""
        config, lock = self._config, self._config.lock
        packages = _required(config, tool, default_packages)
        if not packages:
            return self.bare()
        locked = text_in(tool, lock.file) if lock else ""
        if lock and locked:
            faults = (
                _faults_of_table(tool, config, lock, packages, locked)
                if lock.form == "npm"
                else _faults_of_lines(lock, packages, locked)
            )
            if issues := [Issue(lock.file, fault, f"Renew it: `{lock.renew}`.") for fault in faults]:
                raise InvalidManifest(f"{tool.id!r}", issues)
        hashed = (sha256(locked.encode()).hexdigest(),) if locked else ()
        base = (sys.version, get_platform(), base_interpreter()) if config.uses_python else (get_platform(),)
        folder = cache / "envs" / self._kind / address(*self._own, *base, *packages, *hashed)
        return Environment(
            kind=self._kind,
            folder=str(folder),
            packages=packages,
            bin=str(folder / config.bin) if config.bin else "",
            programs={name: str(folder / path) for name, path in config.programs.items()},
            linked=str(folder / config.link) if config.link else "",
            lock=lock.file if lock and locked else "",
        )

    def bare(self) -> Environment:
        """Name the environment without any package."""
        if not self._config.uses_python:
            return Environment(kind=self._kind)
        python = base_interpreter()
        return Environment(
            self._kind, bin=str(Path(python).parent), programs=dict.fromkeys(self._config.programs, python)
        )

    async def make(self, environment: Environment, tool: Tool, installer: Installer) -> None:
        """Install the packages by the lock of the tool, or else of the first time, unless they are there."""
        if environment.packages:
            own = text_in(tool, environment.lock) if environment.lock else ""
            build = partial(
                build_environment, self._config, packages=environment.packages, own=own, installer=installer
            )
            await make_once(Path(environment.folder), build, proof=self._config.proof)


@remembered
def base_interpreter() -> str:
    """Return the interpreter below any virtual environment that Kiwi itself runs in."""
    # Python keeps it under a private name only; without one, this process runs in no virtual environment.
    return str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())


def _required(config: PackageConfig, tool: Tool, default_packages: Sequence[str]) -> tuple[str, ...]:
    """Return the packages of a tool in one spelling, those that are listed in its file among them."""
    written, listed_in = texts(tool.manifest.config.get("requires")), config.listed_in
    text = text_in(tool, listed_in.file) if listed_in else ""
    if not listed_in or listed_in.form != "json":
        lines = (line.partition(" #")[0].strip() for line in text.splitlines())
        everything = [*default_packages, *written, *(line for line in lines if line and not line.startswith("#"))]
        refuse_others(tool, everything, is_requirement_of(config.requirement))
        return tuple(sorted(set(map(_python_spelling if config.requirement == "pep508" else str.strip, everything))))
    try:
        listed = as_object(as_object(json.loads(text or "{}")).get(listed_in.at))
    except (ValueError, RecursionError) as error:
        issue = Issue(listed_in.file, f"is not JSON: {error}", "Write a JSON object.")
        raise InvalidManifest(f"{tool.id!r}", [issue]) from error
    named = {name: text_of(versions) for name, versions in listed.items()}
    wanted = {**_by_name(default_packages), **named, **_by_name(written)}
    packages = tuple(f"{name}@{versions}" for name, versions in sorted(wanted.items()))
    refuse_others(tool, packages, is_requirement_of(config.requirement))
    return packages


def _by_name(packages: Sequence[str]) -> Mapping[str, str]:
    """Return `name@range` texts as a mapping; the `@` of a scope comes first and does not count."""
    found = {}
    for package in packages:
        at = package.find("@", 1)
        found[package if at < 0 else package[:at]] = "*" if at < 0 else package[at + 1 :]
    return found


def _python_spelling(requirement: str) -> str:
    """Return a requirement in the one spelling that it shares with others that mean the same."""
    versions, mark, marker = requirement.partition(";")
    rest = _PYTHON_NAME.sub("", "".join(versions.split()))
    return f"{package_name(versions)}{rest}{mark}{marker.strip()}"


def _faults_of_lines(lock: PackageLock, packages: Sequence[str], text: str) -> Iterator[str]:
    """Yield what is wrong with a lock for uv: it leaves out a package, or says anything but versions and hashes."""
    row_of = re.compile(lock.row, re.ASCII)
    # The lines are those that uv reads: a comment ends with its line, whatever it contains.
    bare = text.replace("\r\n", "\n").replace("\r", "\n")
    lines = filter(None, map(str.strip, _COMMENT.sub("", bare).replace("\\\n", " ").split("\n")))
    rows = {line: row_of.fullmatch(line) for line in lines}
    known = {package_name(row[1]) for row in rows.values() if row}
    yield from (f"{line[:_SHOWN]!r} is not a version with its hashes" for line, row in rows.items() if row is None)
    missing = (one for one in packages if package_name(one.partition(";")[0]) not in known)
    yield from (f"{one!r} is not locked" for one in missing)


def _faults_of_table(
    tool: Tool, config: PackageConfig, lock: PackageLock, packages: Sequence[str], text: str
) -> Iterator[str]:
    try:
        entries = as_object(as_object(json.loads(text)).get("packages"))
    except (ValueError, RecursionError) as error:
        issue = Issue(lock.file, f"is not JSON: {error}", "Write it as npm does.")
        raise InvalidManifest(f"{tool.id!r}", [issue]) from error
    indexes = indexes_of(config.index)
    yield from (fault for path, entry in entries.items() if path for fault in faults_of(path, entry, indexes))
    missing = (name for name in _by_name(packages) if f"{MODULES}/{name}" not in entries)
    yield from (f"{name!r} is not locked" for name in missing)


def faults_of(path: str, entry: Json, indexes: Indexes) -> Iterator[str]:
    """Yield what is wrong with one package of a lock: npm accepts an address in place of any name or version."""
    said = as_object(entry)
    name, resolved = said.get("name"), said.get("resolved")
    if not _PLACE.fullmatch(path) or said.get("link") or (name is not None and not _PACKAGE.fullmatch(text_of(name))):
        yield f"{path!r} is not a package of an index"
    if not _VERSION.fullmatch(text_of(said.get("version"))):
        yield f"{path!r} has no version"
    place = text_of(resolved)
    if resolved is not None and (_REPOSITORY.match(place) or not indexes.may_offer(place)):
        yield f"{path!r} is fetched from elsewhere than an index: {place[:_SHOWN]!r}"
    if not _HASHES.fullmatch(text_of(said.get("integrity"))):
        yield f"{path!r} has no hash"


async def build_environment(
    config: PackageConfig, folder: Path, *, packages: Sequence[str], installer: Installer, own: str = ""
) -> None:
    """Install packages into a folder, by a lock: the one given, or else the one of the first time."""
    installer.report(Progress(f"Installing {', '.join(packages)}"))
    step = _Step(config, folder, tuple(packages), installer)
    if config.create:
        _demand(await step.run(config.create, (InstallTry(offline=True),)), packages)
    if config.listed_in:
        listed = "\n".join(packages) + "\n"
        if config.listed_in.form == "json":
            listed = compact({"private": True, config.listed_in.at: dict(_by_name(packages))})
        (folder / config.listed_in.file).write_text(listed, encoding="utf-8")
    # The lock of an environment is stored beside all environments of the cache.
    lock, text = folder.parent.parent.parent / "locks" / folder.parent.name / folder.name, own
    if config.lock:
        place = folder / config.lock.file
        if not text:
            with suppress(OSError), lock.open("rb") as file:
                text = file.read(_LARGEST).decode(errors="replace")
        if text:
            place.write_text(text, encoding="utf-8")
        else:
            _demand(await step.run(config.resolve, config.tries), packages)
            write_whole(lock, place.read_bytes())
    result = await step.run(config.install, config.tries)
    if not is_done(result):
        fault = failure(packages, result)
        if config.lock:
            shown = config.lock.file if own else str(lock)
            if _CHANGED.search(result.stderr) or _CHANGED.search(result.stdout):
                raise PackageChanged(packages, lock=shown, said=fault.message)
            fault.suggestion += f" Versions that the index no longer has: renew or remove {shown}."
        raise fault
    if config.link:
        (folder / config.link).mkdir(exist_ok=True)


def _demand(result: ProcessResult, packages: Sequence[str]) -> None:
    if not is_done(result):
        raise failure(packages, result)


class _Step(Struct, frozen=True):
    """Runs the commands of one installation."""

    config: PackageConfig
    folder: Path
    packages: tuple[str, ...]
    installer: Installer

    async def run(self, command: Sequence[str], tries: Sequence[InstallTry]) -> ProcessResult:
        """Run a command in each way that is left, until it succeeds; packages are built only if that was missing."""
        config, result = self.config, None
        reads = program_at(base_interpreter(), base_profile().covers).roots if config.uses_python else ()
        for attempt in tries:
            needs_build = result is not None and re.search(config.build_if.encode(), result.stderr, re.IGNORECASE)
            if attempt.builds and not (config.build_if and needs_build):
                break
            argv = self._filled((*command, *attempt.args))
            result = await self.installer.install(argv, self.folder, config, attempt, reads=reads)
            if is_done(result):
                break
        assert result is not None  # noqa: S101 - there is at least one try that builds nothing
        return result

    def _filled(self, words: Sequence[str]) -> tuple[str, ...]:
        config, values = self.config, {"folder": str(self.folder), "packages": list(self.packages)}
        if config.lock:
            values["lock"] = str(self.folder / config.lock.file)
        if config.listed_in:
            values["requirements"] = str(self.folder / config.listed_in.file)
        if config.uses_python:
            values["python"] = base_interpreter()
        if "{index}" in words:
            places = indexes_of(config.index).places
            if not places:
                raise EnvironmentFailed(
                    f"No index of packages is named, so {', '.join(self.packages)} cannot be installed.",
                    suggestion=f"Set {' or '.join(config.index.variables)} to the address or the folder of an index.",
                    packages=list(self.packages),
                )
            values["index"] = places[0]
        filled: list[str] = []
        for word in as_list(render(list(words), values)):
            filled += map(text_of, word if isinstance(word, list) else [word])
        return (_program(filled[0], config), *filled[1:])


def _program(name: str, config: PackageConfig) -> str:
    """Return where an installer is: uv comes with Kiwi, any other one is on the PATH."""
    if name == "uv":
        try:
            return uv.find_uv_bin()
        except FileNotFoundError:
            install = "Install Kiwi again with its dependencies, or `pip install uv` beside it."
            raise CommandMissing("uv", needed_by="python_runtime", install=install) from None
    if "/" not in name and (found := shutil.which(name, path=search_path())):
        return found
    raise CommandMissing(name, needed_by="packages", install=config.hint)


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
            folder = Path(self.folder)
            if self.kind == "node":
                name = self.wanted[0][: self.wanted[0].rindex("@")]
                packages = as_object(json.loads((folder / _NODE_LOCK).read_text())["packages"])
                entry = as_object(packages.get(f"{MODULES}/{name}"))
                return {"name": name, **{word: as_text(entry.get(word)) for word in ("version", "integrity")}}
            name = package_name(self.wanted[0])
            for pinned, version, integrity in reversed(_PINNED.findall((folder / _LOCK).read_text())):
                if package_name(pinned) == name:
                    return {"name": name, "version": version, "integrity": integrity}
        return {}


def server_package(command: str, args: Sequence[str], cache: Path) -> tuple[Package, tuple[str, ...]] | None:
    """Return the package that a command would fetch, and the arguments for its program; None if it fetches none."""
    found = package_command(command, args)
    if found is None:
        return None
    name = address(_SERVER, sys.version, get_platform(), base_interpreter(), found.program, *found.wanted)
    return Package(found.kind, found.wanted, found.program, str(cache / "envs" / found.kind / name)), found.args


async def have_package(package: Package, installer: Installer) -> None:
    """Have a package installed; where another kernel does so, wait for it."""
    proof = _SERVER if package.kind == "node" else str(Path("bin", package.program))
    await make_once(Path(package.folder), partial(_make, package=package, installer=installer), proof=proof)


async def _make(folder: Path, *, package: Package, installer: Installer) -> None:
    config = shipped_packages(package.kind).config
    await build_environment(config, folder, packages=package.wanted, installer=installer)
    program: Path | None = Path("bin", package.program)
    if package.kind == "python":
        (folder / "requirements.lock").rename(folder / _LOCK)
    elif program := _node_program(folder, package):
        (folder / _SERVER).symlink_to(program)
    if program is None or not (folder / program).is_file():
        name = package.program or "of its own"
        raise EnvironmentFailed(
            f"{package.wanted[0]} has no program {name} that could be the server.",
            suggestion="See how its author starts it: `npx --package NAME` and `uvx --from NAME` name the package.",
            packages=list(package.wanted),
        )


def _node_program(folder: Path, package: Package) -> Path | None:
    """Return the file of a package's program in its folder: the one named, the only one, or the one called like it."""
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
    whole = folder.resolve()
    return found.relative_to(whole) if found and found.is_file() and found.is_relative_to(whole) else None
