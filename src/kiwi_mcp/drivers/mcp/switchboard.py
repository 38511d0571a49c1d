"""What a server says of its own accord, brought to the caller of the call that it belongs to.

Over HTTP a message comes on the stream of the request that it belongs to, and carries the context of whoever sent
that. On other transports nothing tells; then it belongs to the one call under way, and where there are several it is
refused, since the wrong caller must be neither asked nor told.
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
from mcp_types import INVALID_REQUEST, ErrorData

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.drivers.mcp.questions import answer_to, is_question, question_method
from kiwi_mcp.drivers.mcp.sieve import Sieve
from kiwi_mcp.drivers.mcp.talk import Talk
from kiwi_mcp.drivers.mcp.transports import Outgoing

LINGERS = 5.0
"""How long a call that nobody waits for any more may still be what a server asks about, in seconds."""
_TALK: ContextVar[Talk | None] = ContextVar("talk", default=None)


class Switchboard(JSONRPCDispatcher[TransportContext]):
    """The dispatcher of one conversation, which knows the calls under way."""

    def __init__(self, incoming: Sieve, outgoing: Outgoing) -> None:
        super().__init__(incoming, outgoing)
        self._incoming = incoming
        self._talks: set[Talk] = set()

    @contextmanager
    def talking(self, talk: Talk) -> Iterator[None]:
        """Know of a call for as long as the block lasts; of one that is left without an answer, a little longer."""
        self._talks.add(talk)
        token = _TALK.set(talk)
        try:
            yield
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(LINGERS, self._talks.discard, talk)
            raise
        except BaseException:
            self._talks.discard(talk)
            raise
        else:
            self._talks.discard(talk)
        finally:
            _TALK.reset(token)
            talk.end()

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
        talk = self._belonging_to(_TALK.get())
        if talk is None:
            raise MCPError(INVALID_REQUEST, _nobody(len(self._talks)))
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
        return next(iter(self._talks)) if len(self._talks) == 1 else None


def apart() -> Context:
    """Return the context of here for a conversation, which belongs to no call."""
    context = copy_context()
    context.run(_TALK.set, None)
    return context


async def capable(*_: object, **__: object) -> ErrorData:
    """Stand for a callback of the SDK's session: that there is one declares that questions are answered."""
    return ErrorData(code=INVALID_REQUEST, message="The switchboard answers questions.")


def _nobody(calls: int) -> str:
    if calls <= 1:
        return "Nobody can be asked: the call that the question belongs to is not under way."
    return f"Nobody can be asked: {calls} calls are under way, and the request does not say to which it belongs."
