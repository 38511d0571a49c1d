"""Visitors: at the door it is decided who a request comes from, and whether it comes from a web page elsewhere."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from time import monotonic
from urllib.parse import urlsplit

from starlette.requests import Request

from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, TokenExpired, TokenRefused, TooManyTries
from kiwi_mcp.domain.identity import STRANGER, Identity
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.store.whose import account_principal, is_token_principal
from kiwi_mcp.surfaces.gateway.access import AccessTokens, is_access_token
from kiwi_mcp.surfaces.gateway.settings import LOOPBACK
from kiwi_mcp.surfaces.gateway.tokens import Token, Tokens

_ANYBODY = Actor("anybody", ())
_FAILURES, _WINDOW = 30, 60.0
"""How many wrong tokens are answered one by one in how many seconds, before all of them are asked to wait."""
_TAKES_NOTHING = "This server only gives, and takes nothing."


@dataclass(frozen=True, slots=True)
class Visitor:
    """Whoever a request comes from, and what they may do."""

    actor: Actor
    can_write: bool
    why_not: str = ""
    """Why this visitor may not write."""
    can_read: bool = True
    """Whether they may use the registry at all."""
    can_use_tools: bool = False
    can_author: bool = False
    """Whether they may change items, and not only use them."""
    principal: str = ""
    """Who they are, by what they showed: whose sessions, runs and tasks these are."""
    expires_at: float | None = None
    """When what they showed ends by itself, in seconds since 1970."""
    identity: Identity = STRANGER
    """Who they are for the rules."""


class Door:
    """Lets requests in: under the server's own names, from no foreign page, and with a token.

    `is_open` is for a server that only reads, on this machine alone, and has no tokens: anybody sees what is public.
    `access` takes the access tokens of an identity provider as well, for tools alone.
    """

    def __init__(
        self,
        tokens: Tokens,
        *,
        host: str,
        names: Iterable[str],
        is_read_only: bool,
        is_open: bool,
        access: AccessTokens | None = None,
    ) -> None:
        self._tokens = tokens
        self._names = {name.lower() for name in (host, *names, *(LOOPBACK if host in LOOPBACK else ()))}
        self._is_wide = is_address(host) and ip_address(host).is_unspecified
        self._is_read_only = is_read_only
        self._is_open = is_open
        self._access = access
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

    async def admit(self, headers: Mapping[str, str]) -> Visitor:
        """Return who has sent a request, or refuse it without saying what was wrong."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not scheme:
            if self._is_open:
                return Visitor(_ANYBODY, can_write=False, why_not=_TAKES_NOTHING)
            raise no_token()  # nothing was tried, so it is no try
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        if self._access is not None and is_access_token(secret):
            return await self._vouched_for(self._access, secret)
        if (token := self._tokens.find(secret)) is None:
            raise self._refusal(no_token())
        return self._known(token)

    def still_admits(self, visitor: Visitor) -> bool:
        """Whether what a visitor showed is still good for more."""
        if visitor.expires_at is not None:
            return time.time() < visitor.expires_at
        return not self.has_removed(visitor.principal)

    def has_removed(self, principal: str) -> bool:
        """Whether somebody is known by a token that was removed since; a file that cannot be read lets nobody in."""
        try:
            return is_token_principal(principal) and not self._tokens.holds(principal)
        except KiwiError:
            return True

    @property
    def metadata(self) -> JsonObject | None:
        """What clients may read of the identity provider, if there is one."""
        return self._access.settings.metadata if self._access is not None else None

    def check_reader(self, visitor: Visitor) -> None:
        """Refuse a visitor who may not use the registry."""
        if not visitor.can_read:
            raise PolicyDenied(
                "An access token is for tools alone.",
                suggestion="Use the registry with a token that the owner made by `kiwi up token add`.",
            )

    def check_tools(self, visitor: Visitor) -> None:
        """Refuse a visitor who may not use tools."""
        if visitor.can_use_tools:
            return
        if visitor.expires_at is not None and self._access is not None:
            scope = self._access.settings.scope
            raise PolicyDenied(
                f"The access token lacks the scope `{scope}`, so it may not use tools.",
                suggestion="Ask the identity provider for a token with that scope.",
                scope=scope,
            )
        raise PolicyDenied(
            "This token may not use tools.",
            suggestion="Ask the owner for one that may: `kiwi up token add NAME --tools`.",
        )

    def challenge(self, error: KiwiError, headers: Mapping[str, str]) -> str:
        """Return what a refused client is told of the tokens that would do; empty where it is not about tokens."""
        is_unknown, scope = error.http_status == TokenRefused.http_status, error.details.get("scope")
        if not is_unknown and not scope:
            return ""
        if self._access is None:
            return "Bearer"
        settings = self._access.settings
        words = [f'resource_metadata="{settings.metadata_url}"', f'scope="{settings.scope}"']
        if not is_unknown:
            words.insert(0, 'error="insufficient_scope"')
        elif headers.get("authorization"):
            words.insert(0, 'error="invalid_token"')
        return f"Bearer {', '.join(words)}"

    def _known(self, token: Token) -> Visitor:
        is_writer = token.can_write and not self._is_read_only
        return Visitor(
            token.actor,
            can_write=is_writer,
            why_not=_TAKES_NOTHING if self._is_read_only else "This token may read, and not write.",
            can_use_tools=token.can_use_tools,
            can_author=token.can_author,
            principal=token.principal,
            identity=token.identity,
        )

    async def _vouched_for(self, access: AccessTokens, secret: str) -> Visitor:
        try:
            identity = await access.verify(secret)
        except TokenExpired:
            raise
        except TokenRefused as refusal:
            raise self._refusal(refusal) from None
        return Visitor(
            Actor(identity.name, ()),
            can_write=False,
            can_read=False,
            can_use_tools=access.settings.scope in identity.scopes,
            principal=account_principal(identity.name),
            expires_at=identity.expires_at,
            identity=Identity("agent", identity.name),
        )

    def _refusal(self, refusal: TokenRefused) -> TokenRefused:
        """Return how a wrong token is refused, and count it."""
        now = monotonic()
        is_flood = len(self._failures) == _FAILURES and now - self._failures[0] < _WINDOW
        if is_flood:
            return TooManyTries("Too many wrong tokens came.", suggestion="Wait a minute, then use the right one.")
        self._failures.append(now)
        return refusal


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


def no_token() -> TokenRefused:
    """Return the refusal of whoever shows nothing that is good here."""
    return TokenRefused(
        "The request has no token that is valid here.",
        suggestion="Send `Authorization: Bearer …` with a token that the owner made by `kiwi up token add`.",
    )


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
