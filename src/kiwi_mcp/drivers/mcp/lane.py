"""The short way of a request: past the SDK's dispatcher, which costs more than all the rest of a call together.

On the wire it is the same conversation: numbers of its own, out of the dispatcher's reach, and everything that is not
an answer to one of them goes to the dispatcher. What needs more than one answer, progress or a trace, goes there too.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Final

import anyio
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from opentelemetry.trace import get_current_span

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.drivers.mcp.transports import Outgoing

_FIRST: Final = 1 << 30
"""The first number: far above those that the dispatcher counts up, and still one that every language can hold."""
_PARTING = 5.0
"""How long it may take to tell a server that nobody waits any more, in seconds."""


def is_traced() -> bool:
    """Whether a call is part of a trace, which its requests then carry on."""
    return get_current_span().get_span_context().is_valid


class Lane:
    """The requests of one conversation that take the short way."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._numbers = count(_FIRST)
        self._waiting: dict[str | int, asyncio.Future[JSONRPCResponse | JSONRPCError | None]] = {}
        self._has_ended = False

    def number(self) -> int:
        """Return a number for a request, which no other has."""
        return next(self._numbers)

    async def ask(
        self, method: str, params: JsonObject, headers: dict[str, str], number: int | None = None
    ) -> JsonObject:
        """Return the result of a request; what the server refuses is raised as the SDK's error."""
        if self._has_ended:
            raise _closed()
        number = self.number() if number is None else number
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        request = JSONRPCRequest.model_construct(jsonrpc="2.0", id=number, method=method, params=dict(params))
        try:
            await self._outgoing.send(SessionMessage(request, ClientMessageMetadata(headers=headers)))
            answer = await waiting
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise _closed() from None
        except asyncio.CancelledError:
            await self._call_off(number)
            raise
        finally:
            del self._waiting[number]
        if answer is None:
            raise _closed()
        if isinstance(answer, JSONRPCError):
            raise MCPError.from_error_data(answer.error)
        result: JsonObject = answer.result
        return result

    def takes(self, message: JSONRPCMessage) -> bool:
        """Take an answer to one of the requests, and say whether it was one."""
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id is None:
            return False
        waiting = self._waiting.get(coerce_request_id(message.id))
        if waiting is not None and not waiting.done():  # a second answer is none
            waiting.set_result(message)
        return waiting is not None

    def end(self) -> None:
        """Tell everyone who waits that no answer will come."""
        self._has_ended = True
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _call_off(self, number: int) -> None:
        params = {"requestId": number, "reason": "caller cancelled"}
        told = JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params)
        with anyio.move_on_after(_PARTING, shield=True):
            try:
                await self._outgoing.send(SessionMessage(told))
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                return


def _closed() -> MCPError:
    return MCPError(code=CONNECTION_CLOSED, message="Connection closed")
