"""Packages that tools require: the indexes they come from, installers in a sandbox, and locks.

Packages are installed once into a folder, as the `packages` of their runtime say.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache as remembered
from functools import partial
from hashlib import sha256
from pathlib import Path
from sysconfig import get_platform
from typing import Literal
from urllib.parse import urlsplit

import uv
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import CommandMissing, EnvironmentFailed, InvalidManifest, PackageChanged
from kiwi_mcp.domain.isolation import Level, Provenance, ResourceLimits, SandboxProfile
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.environments.environment import Environment, address, make_once
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.manifest.files import write_whole
from kiwi_mcp.manifest.formats import is_requirement_of, package_name
from kiwi_mcp.manifest.mcp.launch_command import package_command
from kiwi_mcp.manifest.runtime import (
    InstallTry,
    PackageConfig,
    PackageIndex,
    PackageLock,
    Packages,
    shipped_packages,
    texts,
)
from kiwi_mcp.manifest.templates import escape, render
from kiwi_mcp.primitives.http.addresses import host_port
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.sandbox.command_files import needed_by, program_at
from kiwi_mcp.sandbox.levels import base_profile

ANY = ("*:443",)
"""Every public host, where no setting names an index: which ones the installer's own is at, is its own affair."""
_UV_NAMES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_INDEX_URL")
_UV_WORDS = ("index-url", "extra-index-url", "find-links", "index", "url", "pip")
_LARGEST_SETTINGS = 262_144
_MISREAD = lazy_pattern(r"[\s\\]")
"""What one program takes for a part of a host, and another for its end."""


class Indexes(Struct, frozen=True):
    """Where packages are fetched from."""

    hosts: tuple[str, ...]
    is_named: bool
    """Whether a setting names them; then they may be nearby as well."""
    paths: tuple[str, ...] = ()
    """Files and folders of this machine that the installer reads: settings, and indexes that are folders."""
    lines: tuple[str, ...] = ()
    """Settings to be written beside what is installed."""
    variables: tuple[tuple[str, str], ...] = ()
    places: tuple[str, ...] = ()
    """The addresses and folders that a setting names, as it writes them."""

    def may_offer(self, address: str) -> bool:
        """Whether packages may be fetched from an address: by https, or from an index that a setting names."""
        scheme = address.partition(":")[0].lower()
        host = None if _MISREAD.search(address) else _host(address)
        return bool(host) and (scheme == "https" or (scheme == "http" and self.is_named and host in self.hosts))


def uv_indexes(environ: Mapping[str, str], home: Path) -> Indexes:
    """Return the indexes of uv: those its variables name, and those in the settings of the user and the machine."""
    places = [text for name in _UV_NAMES for text in environ.get(name, "").replace(",", " ").split()]
    base = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    settings = [path for path in (base / "uv" / "uv.toml", Path("/etc/uv/uv.toml")) if path.is_file()]
    for path in settings:
        with suppress(tomllib.TOMLDecodeError, RecursionError):  # uv says so itself, and better
            places += _texts(tomllib.loads(_text(path)))
    given = () if not settings or "UV_CONFIG_FILE" in environ else (("UV_CONFIG_FILE", str(settings[0])),)
    return _indexes(places, settings, variables=given)


def npm_indexes(environ: Mapping[str, str], home: Path) -> Indexes:
    """Return the indexes of npm: that of its variable, and those in the settings of the user and the machine."""
    named = {name.lower(): value for name, value in environ.items()}.get("npm_config_registry", "")
    lines: list[str] = []
    for line in (line for path in (home / ".npmrc", Path("/etc/npmrc")) for line in _text(path).splitlines()):
        # A line may name the index for everything, or for one scope.
        name, mark, value = (part.strip() for part in line.partition("="))
        if mark and (name == "registry" or name.endswith(":registry")) and _host(value):
            lines.append(f"{name}={value}")
    return _indexes([named, *(line.partition("=")[2] for line in lines)], (), lines=lines)


def _indexes(
    places: Sequence[str],
    settings: Iterable[Path],
    *,
    lines: Iterable[str] = (),
    variables: tuple[tuple[str, str], ...] = (),
) -> Indexes:
    hosts: dict[str, None] = {}
    paths = {str(path.resolve()): None for path in settings}
    for text in places:
        # An index of uv may have a name before its address.
        place = text.partition("=")[2] if "=" in text.partition("://")[0] else text
        if (host := _host(place)) is not None:
            hosts[host] = None
        elif place.removeprefix("file://").startswith("/") and Path(place.removeprefix("file://")).exists():
            paths[str(Path(place.removeprefix("file://")).resolve())] = None
    named = tuple(place for place in places if place)
    return Indexes(tuple(hosts) or ANY, bool(hosts), tuple(paths), tuple(lines), variables, named)


def _host(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    if not parts.hostname or port is None:
        return None
    return host_port(parts.hostname, port)


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_SETTINGS).decode(errors="replace")
    except OSError:
        return ""


def _texts(value: Json) -> Iterator[str]:
    """Yield every text below the words of uv's settings that say where packages are."""
    match value:
        case str():
            yield value
        case list():
            for inner in value:
                yield from _texts(inner)
        case dict():
            for word in _UV_WORDS:
                yield from _texts(value.get(word))


