"""The wire as the SDK sees it: messages in and messages out, over our own reading and writing.

The SDK's own stdio transport reads and writes through worker threads, without a limit on the length of a line. This
one lives in the event loop. A line that is no message is answered with a JSON-RPC error, and the next one is read.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import stat
from collections import deque
from typing import Self

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_REQUEST,
    PARSE_ERROR,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCRequest,
    JSONRPCResponse,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from kiwi_mcp.domain.closing import Block
from kiwi_mcp.surfaces.mcp.greeting import Opening
from kiwi_mcp.surfaces.mcp.lean import ShortWay
from kiwi_mcp.surfaces.mcp.lines import LINE_LIMIT, OVERLONG
from kiwi_mcp.surfaces.mcp.stdio import Wire

_READ_SIZE = 262_144
_JOINED = 65_536
"""The longest message that waits for others to be written with it, in bytes."""
_FLUSH_SECONDS = 2.0
"""How long a client that has left may keep us waiting with what it did not read."""


class Outbound(Block):
    """The one writer of the wire: every message is one line, whole."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._writer: asyncio.StreamWriter | None = None
        self._held: list[bytes] = []
        self._unheard: set[str | int] = set()

    async def open(self) -> None:
        """Take the descriptor into the event loop where it can wait; a file or a device never lets one wait long."""
        if can_wait(self._wire.outbound):
            loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
            transport, protocol = await loop.connect_write_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._wire.outbound, "wb", buffering=0)
            )
            self._writer = asyncio.StreamWriter(transport, protocol, None, loop)

    def leave_unheard(self, number: str | int) -> None:
        """Drop the reply to a request that stage one has answered already."""
        self._unheard.add(number)

    async def send(self, item: SessionMessage, /) -> None:
        """Write one message; a client that reads slowly slows us down."""
        message = item.message
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id in self._unheard:
            self._unheard.discard(message.id)
            return
        await self._write(encoded(message) + b"\n")

    async def _write(self, line: bytes) -> None:
        try:
            if self._writer is None:
                self._wire.write(line)
            else:
                if not self._held:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._held.append(line)
                if len(line) > _JOINED:
                    self._flush()
                await self._writer.drain()
        except OSError:
            raise anyio.BrokenResourceError from None

    def _flush(self) -> None:
        # What was said in one turn of the loop goes out at once, and wakes the client once.
        if self._writer is not None and self._held:
            self._writer.write(b"".join(self._held))
            self._held.clear()

    async def aclose(self) -> None:
        """Write out what is waiting, for as long as somebody may still read it."""
        self._flush()
        if self._writer is None or self._writer.is_closing():
            return
        with anyio.move_on_after(_FLUSH_SECONDS, shield=True) as limit:
            self._writer.close()
            await self._writer.wait_closed()
        if limit.cancelled_caught:
            self._writer.transport.abort()


class Inbound(Block):
    """The one reader of the wire: first what stage one heard, then line by line what nobody answered yet."""

    def __init__(self, wire: Wire, opening: Opening, outbound: Outbound, short: ShortWay) -> None:
        self._fd = wire.inbound
        self._short = short
        self._lines = opening.lines
        self._heard = deque(_replayed(opening, outbound))
        self._outbound = outbound
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.BaseTransport | None = None
        self._is_ended = False

    async def open(self) -> None:
        """Take the descriptor into the event loop where it can wait."""
        if can_wait(self._fd):
            reader = asyncio.StreamReader()
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(self._fd, "rb", buffering=0)
            )
            self._reader = reader

    def end(self) -> None:
        """End the conversation as if the client had left."""
        self._is_ended = True
        if self._transport is not None:
            self._transport.close()

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message that does not take the short way."""
        while (message := await self._message()) is not None:
            if not self._short.takes(message):
                return SessionMessage(message)
        await self._short.aclose()  # while its last words can still be written
        raise anyio.EndOfStream

    async def _message(self) -> JSONRPCMessage | None:
        if self._heard:
            return self._heard.popleft()
        while (line := await self._line()) is not None:
            message = decoded(line)
            if not isinstance(message, ErrorData):
                return message
            if line.strip():  # an empty line is no message, and no fault either
                await self._outbound.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=None, error=message)))
        return None

    async def _line(self) -> bytes | None:
        while not self._is_ended:
            if (line := self._lines.take()) is not None:
                return line
            if self._lines.is_ended:
                break
            self._lines.feed(await self._read())
        return None

    async def _read(self) -> bytes:
        if self._reader is None:
            return await asyncio.to_thread(os.read, self._fd, _READ_SIZE)
        try:
            return await self._reader.read(_READ_SIZE)
        except OSError:
            return b""

    async def aclose(self) -> None:
        """Read no more."""
        self.end()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


def _replayed(opening: Opening, outbound: Outbound) -> list[JSONRPCMessage]:
    messages = []
    for line in opening.heard:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        if isinstance(message, JSONRPCRequest):
            # Under a number of our own, so that dropping the reply cannot hit one that the client waits for.
            message = message.model_copy(update={"id": f"heard-{secrets.token_hex(8)}"})
            outbound.leave_unheard(message.id)
        messages.append(message)
    return messages


def can_wait(fd: int) -> bool:
    """Whether the event loop can wait for a descriptor: a pipe, a socket or a terminal, not a file or a device."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def decoded(line: bytes) -> JSONRPCMessage | ErrorData:
    """Return the message in a line, or what is wrong with it."""
    if line is OVERLONG:
        return ErrorData(code=PARSE_ERROR, message=f"Parse error: a message is longer than {LINE_LIMIT:,} bytes")
    try:
        return jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            return ErrorData(code=PARSE_ERROR, message="Parse error: a line is not JSON")
        return ErrorData(code=INVALID_REQUEST, message="Invalid request: a line is not a JSON-RPC 2.0 message")


def encoded(message: JSONRPCMessage) -> bytes:
    """Return a message as one line; one that cannot be written becomes the error that says so."""
    try:
        return message.model_dump_json(by_alias=True, exclude_unset=True).encode()
    except ValueError:  # pydantic's serialization errors and those of encoding
        number = message.id if isinstance(message, JSONRPCResponse | JSONRPCError) else None
        fault = ErrorData(code=INTERNAL_ERROR, message="The answer cannot be written as JSON")
        return JSONRPCError(jsonrpc="2.0", id=number, error=fault).model_dump_json(exclude_unset=True).encode()
