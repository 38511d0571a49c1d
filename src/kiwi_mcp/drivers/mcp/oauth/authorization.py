"""What Kiwi is to authorization servers: discovery, client registration and proof, tokens; every request is guarded."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from time import time
from urllib.parse import urlsplit, urlunsplit

from mcp.shared.auth_utils import check_resource_allowed, resource_url_from_server_url
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp import __version__
from kiwi_mcp.domain.errors import AddressDenied, RequestFailed, Unavailable, Untrusted
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.drivers.mcp.server import OAuthConfig
from kiwi_mcp.manifest.templates import escape
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.addresses import is_loopback
from kiwi_mcp.primitives.http.token_request import TokenReply, client_assertion, take

_TIMEOUT = 20.0
_LARGEST = 500_000
_FAULT, _TOO_MANY = 500, 429
_FORM = "application/x-www-form-urlencoded"


class TokenForm(Struct, frozen=True):
    """What is sent to get a token: words that may hold `${NAME}`, and the secrets of those names."""

    words: Mapping[str, str]
    secrets: Mapping[str, Secret] = field(default_factory=dict)
    basic: tuple[str, str] | None = None
    """A user name and a password, where the client proves itself so."""


class OAuthHttp(Struct, frozen=True):
    """The way to authorization servers, under the rules that the way to the MCP server itself is under."""

    granted: tuple[str, ...]
    denied: tuple[str, ...]
    secrets: Mapping[str, str]
    """The values of the variables that the server's manifest names."""

    def __repr__(self) -> str:
        return f"OAuthHttp(granted={self.granted!r}, denied={self.denied!r})"

    async def get(self, url: str) -> TokenReply:
        """Read a document."""
        return await self._ask(HttpSpec("GET", escape(url), {"Accept": "application/json"}))

    async def post_json(self, url: str, body: JsonObject, words: Collection[str]) -> TokenReply:
        """Send an object; the values of `words` in the answer are secrets."""
        spec = HttpSpec("POST", escape(url), {"Accept": "application/json"}, body, has_body=True)
        return await self._ask(spec, words)

    async def post_form(self, url: str, form: TokenForm, words: Collection[str]) -> TokenReply:
        """Send a form; the values of `words` in the answer are secrets."""
        headers = {"Accept": "application/json", "Content-Type": _FORM}
        spec = HttpSpec("POST", escape(url), headers, dict(form.words), has_body=True, basic=form.basic)
        return await self._ask(spec, words, self.secrets, form.secrets)

    async def check(self, url: str) -> None:
        """Refuse an address that this machine may not be sent to, though it is the person's browser that goes."""
        host, port = refuse_plain(url)
        await client.network.addresses(host, port, self.granted)

    async def _ask(
        self,
        spec: HttpSpec,
        words: Collection[str] = (),
        secrets: Mapping[str, str] | None = None,
        own: Mapping[str, Secret] | None = None,
    ) -> TokenReply:
        refuse_plain(spec.url)
        bounded = replace(
            spec,
            timeout=_TIMEOUT,
            max_bytes=_LARGEST,
            max_redirects=0,  # a server that moves names its new address in its documents
            granted=self.granted,
            denied=self.denied,
        )
        reply = await take(bounded, words=words, secrets=secrets or {}, own=own or {})
        if reply.status >= _FAULT or reply.status == _TOO_MANY:
            where = spec.url.partition("?")[0]
            raise RequestFailed(f"{where} answered {reply.status}.", suggestion="Try again later.", cause="status")
        return reply


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
        if parts.scheme == "http" and is_loopback(host):
            return host, port or 80
    raise AddressDenied(
        f"The server names {url[:500]!r} for its login, which is not an https address.",
        suggestion="Do not log in there; ask the operator of the server.",
    )


_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_RESOURCE, _SERVER, _OPENID = (
    f"/.well-known/{name}"
    for name in ("oauth-protected-resource", "oauth-authorization-server", "openid-configuration")
)
_DEFAULT_METHODS = ("client_secret_basic",)
"""How a client proves itself where a server does not say (RFC 8414)."""
_MOST = 100
_NOT_THERE = frozenset({401, 403, 404, 405})


