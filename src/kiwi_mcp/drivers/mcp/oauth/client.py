"""Who Kiwi is to an authorization server: a client of the owner's, a document, or one that it registers itself."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from time import time
from urllib.parse import quote

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import RequestFailed, Unavailable
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import plain
from kiwi_mcp.drivers.mcp.oauth.discovery import Authority
from kiwi_mcp.drivers.mcp.oauth.web import Reply, Web
from kiwi_mcp.drivers.mcp.oauth.words import OAuth
from kiwi_mcp.primitives.secrets import Secret

_WITH_SECRET = ("client_secret_basic", "client_secret_post")
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SAID = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A client as an authorization server knows it."""

    client_id: str
    method: str = "none"
    """How it proves itself: `none`, `client_secret_basic`, `client_secret_post`, `private_key_jwt`."""
    secret: Secret | None = None
    redirect: str = ""
    """Where the browser is sent back to, as it was registered."""
    until: float = 0.0
    """When its secret expires; 0 for never."""
    is_registered: bool = False
    """Whether Kiwi registered it itself, so that it is kept."""

    def proof(
        self, form: Mapping[str, str], authority: Authority, oauth: OAuth
    ) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return a form with what proves the client to the server, and the headers that do."""
        named = {**form, "client_id": self.client_id}
        secret = self.secret.reveal() if self.secret else ""
        match self.method:
            case "client_secret_basic":
                pair = f"{quote(self.client_id, safe='')}:{quote(secret, safe='')}"
                return form, {"Authorization": f"Basic {b64encode(pair.encode()).decode()}"}
            case "client_secret_post":
                return {**named, "client_secret": secret}, {}
            case "private_key_jwt":
                return {
                    **named,
                    "client_assertion_type": _ASSERTION,
                    "client_assertion": self._signed(authority, oauth),
                }, {}
            case _:
                return named, {}

    def _signed(self, authority: Authority, oauth: OAuth) -> str:
        # What signs takes longer to load than all the rest here, and few servers want it.
        sign: Callable[[str, str, str, str], str] = import_module("kiwi_mcp.drivers.mcp.oauth.assertion").signed
        return sign(self.client_id, authority.issuer, oauth.private_key, oauth.signing_algorithm)

    @classmethod
    def of(cls, record: JsonObject) -> Client | None:
        """Return a client that was kept."""
        until, secret = record.get("until"), as_text(record.get("secret"))
        if not as_text(record.get("client_id")):
            return None
        return cls(
            as_text(record.get("client_id")),
            as_text(record.get("method")),
            Secret(secret) if secret else None,
            as_text(record.get("redirect")),
            float(until) if isinstance(until, int | float) else 0.0,
            is_registered=True,
        )

    def to_json(self) -> JsonObject:
        """Return the client to be kept."""
        return {
            "client_id": self.client_id,
            "method": self.method,
            "secret": self.secret.reveal() if self.secret else "",
            "redirect": self.redirect,
            "until": self.until,
        }


def owners_client(oauth: OAuth, authority: Authority) -> Client | None:
    """Return the client that needs no registration: the owner's own, or a document that the server can read."""
    if oauth.client_id:
        secret = Secret(oauth.client_secret) if oauth.client_secret else None
        method = oauth.token_auth or _method(authority, has_secret=secret is not None, has_key=bool(oauth.private_key))
        return Client(oauth.client_id, method, secret)
    if oauth.client_metadata_url and authority.takes_documents:
        return Client(oauth.client_metadata_url)
    return None


async def registered(authority: Authority, redirect: str, scope: str, known: Client | None, web: Web) -> Client:
    """Return a client that Kiwi registered: the known one where it is still good for this redirect, or a new one."""
    if known is not None and known.redirect == redirect and (not known.until or known.until > time()):
        return known
    if not authority.registration_endpoint:
        raise Unavailable(
            f"{authority.issuer} does not let clients register themselves.",
            suggestion="Register Kiwi there as a native app and write its `client_id` (and `client_secret: ${NAME}`) "
            "into `config.auth` of the server.",
        )
    method = next((one for one in ("none", *_WITH_SECRET) if one in authority.methods), "none")
    reply = await web.post_json(
        authority.registration_endpoint,
        {
            "client_name": "Kiwi",
            "software_id": "kiwi-mcp",
            "software_version": __version__,
            "application_type": "native",
            "redirect_uris": [redirect],
            "grant_types": ["authorization_code", "refresh_token"],
            "response_types": ["code"],
            "token_endpoint_auth_method": method,
            **({"scope": scope} if scope else {}),
        },
    )
    return replace(_read(reply, method, authority), redirect=redirect)


def _read(reply: Reply, asked: str, authority: Authority) -> Client:
    client_id, secret = as_text(reply.content.get("client_id")), as_text(reply.content.get("client_secret"))
    if not reply.is_ok or not client_id:
        raise RequestFailed(
            f"{authority.issuer} did not register Kiwi: {told(reply)}.",
            suggestion="Register Kiwi there yourself and write its `client_id` into `config.auth` of the server.",
            cause="status",
        )
    method = as_text(reply.content.get("token_endpoint_auth_method")) or asked
    if method in _WITH_SECRET and not secret:
        method = "none"
    if method not in ("none", *_WITH_SECRET):
        raise Unavailable(
            f"{authority.issuer} wants Kiwi to prove itself by {plain(method)[:50]!r}, which it cannot.",
            suggestion="Register Kiwi there yourself and write its `client_id` into `config.auth` of the server.",
        )
    until = reply.content.get("client_secret_expires_at")
    return Client(
        client_id,
        method,
        Secret(secret) if secret and method != "none" else None,
        until=float(until) if isinstance(until, int | float) else 0.0,
        is_registered=True,
    )


def told(reply: Reply) -> str:
    """Return why a server refused, in its own words as far as they can be shown."""
    words = [as_text(reply.content.get(word)) for word in ("error", "error_description")]
    said = plain(": ".join(filter(None, words))).replace("\n", " ")[:_SAID]
    return f"{said} ({reply.status})" if said else f"it answered {reply.status}"


def _method(authority: Authority, *, has_secret: bool, has_key: bool) -> str:
    if has_key:
        return "private_key_jwt"
    if not has_secret:
        return "none"
    return next((one for one in _WITH_SECRET if one in authority.methods), _WITH_SECRET[0])
