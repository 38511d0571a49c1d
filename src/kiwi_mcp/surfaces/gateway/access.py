"""Access tokens of an identity provider: each is verified by the provider's keys, and none is ever believed."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import jwt

from kiwi_mcp.domain.errors import TokenExpired, TokenRefused
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.surfaces.gateway.issuer import ALGORITHMS, Issuer
from kiwi_mcp.surfaces.gateway.settings import OAuth

_log = logging.getLogger("kiwi.gateway")
_LEEWAY = 30
"""How many seconds the clocks of the provider and of this machine may differ."""
_TYPES = frozenset({"", "jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""What an access token may call itself; other tokens of a provider (of a logout, of an event) are signed alike."""
_NEEDED = ["iss", "aud", "sub", "exp"]
_MAX_SUBJECT = 255
_PARTS = 3


@dataclass(frozen=True, slots=True)
class Identity:
    """Whom an access token stands for, what it allows, and until when."""

    name: str
    """The issuer and the subject, which together mean one person."""
    scopes: frozenset[str]
    expires_at: float
    """In seconds since 1970, with what clocks may differ."""


class AccessTokens:
    """The access tokens that are made out for us."""

    def __init__(self, settings: OAuth, issuer: Issuer | None = None) -> None:
        self.settings = settings
        self._issuer = issuer or Issuer(settings.issuer)

    async def verify(self, token: str) -> Identity:
        """Return whom a token stands for; whatever is wrong with it, it is refused in the same words."""
        try:
            header = as_object(jwt.get_unverified_header(token))
            algorithm, kid = as_text(header.get("alg")), as_text(header.get("kid"))
            if algorithm not in ALGORITHMS or as_text(header.get("typ")).lower() not in _TYPES:
                raise _refused("its kind is not taken")
            if (key := await self._issuer.key(kid, algorithm)) is None:
                raise _refused("its key is not known")
            return self._identity(self._claims(token, key, algorithm))
        except jwt.ExpiredSignatureError:
            raise _refused("it has expired", TokenExpired) from None
        except (jwt.PyJWTError, ValueError, TypeError, OverflowError) as error:
            raise _refused(type(error).__name__) from None

    async def aclose(self) -> None:
        """Let go of the provider."""
        await self._issuer.aclose()

    def _claims(self, token: str, key: jwt.PyJWK, algorithm: str) -> JsonObject:
        return as_object(
            jwt.decode(
                token,
                key,
                algorithms=[algorithm],
                audience=self.settings.audience,
                issuer=self.settings.issuer,
                leeway=_LEEWAY,
                options={"require": _NEEDED, "enforce_minimum_key_length": True},
            )
        )

    def _identity(self, claims: JsonObject) -> Identity:
        subject, expires_at = as_text(claims.get("sub")), claims["exp"]
        if not subject.isprintable() or not 0 < len(subject) <= _MAX_SUBJECT:
            raise _refused("its subject is not a name")
        if "cnf" in claims:
            # It belongs to a key of the client's, of which a bearer shows nothing.
            raise _refused("it is bound to a key")
        return Identity(
            name=f"{self.settings.issuer} {subject}",
            scopes=frozenset(_words(claims, "scope") + _words(claims, "scp")),
            expires_at=float(expires_at) + _LEEWAY if isinstance(expires_at, int | float) else 0.0,
        )


def is_access_token(secret: str) -> bool:
    """Whether a word has the form of a signed token, which no token of Kiwi's own has."""
    return secret.count(".") == _PARTS - 1


def _words(claims: JsonObject, name: str) -> list[str]:
    value = claims.get(name)
    return value.split() if isinstance(value, str) else [as_text(word) for word in as_list(value)]


def _refused(reason: str, kind: type[TokenRefused] = TokenRefused) -> TokenRefused:
    _log.info("an access token is refused: %s", reason)
    return kind(
        "The access token is not valid here.",
        suggestion="Get one from the identity provider for this server's own address, and send it as a bearer token.",
    )
