"""Protected-resource and authorization-server metadata; guarded requests."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit, urlunsplit

from mcp.shared.auth_utils import check_resource_allowed, resource_url_from_server_url
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import AddressDenied, RequestFailed, Unavailable, Untrusted
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.manifest.templates import escape
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.addresses import is_loopback
from kiwi_mcp.primitives.http.token_request import TokenReply, take

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

    @classmethod
    def assumed(cls, origin: str) -> AuthorizationServer:
        """Return the server at the addresses of the first protocol revision, without a description of its own."""
        return cls(origin, f"{origin}/token", f"{origin}/authorize", f"{origin}/register")


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
    return OAuthMetadata(resource, authority or AuthorizationServer.assumed(wanted), is_assumed=authority is None)


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
