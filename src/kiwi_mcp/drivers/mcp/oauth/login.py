"""The login of a person: authorization code flow with PKCE, and a callback on this machine."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from secrets import token_urlsafe
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kiwi_mcp.domain.calls import Ask, Question
from kiwi_mcp.domain.errors import InvalidRequest, RequestFailed, Unavailable, Untrusted
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.oauth.account import Account, LoginRecord, account_of
from kiwi_mcp.drivers.mcp.oauth.discovery import AuthorizationServer, Challenge, OAuthHttp, OAuthMetadata, discover
from kiwi_mcp.drivers.mcp.oauth.token_endpoint import (
    NoTokenGiven,
    OAuthClient,
    TokenEndpoint,
    TokenSet,
    joined,
    owners_client,
    registered,
)
from kiwi_mcp.drivers.mcp.server import ServerConfig
from kiwi_mcp.primitives import browser

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
        client = owners_client(account.oauth, found.authority) or await _registered(
            found, back.address, scope, known.client, account.web, server
        )
        form = {
            "response_type": "code",
            "client_id": client.client_id,
            "redirect_uri": back.address,
            "state": state,
            "code_challenge": _hashed(verifier),
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


async def _registered(
    found: OAuthMetadata, redirect: str, scope: str, known: OAuthClient | None, web: OAuthHttp, server: str
) -> OAuthClient:
    try:
        return await registered(found.authority, redirect, scope, known, web)
    except (RequestFailed, Unavailable) as fault:
        if found.is_assumed:
            raise no_login(server) from fault
        raise


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


def _hashed(verifier: str) -> str:
    return urlsafe_b64encode(sha256(verifier.encode()).digest()).decode().rstrip("=")
