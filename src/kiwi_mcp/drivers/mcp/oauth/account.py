"""Sealed login record; the bearer of each request, renewed under a lock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from time import time

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Denied, RequestFailed, StoreDamaged
from kiwi_mcp.domain.json import Json, JsonObject, compact
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
    """What is kept: who gave the tokens, to which client, for which server; and what the server asked for last."""

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
        """Return what is kept; what was kept for another address or another client counts as nothing."""
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
        """Put a record in the place of the one that is kept."""
        self._sealed.write(self.oauth.name, _encode(record, self._bound))

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Be the only one, of all processes, who changes what is kept."""
        async with self._sealed.held(self.oauth.name):
            yield

    def token_endpoint(self, record: LoginRecord) -> TokenEndpoint | None:
        """Return where the next tokens are had with what is kept; None where that does not suffice."""
        if record.authority is None:
            return None
        client = owners_client(self.oauth, record.authority) or record.client
        return TokenEndpoint(record.authority, client, record.resource, self.oauth, self.web) if client else None

    @property
    def _bound(self) -> str:
        """What the tokens are for: with another address or another client they are not sent."""
        words: Json = [
            self.url,
            self.oauth.client_id,
            self.oauth.issuer,
            self.oauth.grant,
            self.oauth.client_metadata_url,
        ]
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


class _StoredAuthority(Struct, frozen=True):
    """What a renewal needs of an authorization server; for a login, the server is asked again."""

    issuer: str = ""
    token_endpoint: str = ""
    methods: tuple[str, ...] = ()
    takes_documents: bool = False


class _StoredClient(Struct, frozen=True):
    """A client that Kiwi registered, without its secret."""

    client_id: str = ""
    method: str = ""
    redirect: str = ""
    until: float = 0.0


class _StoredTokens(Struct, frozen=True):
    """What is known of tokens, without themselves."""

    scope: str = ""
    issued_at: float = 0.0
    expires_at: float | None = None


class _StoredLogin(Struct, frozen=True, omit_defaults=True):
    """A login as it is stored, without its secrets; a part that is absent has only defaults."""

    bound: str = ""
    authority: _StoredAuthority = _StoredAuthority()
    resource: str = ""
    client: _StoredClient = _StoredClient()
    tokens: _StoredTokens = _StoredTokens()
    challenge: Challenge | None = None


def _encode(record: LoginRecord, bound: str) -> EncryptedRecord:
    client = record.client if record.client and record.client.is_registered else None
    authority, tokens = record.authority, record.tokens
    stored = _StoredLogin(
        bound,
        _StoredAuthority(authority.issuer, authority.token_endpoint, authority.methods, authority.takes_documents)
        if authority
        else _StoredAuthority(),
        record.resource,
        _StoredClient(client.client_id, client.method, client.redirect, client.until) if client else _StoredClient(),
        _StoredTokens(tokens.scope, tokens.issued_at, tokens.expires_at) if tokens else _StoredTokens(),
        record.challenge,
    )
    secrets = {
        "access": tokens.access if tokens else None,
        "refresh": tokens.refresh if tokens else None,
        "client": record.client.secret if record.client else None,
    }
    return EncryptedRecord(
        to_builtins(stored), {word: secret for word, secret in secrets.items() if secret is not None}
    )


def _decode(found: EncryptedRecord, bound: str) -> LoginRecord:
    """Return a stored login; one for another address or another client counts as none."""
    try:
        stored = convert(_without_empty(found.facts), _StoredLogin)
    except ValidationError as error:
        raise StoreDamaged(f"A stored login cannot be read: {error}.", suggestion="Log in again.") from error
    if stored.bound != bound:
        return LoginRecord()
    access, authority, client, tokens = found.secrets.get("access"), stored.authority, stored.client, stored.tokens
    return LoginRecord(
        AuthorizationServer(
            issuer=authority.issuer,
            token_endpoint=authority.token_endpoint,
            methods=authority.methods,
            takes_documents=authority.takes_documents,
        )
        if authority.issuer
        else None,
        stored.resource,
        OAuthClient(
            client.client_id,
            client.method,
            found.secrets.get("client"),
            client.redirect,
            client.until,
            is_registered=True,
        )
        if client.client_id
        else None,
        TokenSet(access, found.secrets.get("refresh"), tokens.scope, tokens.issued_at, tokens.expires_at)
        if access is not None
        else None,
        stored.challenge,
    )


def _without_empty(facts: JsonObject) -> JsonObject:
    """Return facts without the empty objects by which older versions wrote that a part is absent."""
    return {word: value for word, value in facts.items() if value != {}}


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
