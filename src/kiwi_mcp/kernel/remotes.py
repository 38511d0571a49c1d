"""Remotes by name: in the owner's file, and open: a layout on disk or over HTTP, with its token from secrets."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import InvalidRequest, NotFound, RemoteNotFound
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel.paths import refuse_nowhere
from kiwi_mcp.kernel.settings import (
    FILE_NAME,
    NO_DATABASE,
    RegistrySettings,
    RemoteSettings,
    registry_settings,
    remote_issues,
)
from kiwi_mcp.manifest.owner_file import rewrite
from kiwi_mcp.policy.secret_access import secrets_for
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.addresses import is_loopback
from kiwi_mcp.primitives.secrets.reveal import names_in
from kiwi_mcp.store.open import DIALECTS, masked
from kiwi_mcp.store.remote.http import HttpRemote
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.remote.sync import LayoutRemote, RemoteRegistry

_FOLDER = "oci:"


def add_remote(user: Path, name: str, remote: RemoteSettings) -> None:
    """Write a remote into the owner's file, and leave all else in it as it was."""
    issues = list(remote_issues(name, {"url": remote.url, "token": remote.token}))
    if issues:
        raise InvalidRequest(
            "; ".join(f"{issue.place} {issue.reason}" for issue in issues) + ".", suggestion=issues[0].fix
        )
    entry = {"url": remote.url} | ({"token": remote.token} if remote.token else {})
    _rewrite(user, lambda remotes: remotes.update({name: entry}))


def remove_remote(user: Path, name: str) -> None:
    """Take a remote out of the owner's file, and leave all else in it as it was."""
    known = registry_settings(user).remotes
    if name not in known:
        raise RemoteNotFound(name, remotes=sorted(known))
    _rewrite(user, lambda remotes: remotes.pop(name, None))


def _rewrite(user: Path, change: Callable[[dict[str, Json]], object]) -> None:
    rewrite(user / FILE_NAME, "remotes", change, check=lambda: registry_settings(user))


def open_source(address: str, settings: RegistrySettings, space: Space) -> RemoteRegistry:
    """Return the remote of that name or address, to read from: nothing there is made or changed."""
    remote = open_remote(address, settings, space)
    if isinstance(remote, LayoutRemote) and not remote.is_there:
        raise NotFound(
            f"There is no registry in {remote.key.removeprefix(_FOLDER)}.",
            suggestion="Check the path; `kiwi registry push FOLDER` makes a folder that can be pulled from.",
        )
    return remote


def open_remote(address: str, settings: RegistrySettings, space: Space) -> RemoteRegistry:
    """Return the remote of that name or address: a folder, or a registry over HTTP."""
    known = (remote for remote in settings.remotes.values() if remote.url.rstrip("/") == address.rstrip("/"))
    named = settings.remotes.get(address) or next(known, RemoteSettings(address))  # with its token if it has one
    scheme, is_address, _ = named.url.partition("://")
    if is_address and scheme in {"http", "https"}:
        host = _host(named.url)
        if named.token and named.url.startswith("http:") and not is_loopback(urlsplit(named.url).hostname or ""):
            raise InvalidRequest(
                "The token would be sent unencrypted: the address begins with http, not https.",
                suggestion="Use `https://…`, or leave the token out.",
            )
        # Which variable holds the token is written in the owner's own settings, so it needs no grant.
        found = secrets_for(names_in(named.token), None, space, needed_by=f"the registry at {host}")
        network = client.Network()
        send = partial(client.send, secrets=found, through=network)
        return HttpRemote(named.url, send, network.aclose, token=named.token)
    if is_address and scheme in DIALECTS:
        raise InvalidRequest("A database is not a remote.", suggestion=NO_DATABASE)
    if not is_address and (named.url.startswith(_FOLDER) or "/" in named.url):
        folder = _absolute(named.url.removeprefix(_FOLDER), space)
        return LayoutRemote(Layout(folder), f"{_FOLDER}{folder}")
    raise RemoteNotFound(masked(address), remotes=sorted(settings.remotes))


def _host(url: str) -> str:
    """Return the host of an address; an address with a user name or a query may hold a secret, so it is not quoted."""
    try:
        parts = urlsplit(url)
        if parts.hostname and parts.port != 0 and parts.username is None and not parts.query + parts.fragment:
            return parts.netloc
    except ValueError:
        pass  # not an address
    raise InvalidRequest(
        "The address of a registry is a host and perhaps a path, with no user name and no query.",
        suggestion="Write it as `https://kiwi.example.com`; a token belongs in a variable.",
    )


def absolute_address(url: str, space: Space) -> str:
    """Return an address that is valid in every project: a folder with its whole path."""
    is_folder = "://" not in url and (url.startswith(_FOLDER) or "/" in url)
    return str(_absolute(url.removeprefix(_FOLDER), space)) if is_folder else url


def _absolute(path: str, space: Space) -> Path:
    given = Path(path).expanduser()
    if not given.is_absolute():
        refuse_nowhere(space)
    return Path(os.path.normpath(space.project / given))
