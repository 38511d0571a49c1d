"""Requests to authorization servers, whose addresses others name: none goes where the owner did not permit it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from urllib.parse import urlsplit

from kiwi_mcp.domain.errors import AddressDenied, RequestFailed
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import plain
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives import http_client, http_secrets
from kiwi_mcp.primitives.secrets import Secret

_TIMEOUT = 20.0
_LARGEST = 500_000
_OK, _FAULT, _TOO_MANY = 200, 500, 429
_FORM = "application/x-www-form-urlencoded"
_SAID = 300


@dataclass(frozen=True, slots=True)
class Form:
    """What is sent to get a token: words that may hold `${NAME}`, and the secrets of those names."""

    words: Mapping[str, str]
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    basic: tuple[str, str] | None = None
    """A user name and a password, where the client proves itself so."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What an authorization server answered: a status, the object in the body if there is one, and secrets of it."""

    status: int
    content: JsonObject
    secrets: Mapping[str, Secret]

    @property
    def is_ok(self) -> bool:
        """Whether it did what it was asked."""
        return _OK <= self.status < _OK + 100

    @property
    def reason(self) -> str:
        """Why it did not, in the server's own words as far as they can be shown."""
        words = [as_text(self.content.get(word)) for word in ("error", "error_description")]
        said = plain(": ".join(filter(None, words))).replace("\n", " ")[:_SAID]
        return f"{said} ({self.status})" if said else f"it answered {self.status}"


@dataclass(frozen=True, slots=True)
class Web:
    """The way to authorization servers, under the rules that the way to the MCP server itself is under."""

    granted: tuple[str, ...]
    denied: tuple[str, ...]
    secrets: Mapping[str, str] = field(repr=False)
    """The values of the variables that the server's manifest names."""

    async def get(self, url: str) -> Reply:
        """Read a document."""
        return await self._ask(HttpSpec("GET", escape(url), {"Accept": "application/json"}))

    async def post_json(self, url: str, body: JsonObject, words: Collection[str]) -> Reply:
        """Send an object; the values of `words` in the answer are secrets."""
        spec = HttpSpec("POST", escape(url), {"Accept": "application/json"}, body, has_body=True)
        return await self._ask(spec, words)

    async def post_form(self, url: str, form: Form, words: Collection[str]) -> Reply:
        """Send a form; the values of `words` in the answer are secrets."""
        headers = {"Accept": "application/json", "Content-Type": _FORM}
        spec = HttpSpec("POST", escape(url), headers, dict(form.words), has_body=True, basic=form.basic)
        return await self._ask(spec, words, self.secrets, form.secrets)

    async def check(self, url: str) -> None:
        """Refuse an address that this machine may not be sent to, though it is the person's browser that goes."""
        host, port = refuse_plain(url)
        await http_client.network.addresses(host, port, self.granted)

    async def _ask(
        self,
        spec: HttpSpec,
        words: Collection[str] = (),
        secrets: Mapping[str, str] | None = None,
        own: Mapping[str, Secret] | None = None,
    ) -> Reply:
        refuse_plain(spec.url)
        bounded = replace(
            spec,
            timeout=_TIMEOUT,
            max_bytes=_LARGEST,
            max_redirects=0,  # whoever moves says so in the documents that name the address
            granted=self.granted,
            denied=self.denied,
        )
        reply = await http_secrets.take(bounded, words=words, secrets=secrets or {}, own=own or {})
        if reply.status >= _FAULT or reply.status == _TOO_MANY:
            where = spec.url.partition("?")[0]
            raise RequestFailed(f"{where} answered {reply.status}.", suggestion="Try again later.", cause="status")
        return Reply(reply.status, reply.content, reply.secrets)


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
