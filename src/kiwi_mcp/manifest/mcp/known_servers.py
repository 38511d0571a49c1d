"""Well-known MCP servers: which entry of a client is one, and what it needs to do its work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct, convert

import kiwi_mcp.data
from kiwi_mcp.domain.json import JsonObject, as_list, as_text, text_of
from kiwi_mcp.manifest.mcp.launch_command import ServerCommand, image_of, package_command
from kiwi_mcp.manifest.yaml import read_yaml

_VERSION = re.compile(r"(?<=.)@.*|\s*(?:\[|[=<>!~]=|[<>]).*")
_ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"]+", re.IGNORECASE)
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
    note: str = ""


@cache
def known_servers_table() -> Mapping[str, KnownServer]:
    """Return the well-known servers, by package."""
    path = Path(kiwi_mcp.data.__file__).parent / "servers.yaml"
    table = convert(read_yaml(path.read_text(encoding="utf-8"), what=path.name).value, dict[str, KnownServer])
    return {package: row for row in table.values() for package in row.packages}


def known_server(command: str, args: Sequence[str]) -> KnownServer | None:
    """Return the well-known server that a command starts; None if it starts another one."""
    if image := image_of(ServerCommand(command, tuple(args))):
        return known_servers_table().get(f"image:{image.partition('@')[0].rpartition(':')[0] or image}")
    found = package_command(command, args)
    return known_package(found.kind, found.wanted[0]) if found else None


def known_package(kind: str, requirement: str) -> KnownServer | None:
    """Return the well-known server of a package for node or Python."""
    return known_servers_table().get(f"{'npm' if kind == 'node' else 'pypi'}:{_VERSION.sub('', requirement)}")


def server_in(config: JsonObject) -> KnownServer | None:
    """Return the well-known server that a manifest's `config` starts."""
    return known_server(as_text(config.get("command")), [text_of(word) for word in as_list(config.get("args"))])


def hosts_named(args: Iterable[str], env: Mapping[str, str]) -> tuple[str, ...]:
    """Return the hosts of the addresses among a server's arguments and variables."""
    return tuple(dict.fromkeys(host for word in (*args, *env.values()) for host in _hosts(word)))


def _hosts(word: str) -> Iterator[str]:
    for found in _ADDRESS.findall(word):
        try:
            address = urlsplit(found)
            host, port = address.hostname, address.port or _PORTS.get(address.scheme.lower())
        except ValueError:
            continue
        if host and "$" not in host:
            yield f"{host}:{port}" if port else host
