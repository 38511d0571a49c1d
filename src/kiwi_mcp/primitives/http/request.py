"""From an HTTP spec to a request: redirect rules, and errors without secrets."""

from __future__ import annotations

import re
import ssl
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlencode

import httpcore2
import httpx2
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import AddressDenied, InvalidRequest, KiwiError, RequestFailed, TooLarge
from kiwi_mcp.domain.json import Json, compact, text_of
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http.addresses import PORTS, is_denied
from kiwi_mcp.primitives.secrets.grants import refuse_request
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.primitives.secrets.reveal import Revealed, names_in, reveal, reveal_json, reveal_url

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_UNFIT = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_OWN = frozenset({"host", "content-length", "transfer-encoding", "connection", "te", "trailer", "upgrade", "expect"})
"""Headers that belong to the connection or name the target; a spec does not set them."""
_CREDENTIALS = frozenset({"authorization", "cookie", "proxy-authorization"})
AGENT = "kiwi"
_HEADER_LIMIT = 100_000
"""About the most that the headers of an answer may have, in bytes; the protocol library keeps it."""
_HEADERS_TOO_LARGE = 431
_SUGGESTIONS = {
    "connect": "Check that the server is running and that the port is right.",
    "tls": "The server's certificate must be valid for this host; verification cannot be switched off.",
    "timeout": "Try again, ask for less, or give the tool a longer `timeout`.",
    "protocol": "Try again; if it stays, the server is at fault.",
}


class WireRequest(Struct, frozen=True):
    """One request with its secrets in place; it is never shown."""

    method: str
    url: httpx2.URL
    headers: tuple[tuple[str, str], ...]
    body: bytes
    private: frozenset[str]
    """The headers, in lower case, that go to the first origin alone."""

    def __repr__(self) -> str:
        return "WireRequest(…)"

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
) -> WireRequest:
    """Return the request of a spec. An invalid request is refused before anything is sent."""
    if not _TOKEN.fullmatch(spec.method):
        raise InvalidRequest(f"{spec.method!r} is not a method.", suggestion="Use GET, POST, PUT, PATCH or DELETE.")
    url = _url(spec.url, reveal_url(spec.url, secrets), schemes)
    given = {name: _header(name, reveal(value, secrets)) for name, value in spec.headers.items()}
    if spec.basic:
        name, password = (reveal(text, secrets) for text in spec.basic)
        if ":" in name:
            raise InvalidRequest("A user name for basic authentication holds a colon.", suggestion="Use another name.")
        given["Authorization"] = f"Basic {b64encode(f'{name}:{password}'.encode()).decode('ascii')}"
    lower = {name.lower(): value for name, value in given.items()}
    body = _body(spec.body, secrets, lower.get("content-type", "")) if spec.has_body else spec.data
    defaults = {"accept": accept, "accept-encoding": "gzip", "user-agent": AGENT}
    if spec.has_body:
        is_text = isinstance(spec.body, str)
        defaults["content-type"] = "text/plain; charset=utf-8" if is_text else "application/json"
    headers = (*given.items(), *((name, value) for name, value in defaults.items() if name not in lower))
    held = {name.lower() for name, value in spec.headers.items() if names_in(value)}
    request = WireRequest(spec.method.upper(), url, headers, body, _CREDENTIALS | held)
    refuse_unbound(spec, request, secrets)
    return request


def redirect(request: WireRequest, status: int, location: str) -> WireRequest:
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
        of_body = {"content-type", "content-encoding", "content-language"}
        kept = tuple(pair for pair in request.headers if pair[0].lower() not in of_body)
        moved = replace(moved, method="GET", body=b"", headers=kept)
    if moved.origin == request.origin:
        return moved
    if moved.body:
        raise _lost(request, "to another origin, which is not sent the body again")
    return replace(moved, headers=tuple(pair for pair in moved.headers if pair[0].lower() not in request.private))


