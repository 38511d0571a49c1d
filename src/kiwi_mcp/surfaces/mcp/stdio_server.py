"""Stage two of `kiwi serve`: the SDK server on the pipe of stage one, until the client leaves."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import stat
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

import anyio
import mcp_types as types
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.shared.message import SessionMessage
from pydantic import ValidationError

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.paths import user_space
from kiwi_mcp.manifest.home_config import usable_config
from kiwi_mcp.primitives.telemetry import start_tracing
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.surfaces.mcp import handshake
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi
from kiwi_mcp.surfaces.mcp.server import FastPath, McpServer, build_server, tool_lists
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

_READ_SIZE = 262_144
_JOINED = 65_536
"""The longest message that waits for others to be written with it, in bytes."""
_FLUSH_SECONDS = 2.0
"""How long a client that has left may keep us waiting with what it did not read."""
_KEPT = 64
"""For how many projects a list is kept."""


class StdioWriter(ObjectSendStream[SessionMessage]):
    """The one writer of the wire: every message is one line, whole."""

    def __init__(self, wire: handshake.StdioPipe) -> None:
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

    async def send(self, item: SessionMessage) -> None:
        """Write one message; a client that reads slowly slows us down."""
        message = item.message
        if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) and message.id in self._unheard:
            self._unheard.discard(message.id)
            return
        line = encoded(message) + b"\n"
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
        # The messages of one turn of the loop are sent at once, and wake the client once.
        if self._writer is not None and self._held:
            self._writer.write(b"".join(self._held))
            self._held.clear()

    async def aclose(self) -> None:
        """Write out what is waiting, as long as the client may still read it."""
        self._flush()
        if self._writer is None or self._writer.is_closing():
            return
        with anyio.move_on_after(_FLUSH_SECONDS, shield=True) as limit:
            self._writer.close()
            await self._writer.wait_closed()
        if limit.cancelled_caught:
            self._writer.transport.abort()


class StdioReader(ObjectReceiveStream[SessionMessage | Exception]):
    """The only reader of the connection: first the input that stage one read, then each line without an answer yet."""

    def __init__(
        self,
        wire: handshake.StdioPipe,
        opening: handshake.HandshakeResult,
        outbound: StdioWriter,
        short: FastPath,
        leave: Callable[[], None],
    ) -> None:
        self._leave = leave
        self._fd = wire.inbound
        self._short = short
        self._lines = opening.lines
        self._heard: deque[types.JSONRPCMessage] = deque()
        for line in opening.heard:
            message = types.jsonrpc_message_adapter.validate_json(line, by_name=False)
            if isinstance(message, types.JSONRPCRequest):
                # Under a number of our own, so that dropping the reply cannot hit one that the client waits for.
                message = message.model_copy(update={"id": f"heard-{secrets.token_hex(8)}"})
                outbound.leave_unheard(message.id)
            self._heard.append(message)
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
        self._leave()
        await self._short.aclose()  # while its last words can still be written
        raise anyio.EndOfStream

    async def _message(self) -> types.JSONRPCMessage | None:
        if self._heard:
            return self._heard.popleft()
        while not self._is_ended:
            if (line := self._lines.take()) is None:
                if self._lines.is_ended:
                    break
                self._lines.feed(await self._read())
                continue
            message = decoded(line)
            if not isinstance(message, types.ErrorData):
                return message
            if line.strip():  # an empty line is no message, and no fault either
                await self._outbound.send(SessionMessage(types.JSONRPCError(jsonrpc="2.0", id=None, error=message)))
        return None

    async def _read(self) -> bytes:
        if self._reader is None:
            return await asyncio.to_thread(os.read, self._fd, _READ_SIZE)
        try:
            return await self._reader.read(_READ_SIZE)
        except OSError:
            return b""

    async def aclose(self) -> None:
        """Stop reading."""
        self.end()


def can_wait(fd: int) -> bool:
    """Whether the event loop can wait for a descriptor: a pipe, a socket or a terminal, not a file or a device."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


