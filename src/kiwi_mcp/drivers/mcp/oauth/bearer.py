"""The token that each request to a server carries: renewed when it is due, and never by asking a person."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from time import time

from kiwi_mcp.domain.errors import Denied, RequestFailed
from kiwi_mcp.drivers.mcp.oauth.account import Account, Record
from kiwi_mcp.drivers.mcp.oauth.client import owners_client
from kiwi_mcp.drivers.mcp.oauth.discovery import Challenge, discover, is_offered
from kiwi_mcp.drivers.mcp.oauth.tokens import Desk, Refused, Tokens, joined
from kiwi_mcp.primitives.secrets import Secret

_UNAUTHORIZED, _FORBIDDEN = 401, 403
_YOUNG = 30.0
"""A token that was refused within so many seconds after it was given out is not renewed: that would not help."""
_renewals: set[asyncio.Future[Secret | None]] = set()


class NoLogin(Exception):
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
        with suppress(RequestFailed):  # the old one may be good still, and whoever refuses it says more
            return await self._renewed(tokens.access) or tokens.access
        return tokens.access

    def is_asked(self, status: int, challenge: str) -> bool:
        """Whether a refusal is about the token: there is none, it is good no more, or it allows too little."""
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
            raise NoLogin
        await self._note(asked)
        self.is_login_wanted = True
        return None

    async def _is_offered(self) -> bool:
        """Whether somebody could log in at all; a server that cannot be asked about that offers nothing."""
        try:
            return await is_offered(self._account.url, self._account.web)
        except (RequestFailed, Denied):
            return False

    async def _renewed(self, token: Secret) -> Secret | None:
        """Return the token that follows on another one.

        Whoever calls it off does not end it: the old token is used up once it was sent, and the new one must be kept.
        """
        task = asyncio.ensure_future(self._renew(token))
        _renewals.add(task)
        task.add_done_callback(_ended)
        return await asyncio.shield(task)

    async def _renew(self, token: Secret) -> Secret | None:
        """Have a token renewed; whoever was faster has done so already."""
        async with self._account.held():
            record = self._account.record()
            tokens, desk = record.tokens, self._account.desk(record)
            if tokens is None or not tokens.access.is_same(token):
                return tokens.access if tokens else None
            if tokens.refresh is None or desk is None or _is_young(tokens):
                return None
            try:
                following = await desk.refreshed(tokens)
            except Refused as refusal:
                # A client that the server has forgotten is registered anew at the next login.
                client = None if refusal.error == "invalid_client" else record.client
                self._account.keep(replace(record, tokens=None, client=client))
                return None
            self._account.keep(replace(record, tokens=following))
            return following.access

    async def _granted(self, token: Secret | None, asked: Challenge) -> Secret | None:
        """Return a token for Kiwi's own credentials."""
        account = self._account
        async with account.held():
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
                return None  # it has all that is asked for, and is refused nevertheless
            desk = Desk(found.authority, client, found.resource, account.oauth, account.web)
            try:
                given = await desk.granted(scope)
            except Refused as refusal:
                raise RequestFailed(
                    f"{refusal.message}.", suggestion="Check the client in `config.auth` of the server.", cause="status"
                ) from None
            account.keep(Record(found.authority, found.resource, tokens=given))
            return given.access

    async def _note(self, asked: Challenge) -> None:
        async with self._account.held():
            record = self._account.record()
            if record.challenge != asked:
                self._account.keep(replace(record, challenge=asked))


def _ended(task: asyncio.Future[Secret | None]) -> None:
    _renewals.discard(task)
    if not task.cancelled():
        task.exception()  # whoever waited has it; where nobody did, the next one meets the same


async def settled() -> None:
    """Wait until no token is being renewed any more in this event loop."""
    loop = asyncio.get_running_loop()
    while mine := {task for task in _renewals if task.get_loop() is loop}:
        await asyncio.wait(mine)


def _is_young(tokens: Tokens) -> bool:
    return tokens.is_fresh() and time() - tokens.issued_at < _YOUNG
