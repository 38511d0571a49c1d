"""Client registration and proof; code, refresh, client credentials."""

from __future__ import annotations

from collections.abc import Mapping
from time import time

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import RequestFailed, Unavailable, Untrusted
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.drivers.mcp.oauth.discovery import AuthorizationServer, OAuthHttp, TokenForm, is_same
from kiwi_mcp.drivers.mcp.server import OAuthConfig
from kiwi_mcp.manifest.templates import escape
from kiwi_mcp.primitives.http.token_request import TokenReply, client_assertion

_WITH_SECRET = ("client_secret_basic", "client_secret_post")
_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
_SECRET, _SIGNED = "KIWI_CLIENT_SECRET", "KIWI_CLIENT_ASSERTION"
_REGISTRATION_SECRETS = ("client_secret", "registration_access_token")


class OAuthClient(Struct, frozen=True):
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

    def proved(
        self, form: TokenForm, authority: AuthorizationServer, oauth: OAuthConfig, secrets: Mapping[str, str]
    ) -> TokenForm:
        """Return a form with what proves the client to the server."""
        name = escape(self.client_id)
        own = {_SECRET: self.secret} if self.secret else {}
        password = f"${{{_SECRET}}}" if self.secret else oauth.client_secret
        match self.method:
            case "client_secret_basic":
                return TokenForm(form.words, {**form.secrets, **own}, (name, password))
            case "client_secret_post":
                words = {**form.words, "client_id": name, "client_secret": password}
                return TokenForm(words, {**form.secrets, **own})
            case "private_key_jwt":
                signed = client_assertion(
                    self.client_id, authority.issuer, oauth.private_key, oauth.signing_algorithm, secrets
                )
                words = {"client_assertion_type": _ASSERTION, "client_assertion": f"${{{_SIGNED}}}", "client_id": name}
                return TokenForm({**form.words, **words}, {**form.secrets, _SIGNED: signed})
            case _:
                return TokenForm({**form.words, "client_id": name}, form.secrets)


def owners_client(oauth: OAuthConfig, authority: AuthorizationServer) -> OAuthClient | None:
    """Return the client that needs no registration: the owner's own, or a document that the server can read.

    What proves the owner's own is for the authorization server that the owner names, and for no other.
    """
    if oauth.client_id:
        if oauth.client_secret or oauth.private_key:
            _refuse_stranger(oauth, authority)
        return OAuthClient(oauth.client_id, oauth.token_auth or _method(oauth, authority))
    if oauth.client_metadata_url and authority.takes_documents:
        return OAuthClient(oauth.client_metadata_url)
    return None


async def registered(
    authority: AuthorizationServer, redirect: str, scope: str, known: OAuthClient | None, web: OAuthHttp
) -> OAuthClient:
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
    reply = await web.post_json(authority.registration_endpoint, about, _REGISTRATION_SECRETS)
    return replace(_read(reply, method, authority), redirect=redirect)


def _read(reply: TokenReply, asked: str, authority: AuthorizationServer) -> OAuthClient:
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
            f"{authority.issuer} wants Kiwi to prove itself by {strip_controls(method)[:50]!r}, which it cannot.",
            suggestion="Register Kiwi there yourself and write its `client_id` into `config.auth` of the server.",
        )
    until = reply.content.get("client_secret_expires_at")
    return OAuthClient(
        client_id,
        method,
        secret if method != "none" else None,
        until=float(until) if isinstance(until, int | float) else 0.0,
        is_registered=True,
    )


def _refuse_stranger(oauth: OAuthConfig, authority: AuthorizationServer) -> None:
    # An MCP server names its authorization server itself, so it could choose where the secret is sent.
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


def _method(oauth: OAuthConfig, authority: AuthorizationServer) -> str:
    if oauth.private_key:
        return "private_key_jwt"
    if not oauth.client_secret:
        return "none"
    return next((one for one in _WITH_SECRET if one in authority.methods), _WITH_SECRET[0])


_MARGIN = 30.0
"""How long before its end a token is renewed, in seconds."""
_LONGEST = 10 * 365 * 86_400.0
_REFRESH = "KIWI_REFRESH_TOKEN"
_TOKEN_SECRETS = ("access_token", "refresh_token", "id_token")


class NoTokenGiven(Exception):
    """An authorization server gave no token, and said why."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message


class TokenSet(Struct, frozen=True):
    """The access token of requests, and the refresh token for the next one."""

    access: Secret
    refresh: Secret | None
    scope: str
    issued_at: float
    expires_at: float | None

    def is_fresh(self) -> bool:
        """Whether the token is good for a while."""
        return self.expires_at is None or time() < self.expires_at - min(
            _MARGIN, (self.expires_at - self.issued_at) / 2
        )


class TokenEndpoint(Struct, frozen=True):
    """The token endpoint of an authorization server, for one client and one MCP server."""

    authority: AuthorizationServer
    client: OAuthClient
    resource: str
    oauth: OAuthConfig
    web: OAuthHttp

    async def exchanged(self, code: str, verifier: str, redirect: str, scope: str) -> TokenSet:
        """Return the tokens for a code."""
        words = {"grant_type": "authorization_code", "redirect_uri": redirect, "code_verifier": verifier}
        return await self._tokens(TokenForm({**words, "code": escape(code)}), scope)

    async def refreshed(self, tokens: TokenSet) -> TokenSet:
        """Return the tokens that follow on others."""
        words = {"grant_type": "refresh_token", "refresh_token": f"${{{_REFRESH}}}"}
        own = {_REFRESH: tokens.refresh} if tokens.refresh else {}
        return await self._tokens(TokenForm(words, own), tokens.scope, tokens.refresh)

    async def granted(self, scope: str) -> TokenSet:
        """Return tokens for Kiwi's own credentials."""
        words = {"grant_type": "client_credentials", **({"scope": escape(scope)} if scope else {})}
        return await self._tokens(TokenForm(words), scope)

    async def _tokens(self, form: TokenForm, scope: str, refresh: Secret | None = None) -> TokenSet:
        whole = replace(form, words={**form.words, "resource": escape(self.resource)})
        proved = self.client.proved(whole, self.authority, self.oauth, self.web.secrets)
        reply = await self.web.post_form(self.authority.token_endpoint, proved, _TOKEN_SECRETS)
        access = reply.secrets.get("access_token")
        if not reply.is_ok or access is None:
            raise NoTokenGiven(
                as_text(reply.content.get("error")), f"{self.authority.issuer} gave no token: {reply.reason}"
            )
        if as_text(reply.content.get("token_type")).lower() != "bearer":
            raise NoTokenGiven("", f"{self.authority.issuer} gave a token of a kind that is not spoken")
        lasts = _number(reply.content.get("expires_in"))
        now = time()
        return TokenSet(
            access,
            reply.secrets.get("refresh_token") or refresh,
            as_text(reply.content.get("scope")) or scope,
            now,
            now + min(max(lasts, 0.0), _LONGEST) if lasts is not None else None,
        )


def joined(*scopes: str) -> str:
    """Return all rights of several lists, each once."""
    return " ".join(dict.fromkeys(right for scope in scopes for right in scope.split()))


def _number(value: Json) -> float | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():  # some servers write their numbers as texts
        return float(value[:12])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
