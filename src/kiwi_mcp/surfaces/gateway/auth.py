"""Authentication at the gateway: host and origin, the user of a token, and the caller of a request."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from ipaddress import ip_address
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request

from kiwi_mcp.domain.calls import NO_CALLER, STRANGER, Caller, Principal, Served
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied, TokenExpired, TokenRefused, TooManyTries
from kiwi_mcp.domain.items import ItemType
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.domain.registry import PUBLIC_ACTOR, Actor
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.paths import user_space
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.policy.policy_files import OwnerAuthority
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.principals import account_principal, is_token_principal
from kiwi_mcp.surfaces.gateway.oauth import LOOPBACK, TokenVerifier, is_access_token

_FAILURES, _WINDOW = 30, 60.0
"""How many wrong tokens are answered one by one in how many seconds, before all of them are asked to wait."""
_TAKES_NOTHING = "This server only gives, and takes nothing."
visiting: ContextVar[GatewayUser | None] = ContextVar("visiting", default=None)
"""The sender of the request that is being answered.

The SDK passes it on to everything that is done for a request, and so does every task, even one that outlives it.
"""


class GatewayUser(Struct, frozen=True):
    """The sender of a request, and what they may do."""

    actor: Actor
    can_write: bool
    why_not: str = ""
    """Why this visitor may not write."""
    can_read: bool = True
    """Whether they may use the registry at all."""
    can_use_tools: bool = False
    can_author: bool = False
    """Whether they may change items, and not only use them."""
    can_manage: bool = False
    """Whether the API lets them call the verbs of the owner."""
    principal: str = ""
    """Who they are, according to their token: the owner of their sessions, runs and tasks."""
    expires_at: float | None = None
    """When what they showed ends by itself, in seconds since 1970."""
    identity: Principal = STRANGER
    """Who they are for the rules."""


class Authenticator:
    """Admits requests: under the server's own names, from no foreign page, and with a token.

    `is_open` is for a read-only server on this machine alone, without tokens: any client sees what is public. `access`
    also accepts the access tokens of an identity provider, for tools alone.
    """

    def __init__(
        self,
        tokens: TokenStore,
        *,
        host: str,
        names: Iterable[str],
        is_read_only: bool,
        is_open: bool,
        access: TokenVerifier | None = None,
    ) -> None:
        self._tokens = tokens
        self._names = {name.lower() for name in (host, *names, *(LOOPBACK if host in LOOPBACK else ()))}
        self._is_wide = is_address(host) and ip_address(host).is_unspecified
        self._is_read_only = is_read_only
        self._is_open = is_open
        self._access = access
        self._failures: deque[float] = deque(maxlen=_FAILURES)

    def check_origin(self, headers: Mapping[str, str]) -> None:
        """Refuse requests that a browser sends for a foreign page, and host names that do not belong to this server."""
        host = _host(headers.get("host", ""))
        # A page can have a name of its own point to this machine, but never an address.
        if host not in self._names and not (self._is_wide and is_address(host)):
            suggestion = "Use the address that `kiwi up` printed, or start it with `--name NAME`."
            raise PolicyDenied("The request was sent to a name that this server does not have.", suggestion=suggestion)
        origin = headers.get("origin")
        if origin is not None and _authority(origin) != headers.get("host", "").lower():
            raise PolicyDenied(
                "The request comes from a page of another origin.", suggestion="Call the server from a program."
            )

    async def admit(self, headers: Mapping[str, str]) -> GatewayUser:
        """Return who has sent a request, or refuse it without saying what was wrong."""
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        if not scheme:
            if self._is_open:
                return GatewayUser(PUBLIC_ACTOR, can_write=False, why_not=_TAKES_NOTHING)
            raise no_token()  # nothing was tried, so it is no try
        secret = secret.strip() if scheme.lower() == "bearer" else ""
        if self._access is not None and is_access_token(secret):
            return await self._vouched_for(self._access, secret)
        if (token := self._tokens.find(secret)) is None:
            raise self._refusal(no_token())
        is_writer = token.can_write and not self._is_read_only
        return GatewayUser(
            token.actor,
            can_write=is_writer,
            why_not=_TAKES_NOTHING if self._is_read_only else "This token may read, and not write.",
            can_use_tools=token.can_use_tools,
            can_author=token.can_author,
            can_manage=token.can_manage,
            principal=token.principal,
            identity=token.identity,
        )

    def still_admits(self, visitor: GatewayUser) -> bool:
        """Whether what a visitor showed is still good for more."""
        if visitor.expires_at is not None:
            return time.time() < visitor.expires_at
        return not self.has_removed(visitor.principal)

    def has_removed(self, principal: str) -> bool:
        """Whether a principal's token was removed since; if the file cannot be read, every principal is refused."""
        try:
            return is_token_principal(principal) and not self._tokens.holds(principal)
        except KiwiError:
            return True

    @property
    def metadata(self) -> JsonObject | None:
        """What clients may read of the identity provider, if there is one."""
        return self._access.settings.metadata if self._access is not None else None

    def check_reader(self, visitor: GatewayUser) -> None:
        """Refuse a visitor who may not use the registry."""
        if not visitor.can_read:
            suggestion = "Use the registry with a token that the owner made by `kiwi up token add`."
            raise PolicyDenied("An access token is for tools alone.", suggestion=suggestion)

    def check_tools(self, visitor: GatewayUser) -> None:
        """Refuse a visitor who may not use tools."""
        if visitor.can_use_tools:
            return
        if visitor.expires_at is not None and self._access is not None:
            scope = self._access.settings.scope
            message = f"The access token lacks the scope `{scope}`, so it may not use tools."
            suggestion = "Ask the identity provider for a token with that scope."
            raise PolicyDenied(message, suggestion=suggestion, scope=scope)
        suggestion = "Ask the owner for one that may: `kiwi up token add NAME --tools`."
        raise PolicyDenied("This token may not use tools.", suggestion=suggestion)

    def check_mcp(self, visitor: GatewayUser) -> None:
        """Refuse a visitor who may not use tools over MCP: a model never acts with a token that may manage."""
        self.check_tools(visitor)
        if visitor.can_manage:
            suggestion = "Give an MCP client a token of its own: `kiwi up token add NAME --tools`."
            raise PolicyDenied("A token that may manage is not accepted here.", suggestion=suggestion)

    def challenge(self, error: KiwiError, headers: Mapping[str, str]) -> str:
        """Return the challenge that tells a refused client which tokens it needs; empty if no token is the reason."""
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

    async def _vouched_for(self, access: TokenVerifier, secret: str) -> GatewayUser:
        try:
            identity = await access.verify(secret)
        except TokenExpired:
            raise
        except TokenRefused as refusal:
            raise self._refusal(refusal) from None
        return GatewayUser(
            Actor(identity.name, ()),
            can_write=False,
            can_read=False,
            can_use_tools=access.settings.scope in identity.scopes,
            principal=account_principal(identity.name),
            expires_at=identity.expires_at,
            identity=Principal("agent", identity.name),
        )

    def _refusal(self, refusal: TokenRefused) -> TokenRefused:
        """Return how a wrong token is refused, and count it."""
        now = monotonic()
        is_flood = len(self._failures) == _FAILURES and now - self._failures[0] < _WINDOW
        if is_flood:
            return TooManyTries("Too many wrong tokens came.", suggestion="Wait a minute, then use the right one.")
        self._failures.append(now)
        return refusal