def _lost(request: WireRequest, where: str) -> RequestFailed:
    return RequestFailed(
        f"{request.shown} redirects {where}.", suggestion="Call the final address itself.", cause="protocol"
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


def _body(body: Json, secrets: Mapping[str, str], content_type: str) -> bytes:
    try:
        # Secrets go into the strings before these are encoded, so none can end its string.
        revealed = reveal_json(body, secrets)
        if isinstance(revealed, Mapping) and content_type.lower().startswith("application/x-www-form-urlencoded"):
            # Fields as a form; a list repeats its field.
            pairs = [
                (name, text_of(value))
                for name, given in revealed.items()
                for value in (given if isinstance(given, list | tuple) else (given,))
            ]
            return urlencode(pairs).encode()
        return (revealed if isinstance(revealed, str) else compact(revealed)).encode()
    except (ValueError, RecursionError):
        raise InvalidRequest(
            "The body cannot be written as JSON: it has a number or a text that JSON has not, or is too deep.",
            suggestion="Send finite numbers, valid Unicode and less nesting.",
        ) from None


def refuse_unbound(spec: HttpSpec, request: WireRequest, secrets: Mapping[str, str]) -> None:
    """Refuse a request that would carry a stored secret where it may not go."""
    if isinstance(secrets, Revealed) and secrets.bounds:
        refuse_request(spec, secrets.bounds, host=request.host, port=request.port)


def refuse_denied(request: WireRequest, denied: Sequence[str]) -> None:
    """Refuse a target that the owner denies, at any address."""
    # Judged here and not by the plan alone: a redirect or a variable is no way around.
    if is_denied(request.host, request.port, denied):
        raise AddressDenied(
            f"The owner's policy denies {request.authority}.",
            suggestion="Ask the owner: the rule stands under `hosts.deny` in the policy.",
        )


def failed(request: WireRequest, cause: str, reason: str) -> RequestFailed:
    """Return the failure of a request, with its cause in one word."""
    return RequestFailed(
        f"The request to {request.shown} failed: {reason}.", suggestion=_SUGGESTIONS[cause], cause=cause
    )


@contextmanager
def explaining(request: WireRequest) -> Iterator[None]:
    """Turn the library's errors into ours; theirs are not kept, since they may quote headers."""
    try:
        yield
    except httpcore2.TimeoutException:
        raise failed(request, "timeout", "the server did not answer in time") from None
    except httpcore2.ConnectError as fault:
        raise connection_failed(request, fault.args[0] if fault.args else fault) from None
    except httpcore2.RemoteProtocolError as fault:
        first = fault.args[0] if fault.args else None
        if getattr(first, "error_status_hint", None) == _HEADERS_TOO_LARGE:
            raise TooLarge(f"The head of {request.authority}'s reply", size=None, limit=_HEADER_LIMIT) from None
        raise failed(request, "protocol", "the server ended the connection or did not speak HTTP") from None
    except httpcore2.LocalProtocolError:
        raise failed(request, "protocol", "it cannot be written as HTTP") from None
    except (httpcore2.NetworkError, httpcore2.ProtocolError):
        raise failed(request, "protocol", "the connection was lost") from None


def connection_failed(request: WireRequest, fault: object) -> RequestFailed:
    """Return why no connection was made: the certificate, or the network."""
    if isinstance(fault, ssl.SSLCertVerificationError):
        return failed(request, "tls", f"the certificate is not trusted ({fault.verify_message})")
    if isinstance(fault, ssl.SSLError):
        return failed(request, "tls", f"no secure connection could be agreed on ({fault.reason})")
    reason = fault.strerror if isinstance(fault, OSError) else None
    return failed(request, "connect", f"no connection ({reason})" if reason else "no connection")


@contextmanager
def limited(spec: HttpSpec, request: WireRequest, redactor: Redactor) -> Iterator[None]:
    """Turn the end of the time limit into an error, and take the secrets out of every error."""
    try:
        yield
    except TimeoutError:
        late = failed(request, "timeout", f"it did not end within its {spec.timeout:g} seconds")
        raise _clean(late, redactor) from None
    except KiwiError as fault:
        raise _clean(fault, redactor) from None


def _clean(fault: KiwiError, redactor: Redactor) -> KiwiError:
    fault.message = redactor.text(fault.message)
    fault.args = (fault.message,)
    fault.details = {
        name: redactor.text(value) if isinstance(value, str) else value for name, value in fault.details.items()
    }
    return fault
