"""Who Kiwi is to an authorization server: a client of the owner's, a document, or one that it registers itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from time import time

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import RequestFailed, Unavailable, Untrusted
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import plain
from kiwi_mcp.drivers.mcp.oauth.discovery import Authority, is_same
from kiwi_mcp.drivers.mcp.oauth.web import Form, Reply, Web
from kiwi_mcp.drivers.mcp.oauth.words import OAuth
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives.secrets import Secret

_WITH_SECRET = ("client_secret_basic", "client_secret_post")
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SECRET, _SIGNED = "KIWI_CLIENT_SECRET", "KIWI_CLIENT_ASSERTION"
_HIDDEN = ("client_secret", "registration_access_token")


@dataclass(frozen=True, slots=True)
class Client:
    """A client as an authorization server knows it."""

    client_id: str
    method: str = "none"
    """How it proves itself: `none`, `client_secret_basic`, `client_secret_post`, `private_key_jwt`."""
    secret: Secret | None = None
    """What it got when it was registered; that of the owner's own client is in a variable."""
    redirect: str = ""
    """Where the browser is sent back to, as it was registered."""
    until: float = 0.0
    """When its secret expires; 0 for never."""
    is_registered: bool = False
    """Whether Kiwi registered it itself, so that it is kept."""

    def proved(self, form: Form, authority: Authority, oauth: OAuth, secrets: Mapping[str, str]) -> Form:
        """Return a form with what proves the client to the server."""
        name = escape(self.client_id)
        own = {_SECRET: self.secret} if self.secret else {}
        password = f"${{{_SECRET}}}" if self.secret else oauth.client_secret
        match self.method:
            case "client_secret_basic":
                return Form(form.words, {**form.secrets, **own}, (name, password))
            case "client_secret_post":
                words = {**form.words, "client_id": name, "client_secret": password}
                return Form(words, {**form.secrets, **own})
            case "private_key_jwt":
                signed = _signed(self.client_id, authority.issuer, oauth, secrets)
                words = {"client_assertion_type": _ASSERTION, "client_assertion": f"${{{_SIGNED}}}", "client_id": name}
                return Form({**form.words, **words}, {**form.secrets, _SIGNED: signed})
            case _:
                return Form({**form.words, "client_id": name}, form.secrets)

    @classmethod
    def of(cls, facts: JsonObject, secret: Secret | None) -> Client | None:
        """Return a client that was kept."""
        until = facts.get("until")
        if not as_text(facts.get("client_id")):
            return None
        return cls(
            as_text(facts.get("client_id")),
            as_text(facts.get("method")),
            secret,
            as_text(facts.get("redirect")),
            float(until) if isinstance(until, int | float) else 0.0,
            is_registered=True,
        )

    def to_json(self) -> JsonObject:
        """Return all of the client but its secret, to be kept."""
        return {"client_id": self.client_id, "method": self.method, "redirect": self.redirect, "until": self.until}


def owners_client(oauth: OAuth, authority: Authority) -> Client | None:
    """Return the client that needs no registration: the owner's own, or a document that the server can read.

    What proves the owner's own is for the authorization server that the owner names, and for no other.
    """
    if oauth.client_id:
        if oauth.client_secret or oauth.private_key:
            _refuse_stranger(oauth, authority)
        return Client(oauth.client_id, oauth.token_auth or _method(oauth, authority))
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
    about: JsonObject = {
        "client_name": "Kiwi",
        "software_id": "kiwi-mcp",
        "software_version": __version__,
        "application_type": "native",
        "redirect_uris": [redirect],
        "grant_types": ["authorization_code", "refresh_token"],
        "response_types": ["code"],
        "token_endpoint_auth_method": method,
        **({"scope": escape(scope)} if scope else {}),
    }
    reply = await web.post_json(authority.registration_endpoint, about, _HIDDEN)
    return replace(_read(reply, method, authority), redirect=redirect)


def _read(reply: Reply, asked: str, authority: Authority) -> Client:
    client_id, secret = as_text(reply.content.get("client_id")), reply.secrets.get("client_secret")
    if not reply.is_ok or not client_id:
        raise RequestFailed(
            f"{authority.issuer} did not register Kiwi: {reply.reason}.",
            suggestion="Register Kiwi there yourself and write its `client_id` into `config.auth` of the server.",
            cause="status",
        )
    method = as_text(reply.content.get("token_endpoint_auth_method")) or asked
    if method in _WITH_SECRET and secret is None:
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
        secret if method != "none" else None,
        until=float(until) if isinstance(until, int | float) else 0.0,
        is_registered=True,
    )


def _refuse_stranger(oauth: OAuth, authority: Authority) -> None:
    # The server that is asked says itself where its tokens are had, and would be believed about the secret too.
    if not oauth.issuer:
        raise Untrusted(
            f"The manifest does not say for which authorization server its client secret is, and {authority.issuer} "
            "is only what the server names.",
            suggestion="If it is the right one, write it as `issuer` into `config.auth` of the server.",
        )
    if not is_same(authority.issuer, oauth.issuer):
        raise Untrusted(
            f"The client secret is for {oauth.issuer}, not for {authority.issuer}.",
            suggestion="If that is right, change `config.auth.issuer` of the server.",
        )


def _method(oauth: OAuth, authority: Authority) -> str:
    if oauth.private_key:
        return "private_key_jwt"
    if not oauth.client_secret:
        return "none"
    return next((one for one in _WITH_SECRET if one in authority.methods), _WITH_SECRET[0])


def _signed(client_id: str, audience: str, oauth: OAuth, secrets: Mapping[str, str]) -> Secret:
    # What signs takes longer to load than all the rest here, and few servers want it.
    sign: Callable[[str, str, str, str, Mapping[str, str]], Secret]
    sign = import_module("kiwi_mcp.primitives.assertion").signed
    return sign(client_id, audience, oauth.private_key, oauth.signing_algorithm, secrets)
