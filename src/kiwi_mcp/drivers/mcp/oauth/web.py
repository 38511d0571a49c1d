"""Requests to authorization servers, whose addresses others name: none goes where the owner did not permit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from kiwi_mcp.domain.errors import AddressDenied, RequestFailed
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import http_client

_TIMEOUT = 20.0
_LARGEST = 500_000
_OK, _FAULT, _TOO_MANY = 200, 500, 429


@dataclass(frozen=True, slots=True)
class Reply:
    """What an authorization server answered: a status, and the object in the body if there is one."""

    status: int
    content: JsonObject

    @property
    def is_ok(self) -> bool:
        """Whether it did what it was asked."""
        return _OK <= self.status < _OK + 100


@dataclass(frozen=True, slots=True)
class Web:
    """The way to authorization servers, under the rules that the way to the MCP server itself is under."""

    granted: tuple[str, ...]
    denied: tuple[str, ...]

    async def get(self, url: str) -> Reply:
        """Read a document."""
        return await self._ask("GET", url, {"Accept": "application/json"})

    async def post_json(self, url: str, body: JsonObject) -> Reply:
        """Send an object."""
        return await self._ask("POST", url, {"Accept": "application/json"}, body)

    async def post_form(self, url: str, form: Mapping[str, str], headers: Mapping[str, str]) -> Reply:
        """Send a form."""
        own = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
        return await self._ask("POST", url, {**own, **headers}, dict(form))

    async def check(self, url: str) -> None:
        """Refuse an address that this machine may not be sent to, though it is the person's browser that goes."""
        host, port = refuse_plain(url)
        await http_client.network.addresses(host, port, self.granted)

    async def _ask(self, method: str, url: str, headers: Mapping[str, str], body: JsonObject | None = None) -> Reply:
        refuse_plain(url)
        spec = HttpSpec(
            method,
            escape(url),
            headers={name: escape(value) for name, value in headers.items()},
            body=_escaped(body),
            has_body=body is not None,
            timeout=_TIMEOUT,
            max_bytes=_LARGEST,
            max_redirects=0,  # whoever moves says so in the documents that name the address
            granted=self.granted,
            denied=self.denied,
        )
        reply = await http_client.send(spec)
        if reply.status >= _FAULT or reply.status == _TOO_MANY:
            raise RequestFailed(f"{reply.url} answered {reply.status}.", suggestion="Try again later.", cause="status")
        try:
            found: Json = json.loads(reply.body)
        except (ValueError, RecursionError):
            found = None
        return Reply(reply.status, as_object(found))


def refuse_plain(url: str) -> tuple[str, int]:
    """Return the host and port of an address; one at which others could listen is refused."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    else:
        if host and parts.scheme == "https":
            return host, port or 443
        if parts.scheme == "http" and _is_here(host):
            return host, port or 80
    raise AddressDenied(
        f"The server names {url[:500]!r} for its login, which is not an https address.",
        suggestion="Do not log in there; ask whoever runs the server.",
    )


def _is_here(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _escaped(value: Json) -> Json:
    match value:
        case str():
            return escape(value)
        case Mapping():
            return {name: _escaped(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_escaped(inner) for inner in value]
        case _:
            return value