_TIMEOUT = 600.0
_LAST_LINES = 12
_PASSED = {"LANG", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"}
_PASSED_STARTS = ("UV_", "npm_config_")
_PASSED_ENDS = ("_proxy",)
_SYSTEM_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
_LIMITS = ResourceLimits(
    memory_bytes=4_294_967_296,
    tmp_bytes=1_073_741_824,
    open_files=8_192,
    workspace_bytes=17_179_869_184,
    workspace_files=1_000_000,
)


class Installer(Struct, frozen=True):
    """Runs installers for one call: where their caches are, how strictly they are isolated, who gets progress."""

    space: Space
    level: Level
    report: Report
    provenance: Provenance = "builtin"
    is_shipped: bool = True
    """Whether the commands ship with Kiwi; those of another runtime reach only indexes that the owner names."""

    async def run(
        self,
        command: Sequence[str],
        tries: Sequence[InstallTry],
        *,
        config: PackageConfig,
        folder: Path,
        packages: Sequence[str],
    ) -> ProcessResult:
        """Run a command in each way that is left, until it succeeds; packages are built only if that was missing."""
        result = None
        reads = program_at(base_interpreter(), base_profile().covers).roots if config.uses_python else ()
        for attempt in tries:
            needs_build = result is not None and re.search(config.build_if.encode(), result.stderr, re.IGNORECASE)
            if attempt.builds and not (config.build_if and needs_build):
                break
            argv = _filled((*command, *attempt.args), config, folder, packages)
            result = await self._install(argv, folder, config, attempt, reads)
            if is_done(result):
                break
        assert result is not None  # noqa: S101 - there is at least one try that builds nothing
        return result

    async def _install(
        self, argv: Sequence[str], folder: Path, config: PackageConfig, attempt: InstallTry, reads: Sequence[str]
    ) -> ProcessResult:
        indexes = indexes_of(config.index)
        if indexes.lines:
            (folder / ".npmrc").write_text("\n".join(indexes.lines) + "\n", encoding="utf-8")
        # Nothing but the indexes that the owner's settings name: any other host would be the author's choice.
        if not self.is_shipped and not indexes.is_named:
            indexes = replace(indexes, hosts=())
        # Code of a package, and the commands of a runtime that does not ship with Kiwi, see no cache of others.
        is_apart = attempt.builds or not self.is_shipped
        cache = folder / ".cache" if is_apart else self.space.cache / "packages" / config.index.settings
        if not is_apart or not self.is_shipped:
            cache.mkdir(parents=True, exist_ok=True)
        cache = cache if is_apart else cache.resolve()
        facts = {"cache": str(cache), "folder": str(folder)}
        own = {name: text_of(value) for name, value in as_object(render(dict(config.env), facts)).items()}
        passed = installer_env(os.environ, is_shipped=self.is_shipped)
        env = {**passed, **dict(indexes.variables), **own, "HOME": str(cache)}
        hosts = () if attempt.offline else indexes.hosts
        profile = SandboxProfile(
            self.level,
            readable=(*reads, *indexes.paths, *_certificates(env), *needed_by(argv[0], env["PATH"])),
            writable=(str(folder), *(() if cache.is_relative_to(folder) else (str(cache),))),
            hosts=hosts,
            # A configured index may be on a private address. Without one, the installer uses its default index, at any
            # address that this machine resolves, as long as no package code runs that could choose it.
            private_hosts=hosts if indexes.is_named or not attempt.builds else (),
            limits=_LIMITS,
            provenance=self.provenance,
        )
        try:
            sandbox = await open_sandbox(profile, self.space)
            spec = ProcessSpec(argv=tuple(argv), cwd=str(folder), env=env, timeout=_TIMEOUT)
            return await sandbox.run(spec, secrets={}, report=silent)
        finally:
            if is_apart:
                shutil.rmtree(cache, ignore_errors=True)


def indexes_of(index: PackageIndex) -> Indexes:
    """Return where packages are fetched from on this machine, as its owner's settings say."""
    match index.settings:
        case "uv":
            return uv_indexes(os.environ, Path.home())
        case "npm":
            return npm_indexes(os.environ, Path.home())
        case _:
            return named_indexes(os.environ, index.variables)


def named_indexes(environ: Mapping[str, str], names: Iterable[str]) -> Indexes:
    """Return the indexes that some variables name; a value that is no address and no folder does not count.

    The names come from a runtime that any author may have written, so no value is passed on, and none with a password
    counts.
    """
    values = [environ.get(name, "") for name in names]
    places = [value for value in values if _host(value) or value.removeprefix("file://").startswith("/")]
    found = _indexes([place for place in places if "@" not in place], ())
    return found if found.is_named else replace(found, hosts=())


def install_level(level: Level) -> Level:
    """Return the isolation of installers for code of some level; the strictest has no network, which they need."""
    return "sandboxed" if level == "restricted" else level


def installer_env(environ: Mapping[str, str], *, is_shipped: bool) -> Mapping[str, str]:
    """Return the variables of an installer: where to find packages and which certificates to trust, nothing else.

    One that does not ship with Kiwi gets no setting of another installer.
    """
    passed = {
        name: escape(value)
        for name, value in environ.items()
        if name in _PASSED or (is_shipped and (name.startswith(_PASSED_STARTS) or name.lower().endswith(_PASSED_ENDS)))
    }
    index = environ.get("PIP_INDEX_URL")
    if is_shipped and index and not {"UV_DEFAULT_INDEX", "UV_INDEX_URL"} & environ.keys():
        passed["UV_DEFAULT_INDEX"] = escape(index)
    if is_shipped and _SYSTEM_CERTIFICATES.is_file():
        # A network may use its own certificate authority, which only the machine knows.
        passed.setdefault("UV_SYSTEM_CERTS", "1")
    return {**passed, "PATH": escape(search_path()), "NO_COLOR": "1"}


def _certificates(env: Mapping[str, str]) -> Iterator[str]:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS"):
        if (path := Path(env.get(name) or "/")).exists() and path != Path("/"):
            real = str(path.resolve())
            if not base_profile().covers(real):
                yield real


def is_done(result: ProcessResult) -> bool:
    """Whether an installer came to its end without a complaint."""
    return result.exit_code == 0 and not result.timed_out


def failure(packages: Sequence[str], result: ProcessResult) -> EnvironmentFailed:
    """Return the error that quotes an installer's last lines."""
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    lines = "\n".join(said.splitlines()[-_LAST_LINES:])
    ending = f"did not end within {_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    return EnvironmentFailed(
        f"Installing {', '.join(packages)} {ending}: {lines}",
        suggestion="Check the names and versions that the tool requires, and that the package index can be reached.",
        packages=list(packages),
    )


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
_LARGEST_LOCK = 8_388_608
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
        locked = _text_in(tool, lock.file) if lock else ""
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
            own = _text_in(tool, environment.lock) if environment.lock else ""
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
    written = texts(tool.manifest.config.get("requires"))
    listed_in = config.listed_in
    text = _text_in(tool, listed_in.file) if listed_in else ""
    if not listed_in or listed_in.form != "json":
        lines = (line.partition(" #")[0].strip() for line in text.splitlines())
        everything = [*default_packages, *written, *(line for line in lines if line and not line.startswith("#"))]
        _refuse_others(tool, everything, is_requirement_of(config.requirement))
        return tuple(sorted(set(map(_python_spelling if config.requirement == "pep508" else str.strip, everything))))
    try:
        listed = as_object(as_object(json.loads(text or "{}")).get(listed_in.at))
    except (ValueError, RecursionError) as error:
        issue = Issue(listed_in.file, f"is not JSON: {error}", "Write a JSON object.")
        raise InvalidManifest(f"{tool.id!r}", [issue]) from error
    named = {name: text_of(versions) for name, versions in listed.items()}
    wanted = {**_by_name(default_packages), **named, **_by_name(written)}
    packages = tuple(f"{name}@{versions}" for name, versions in sorted(wanted.items()))
    _refuse_others(tool, packages, is_requirement_of(config.requirement))
    return packages


