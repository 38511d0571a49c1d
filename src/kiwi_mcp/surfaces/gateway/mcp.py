"""The gateway's `/mcp`: the MCP server over streamable HTTP, for clients of every era, each within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from kiwi_mcp.domain.errors import KiwiError, TokenRefused, TooLarge, TooSlow, Unavailable
from kiwi_mcp.surfaces.gateway.registry import declared_length
from kiwi_mcp.surfaces.gateway.sessions import MAX_BODY, Sessions
from kiwi_mcp.surfaces.gateway.visited import visiting
from kiwi_mcp.surfaces.gateway.visitors import Door, Visitor, visitor_of
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.port import LEFT, Context
from kiwi_mcp.surfaces.mcp.server import McpServer

MCP = "/mcp"
_BODY_SECONDS = 60.0
_CALL_SECONDS = 86_460.0
"""How long a request may take: as long as the longest tool may, and a moment."""
_LISTENING_SECONDS = 3_600.0
"""How long a stream may listen for news; then the client opens another."""
_AT_ONCE = 64
"""How many requests of one visitor are answered at a time, and how many streams of theirs listen.

Both together are a quarter of the connections that there can be.
"""
_LOOK_SECONDS = 5.0
"""How soon a token that was removed ends what was begun with it."""


@dataclass(eq=False, slots=True)
class _Visit:
    """One request on its way, and the limit that ends it."""

    visitor: Visitor
    is_listening: bool
    limit: asyncio.Timeout
    has_begun: bool = field(default=False)
    reason: KiwiError | None = None
    """Why it was ended, where that is the visitor's affair."""

    def end(self, reason: KiwiError | None = None) -> None:
        self.reason = reason
        if not self.limit.expired():
            self.limit.reschedule(asyncio.get_running_loop().time())


class McpEndpoint:
    """What is behind `/mcp`; whoever gets here was let in by the door."""

    def __init__(self, server: McpServer, door: Door, calls: Calls) -> None:
        self._sessions = Sessions(server)
        self._calls = calls
        self._door = door
        self._visits: set[_Visit] = set()
        self._is_ending = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Answer requests within the block; what is under way at its end is cancelled, and waited for."""
        fault: KiwiError | None = None
        async with self._sessions.run():
            watch = asyncio.create_task(self._watch())
            try:
                yield
            except KiwiError as error:
                fault = error  # raised in here, it would leave the SDK's group of tasks as one of a group of errors
            finally:
                watch.cancel()
                await self.end()
        if fault is not None:
            raise fault

    async def end(self) -> None:
        """Take no more requests, and end those under way."""
        self._is_ending = True
        for visit in self._visits:
            visit.end()
        await self._sessions.end_where(lambda _: True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; refusals are raised before anything was answered."""
        visitor, headers = scope["kiwi.visitor"], Headers(scope=scope)
        self._door.check_tools(visitor)
        is_listening = scope["method"] == "GET" or headers.get("mcp-method") == "subscriptions/listen"
        self._check_room(visitor, headers, is_listening=is_listening)
        scope["user"] = _user(visitor)
        visiting.set(visitor)
        limit = asyncio.timeout(_LISTENING_SECONDS if is_listening else _CALL_SECONDS)
        visit = _Visit(visitor, is_listening, limit)
        self._visits.add(visit)
        scope[LEFT] = left = asyncio.Event()
        try:
            await self._answer(visit, scope, timely(receive), send)
        finally:
            self._visits.discard(visit)
            left.set()

    async def _answer(self, visit: _Visit, scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            visit.has_begun = True
            await send(message)

        try:
            async with visit.limit:
                await self._sessions.handle_request(scope, receive, noting)
        except TimeoutError:
            if not visit.has_begun:  # half an answer cannot be taken back: the connection is closed
                raise (visit.reason or _leaving()) from None

    def _check_room(self, visitor: Visitor, headers: Headers, *, is_listening: bool) -> None:
        if self._is_ending:
            raise _leaving()
        if (length := declared_length(headers)) > MAX_BODY:
            raise TooLarge("The body", size=length, limit=MAX_BODY)
        theirs = [visit for visit in self._visits if visit.visitor.principal == visitor.principal]
        if sum(visit.is_listening == is_listening for visit in theirs) >= _AT_ONCE:
            raise Unavailable(
                f"{_AT_ONCE} requests of yours are under way.", suggestion="Wait for some of them to end."
            )

    async def _watch(self) -> None:
        """End what was begun with a token that has been removed, and what listens with one that has expired."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            for visit in list(self._visits):
                is_good = self._door.still_admits(visit.visitor)
                # A call that was begun in time is finished; news are for those who may hear them now.
                if not is_good and (visit.is_listening or visit.visitor.expires_at is None):
                    visit.end(_removed())
            await self._sessions.end_where(self._door.has_removed)
            self._calls.end_where(self._door.has_removed)


def timely(receive: Receive) -> Receive:
    """Return where a body is received from, which has to come within its limits of size and time."""
    end, size, is_whole = asyncio.get_running_loop().time() + _BODY_SECONDS, 0, False

    async def receiving() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(end):
                message = await receive()
        except TimeoutError:
            raise TooSlow("The body did not come in time.", suggestion="Send it faster, or less of it.") from None
        size, is_whole = size + len(message.get("body", b"")), not message.get("more_body", False)
        if size > MAX_BODY:
            raise TooLarge("The body", size=None, limit=MAX_BODY)
        return message

    return receiving


def principal(context: Context) -> str:
    """Return who has sent a request, as it stands in the record."""
    assert isinstance(context.request, Request)  # noqa: S101 - every message came in one
    return visitor_of(context.request).principal


def _user(visitor: Visitor) -> AuthenticatedUser:
    """Return a visitor as the SDK knows users: what it binds a session to."""
    return AuthenticatedUser(AccessToken(token="", client_id=visitor.principal, scopes=[]))


def _removed() -> TokenRefused:
    return TokenRefused(
        "The token was removed, or has expired, while the request was under way.",
        suggestion="Ask the owner for another one; what was begun with this one was stopped.",
    )


def _leaving() -> Unavailable:
    return Unavailable("This server is ending, or the request took too long.", suggestion="Try again in a moment.")
