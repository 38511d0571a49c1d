"""Transports to a server: pipes, streamable HTTP, SSE and WebSocket; each turns its data into messages."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol
from urllib.parse import urljoin

import anyio
from anyio.abc import ObjectReceiveStream, ObjectSendStream
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import SessionMessage
from mcp_types import ErrorData, JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.plan import HttpSpec, ProcessSpec
from kiwi_mcp.drivers.git_copy import GitCopy, git_copies
from kiwi_mcp.drivers.mcp.oauth.account import AccountBearer, account_of
from kiwi_mcp.drivers.mcp.server import ServerConfig
from kiwi_mcp.drivers.output import NotJsonOutput, parse
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.primitives.http import client, origin_client
from kiwi_mcp.sandbox.backend import always
from kiwi_mcp.sandbox.command_files import files_of_command, is_in
from kiwi_mcp.sandbox.quarantine import NameWatch

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
        """Accept no further messages."""


class ServerReader(ObjectReceiveStream[SessionMessage | Exception]):
    """What a server says, one message at a time; `noise` counts the lines after the first message that were none."""

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
            if found := list(_messages(line.strip().removeprefix(b"\xef\xbb\xbf"))):
                self._heard.extend(found)
                self._has_spoken, self._noise_in_a_row = True, 0
                break
            self.noise += self._has_spoken
            self._noise_in_a_row += 1
            if self._noise_in_a_row > MOST_NOISE:
                raise _at_fault(f"it printed more than {MOST_NOISE:,} lines in a row that are no messages.")
        return SessionMessage(self._heard.popleft())

    async def _breathe(self) -> None:
        self._taken += 1
        if self._taken % _BREATH == 0:
            await asyncio.sleep(0)

    async def aclose(self) -> None:
        """Leave the process or the connection to the block that opened it."""


class ServerWriter(ObjectSendStream[SessionMessage]):
    """The messages to a server, each as one line."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send

    async def send(self, item: SessionMessage) -> None:
        """Send one message."""
        try:
            await self._send(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode())
        except OSError:
            raise anyio.BrokenResourceError from None

    async def aclose(self) -> None:
        """Leave the process or the connection to the block that opened it."""


def _messages(text: bytes) -> Iterator[JSONRPCMessage]:
    """Yield the messages of a line: one, or those of a batch, which one old revision of the protocol had."""
    if not text.startswith((b"{", b"[")):
        return
    try:
        value = parse(text).value
    except NotJsonOutput:
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
            code, message = error.get("code"), error.get("message")
            fault = ErrorData(
                code=code if isinstance(code, int) else _INTERNAL,
                message=message if isinstance(message, str) else "The server gave no message.",
                data=error.get("data"),
            )
            return JSONRPCError.model_construct(jsonrpc="2.0", id=number, error=fault)
        case _:
            return None


def _at_fault(reason: str) -> Unavailable:
    return Unavailable(reason, suggestion="The server is at fault: report it.")


def _params(value: JsonObject) -> dict[str, Json] | None:
    params = value.get("params")
    return dict(params) if isinstance(params, Mapping) else None


_POST = 30.0
"""How long a server may take to accept a message that is posted to it, in seconds."""


class Outgoing(AbstractAsyncContextManager["Outgoing", bool | None], Protocol):
    """Where messages for a server are put."""

    async def send(self, item: SessionMessage, /) -> None:
        """Send one message."""

    async def aclose(self) -> None:
        """Stop sending."""


class LoginNeeded(Exception):
    """A conversation cannot begin, or continue, before a login."""


class ServerStreams(Struct, frozen=True):
    """Both directions of a conversation, and what else can be known of the other side."""

    incoming: Incoming
    outgoing: Outgoing
    complaints: Callable[[], str] = str
    """What the server wrote to standard error last."""
    ending: Callable[[], str] = str
    """How its process ended, empty while it runs."""
    noise: Callable[[], int] = int
    """How many lines it printed among its messages that were none."""
    refused: Callable[[], tuple[str, ...]] = tuple
    """The hosts that were denied to its process."""
    left: Callable[[], JsonObject] = dict
    """What its process sent and received since this was asked last."""
    watch: NameWatch | None = None
    """What looks for settings of other programs that its process leaves behind; None where it has no process."""
    git_copies: tuple[GitCopy, ...] = ()
    """The git folders that its process has a copy of."""
    is_whole: Callable[[], bool] = always
    """Whether its sandbox still protects the settings of other programs that it protected at the start."""


