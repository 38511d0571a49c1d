"""Access tokens of an identity provider: the gateway's settings, the keys of the provider, the check of a token."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from urllib.parse import urlsplit

import jwt
from jwt import PyJWK, PyJWTError
from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest, KiwiError, TokenExpired, TokenRefused, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.manifest.document import read_json, read_yaml
from kiwi_mcp.primitives.http import client

FILE_NAME = "gateway.yaml"
"""The file in the user's space, which the owner writes; options of `kiwi up` go before it."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
SCOPE = "kiwi:tools"
WELL_KNOWN = "/.well-known/oauth-protected-resource"

_WORDS = ("issuer", "audience", "scope")
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+")
"""A scope as RFC 6749 has it."""
ALGORITHMS: Mapping[str, Mapping[str, str]] = {
    "RS256": {"kty": "RSA"},
    "PS256": {"kty": "RSA"},
    "ES256": {"kty": "EC", "crv": "P-256"},
    "EdDSA": {"kty": "OKP", "crv": "Ed25519"},
}
"""The ways of signing that are taken, and the keys that each needs: no shared secrets, and never none at all."""
_log = logging.getLogger("kiwi.gateway")
_FRESH, _STALE = 600.0, 3_600.0
"""For how many seconds keys are used without a question, and for how many more while the provider is silent."""
_PAUSE, _RETRY = 60.0, 5.0
"""How many seconds lie between fetches for keys that are not known, and after one that failed."""
_SECONDS = 8.0
_MAX_BYTES = 262_144
_MAX_KEYS = 100
_OK = 200
_LEEWAY = 30
"""How many seconds the clocks of the provider and of this machine may differ."""
_TYPES = frozenset({"", "jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""What an access token may call itself; other tokens of a provider (of a logout, of an event) are signed alike."""
_MAX_SUBJECT = 255


class IdentityProvider(Struct, frozen=True):
    """The access tokens that are accepted: of this issuer, for our audience, with the scope that allows tools."""

    issuer: str
    audience: str
    scope: str = SCOPE

    @property
    def metadata_url(self) -> str:
        """Where clients read which issuer to go to: the place that RFC 9728 derives from the audience."""
        parts = urlsplit(self.audience)
        return f"{parts.scheme}://{parts.netloc}{WELL_KNOWN}{parts.path.rstrip('/')}"

    @property
    def metadata(self) -> JsonObject:
        """What they read there."""
        return {
            "resource": self.audience,
            "resource_name": "Kiwi",
            "authorization_servers": [self.issuer],
            "scopes_supported": [self.scope],
            "bearer_methods_supported": ["header"],
        }

    @property
    def host(self) -> str:
        """The name under which clients reach us."""
        return urlsplit(self.audience).hostname or ""


def oauth_settings(user: Path, *, issuer: str = "", audience: str = "", scope: str = "") -> IdentityProvider | None:
    """Return the identity provider that the options or the owner's file name; None if there is none."""
    given = {"issuer": issuer, "audience": audience, "scope": scope}
    words = {**_written(user / FILE_NAME), **{word: text for word, text in given.items() if text}}
    if not words:
        return None
    if issues := list(_issues(words)):
        response = "; ".join(f"{issue.place} {issue.reason}" for issue in issues)
        message = f"The identity provider cannot be used: {response}."
        raise InvalidRequest(message, suggestion=issues[0].fix, issues=[issue.to_json() for issue in issues])
    return IdentityProvider(words["issuer"], words["audience"], words.get("scope") or SCOPE)


def is_secure(url: str) -> bool:
    """Whether data from an address is safe from changes in transit: by TLS, or because it is on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)


def _issues(words: Mapping[str, str]) -> Iterator[Issue]:
    for word, what in (("issuer", "of the identity provider"), ("audience", "at which clients reach `/mcp` here")):
        if not (url := words.get(word, "")):
            yield Issue(word, "is missing", f"Give `--{word} URL`: the address {what}.")
        elif not _is_address(url):
            fix = "Write `https://name/path`, without a query; plain `http` is for this machine alone."
            yield Issue(word, f"{url[:100]!r} is not an address {what}", fix)
    if not _SCOPE.fullmatch(words.get("scope") or SCOPE):
        yield Issue("scope", "is not one word", f"Write one such as `{SCOPE}`.")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_plain = bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
    except ValueError:
        return False
    is_quoted = url.isascii() and url.isprintable() and not set(url) & set('?#"\\ ')
    return is_plain and is_quoted and is_secure(url)


def _written(path: Path) -> Mapping[str, str]:
    try:
        # The users that may write this file decide who may use the tools.
        state = path.stat()
        is_private = not state.st_mode & 0o022 and state.st_uid in {os.geteuid(), 0}
        value = read_yaml(path.read_text(encoding="utf-8"), what=FILE_NAME).value
    except FileNotFoundError:
        return {}
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(f"cannot be read: {error}", "Make it a text file that you can read.") from error
    if not is_private:
        raise _unreadable("may be written by others", "Make it yours alone: `chmod 600`.")
    written, known = as_object(value), f"Use one of: {', '.join(_WORDS)}."
    issues = [Issue(word, "is not a known key", known) for word in written if word not in _WORDS]
    issues += [Issue(word, "is not a text", known) for word in _WORDS if word in written and not as_text(written[word])]
    if issues or (value is not None and not isinstance(value, Mapping)):
        raise InvalidManifest(f"The owner's {FILE_NAME}", issues or [Issue("", "is not a mapping", known)])
    return {word: as_text(written[word]) for word in written}


def _unreadable(reason: str, fix: str) -> InvalidManifest:
    return InvalidManifest(f"The owner's {FILE_NAME}", [Issue("", reason, fix)])


class JwksCache:
    """The keys of one identity provider."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._keys: Mapping[tuple[str, str], PyJWK] = {}
        self._fetched_at = self._tried_at = float("-inf")
        self._renewal: asyncio.Task[None] | None = None
        self._network = client.Network()

    async def key(self, kid: str, algorithm: str) -> PyJWK | None:
        """Return a key of the provider; None where it has no such key. A provider that is not there is an error."""
        if self._age > _FRESH:
            self._renew(_RETRY)
        if self._age > _STALE:
            await self._renewed()
        if self._age > _STALE:
            message = "The identity provider is unreachable, so its tokens cannot be checked."
            suggestion = "Try again in a moment; the owner checks `--issuer` and that this machine can reach it."
            raise Unavailable(message, suggestion=suggestion)
        if (found := self._find(kid, algorithm)) is None and self._renew(_PAUSE):
            await self._renewed()
            found = self._find(kid, algorithm)
        return found

    async def aclose(self) -> None:
        """Stop asking the provider."""
        if self._renewal is not None:
            self._renewal.cancel()
            with suppress(asyncio.CancelledError):
                await self._renewal
        await self._network.aclose()

    @property
    def _age(self) -> float:
        return monotonic() - self._fetched_at

    def _find(self, kid: str, algorithm: str) -> PyJWK | None:
        if kid:
            return self._keys.get((kid, algorithm))
        fitting = [key for (_, its), key in self._keys.items() if its == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    def _renew(self, pause: float) -> bool:
        """Begin to fetch the keys unless that was done within the pause; say whether they are being fetched."""
        if self._renewal is not None and not self._renewal.done():
            return True
        if monotonic() - self._tried_at < pause:
            return False
        self._tried_at = monotonic()
        self._renewal = asyncio.create_task(self._fetch())
        return True

    async def _renewed(self) -> None:
        if self._renewal is not None:
            await asyncio.shield(self._renewal)  # one that waits may leave, and the others go on waiting

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(_SECONDS):
                self._keys, self._fetched_at = usable_keys(await self._published()), monotonic()
        except TimeoutError:
            _log.warning("the identity provider did not answer in time")
        except (KiwiError, ValueError) as error:  # the latter for an invalid address
            _log.warning("the identity provider cannot be used: %s", error)

    async def _published(self) -> Sequence[Json]:
        for url in metadata_urls(self._url):
            if (described := await self._get(url)) is not None:
                break
        else:
            raise self._nonsense("it does not describe itself")
        if as_text(described.get("issuer")) != self._url:
            raise self._nonsense("it calls itself by another name")
        keys_url = as_text(described.get("jwks_uri"))
        if not is_secure(keys_url) or (keys_url.startswith("http:") and not self._url.startswith("http:")):
            raise self._nonsense("it names no safe address for its keys")
        if (found := await self._get(keys_url)) is None:
            raise self._nonsense("it does not give its keys")
        return as_list(found.get("keys"))[:_MAX_KEYS]

    async def _get(self, url: str) -> JsonObject | None:
        spec = HttpSpec(
            "GET",
            url,
            headers={"Accept": "application/json"},
            timeout=_SECONDS,
            max_bytes=_MAX_BYTES,
            max_redirects=0,
            # The provider is where the owner says it is; anywhere else has to be a public address.
            granted=(_authority(self._url),) if _authority(url) == _authority(self._url) else (),
        )
        reply = await client.send(spec, through=self._network)
        if reply.status != _OK or reply.is_truncated:
            return None
        text = reply.body.decode(errors="replace")
        return as_object(read_json(text, what="The provider's answer", max_bytes=_MAX_BYTES).value)

    def _nonsense(self, reason: str) -> Unavailable:
        return Unavailable(f"{self._url}: {reason}.", suggestion="Check `--issuer`.")


def metadata_urls(issuer: str) -> Iterator[str]:
    """Yield where a provider may describe itself: as RFC 8414 has it, and the two ways of OpenID Connect."""
    parts = urlsplit(issuer)
    base, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    yield f"{base}/.well-known/oauth-authorization-server{path}"
    yield f"{base}/.well-known/openid-configuration{path}"
    if path:
        yield f"{base}{path}/.well-known/openid-configuration"


def usable_keys(published: Sequence[Json]) -> Mapping[tuple[str, str], PyJWK]:
    """Return the published keys that verify signatures, by their id and by each way of signing they fit."""
    keys: dict[tuple[str, str], PyJWK] = {}
    for jwk in map(as_object, published):
        public = {word: value for word, value in jwk.items() if word != "d"}
        for algorithm, needed in ALGORITHMS.items():
            name = (as_text(jwk.get("kid")), algorithm)
            is_for_signatures = jwk.get("use", "sig") == "sig" and jwk.get("alg", algorithm) == algorithm
            is_of_kind = all(jwk.get(word) == value for word, value in needed.items())
            if name not in keys and is_for_signatures and is_of_kind:
                with suppress(PyJWTError, ValueError, TypeError):  # a key that cannot be read takes no other with it
                    keys[name] = PyJWK(public, algorithm)
    return keys


def _authority(url: str) -> str:
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


class VerifiedToken(Struct, frozen=True):
    """The person of an access token, what it allows, and until when."""

    name: str
    """The issuer and the subject, which together mean one person."""
    scopes: frozenset[str]
    expires_at: float
    """In seconds since 1970, with what clocks may differ."""


class TokenVerifier:
    """The access tokens that are made out for us."""

    def __init__(self, settings: IdentityProvider, issuer: JwksCache | None = None) -> None:
        self.settings = settings
        self._issuer = issuer or JwksCache(settings.issuer)

    async def verify(self, token: str) -> VerifiedToken:
        """Return the person of a token; every invalid token is refused with the same message."""
        try:
            header = as_object(jwt.get_unverified_header(token))
            algorithm, kid = as_text(header.get("alg")), as_text(header.get("kid"))
            if algorithm not in ALGORITHMS or as_text(header.get("typ")).lower() not in _TYPES:
                raise _refused("its kind is not taken")
            if (key := await self._issuer.key(kid, algorithm)) is None:
                raise _refused("its key is not known")
            claims = jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self.settings.audience,
                issuer=self.settings.issuer,
                leeway=_LEEWAY,
                options={"require": ["iss", "aud", "sub", "exp"], "enforce_minimum_key_length": True},
            )
            return self._identity(as_object(claims))
        except jwt.ExpiredSignatureError:
            raise _refused("it has expired", TokenExpired) from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise _refused(type(error).__name__) from None

    async def aclose(self) -> None:
        """Close the connection to the provider."""
        await self._issuer.aclose()

    def _identity(self, claims: JsonObject) -> VerifiedToken:
        subject, expires_at = as_text(claims.get("sub")), claims["exp"]
        if not subject.isprintable() or not 0 < len(subject) <= _MAX_SUBJECT:
            raise _refused("its subject is not a name")
        if "cnf" in claims:
            # It belongs to a key of the client's, of which a bearer shows nothing.
            raise _refused("it is bound to a key")
        return VerifiedToken(
            name=f"{self.settings.issuer} {subject}",
            scopes=frozenset(_words(claims, "scope") + _words(claims, "scp")),
            expires_at=float(expires_at) + _LEEWAY if isinstance(expires_at, int | float) else 0.0,
        )


def is_access_token(secret: str) -> bool:
    """Whether a word has the form of a signed token, which no token of Kiwi's own has."""
    return secret.count(".") == 2  # noqa: PLR2004 - header, claims and signature


def _words(claims: JsonObject, name: str) -> list[str]:
    value = claims.get(name)
    return value.split() if isinstance(value, str) else [as_text(word) for word in as_list(value)]


def _refused(reason: str, kind: type[TokenRefused] = TokenRefused) -> TokenRefused:
    _log.info("an access token is refused: %s", reason)
    suggestion = "Get one from the identity provider for this server's own address, and send it as a bearer token."
    return kind("The access token is not valid here.", suggestion=suggestion)
