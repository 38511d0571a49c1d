"""Package indexes: where installers fetch from, by their own settings, and so the hosts that they reach.

Kiwi names no index. What uv and npm would read from the user's settings is read here, because they are run without a
home; credentials that stand there apart from an address are left behind.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kiwi_mcp.domain.json import Json

ANY = ("*:443",)
"""Every public host, where no setting names an index: which ones the installer's own is at, is its own affair."""
_PORTS = {"http": 80, "https": 443}
_UV_NAMES = ("UV_DEFAULT_INDEX", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_INDEX_URL")
_UV_WORDS = ("index-url", "extra-index-url", "find-links", "index", "url", "pip")
_LARGEST = 262_144
_MISREAD = re.compile(r"[\s\\]")
"""What one program takes for a part of a host, and another for its end."""


@dataclass(frozen=True, slots=True)
class Indexes:
    """Where packages are fetched from."""

    hosts: tuple[str, ...]
    is_named: bool
    """Whether a setting names them; then they may be nearby as well."""
    paths: tuple[str, ...] = ()
    """Files and folders of this machine that the installer reads: settings, and indexes that are folders."""
    lines: tuple[str, ...] = ()
    """Settings to be written beside what is installed."""
    variables: tuple[tuple[str, str], ...] = ()

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
        places += _texts(_toml(path))
    given = () if not settings or "UV_CONFIG_FILE" in environ else (("UV_CONFIG_FILE", str(settings[0])),)
    return _indexes(places, settings, variables=given)


def npm_indexes(environ: Mapping[str, str], home: Path) -> Indexes:
    """Return the indexes of npm: that of its variable, and those in the settings of the user and the machine."""
    named = {name.lower(): value for name, value in environ.items()}.get("npm_config_registry", "")
    lines = [line for path in (home / ".npmrc", Path("/etc/npmrc")) for line in _registries(path)]
    return _indexes([named, *(line.partition("=")[2] for line in lines)], (), lines=lines)


def _indexes(
    places: Iterable[str],
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
    return Indexes(tuple(hosts) or ANY, bool(hosts), tuple(paths), tuple(lines), variables)


def _host(address: str) -> str | None:
    try:
        parts = urlsplit(address)
        port = parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    if not parts.hostname or port is None:
        return None
    return f"[{parts.hostname}]:{port}" if ":" in parts.hostname else f"{parts.hostname}:{port}"


def _registries(path: Path) -> Iterator[str]:
    """Yield the lines of npm's settings that name an index, for everything or for one scope."""
    for line in _text(path).splitlines():
        name, mark, value = (part.strip() for part in line.partition("="))
        if mark and (name == "registry" or name.endswith(":registry")) and _host(value):
            yield f"{name}={value}"


def _toml(path: Path) -> Json:
    try:
        return tomllib.loads(_text(path))
    except (tomllib.TOMLDecodeError, RecursionError):  # uv says so itself, and better
        return None


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
