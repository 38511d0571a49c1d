"""Messages on a wire of our own: lines in, lines out, as the SDK wants them.

What is no message ends no conversation, unless nothing else comes. Package runners print progress before the server
speaks, so lines that are not JSON are skipped until the first message; afterwards they are counted, and told once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Protocol, Self

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse

from kiwi_mcp.domain.closing import Block
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.drivers.heard import NotJson, parse

_INTERNAL = -32603
_BREATH = 32
"""Lines and messages after which others have their turn, however many more are here already."""
MOST_IN_BATCH = 1_000
"""The most messages that one line may hold."""
MOST_NOISE = 100_000
"""Lines in a row that are no messages, after which a server is no longer listened to."""


class Incoming(Protocol):
    """Where the messages of a server are taken from."""

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message."""

    async def aclose(self) -> None:
        """Take no more."""


class Inbound(Block):
    """What a server says, one message at a time.

    `noise` is how many lines were no messages since the first that was one.
    """

    def __init__(self, line: Callable[[], Awaitable[bytes | None]]) -> None:
        self._line = line
        self._heard: deque[JSONRPCMessage] = deque()
        self._taken = 0
        self._noise_in_a_row = 0
        self._has_spoken = False
        self.noise = 0

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message."""
        await self._breathe()
        while not self._heard:
            line = await self._line()
            if line is None:
                raise anyio.EndOfStream
            await self._breathe()
            self._hear(line)
        return SessionMessage(self._heard.popleft())

    async def _breathe(self) -> None:
        self._taken += 1
        if self._taken % _BREATH == 0:
            await asyncio.sleep(0)

    def _hear(self, line: bytes) -> None:
        text = line.strip().removeprefix(b"\xef\xbb\xbf")
        if found := list(_messages(text)):
            self._heard.extend(found)
            self._has_spoken, self._noise_in_a_row = True, 0
            return
        self.noise += self._has_spoken
        self._noise_in_a_row += 1
        if self._noise_in_a_row > MOST_NOISE:
            raise _at_fault(f"it printed more than {MOST_NOISE:,} lines in a row that are no messages.")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class Outbound(Block):
    """What is said to a server, each message as one line."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send

    async def send(self, item: SessionMessage, /) -> None:
        """Send one message."""
        try:
            await self._send(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
        except OSError:
            raise anyio.BrokenResourceError from None


def _messages(text: bytes) -> Iterator[JSONRPCMessage]:
    """Yield the messages of a line: one, or those of a batch, which one old revision of the protocol had."""
    if not text.startswith((b"{", b"[")):
        return
    try:
        value = parse(text).value
    except NotJson:
        return
    batch = value if isinstance(value, list) else [value]
    if len(batch) > MOST_IN_BATCH:
        raise _at_fault(f"it sent more than {MOST_IN_BATCH:,} messages in one line.")
    for each in batch:
        if isinstance(each, dict) and (message := _message(each)) is not None:
            yield message


def _message(value: JsonObject) -> JSONRPCMessage | None:
    match value:
        case {"jsonrpc": "2.0", "method": str(method), "id": str() | int() as number} if not isinstance(number, bool):
            return JSONRPCRequest.model_construct(jsonrpc="2.0", id=number, method=method, params=_params(value))
        case {"jsonrpc": "2.0", "method": str(method)} if "id" not in value:
            return JSONRPCNotification.model_construct(jsonrpc="2.0", method=method, params=_params(value))
        case {"jsonrpc": "2.0", "result": Mapping() as result, "id": str() | int() as number}:
            return JSONRPCResponse.model_construct(jsonrpc="2.0", id=number, result=dict(result))
        case {"jsonrpc": "2.0", "error": Mapping() as error, "id": str() | int() | None as number}:
            return JSONRPCError.model_construct(jsonrpc="2.0", id=number, error=_error(error))
        case _:
            return None


def _at_fault(reason: str) -> Unavailable:
    return Unavailable(reason, suggestion="The server is at fault: report it.")


def _params(value: JsonObject) -> dict[str, Json] | None:
    params = value.get("params")
    return dict(params) if isinstance(params, Mapping) else None


def _error(error: JsonObject) -> ErrorData:
    code, message = error.get("code"), error.get("message")
    return ErrorData(
        code=code if isinstance(code, int) else _INTERNAL,
        message=message if isinstance(message, str) else "The server gave no message.",
        data=error.get("data"),
    )
