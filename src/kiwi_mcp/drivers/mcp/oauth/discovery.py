"""Who gives out tokens for a server: what the server says of itself, and what its authorization server does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from mcp.shared.auth_utils import check_resource_allowed, resource_url_from_server_url

from kiwi_mcp.domain.errors import Unavailable, Untrusted
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.drivers.mcp.oauth.web import Web

_PARAMETER = re.compile(r'([A-Za-z_]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s,"]+))')
_RESOURCE, _SERVER, _OPENID = (
    f"/.well-known/{name}"
    for name in ("oauth-protected-resource", "oauth-authorization-server", "openid-configuration")
)
_DEFAULT_METHODS = ("client_secret_basic",)
"""How a client proves itself where a server does not say (RFC 8414)."""
_MOST = 100
_NOT_THERE = frozenset({401, 403, 404, 405})


@dataclass(frozen=True, slots=True)
class Challenge:
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

    @classmethod
    def of(cls, record: JsonObject) -> Challenge:
        """Return a challenge that was kept."""
        return cls(*(as_text(record.get(word)) for word in ("error", "scope", "metadata")))

    def to_json(self) -> JsonObject:
        """Return the challenge to be kept."""
        return {"error": self.error, "scope": self.scope, "metadata": self.metadata}

    @property
    def wants_more(self) -> bool:
        """Whether it asks for rights that the token does not have."""
        return self.error == "insufficient_scope"


@dataclass(frozen=True, slots=True)
class Authority:
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
    def read(cls, document: JsonObject) -> Authority:
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
    def assumed(cls, origin: str) -> Authority:
        """Return the server that stands where the first revision of the protocol put it, and describes nothing."""
        return cls(origin, f"{origin}/token", f"{origin}/authorize", f"{origin}/register")


@dataclass(frozen=True, slots=True)
class Found:
    """The server's name for itself, who gives out tokens for it, and which rights it knows."""

    resource: str
    authority: Authority
    scopes: tuple[str, ...] = ()
    is_assumed: bool = False
    """Whether nothing says that there is such an authority."""


async def discover(url: str, challenge: Challenge, issuer: str, web: Web) -> Found:
    """Return who gives out tokens for the server at an address; `issuer` is the one that the owner wants, if any."""
    document = await _resource_document(url, challenge, web)
    if document is None:
        return await _without_document(url, issuer, web)
    resource, named = as_text(document.get("resource")), _texts(document, "authorization_servers")
    if not check_resource_allowed(resource_url_from_server_url(url), resource):
        raise Untrusted(
            f"The server at {_shown(url)} describes itself as {resource[:500]!r}, which it is not.",
            suggestion="Do not log in there; ask whoever runs the server.",
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
    return Found(resource, authority, _texts(document, "scopes_supported"))


async def is_offered(url: str, web: Web) -> bool:
    """Whether a server says, or shows in the oldest way, that tokens for it can be had by logging in."""
    if await _resource_document(url, Challenge(), web) is not None:
        return True
    if (await web.get(_at(url, _SERVER))).is_ok:
        return True
    # The first revision of the protocol has a page at a fixed place, which refuses who asks it for nothing.
    return (await web.get(_at(url, "/authorize"))).status not in _NOT_THERE


async def _resource_document(url: str, challenge: Challenge, web: Web) -> JsonObject | None:
    path = urlsplit(url).path.rstrip("/")
    places = [challenge.metadata, _at(url, f"{_RESOURCE}{path}"), _at(url, _RESOURCE)]
    for place in dict.fromkeys(filter(None, places)):
        reply = await web.get(place)
        if reply.is_ok and as_text(reply.content.get("resource")) and _texts(reply.content, "authorization_servers"):
            return reply.content
    return None


async def _without_document(url: str, issuer: str, web: Web) -> Found:
    """Return who gives out tokens for a server that says nothing of itself: the owner knows, or it does so itself."""
    wanted = issuer or _at(url, "")
    authority = await _authority(wanted, _places(wanted) if issuer else [_at(url, _SERVER)], web)
    if authority is None and issuer:
        raise _undescribed(issuer)
    resource = resource_url_from_server_url(url)
    return Found(resource, authority or Authority.assumed(wanted), is_assumed=authority is None)


async def _authority(issuer: str, places: list[str], web: Web) -> Authority | None:
    for place in places:
        reply = await web.get(place)
        if not reply.is_ok or not as_text(reply.content.get("issuer")):
            continue
        found = Authority.read(reply.content)
        if not is_same(found.issuer, issuer):
            raise Untrusted(
                f"{place} describes {found.issuer[:500]!r} and not {issuer!r}.",
                suggestion="Do not log in there; ask whoever runs the server.",
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
        suggestion="Check `config.auth.issuer` of the server, or ask whoever runs it.",
    )