def _refuse_others(tool: Tool, packages: Sequence[str], is_one: Callable[[str], bool]) -> None:
    """Refuse requirements that are not a name and versions: addresses, paths, options."""
    fix = "Write a name and versions, such as `httpx>=0.27`."
    others = [package for package in packages if not is_one(package)]
    if others:
        reason = "is not a package of an index"
        issues = [Issue("config.requires", f"{package!r} {reason}", fix) for package in others]
        raise InvalidManifest(f"{tool.id!r}", issues)


def _text_in(tool: Tool, path: str) -> str:
    """Return the text of one file of a tool, empty where it has no such file."""
    found = next((file for file in tool.files if file.path == path), None)
    return load_bytes(tool, found).decode("utf-8", errors="replace") if found else ""


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
    run = partial(installer.run, config=config, folder=folder, packages=packages)
    if config.create:
        _demand(await run(config.create, (InstallTry(offline=True),)), packages)
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
                text = file.read(_LARGEST_LOCK).decode(errors="replace")
        if text:
            place.write_text(text, encoding="utf-8")
        else:
            _demand(await run(config.resolve, config.tries), packages)
            write_whole(lock, place.read_bytes())
    result = await run(config.install, config.tries)
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


def _filled(words: Sequence[str], config: PackageConfig, folder: Path, packages: Sequence[str]) -> tuple[str, ...]:
    """Return a command with its values; only what it names is looked up."""
    values = {"folder": str(folder), "packages": list(packages)}
    if config.lock:
        values["lock"] = str(folder / config.lock.file)
    if config.listed_in:
        values["requirements"] = str(folder / config.listed_in.file)
    if config.uses_python:
        values["python"] = base_interpreter()
    if "{index}" in words:
        places = indexes_of(config.index).places
        if not places:
            raise EnvironmentFailed(
                f"No index of packages is named, so {', '.join(packages)} cannot be installed.",
                suggestion=f"Set {' or '.join(config.index.variables)} to the address or the folder of an index.",
                packages=list(packages),
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
