"""Sealed login record; the bearer of each request, renewed under a lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from time import time

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Denied, RequestFailed, StoreDamaged
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.drivers.mcp.oauth.discovery import AuthorizationServer, Challenge, OAuthHttp, discover, is_offered
from kiwi_mcp.drivers.mcp.oauth.token_endpoint import (
    NoTokenGiven,
    OAuthClient,
    TokenEndpoint,
    TokenSet,
    joined,
    owners_client,
)
from kiwi_mcp.drivers.mcp.server import OAuthConfig
from kiwi_mcp.primitives.http.request import prepare
from kiwi_mcp.primitives.secrets.encrypted_records import EncryptedRecord, EncryptedRecords
from kiwi_mcp.primitives.secrets.key_storage import file_key

_FOLDER, _KEY = "logins", "sealing.key"


class LoginRecord(Struct, frozen=True):
    """A stored login: authorization server, client and tokens, and what the MCP server asked for last."""

    authority: AuthorizationServer | None = None
    resource: str = ""
    client: OAuthClient | None = None
    tokens: TokenSet | None = None
    challenge: Challenge | None = None


class Account(Struct):
    """One server at one address, and the record of its login."""

    url: str
    oauth: OAuthConfig
    web: OAuthHttp
    _sealed: EncryptedRecords
    _read: tuple[tuple[int, int] | None, LoginRecord] | None = None

    def record(self) -> LoginRecord:
        """Return the stored login; one for another address or another client does not count."""
        mark = self._sealed.mark(self.oauth.name)
        if self._read is None or self._read[0] != mark:
            self._read = mark, self._opened()
        return self._read[1]

    def record_or_reset(self) -> LoginRecord:
        """Return the stored record; remove a record that cannot be opened, because the next login creates another."""
        try:
            return self.record()
        except StoreDamaged:
            forget(self.oauth)
            return self.record()

    def keep(self, record: LoginRecord) -> None:
        """Store a record in place of the present one."""
        self._sealed.write(self.oauth.name, _encode(record, self._bound))

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Lock the stored login against other processes."""
        async with self._sealed.held(self.oauth.name):
            yield

    def token_endpoint(self, record: LoginRecord) -> TokenEndpoint | None:
        """Return the endpoint for the next tokens; None if the record does not suffice."""
        if record.authority is None:
            return None
        client = owners_client(self.oauth, record.authority) or record.client
        return TokenEndpoint(record.authority, client, record.resource, self.oauth, self.web) if client else None

    @property
    def _bound(self) -> str:
        """A hash of what the tokens are for: they are not sent to another address or by another client."""
        oauth = self.oauth
        words: Json = [self.url, oauth.client_id, oauth.issuer, oauth.grant, oauth.client_metadata_url]
        return sha256(compact(words).encode(errors="surrogatepass")).hexdigest()

    def _opened(self) -> LoginRecord:
        found = self._sealed.read(self.oauth.name)
        return LoginRecord() if found is None else _decode(found, self._bound)


def account_of(spec: HttpSpec, oauth: OAuthConfig, secrets: Mapping[str, str]) -> Account:
    """Return the account of a server that is reached by a spec."""
    return Account(
        str(prepare(spec, secrets).url), oauth, OAuthHttp(spec.granted, spec.denied, secrets), _sealed(oauth)
    )


def forget(oauth: OAuthConfig) -> bool:
    """Remove everything stored for a server's login, and return whether there was anything."""
    return _sealed(oauth).remove(oauth.name)


def _sealed(oauth: OAuthConfig) -> EncryptedRecords:
    return EncryptedRecords(oauth.folder / _FOLDER, file_key(oauth.folder / _KEY))


_AUTHORITY = ("issuer", "token_endpoint", "methods", "takes_documents")
"""What a renewal needs of an authorization server; for a login, the server is asked again."""
_CLIENT = ("client_id", "method", "redirect", "until")
_TOKENS = ("scope", "issued_at", "expires_at")
_SECRETS = ("access", "refresh")


def _encode(record: LoginRecord, bound: str) -> EncryptedRecord:
    """Return a login as it is stored: the facts, without parts that are absent, and the secrets."""
    client, tokens = record.client, record.tokens
    facts = {
        "bound": bound,
        "authority": _part(record.authority, _AUTHORITY),
        "resource": record.resource,
        "client": _part(client, _CLIENT) if client and client.is_registered else {},
        "tokens": _part(tokens, _TOKENS),
        "challenge": to_builtins(record.challenge),
    }
    secrets = {
        "access": tokens.access if tokens else None,
        "refresh": tokens.refresh if tokens else None,
        "client": client.secret if client else None,
    }
    return EncryptedRecord(
        {word: value for word, value in facts.items() if value},
        {word: secret for word, secret in secrets.items() if secret is not None},
    )


def _part(value: Struct | None, words: Sequence[str]) -> JsonObject:
    return {word: to_builtins(getattr(value, word)) for word in words} if value else {}


def _decode(found: EncryptedRecord, bound: str) -> LoginRecord:
    """Return a stored login; one for another address or another client counts as none."""
    facts, secrets = found.facts, found.secrets
    if facts.get("bound") != bound:
        return LoginRecord()
    authority, client, tokens = (as_object(facts.get(word)) for word in ("authority", "client", "tokens"))
    parts = {
        "authority": authority if authority.get("issuer") else None,
        "resource": facts.get("resource", ""),
        "client": {**client, "secret": secrets.get("client"), "is_registered": True}
        if client.get("client_id")
        else None,
        "tokens": {**tokens, **{word: secrets.get(word) for word in _SECRETS}} if "access" in secrets else None,
        "challenge": facts.get("challenge") or None,
    }
    try:
        return convert(parts, LoginRecord)
    except ValidationError as error:
        raise StoreDamaged(f"A stored login cannot be read: {error}.", suggestion="Log in again.") from error


