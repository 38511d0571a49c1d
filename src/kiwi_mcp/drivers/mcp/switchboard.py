"""What a server says of its own accord, brought to the caller of the call that it belongs to.

Over HTTP a message comes on the stream of the request that it belongs to, and carries the context of whoever sent
that. On other transports nothing tells; then it belongs to the one call under way, and where there may be several it
is refused, since the wrong caller must be neither asked nor told. A call that was left counts until the server has
answered it: whatever it was told, it may still be at it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any

import anyio
import anyio.abc
from mcp.shared.dispatcher import DispatchContext, OnNotify, OnNotifyIntercept, OnRequest
from mcp.shared.exceptions import MCPError
from mcp.shared.jsonrpc_dispatcher import JSONRPCDispatcher
from mcp.shared.transport_context import TransportContext
from mcp_types import INVALID_REQUEST, ErrorData, RequestId

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.drivers.mcp.questions import answer_to, is_question, question_method
from kiwi_mcp.drivers.mcp.sieve import Sieve
from kiwi_mcp.drivers.mcp.talk import Talk
from kiwi_mcp.drivers.mcp.transports import Outgoing

MOST_LEFT = 64
"""How many calls that nobody waits for are told from one another; with more, messages never belong to a call again."""
_TALK: ContextVar[Talk | None] = ContextVar("talk", default=None)


class Switchboard(JSONRPCDispatcher[TransportContext]):
    """The dispatcher of one conversation, which knows the calls under way."""

    def __init__(self, incoming: Sieve, outgoing: Outgoing) -> None:
        super().__init__(incoming, outgoing)
        self._incoming = incoming
        incoming.answered = self.answered
        self._talks: set[Talk] = set()
        self._left: set[RequestId] = set()
        self._is_lost = False
        self.asks_blindly = False
        """Whether the server has asked a person or their model something without saying for which call."""

    @property
    def is_clear(self) -> bool:
        """Whether no call is under way, and the server has answered all that were."""
        return not self._talks and not self._has_left

    @contextmanager
    def talking(self, talk: Talk) -> Iterator[None]:
        """Know of a call for as long as the block lasts."""
        self._talks.add(talk)
        token = _TALK.set(talk)
        try:
            yield
        finally:
            self._talks.discard(talk)
            _TALK.reset(token)
            talk.end()

    @contextmanager
    def waiting_for(self, number: RequestId) -> Iterator[None]:
        """Know of a call's request that is left without an answer, until there is one."""
        try:
            yield
        except asyncio.CancelledError:
            if _TALK.get() is not None:
                self.leave(number)
            raise

    def leave(self, number: RequestId) -> None:
        """Note that nobody waits any more for something that the server may still be at."""
        self._is_lost = self._is_lost or len(self._left) >= MOST_LEFT
        if not self._is_lost:
            self._left.add(number)

    def answered(self, number: RequestId) -> None:
        """Note that the server is done with something."""
        self._left.discard(number)

    async def run(
        self,
        on_request: OnRequest,
        on_notify: OnNotify,
        on_notify_intercept: OnNotifyIntercept | None = None,
        *,
        task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Drive the conversation; questions and lines of the log go to callers, all else to the session."""

        async def asked(
            context: DispatchContext[TransportContext], method: str, params: Mapping[str, Any] | None
        ) -> dict[str, Any]:
            if is_question(method):
                return await self._answer(method, params or {})
            return await on_request(context, method, params)

        def told(method: str, params: Mapping[str, Any] | None) -> bool:
            if method == "notifications/message":
                self._note(params or {})
                return True
            return on_notify_intercept is not None and on_notify_intercept(method, params)

        await super().run(asked, on_notify, told, task_status=task_status)

    async def _answer(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        told = _TALK.get()
        # Folders are asked for by servers that hold one conversation for all, and can do without.
        self.asks_blindly = self.asks_blindly or (told is None and method != "roots/list")
        talk = self._belonging_to(told)
        if talk is None:
            raise MCPError(INVALID_REQUEST, self._nobody())
        try:
            return dict(await answer_to(question_method(method), params, talk))
        except KiwiError as fault:
            raise MCPError(INVALID_REQUEST, fault.message) from None

    def _note(self, params: Mapping[str, Any]) -> None:
        context = self._incoming.last_context
        if (talk := self._belonging_to(context.get(_TALK) if context is not None else None)) is not None:
            talk.note(params)

    def _belonging_to(self, told: Talk | None) -> Talk | None:
        """Return the call that a message belongs to: the one it came with, else the only one."""
        if told is not None:
            return told if told in self._talks else None
        return next(iter(self._talks)) if len(self._talks) == 1 and not self._has_left else None

    @property
    def _has_left(self) -> bool:
        return self._is_lost or bool(self._left)

    def _nobody(self) -> str:
        calls, left = len(self._talks), f"more than {MOST_LEFT}" if self._is_lost else len(self._left)
        if not calls or (calls == 1 and not self._has_left):
            return "Nobody can be asked: the call that the question belongs to is not under way."
        others = f" and {left} that nobody waits for" if self._has_left else ""
        again = " Call again: each call has a connection of its own from now on." if self.asks_blindly else ""
        return (
            f"Nobody can be asked: {calls} call{'s are' if calls > 1 else ' is'} under way{others}, and the request "
            f"does not say to which it belongs.{again}"
        )


def apart() -> Context:
    """Return the context of here for a conversation, which belongs to no call."""
    context = copy_context()
    context.run(_TALK.set, None)
    return context


async def capable(*_: object, **__: object) -> ErrorData:
    """Stand for a callback of the SDK's session: that there is one declares that questions are answered."""
    return ErrorData(code=INVALID_REQUEST, message="The switchboard answers questions.")