class Challenge(Struct, frozen=True):
    """What a server asked for when it refused a request."""

    error: str = ""
    scope: str = ""
    metadata: str = ""
    """Where it says more of itself."""

    @classmethod
    def read(cls, header: str) -> Challenge:
        """Return the challenge of a `WWW-Authenticate` header."""
        found = {word.lower(): quoted or bare for word, quoted, bare in _PARAMETER.findall(header[:10_000])}
        return cls(found.get("error", ""), found.get("scope", ""), found.get("resource_metadata", ""))

    @property
    def wants_more(self) -> bool:
        """Whether it asks for rights that the token does not have."""
        return self.error == "insufficient_scope"


class AuthorizationServer(Struct, frozen=True):
    """An authorization server, as its own document describes it."""

    issuer: str
    token_endpoint: str
    authorization_endpoint: str = ""
    registration_endpoint: str = ""
    methods: tuple[str, ...] = _DEFAULT_METHODS
    """How a client may prove itself to it."""
    scopes: tuple[str, ...] = ()
    has_pkce: bool = True
    takes_documents: bool = False
    """Whether a client may be the address of a document about itself."""
    names_itself: bool = False
    """Whether it sends its name along with every code."""

    @classmethod
    def read(cls, document: JsonObject) -> AuthorizationServer:
        """Return the server that a document describes."""
        methods = _texts(document, "token_endpoint_auth_methods_supported")
        return cls(
            issuer=as_text(document.get("issuer")),
            token_endpoint=as_text(document.get("token_endpoint")),
            authorization_endpoint=as_text(document.get("authorization_endpoint")),
            registration_endpoint=as_text(document.get("registration_endpoint")),
            methods=methods or _DEFAULT_METHODS,
            scopes=_texts(document, "scopes_supported"),
            has_pkce="S256" in _texts(document, "code_challenge_methods_supported"),
            takes_documents=document.get("client_id_metadata_document_supported") is True,
            names_itself=document.get("authorization_response_iss_parameter_supported") is True,
        )


class OAuthMetadata(Struct, frozen=True):
    """The server's name for itself, who gives out tokens for it, and which rights it knows."""

    resource: str
    authority: AuthorizationServer
    scopes: tuple[str, ...] = ()
    is_assumed: bool = False
    """Whether nothing says that there is such an authority."""


async def discover(url: str, challenge: Challenge, issuer: str, web: OAuthHttp) -> OAuthMetadata:
    """Return who gives out tokens for the server at an address; `issuer` is the one that the owner wants, if any."""
    document = await _resource_document(url, challenge, web)
    if document is None:
        return await _without_document(url, issuer, web)
    resource, named = as_text(document.get("resource")), _texts(document, "authorization_servers")
    if not check_resource_allowed(resource_url_from_server_url(url), resource):
        raise Untrusted(
            f"The server at {_shown(url)} describes itself as {resource[:500]!r}, which it is not.",
            suggestion="Do not log in there; ask the operator of the server.",
        )
    if issuer and issuer not in named:
        raise Untrusted(
            f"The server at {_shown(url)} has its tokens from {', '.join(named)[:500]}, not from {issuer}.",
            suggestion="If that is right, change `config.auth.issuer` of the server.",
        )
    wanted = issuer or named[0]
    authority = await _authority(wanted, _places(wanted), web)
    if authority is None:
        raise _undescribed(wanted)
    return OAuthMetadata(resource, authority, _texts(document, "scopes_supported"))


async def is_offered(url: str, web: OAuthHttp) -> bool:
    """Whether a server offers OAuth: by its metadata, or by the fixed paths of the first protocol revision."""
    if await _resource_document(url, Challenge(), web) is not None:
        return True
    if (await web.get(_at(url, _SERVER))).is_ok:
        return True
    # The first revision of the protocol has a page at a fixed place, which refuses who asks it for nothing.
    return (await web.get(_at(url, "/authorize"))).status not in _NOT_THERE


