"""Installers in a sandbox, and the indexes that they may reach."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import EnvironmentFailed
from kiwi_mcp.domain.isolation import Level, Provenance, ResourceLimits, SandboxProfile
from kiwi_mcp.domain.json import Json, as_object, text_of
from kiwi_mcp.domain.outcome import Report, silent
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.manifest.runtime import InstallTry, PackageConfig, PackageIndex
from kiwi_mcp.manifest.templates import escape, render
from kiwi_mcp.primitives.http.addresses import host_port
from kiwi_mcp.primitives.process import run
from kiwi_mcp.primitives.process.spawn import search_path
from kiwi_mcp.sandbox.command_files import needed_by
from kiwi_mcp.sandbox.levels import base_profile

ANY = ("*:443",)
"""Every public host, where no setting names an index: which ones the installer's own is at, is its own affair."""
_UV_NAMES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_INDEX_URL")
_UV_WORDS = ("index-url", "extra-index-url", "find-links", "index", "url", "pip")
_LARGEST = 262_144
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
            return file.read(_LARGEST).decode(errors="replace")
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

    async def install(
        self,
        argv: Sequence[str],
        folder: Path,
        config: PackageConfig,
        attempt: InstallTry,
        *,
        reads: Sequence[str] = (),
    ) -> run.ProcessResult:
        """Run a command of a package manager, in the folder that it fills."""
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


def is_done(result: run.ProcessResult) -> bool:
    """Whether an installer came to its end without a complaint."""
    return result.exit_code == 0 and not result.timed_out


def failure(packages: Sequence[str], result: run.ProcessResult) -> EnvironmentFailed:
    """Return the error that quotes an installer's last lines."""
    said = (result.stderr or result.stdout).decode("utf-8", errors="replace").strip()
    lines = "\n".join(said.splitlines()[-_LAST_LINES:])
    ending = f"did not end within {_TIMEOUT:.0f} seconds" if result.timed_out else "failed"
    return EnvironmentFailed(
        f"Installing {', '.join(packages)} {ending}: {lines}",
        suggestion="Check the names and versions that the tool requires, and that the package index can be reached.",
        packages=list(packages),
    )