def decoded(line: bytes) -> types.JSONRPCMessage | types.ErrorData:
    """Return the message in a line, or what is wrong with it."""
    if line is handshake.OVERLONG:
        message = f"Parse error: a message is longer than {handshake.LINE_LIMIT:,} bytes"
        return types.ErrorData(code=types.PARSE_ERROR, message=message)
    try:
        return types.jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValidationError as error:
        if error.errors(include_url=False, include_input=False)[0]["type"] == "json_invalid":
            return types.ErrorData(code=types.PARSE_ERROR, message="Parse error: a line is not JSON")
        message = "Invalid request: a line is not a JSON-RPC 2.0 message"
        return types.ErrorData(code=types.INVALID_REQUEST, message=message)


def encoded(message: types.JSONRPCMessage) -> bytes:
    """Return a message as one line; one that cannot be written becomes the error that says so."""
    try:
        return message.model_dump_json(by_alias=True, exclude_unset=True).encode()
    except ValueError:  # pydantic's serialization errors and those of encoding
        number = message.id if isinstance(message, types.JSONRPCResponse | types.JSONRPCError) else None
        fault = types.ErrorData(code=types.INTERNAL_ERROR, message="The answer cannot be written as JSON")
        return types.JSONRPCError(jsonrpc="2.0", id=number, error=fault).model_dump_json(exclude_unset=True).encode()


def run(wire: handshake.StdioPipe, opening: handshake.HandshakeResult, project: str) -> None:
    """Serve the rest of a conversation that stage one has opened, with a kernel of its own."""
    if missing := start_tracing():
        sys.stderr.write(f"warning: {missing}\n")
    folder = Path(project).expanduser().absolute() if project else None
    kernel = Kernel(folder, is_owner=False, surface="mcp")
    calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=principal, kernel=kernel)
    asyncio.run(serve(kernel, wire, opening, calls=calls, project=project))


def principal(_context: Context) -> str:
    """Return who calls over standard input: the user that started the process."""
    return STDIO


async def serve(
    kernel: KernelApi, wire: handshake.StdioPipe, opening: handshake.HandshakeResult, *, calls: Calls, project: str = ""
) -> None:
    """Serve until the client leaves or the process is asked to end; calls in flight are cancelled first."""
    outbound = StdioWriter(wire)
    changes = ToolListWatcher(kernel)
    server = build_server(kernel, calls=calls, changes=changes)
    short = FastPath(server, outbound.send)
    inbound = StdioReader(wire, opening, outbound, short, calls.leave)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, inbound.end)
    settling = asyncio.create_task(settle(server, changes, opening, project))
    try:
        await outbound.open()
        await inbound.open()
        await server.run(inbound, outbound, server.create_initialization_options())
    finally:
        settling.cancel()
        await asyncio.wait({settling})
        calls.leave()
        await short.aclose()
        await changes.aclose()
        await calls.aclose()
        await kernel.aclose()


async def settle(server: McpServer, changes: ToolListWatcher, opening: handshake.HandshakeResult, project: str) -> None:
    """Keep the list of tools that holds for the next start, and notice whether stage one gave out another.

    Where the owner prefers nothing of their own, and has no servers, it is the prepared one, which is not kept again.
    """
    root = usable_config(user_space()).memory_root
    preferences = f"{root}/preferences.yaml" if root else handshake.PREFERENCES
    made_under = handshake.stamp(preferences)
    path = Path(handshake.path_of(project))
    tools = await tool_lists(server)
    if made_under is None and tools == handshake.load_prepared()["tools"]:
        with suppress(OSError):
            await asyncio.to_thread(path.unlink, missing_ok=True)
    else:
        made_for = {**handshake.conditions(project, made_under), "preferences": preferences}
        await asyncio.to_thread(keep, path, {**made_for, "tools": tools})
    if opening.listed is not None and tools[opening.listed[0]] != opening.listed[1]:
        changes.outdate_tools()


def keep(path: Path, kept: Mapping[str, object]) -> None:
    """Write a list down whole; where that cannot be done, the next start takes a moment longer."""
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = mkstemp(dir=path.parent)  # readable by no other user
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(kept, file)
        Path(draft).replace(path)
        by_age = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        for oldest in by_age[:-_KEPT]:
            oldest.unlink()