async def _resource_document(url: str, challenge: Challenge, web: OAuthHttp) -> JsonObject | None:
    path = urlsplit(url).path.rstrip("/")
    places = [challenge.metadata, _at(url, f"{_RESOURCE}{path}"), _at(url, _RESOURCE)]
    for place in dict.fromkeys(filter(None, places)):
        reply = await web.get(place)
        if reply.is_ok and as_text(reply.content.get("resource")) and _texts(reply.content, "authorization_servers"):
            return reply.content
    return None


async def _without_document(url: str, issuer: str, web: OAuthHttp) -> OAuthMetadata:
    """Return who gives out tokens for a server that says nothing of itself: the owner knows, or it does so itself."""
    wanted = issuer or _at(url, "")
    authority = await _authority(wanted, _places(wanted) if issuer else [_at(url, _SERVER)], web)
    if authority is None and issuer:
        raise _undescribed(issuer)
    resource = resource_url_from_server_url(url)
    assumed = AuthorizationServer(wanted, f"{wanted}/token", f"{wanted}/authorize", f"{wanted}/register")
    return OAuthMetadata(resource, authority or assumed, is_assumed=authority is None)


async def _authority(issuer: str, places: list[str], web: OAuthHttp) -> AuthorizationServer | None:
    for place in places:
        reply = await web.get(place)
        if not reply.is_ok or not as_text(reply.content.get("issuer")):
            continue
        found = AuthorizationServer.read(reply.content)
        if not is_same(found.issuer, issuer):
            raise Untrusted(
                f"{place} describes {found.issuer[:500]!r} and not {issuer!r}.",
                suggestion="Do not log in there; ask the operator of the server.",
            )
        if not found.token_endpoint:
            raise _undescribed(issuer)
        return found
    return None


def _places(issuer: str) -> list[str]:
    """Return where an authorization server may describe itself, in the order of the specification."""
    path = urlsplit(issuer).path.rstrip("/")
    if not path:
        return [_at(issuer, _SERVER), _at(issuer, _OPENID)]
    return [_at(issuer, f"{_SERVER}{path}"), _at(issuer, f"{_OPENID}{path}"), _at(issuer, f"{path}{_OPENID}")]


def _at(url: str, path: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc, path, "", ""))


def is_same(found: str, wanted: str) -> bool:
    """Whether two names are one; a bare host may be written with its slash, as both lead to the same document."""
    return found == wanted or (found.rstrip("/") == wanted.rstrip("/") and not urlsplit(found).path.strip("/"))


def _texts(document: Mapping[str, object], word: str) -> tuple[str, ...]:
    found = document.get(word)
    return tuple(one for one in found[:_MOST] if isinstance(one, str)) if isinstance(found, list) else ()


def _shown(url: str) -> str:
    return url.partition("?")[0]


def _undescribed(issuer: str) -> Unavailable:
    return Unavailable(
        f"The authorization server {issuer[:500]} does not say how tokens are had from it.",
        suggestion="Check `config.auth.issuer` of the server, or ask its operator.",
    )


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
        method = oauth.token_auth
        if oauth.client_secret or oauth.private_key:
            # An MCP server names its authorization server itself, so it could choose where the secret is sent.
            if not oauth.issuer:
                raise Untrusted(
                    "The manifest does not say for which authorization server its client secret is, and "
                    f"{authority.issuer} is only what the server names.",
                    suggestion="If it is the right one, write it as `issuer` into `config.auth` of the server.",
                )
            if not is_same(authority.issuer, oauth.issuer):
                raise Untrusted(
                    f"The client secret is for {oauth.issuer}, not for {authority.issuer}.",
                    suggestion="If that is right, change `config.auth.issuer` of the server.",
                )
            with_secret = next((one for one in _WITH_SECRET if one in authority.methods), _WITH_SECRET[0])
            method = method or ("private_key_jwt" if oauth.private_key else with_secret)
        return OAuthClient(oauth.client_id, method or "none")
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
        """Return the tokens that replace others."""
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
