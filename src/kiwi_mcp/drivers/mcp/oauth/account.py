"""Login of a person with PKCE; the sealed record of it; the bearer of each request, renewed under a lock."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from hashlib import sha256
from secrets import token_urlsafe
from time import time
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Ask, Question
from kiwi_mcp.domain.errors import Denied, InvalidRequest, RequestFailed, StoreDamaged, Unavailable, Untrusted
from kiwi_mcp.domain.json import Json, JsonObject, as_object, compact
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.drivers.mcp.oauth.authorization import (
    AuthorizationServer,
    Challenge,
    NoTokenGiven,
    OAuthClient,
    OAuthHttp,
    OAuthMetadata,
    TokenEndpoint,
    TokenSet,
    discover,
    is_offered,
    joined,
    owners_client,
    registered,
)
from kiwi_mcp.drivers.mcp.server import OAuthConfig, ServerConfig
from kiwi_mcp.primitives import browser
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
            found = self._sealed.read(self.oauth.name)
            self._read = mark, LoginRecord() if found is None else _decode(found, self._bound)
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
    """A server refuses requests without a token, and offers no way to get one."""


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
        if token is None and not (self._account.oauth.is_declared or asked.metadata):
            try:
                offered = await is_offered(self._account.url, self._account.web)
            except (RequestFailed, Denied):  # a server that cannot be asked about it offers no login
                offered = False
            if not offered:
                raise NoOAuthOffered
        async with self._account.locked():
            record = self._account.record()
            if record.challenge != asked:
                self._account.keep(replace(record, challenge=asked))
        self.is_login_wanted = True
        return None

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


LIMIT = 300.0
"""How long a person has to log in, in seconds."""
_OFFLINE = "offline_access"
_SAID = 300


def account_for(server: ServerConfig, secrets: Mapping[str, str]) -> Account:
    """Return the account of a server that a person can log in to."""
    if server.oauth is None or not isinstance(server.spec, HttpSpec):
        raise InvalidRequest(
            f"{server.name!r} is started here, or its manifest says what it is sent, so it needs no login.",
            suggestion="Only servers with the transport `http` or `sse` and no other `auth` have a login.",
        )
    return account_of(server.spec, server.oauth, secrets)


async def log_in(account: Account, ask: Ask, *, server: str, scopes: Sequence[str] = ()) -> TokenSet:
    """Have a person allow what a server asks for, and keep the tokens; `ask` shows them the address to open."""
    if account.oauth.grant == "client_credentials":
        raise InvalidRequest(
            f"{server!r} knows Kiwi by credentials of its own, so it needs no login.", suggestion="Just call it."
        )
    before = account.record_or_reset()
    challenge = before.challenge or Challenge()
    found = await discover(account.url, challenge, account.oauth.issuer, account.web)
    _refuse_unfit(found.authority)
    # What one authorization server knows about Kiwi and the person must not reach another one.
    known = before if before.authority and before.authority.issuer == found.authority.issuer else LoginRecord()
    scope = _scope(account, found, challenge, known, scopes)
    state, verifier = token_urlsafe(32), token_urlsafe(64)
    port = account.oauth.redirect_port or (urlsplit(known.client.redirect).port if known.client else None) or 0
    async with browser.login_callback(lambda words: words.get("state") == state, port=port) as back:
        _refuse_other_port(account, back.address)
        client = owners_client(account.oauth, found.authority)
        if client is None:
            try:
                client = await registered(found.authority, back.address, scope, known.client, account.web)
            except (RequestFailed, Unavailable) as fault:
                if found.is_assumed:
                    raise no_login(server) from fault
                raise
        form = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": back.address,
            "state": state,
            "code_challenge": urlsafe_b64encode(sha256(verifier.encode()).digest()).decode().rstrip("="),
            "code_challenge_method": "S256",
            "resource": found.resource,
            **({"scope": scope} if scope else {}),
            **({"prompt": "consent"} if _OFFLINE in scope.split() else {}),
        }
        address = _with(found.authority.authorization_endpoint, form)
        await account.web.check(address)
        await _shown(address, ask, server)
        words = await back.words(LIMIT)
        code = _code(words, found.authority)
        endpoint = TokenEndpoint(found.authority, client, found.resource, account.oauth, account.web)
        try:
            tokens = await endpoint.exchanged(code, verifier, back.address, scope)
        except NoTokenGiven as refusal:
            raise RequestFailed(f"{refusal.message}.", suggestion="Log in again.", cause="status") from None
    async with account.locked():
        account.keep(LoginRecord(found.authority, found.resource, client, tokens))
    return tokens


def no_login(server: str) -> Unavailable:
    """Return the refusal of a login to a server that names no authorization server, and issues no tokens itself."""
    return Unavailable(
        f"The MCP server {server!r} requires a token and offers no OAuth, so a login is not possible.",
        suggestion=f"Get a token from its operator, set it as a variable, `kiwi mcp remove {server}`, and then "
        f"`kiwi mcp add {server} --url URL --header Authorization='Bearer ${{NAME}}'`.",
    )


def _refuse_other_port(account: Account, address: str) -> None:
    wanted = account.oauth.redirect_port
    if wanted and urlsplit(address).port != wanted:
        raise Unavailable(
            f"Port {wanted} of this machine, at which the login is to end, is taken.",
            suggestion="End the program that uses it, or register another one and change `config.auth.redirect_port`.",
        )


def _refuse_unfit(authority: AuthorizationServer) -> None:
    if not authority.authorization_endpoint:
        raise Unavailable(
            f"{authority.issuer} has no page where a person could log in.",
            suggestion="If it knows Kiwi by credentials, say `grant: client_credentials` in `config.auth`.",
        )
    if not authority.has_pkce:
        raise Unavailable(
            f"{authority.issuer} does not protect its codes (PKCE with S256), so they could be stolen on their way.",
            suggestion="Do not log in there; ask the operator of the server.",
        )


def _scope(
    account: Account, found: OAuthMetadata, challenge: Challenge, known: LoginRecord, scopes: Sequence[str]
) -> str:
    """Return the rights to ask for: what the owner says, else what the server asked for, else all that it knows."""
    before = known.tokens.scope if known.tokens else ""
    asked = " ".join(scopes or account.oauth.scopes) or challenge.scope or before or " ".join(found.scopes)
    if challenge.wants_more:  # what was allowed before is asked for again, or it would be lost
        asked = joined(before, asked, challenge.scope)
    return joined(asked, _OFFLINE) if asked and _OFFLINE in found.authority.scopes else joined(asked)


async def _shown(address: str, ask: Ask, server: str) -> None:
    question = Question(
        "elicitation/create",
        {
            "mode": "url",
            "elicitationId": token_urlsafe(16),
            "url": address,
            "message": f"Log in to the MCP server {server} in your browser.",
        },
    )
    answers = await ask({"login": question})
    if answers.get("login", {}).get("action") != "accept":
        raise Unavailable("The login was called off.", suggestion=f"`kiwi mcp login {server}` starts it again.")


def _code(words: browser.Words, authority: AuthorizationServer) -> str:
    """Return the code, once it is sure that it comes from the server that the person was sent to (RFC 9207)."""
    named = words.get("iss")
    if named != authority.issuer if named is not None else authority.names_itself:
        raise Untrusted(
            f"The answer to the login came from {strip_controls(named or '')[:_SAID]!r}, "
            f"not from {authority.issuer!r}.",
            suggestion="Do not log in there; ask the operator of the server.",
        )
    if code := words.get("code", ""):
        return code
    reason = ": ".join(filter(None, (words.get("error"), words.get("error_description")))) or "no code was given"
    raise Unavailable(
        f"{authority.issuer} did not allow it: {strip_controls(reason)[:_SAID]}.",
        suggestion="Log in again, and allow it.",
    )


def _with(endpoint: str, form: dict[str, str]) -> str:
    """Return an address with more words in its query; those that it has of its own stay."""
    parts = urlsplit(endpoint)
    own = [pair for pair in parse_qsl(parts.query, keep_blank_values=True) if pair[0] not in form]
    return urlunsplit((parts.scheme, parts.netloc, parts.path, urlencode([*own, *form.items()]), ""))
