"""Tokens: what they are, and how an authorization server is asked for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import time

from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.drivers.mcp.oauth.client import Client
from kiwi_mcp.drivers.mcp.oauth.discovery import Authority
from kiwi_mcp.drivers.mcp.oauth.web import Form, Web
from kiwi_mcp.drivers.mcp.oauth.words import OAuth
from kiwi_mcp.manifest.render import escape
from kiwi_mcp.primitives.secrets import Secret

_MARGIN = 30.0
"""How long before its end a token is renewed, in seconds."""
_LONGEST = 10 * 365 * 86_400.0
_REFRESH = "KIWI_REFRESH_TOKEN"
_HIDDEN = ("access_token", "refresh_token", "id_token")


class Refused(Exception):
    """An authorization server gave no token, and said why."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error
        self.message = message


@dataclass(frozen=True, slots=True)
class Tokens:
    """What a request is allowed by, and what the next token is had with."""

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

    def to_json(self) -> JsonObject:
        """Return all of the tokens but themselves, to be kept."""
        return {"scope": self.scope, "issued_at": self.issued_at, "expires_at": self.expires_at}

    @classmethod
    def of(cls, facts: JsonObject, access: Secret | None, refresh: Secret | None) -> Tokens | None:
        """Return tokens that were kept."""
        if access is None:
            return None
        issued_at, expires_at = _number(facts.get("issued_at")) or 0.0, _number(facts.get("expires_at"))
        return cls(access, refresh, as_text(facts.get("scope")), issued_at, expires_at)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where tokens are had: an authorization server, who Kiwi is to it, and for which server they are."""

    authority: Authority
    client: Client
    resource: str
    oauth: OAuth
    web: Web

    async def exchanged(self, code: str, verifier: str, redirect: str, scope: str) -> Tokens:
        """Return the tokens for a code."""
        words = {"grant_type": "authorization_code", "redirect_uri": redirect, "code_verifier": verifier}
        return await self._tokens(Form({**words, "code": escape(code)}), scope)

    async def refreshed(self, tokens: Tokens) -> Tokens:
        """Return the tokens that follow on others."""
        words = {"grant_type": "refresh_token", "refresh_token": f"${{{_REFRESH}}}"}
        own = {_REFRESH: tokens.refresh} if tokens.refresh else {}
        return await self._tokens(Form(words, own), tokens.scope, tokens.refresh)

    async def granted(self, scope: str) -> Tokens:
        """Return tokens for Kiwi's own credentials."""
        words = {"grant_type": "client_credentials", **({"scope": escape(scope)} if scope else {})}
        return await self._tokens(Form(words), scope)

    async def _tokens(self, form: Form, scope: str, refresh: Secret | None = None) -> Tokens:
        whole = replace(form, words={**form.words, "resource": escape(self.resource)})
        proved = self.client.proved(whole, self.authority, self.oauth, self.web.secrets)
        reply = await self.web.post_form(self.authority.token_endpoint, proved, _HIDDEN)
        access = reply.secrets.get("access_token")
        if not reply.is_ok or access is None:
            raise Refused(as_text(reply.content.get("error")), f"{self.authority.issuer} gave no token: {reply.reason}")
        if as_text(reply.content.get("token_type")).lower() != "bearer":
            raise Refused("", f"{self.authority.issuer} gave a token of a kind that is not spoken")
        lasts = _number(reply.content.get("expires_in"))
        now = time()
        return Tokens(
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