_UNAUTHORIZED, _FORBIDDEN = 401, 403
_YOUNG = 30.0
"""A token that is refused within this many seconds after it was issued is not renewed: that would not help."""
_renewals: set[asyncio.Future[Secret | None]] = set()


class NoOAuthOffered(Exception):
    """A server refuses who brings no token, and offers no way to get one."""


class AccountBearer:
    """The token of an account."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self.is_login_wanted = False

    async def token(self) -> Secret | None:
        """Return the token that is kept, renewed if it is due."""
        tokens = self._account.record().tokens
        if tokens is None or tokens.is_fresh():
            return tokens.access if tokens else None
        with suppress(RequestFailed):  # the old token may still be valid, and a refusal of the server says more
            return await self._renewed(tokens.access) or tokens.access
        return tokens.access

    def is_asked(self, status: int, challenge: str) -> bool:
        """Whether a refusal is about the token: it is missing, no longer valid, or allows too little."""
        if status == _UNAUTHORIZED:
            return True
        return status == _FORBIDDEN and Challenge.read(challenge).wants_more

    async def instead(self, token: Secret | None, status: int, challenge: str) -> Secret | None:
        """Return a token that may do better; what only a person can allow is noted for the next login."""
        asked = Challenge.read(challenge)
        is_own = self._account.oauth.grant == "client_credentials"
        if token is not None and status == _UNAUTHORIZED and (another := await self._renewed(token)) is not None:
            return another
        if is_own and (another := await self._granted(token, asked)) is not None:
            return another
        if token is None and not (self._account.oauth.is_declared or asked.metadata or await self._is_offered()):
            raise NoOAuthOffered
        await self._note(asked)
        self.is_login_wanted = True
        return None

    async def _is_offered(self) -> bool:
        """Whether a login is possible at all; a server that cannot be asked about it offers none."""
        try:
            return await is_offered(self._account.url, self._account.web)
        except (RequestFailed, Denied):
            return False

    async def _renewed(self, token: Secret) -> Secret | None:
        """Return the token that replaces another one.

        Cancelling the caller does not cancel the renewal: the old token is used up once it was sent, and the new one
        must be stored.
        """
        task = asyncio.ensure_future(self._renew(token))
        _renewals.add(task)
        task.add_done_callback(_ended)
        return await asyncio.shield(task)

    async def _renew(self, token: Secret) -> Secret | None:
        """Renew a token, unless another caller has already done so."""
        async with self._account.locked():
            record = self._account.record()
            tokens, endpoint = record.tokens, self._account.token_endpoint(record)
            if tokens is None or not tokens.access.is_same(token):
                return tokens.access if tokens else None
            if tokens.refresh is None or endpoint is None or _is_young(tokens):
                return None
            try:
                following = await endpoint.refreshed(tokens)
            except NoTokenGiven as refusal:
                # A client that the server has forgotten is registered again at the next login.
                client = None if refusal.error == "invalid_client" else record.client
                self._account.keep(replace(record, tokens=None, client=client))
                return None
            self._account.keep(replace(record, tokens=following))
            return following.access

    async def _granted(self, token: Secret | None, asked: Challenge) -> Secret | None:
        """Return a token for Kiwi's own credentials."""
        account = self._account
        async with account.locked():
            record = account.record()
            tokens = record.tokens
            if tokens is not None and (token is None or not tokens.access.is_same(token)):
                return tokens.access
            if tokens is not None and _is_young(tokens) and not asked.wants_more:
                return None
            found = await discover(account.url, asked, account.oauth.issuer, account.web)
            client = owners_client(account.oauth, found.authority)
            if client is None:
                return None
            known = tokens.scope if tokens and asked.wants_more else ""
            scope = joined(" ".join(account.oauth.scopes) or known, asked.scope or " ".join(found.scopes))
            if tokens is not None and asked.wants_more and joined(tokens.scope) == scope:
                return None  # it has every scope that is asked for, and is refused nevertheless
            endpoint = TokenEndpoint(found.authority, client, found.resource, account.oauth, account.web)
            try:
                given = await endpoint.granted(scope)
            except NoTokenGiven as refusal:
                raise RequestFailed(
                    f"{refusal.message}.", suggestion="Check the client in `config.auth` of the server.", cause="status"
                ) from None
            account.keep(LoginRecord(found.authority, found.resource, tokens=given))
            return given.access

    async def _note(self, asked: Challenge) -> None:
        async with self._account.locked():
            record = self._account.record()
            if record.challenge != asked:
                self._account.keep(replace(record, challenge=asked))


def _ended(task: asyncio.Future[Secret | None]) -> None:
    _renewals.discard(task)
    if not task.cancelled():
        task.exception()  # a caller that waited has the error; without one, the next caller gets the same error


async def settled() -> None:
    """Wait until no token is being renewed any more in this event loop."""
    loop = asyncio.get_running_loop()
    while mine := {task for task in _renewals if task.get_loop() is loop}:
        await asyncio.wait(mine)


def _is_young(tokens: TokenSet) -> bool:
    return tokens.is_fresh() and time() - tokens.issued_at < _YOUNG
