"""Opening a remote by its address, or by the name that the owner gave it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.errors import InvalidRequest, NotFound, RemoteNotFound
from kiwi_mcp.kernel.delivery import delivered
from kiwi_mcp.kernel.places import refuse_nowhere
from kiwi_mcp.kernel.registry.port import FolderRemote, RegistryRemote, Remote
from kiwi_mcp.kernel.settings import RegistrySettings, RemoteSettings
from kiwi_mcp.primitives.secrets import names_in
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.layout import Layout
from kiwi_mcp.store.open import DIALECTS, masked, open_target
from kiwi_mcp.store.open import open_source as open_foreign
from kiwi_mcp.store.registry import Registry

_FOLDER = "oci:"


async def open_remote(address: str, settings: RegistrySettings, space: Space) -> Remote:
    """Return the remote of that name or address, to write to; a database is opened as the owner's actor."""
    return await _open(address, settings, space, open_target)


async def open_source(address: str, settings: RegistrySettings, space: Space) -> Remote:
    """Return the remote of that name or address, to read from: nothing there is made or changed."""
    remote = await _open(address, settings, space, open_foreign)
    if isinstance(remote, FolderRemote) and not remote.is_there:
        raise NotFound(
            f"There is no registry in {remote.key.removeprefix(_FOLDER)}.",
            suggestion="Check the path; `kiwi registry push FOLDER` makes a folder that can be pulled from.",
        )
    return remote


async def _open(address: str, settings: RegistrySettings, space: Space, opened: Callable[[str], Database]) -> Remote:
    named = settings.remotes.get(address) or _at(address, settings)
    scheme, is_address, _ = named.url.partition("://")
    if is_address and scheme in {"http", "https"}:
        return _over_http(named, space)
    if is_address and scheme in DIALECTS:
        return await asyncio.to_thread(_in_database, named.url, settings, opened)
    if not is_address and (named.url.startswith(_FOLDER) or "/" in named.url):
        return _in_folder(named.url.removeprefix(_FOLDER), space)
    raise RemoteNotFound(masked(address), remotes=sorted(settings.remotes))


def _at(address: str, settings: RegistrySettings) -> RemoteSettings:
    """Return the remote that an address means; one that has a name keeps its token."""
    known = (remote for remote in settings.remotes.values() if remote.url.rstrip("/") == address.rstrip("/"))
    return next(known, RemoteSettings(address))


def _over_http(remote: RemoteSettings, space: Space) -> Remote:
    host = _host(remote.url)
    if remote.token and remote.url.startswith("http:") and not _is_here(urlsplit(remote.url).hostname or ""):
        raise InvalidRequest(
            "The token would go over the network for all to read: the address begins with http, not https.",
            suggestion="Use `https://…`, or leave the token out.",
        )
    # Which variable holds the token is written in the owner's own settings, so it needs no grant.
    found = delivered(names_in(remote.token), None, space, needed_by=f"the registry at {host}")
    # Only this kind brings an HTTP client along, for which every other start would have to wait.
    over_http = import_module("kiwi_mcp.kernel.registry.over_http")
    make: Callable[[str, str, Mapping[str, str]], Remote] = over_http.HttpRemote
    return make(remote.url, remote.token, found)


def _host(url: str) -> str:
    """Return the host of an address that is nothing but a place; one that holds a secret is not quoted."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and parts.username is None and not parts.query + parts.fragment:
            return parts.netloc
    except ValueError:
        pass  # no address at all
    raise InvalidRequest(
        "The address of a registry is a host and perhaps a path, with no user name and no query.",
        suggestion="Write it as `https://kiwi.example.com`; a token belongs into a variable.",
    )


def _is_here(host: str) -> bool:
    """Whether a host is this machine, under one of the names that always mean it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _in_database(url: str, settings: RegistrySettings, opened: Callable[[str], Database]) -> Remote:
    database = opened(url)
    is_own = url == settings.url
    return RegistryRemote(Registry(database, settings.actor), masked(url), is_own=is_own, close=database.close)


def _in_folder(path: str, space: Space) -> Remote:
    folder = _absolute(path, space)
    return FolderRemote(Layout(folder), f"{_FOLDER}{folder}")


def lasting(url: str, space: Space) -> str:
    """Return an address that means the same from every project: that of a folder with its whole path."""
    is_folder = "://" not in url and (url.startswith(_FOLDER) or "/" in url)
    return str(_absolute(url.removeprefix(_FOLDER), space)) if is_folder else url


def _absolute(path: str, space: Space) -> Path:
    given = Path(path).expanduser()
    if not given.is_absolute():
        refuse_nowhere(space)
    return Path(os.path.normpath(space.project / given))