def visitor_of(request: Request) -> GatewayUser:
    """Return the authenticated user of this request."""
    visitor = request.scope["kiwi.visitor"]
    assert isinstance(visitor, GatewayUser)  # noqa: S101 - nothing gets here but through the door
    return visitor


def is_address(host: str) -> bool:
    """Whether a host is an address and no name."""
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def no_token() -> TokenRefused:
    """Return the refusal of a client without a valid credential."""
    suggestion = "Send `Authorization: Bearer …` with a token that the owner made by `kiwi up token add`."
    return TokenRefused("The request has no token that is valid here.", suggestion=suggestion)


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


class VisitedKernel(Kernel):
    """A kernel that knows who calls; with a project it serves that project alone, unless it `is_wide`."""

    def __init__(self, project: Path | None = None, *, user: Path | None = None, is_wide: bool = False) -> None:
        space = user or user_space()
        authority = OwnerAuthority(space, TokenStore(space).identify)
        served = Served(None if is_wide or project is None else project.resolve())
        super().__init__(project, user=space, is_owner=False, surface="gateway", authority=authority, served=served)

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NO_CALLER) -> Answer:
        """Answer one verb; a thread always calls as its starter."""
        return await super().call(verb, payload, caller if caller.origin.thread else visited_by(visiting.get(), caller))

    def acting(self) -> Caller:
        """Return the visitor that sent the current request."""
        return visited_by(visiting.get(), NO_CALLER)

    def seen(self, offers: Offers) -> Offers:
        """Return the part of the offers that is for a visitor to know of."""
        permission = self._permission()
        return offers if permission is None else permission.seen(offers)

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:
        """Return an item as clients see it, if it is for a visitor to know of."""
        offer, permission = super().offered(name, kind, item_type), self._permission()
        if offer is None or permission is None:
            return offer
        return None if permission.fault or permission.is_hidden(offer.identity) else offer

    def _permission(self) -> ItemVisibility | None:
        """Return what the rules let a visitor know of; None outside of a visit."""
        visitor = visiting.get()
        return None if visitor is None else ItemVisibility(self.catalog(), self.rights(self.acting()))


def visited_by(visitor: GatewayUser | None, caller: Caller) -> Caller:
    """Return a caller in the name of the sender of the request; without one, a caller that no rule knows."""
    identity = visitor.identity if visitor else STRANGER
    name = visitor.principal if visitor else ""
    can_author = visitor is not None and visitor.can_author
    return replace(
        caller,
        name=name,
        identity=identity,
        is_owner=identity.kind == "owner",
        can_author=can_author,
        actor=visitor.actor if visitor else None,
        can_manage=visitor is not None and visitor.can_manage,
        can_write=visitor is not None and visitor.can_write,
        expires_at=visitor.expires_at if visitor else None,
    )