def opened(server: ServerConfig, secrets: Mapping[str, str]) -> AbstractAsyncContextManager[ServerStreams]:
    """Open the way to a server; what was started or connected for it is gone when the block ends."""
    match server.transport, server.spec:
        case "stdio", ProcessSpec() as process:
            return _piped(server, process, secrets)
        case "http", HttpSpec() as address:
            return _posted(server, address, secrets)
        case "sse", HttpSpec() as address:
            return _streamed(server, address, secrets)
        case _, HttpSpec() as address:
            return _socketed(address, secrets)
        case _:
            raise TypeError(server.transport)


@asynccontextmanager
async def _piped(server: ServerConfig, spec: ProcessSpec, secrets: Mapping[str, str]) -> AsyncIterator[ServerStreams]:
    """Start the process of a server in its sandbox."""
    profile = server.profile
    if profile.level != "trusted":
        seen = files_of_command(spec, has_folder=server.has_folder)
        # The files that its command names are already in its sandbox; what Kiwi installed for it is added here.
        made = tuple(path for path in seen.readable if server.package and is_in(path, server.package.folder))
        profile, spec = replace(profile, readable=(*profile.readable, *made)), seen.spec
    async with AsyncExitStack() as keep:
        copies = await keep.enter_async_context(git_copies(profile, server.space.cache))
        profile = replace(profile, git_copies=tuple((one.git, str(one.folder)) for one in copies))
        sandbox = await open_sandbox(profile, server.space)
        talking = sandbox.talking(spec, secrets=secrets, longest_line=server.max_bytes)
        process, is_whole = await keep.enter_async_context(talking)

        async def send(message: bytes) -> None:
            process.send(message + b"\n")

        inbound = ServerReader(process.line)
        yield ServerStreams(
            inbound,
            ServerWriter(send),
            complaints=process.complaints,
            ending=process.ending,
            noise=lambda: inbound.noise,
            refused=sandbox.traffic.refused,
            left=sandbox.traffic.news,
            watch=sandbox.watch,
            git_copies=copies,
            is_whole=is_whole,
        )


@asynccontextmanager
async def _posted(server: ServerConfig, spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[ServerStreams]:
    url, client = origin_client.client(spec, secrets=secrets, bearer=_bearer(server, spec, secrets))
    async with (
        client,
        streamable_http_client(url, http_client=client, max_sse_event_size=server.max_bytes) as (incoming, outgoing),
    ):
        yield ServerStreams(incoming, outgoing)


@asynccontextmanager
async def _streamed(server: ServerConfig, spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[ServerStreams]:
    """Open the one stream of all that a server says; each message to it is posted to the address it says first."""
    bearer = _bearer(server, spec, secrets)
    url, client = origin_client.client(spec, secrets=secrets, streamed=("GET",), bearer=bearer)
    async with client, client.sse(url, max_event_size=server.max_bytes) as source:
        if not source.response.is_success:
            raise _refused(bearer, f"it answered {source.response.status_code}")
        events = aiter(source)

        async def heard(kind: str = "message") -> str | None:
            try:
                async for event in events:
                    if event.event == kind and event.data:  # empty ones keep the stream alive
                        return event.data
            except origin_client.EventFault as fault:
                raise _unread(f"its stream cannot be read: {fault}") from None
            return None

        endpoint = urljoin(url, await heard("endpoint") or "")

        async def line() -> bytes | None:
            data = await heard()
            return None if data is None else data.encode()

        async def send(message: bytes) -> None:
            async with asyncio.timeout(_POST):
                reply = await client.post(endpoint, content=message, headers={"content-type": "application/json"})
            if not reply.is_success:
                raise _refused(bearer, f"it answered {reply.status_code} to a message")

        inbound = ServerReader(line)
        yield ServerStreams(inbound, ServerWriter(send), noise=lambda: inbound.noise)


def _bearer(server: ServerConfig, spec: HttpSpec, secrets: Mapping[str, str]) -> AccountBearer | None:
    """Return the source of a server's tokens, if it can have any."""
    return AccountBearer(account_of(spec, server.oauth, secrets)) if server.oauth is not None else None


def _refused(bearer: AccountBearer | None, reason: str) -> Exception:
    return LoginNeeded() if bearer is not None and bearer.is_login_wanted else _unread(reason)


def _unread(reason: str) -> Unavailable:
    return Unavailable(reason, suggestion="Ask for less at once, or use the server's `http` transport.")


@asynccontextmanager
async def _socketed(spec: HttpSpec, secrets: Mapping[str, str]) -> AsyncIterator[ServerStreams]:
    async with client.channel(spec, secrets=secrets, through=client.network, protocol="mcp") as socket:
        inbound = ServerReader(socket.receive)
        yield ServerStreams(inbound, ServerWriter(socket.send), noise=lambda: inbound.noise)
