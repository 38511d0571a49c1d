"""Visitors: at the door it is decided who a request comes from, and whether it comes from a web page elsewhere."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from urllib.parse import urlsplit

from starlette.requests import Request

from kiwi_mcp.domain.errors import PolicyDenied, TokenRefused, TooManyTries
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.surfaces.gateway.tokens import Tokens

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ANYBODY = Actor("anybody", ())
_FAILURES, _WINDOW = 30, 60.0
"""How many wrong tokens are answered one by one in how many seconds, before all of them are asked to wait."""


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever a request comes from."""

    actor: Actor
    can_write: bool
    why_not: str = ""
    """Why this visitor may not write."""


class Door:
    """Lets requests in: under the server's own names, from no foreign page, and with a token.

    `is_open` is for a server that only reads, on this machine alone, and has no tokens: anybody sees what is public.
    """

    def __init__(self, tokens: Tokens, *, host: str, names: Iterable[str], is_read_only: bool, is_open: bool) -> None:
        self._tokens = tokens
        self._names = {name.lower() for name in (host, *names, *(LOOPBACK if host in LOOPBACK else ()))}
        self._is_wide = is_address(host) and ip_address(host).is_unspecified
        self._is_read_only = is_read_only
        self._is_open = is_open
        self._failures: deque[float] = deque(maxlen=_FAILURES)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse what a browser sends for somebody else's page, and names that somebody made to point here."""
        host = _host(headers.get("host", ""))
        # A page can have a name of its own point to this machine, but never an address.
        if host not in self._names and not (self._is_wide and is_address(host)):
            raise PolicyDenied(
                "The request was sent to a name that this server does not have.",
                suggestion="Use the address that `kiwi up` printed, or start it with `--name NAME`.",
            )
        origin = headers.get("origin")
        if origin is not None and _authority(origin) != headers.get("host", "").lower():
            raise PolicyDenied(
                "The request comes from a page of another origin.", suggestion="Call the server from a program."
            )

    def admit(self, headers: Mapping[str, str]) -> Visitor:
        """Return who has sent a request, or refuse it without saying what was wrong."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if self._is_open and not scheme:
            return Visitor(_ANYBODY, can_write=False, why_not="This server only gives, and takes nothing.")
        token = self._tokens.find(secret.strip()) if scheme.lower() == "bearer" else None
        if token is None:
            raise self._refusal()
        if self._is_read_only:
            return Visitor(token.actor, can_write=False, why_not="This server only gives, and takes nothing.")
        return Visitor(token.actor, token.can_write, "This token may read, and not write.")

    def _refusal(self) -> TokenRefused:
        now = monotonic()
        is_flood = len(self._failures) == _FAILURES and now - self._failures[0] < _WINDOW
        if is_flood:
            return TooManyTries("Too many wrong tokens came.", suggestion="Wait a minute, then use the right one.")
        self._failures.append(now)
        return TokenRefused(
            "The request has no token that is valid here.",
            suggestion="Send `Authorization: Bearer …` with a token that the owner made by `kiwi up token add`.",
        )


def visitor_of(request: Request) -> Visitor:
    """Return who the door let in with this request."""
    visitor = request.scope["kiwi.visitor"]
    assert isinstance(visitor, Visitor)  # noqa: S101 - nothing gets here but through the door
    return visitor


def is_address(host: str) -> bool:
    """Whether a host is an address and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return "?"  # which no host is called


def _host(authority: str) -> str:
    try:
        return (urlsplit(f"//{authority}").hostname or "").lower()
    except ValueError:
        return ""
