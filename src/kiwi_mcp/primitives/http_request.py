"""A request as it goes on the wire: made from its spec with the secrets in place, and changed by redirects."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import urlencode

import httpx2

from kiwi_mcp.domain.errors import AddressDenied, InvalidRequest, RequestFailed
from kiwi_mcp.domain.json import Json, JsonObject, compact, text_of
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.addresses import is_denied
from kiwi_mcp.primitives.bounds import PORTS, refuse_request
from kiwi_mcp.primitives.secrets import Revealed, names_in, reveal, reveal_json, reveal_url

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNFIT = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OWN = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade", "expect"})
"""Headers that belong to the connection or name the target; a spec does not set them."""
_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})
_CONTENT = frozenset({"content-type", "content-encoding", "content-language"})
_FORM = "application/x-www-form-urlencoded"
AGENT = "kiwi"


@dataclass(frozen=True, slots=True, repr=False)
class Request:
    """One request with its secrets in place; it is never shown."""

    method: str
    url: httpx2.URL
    headers: tuple[tuple[str, str], ...]
    body: bytes
    private: frozenset[str]
    """The headers, in lower case, that go to the first origin alone."""

    @property
    def port(self) -> int:
        """The port of the target."""
        return self.url.port or PORTS[self.url.scheme]

    @property
    def host(self) -> str:
        """The host of the target in ASCII, without brackets and without the root's dot."""
        return self.url.raw_host.decode("ascii").removesuffix(".")

    @property
    def authority(self) -> str:
        """The value of the Host header: what the URL names, never what a spec says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.url.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> tuple[str, str, int]:
        """What must be equal for credentials to be sent again."""
        return (self.url.scheme, self.host, self.port)

    @property
    def shown(self) -> str:
        """The URL as messages may show it: without its query."""
        path = self.url.raw_path.partition(b"?")[0].decode("ascii")
        return f"{self.url.scheme}://{self.authority}{path}"


def prepare(
    spec: HttpSpec, secrets: Mapping[str, str], *, schemes: tuple[str, ...] = ("http", "https"), accept: str = "*/*"
) -> Request:
    """Return the request of a spec; whatever cannot be sent is refused before anything is."""
    if not _TOKEN.fullmatch(spec.method):
        raise InvalidRequest(f"{spec.method!r} is not a method.", suggestion="Use GET, POST, PUT, PATCH or DELETE.")
    url = _url(spec.url, reveal_url(spec.url, secrets), schemes)
    given = {name: _header(name, reveal(value, secrets)) for name, value in spec.headers.items()}
    if spec.basic:
        given["Authorization"] = _basic(*(reveal(text, secrets) for text in spec.basic))
    lower = {name.lower(): value for name, value in given.items()}
    body = _body(spec.body, secrets, lower.get("content-type", "")) if spec.has_body else b""
    defaults = {"accept": accept, "accept-encoding": "gzip", "user-agent": AGENT}
    if spec.has_body:
        is_text = isinstance(spec.body, str)
        defaults["content-type"] = "text/plain; charset=utf-8" if is_text else "application/json"
    headers = (*given.items(), *((name, value) for name, value in defaults.items() if name not in lower))
    held = {name.lower() for name, value in spec.headers.items() if names_in(value)}
    request = Request(spec.method.upper(), url, headers, body, _CREDENTIALS | held)
    refuse_unbound(spec, request, secrets)
    return request


def redirect(request: Request, status: int, location: str) -> Request:
    """Return the request that a redirect asks for, without what must not go to another origin."""
    try:
        url = request.url.join(location)
    except httpx2.InvalidURL:
        raise _lost(request, "to something that is no URL") from None
    if url.scheme not in {"http", "https"} or not url.host or url.userinfo:
        raise AddressDenied(
            f"{request.shown} redirects to a `{url.scheme}` address that is not followed.",
            suggestion="Call the final address itself, if it is one that may be called.",
        )
    becomes_get = (status == 303 and request.method != "HEAD") or (  # noqa: PLR2004 - See Other
        status in {301, 302} and request.method == "POST"
    )
    moved = replace(request, url=url)
    if becomes_get:
        kept = tuple(pair for pair in request.headers if pair[0].lower() not in _CONTENT)
        moved = replace(moved, method="GET", body=b"", headers=kept)
    if moved.origin == request.origin:
        return moved
    if moved.body:
        raise _lost(request, "to another origin, which is not sent the body again")
    return replace(moved, headers=tuple(pair for pair in moved.headers if pair[0].lower() not in request.private))


def _lost(request: Request, where: str) -> RequestFailed:
    return RequestFailed(
        f"{request.shown} redirects {where}.",
        suggestion="Call the final address itself.",
        cause="protocol",
    )


def _url(written: str, revealed: str, schemes: tuple[str, ...]) -> httpx2.URL:
    # Messages quote the URL as it was written, with names where the secrets are, and do not name the fault they
    # came from, since that one quotes the rest.
    try:
        url = httpx2.URL(revealed)
    except (httpx2.InvalidURL, UnicodeError):
        raise _bad_url(written, "it is no URL") from None
    if url.scheme not in schemes:
        raise _bad_url(written, f"it must begin with {' or '.join(f'{scheme}://' for scheme in schemes)}")
    if not url.host:
        raise _bad_url(written, "it has no host")
    if url.userinfo:
        raise _bad_url(written, "it holds a user name; credentials belong into a header")
    if url.port is not None and not 0 < url.port < 65_536:  # noqa: PLR2004 - ports are 16 bits
        raise _bad_url(written, "it has no such port")
    return url


def _bad_url(written: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{written!r} cannot be called: {reason}.", suggestion="Write the URL in full.", url=written)


def _header(name: str, value: str) -> str:
    if not _TOKEN.fullmatch(name) or _UNFIT.search(value):
        raise InvalidRequest(
            f"The header {name!r} holds a line break or another character that headers cannot have.",
            suggestion="Remove it from the header's name, the parameter or the variable.",
        )
    if name.lower() in _OWN:
        raise InvalidRequest(
            f"The header {name!r} is set by Kiwi itself.", suggestion="Remove it; the URL alone names the target."
        )
    return value.strip(" \t")


def _basic(name: str, password: str) -> str:
    if ":" in name:
        raise InvalidRequest("A user name for basic authentication holds a colon.", suggestion="Use another name.")
    return f"Basic {b64encode(f'{name}:{password}'.encode()).decode('ascii')}"


def _body(body: Json, secrets: Mapping[str, str], content_type: str) -> bytes:
    try:
        # Secrets go into the strings before these are encoded, so none can end its string.
        revealed = reveal_json(body, secrets)
        if isinstance(revealed, Mapping) and content_type.lower().startswith(_FORM):
            return _form(revealed)
        return (revealed if isinstance(revealed, str) else compact(revealed)).encode()
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "The body cannot be written as JSON: it has a number or a text that JSON has not, or is too deep.",
            suggestion="Send finite numbers, valid Unicode and less nesting.",
        ) from None


def _form(fields: JsonObject) -> bytes:
    """Return fields as a form; a list repeats its field."""
    pairs = [
        (name, text_of(value))
        for name, given in fields.items()
        for value in (given if isinstance(given, list | tuple) else (given,))
    ]
    return urlencode(pairs).encode()


def refuse_unbound(spec: HttpSpec, request: Request, secrets: Mapping[str, str]) -> None:
    """Refuse a request that would carry a stored secret where it may not go."""
    if isinstance(secrets, Revealed) and secrets.bounds:
        refuse_request(spec, secrets.bounds, host=request.host, port=request.port)


def refuse_denied(request: Request, denied: Sequence[str]) -> None:
    """Refuse a target that the owner denies, whatever address it has."""
    # Judged here and not by the plan alone: a redirect or a variable is no way around.
    if is_denied(request.host, request.port, denied):
        raise AddressDenied(
            f"The owner's policy denies {request.authority}.",
            suggestion="Ask the owner: the rule stands under `hosts.deny` in the policy.",
        )
