"""WebSocket requests and channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from time import monotonic

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK, InvalidHandshake, WebSocketException
from websockets.typing import Subprotocol

from kiwi_mcp.domain.errors import TooLarge
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http.pool import Network
from kiwi_mcp.primitives.http.request import AGENT, WireRequest, connection_failed, failed, prepare, refuse_denied

IDLE = 60.0
"""How long a server may be silent, in seconds, where the request's own limit is not shorter."""
_CLOSE = 0.5
"""How long a server may take to say goodbye, in seconds."""
_LONGEST = 4_000_000
"""The most one message may have, in bytes."""
_SENDING = 30.0
"""How long the other side may take to accept one message of a talk, in seconds."""
_TOO_BIG = 1009
_ALSO_OURS = frozenset({"accept", "accept-encoding", "content-type", "user-agent"})


async def messages(spec: HttpSpec, request: WireRequest, through: Network) -> AsyncGenerator[str | bytes, None]:
    """Yield the messages of a WebSocket, up to `max_events`, within the limits of time and size."""
    end, size = monotonic() + spec.timeout, 0
    async with AsyncExitStack() as stack:
        async with asyncio.timeout(spec.timeout):
            connection = await _opened(spec, request, through)
            stack.push_async_callback(connection.close)
            if spec.has_body:
                await connection.send(request.body.decode())
        for _ in range(spec.max_events):
            async with asyncio.timeout(min(IDLE, end - monotonic())):
                message = await _received(connection, request)
            if message is None:
                return
            if (size := size + len(message)) > spec.max_bytes:
                raise TooLarge(f"The stream of {request.authority}", size=None, limit=spec.max_bytes)
            yield message


class Channel:
    """A WebSocket on which both sides speak whenever they like."""

    def __init__(self, connection: ClientConnection, request: WireRequest) -> None:
        self._connection = connection
        self._request = request

    async def send(self, message: bytes) -> None:
        """Send one message as text; a connection that is gone is a broken pipe."""
        try:
            async with asyncio.timeout(_SENDING):
                await self._connection.send(message, text=True)
        except (ConnectionClosed, TimeoutError):
            raise BrokenPipeError from None

    async def receive(self) -> bytes | None:
        """Return the next message, or None where the other side has said goodbye."""
        message = await _received(self._connection, self._request)
        return message.encode(errors="surrogatepass") if isinstance(message, str) else message


@asynccontextmanager
async def channel(
    spec: HttpSpec, *, secrets: Mapping[str, str], through: Network, protocol: str
) -> AsyncIterator[Channel]:
    """Open a WebSocket for a talk in a protocol of its own, for as long as the block lasts."""
    request = prepare(spec, secrets, schemes=("ws", "wss"))
    connection = await _opened(spec, request, through, protocol=protocol, longest=spec.max_bytes)
    try:
        yield Channel(connection, request)
    finally:
        await connection.close()


async def _opened(
    spec: HttpSpec, request: WireRequest, through: Network, *, protocol: str = "", longest: int = _LONGEST
) -> ClientConnection:
    is_secure = request.url.scheme == "wss"
    refuse_denied(request, spec.denied)
    try:
        return await connect(
            str(request.url.copy_with(fragment=None)),
            sock=await through.connect(request.host, request.port, spec.granted),
            ssl=through.tls() if is_secure else None,
            server_hostname=request.host if is_secure else None,
            additional_headers=[pair for pair in request.headers if pair[0].lower() not in _ALSO_OURS],
            user_agent_header=AGENT,
            proxy=None,
            compression=None,  # so that a small message cannot become a large one
            subprotocols=[Subprotocol(protocol)] if protocol else None,
            max_size=min(longest, spec.max_bytes),
            open_timeout=None,
            close_timeout=_CLOSE,
        )
    except InvalidHandshake as fault:
        raise failed(request, "protocol", f"the server did not open a WebSocket ({type(fault).__name__})") from None
    except TimeoutError:
        raise
    except OSError as fault:
        raise connection_failed(request, fault) from None
    except ValueError:  # a redirect, which a socket that is connected already cannot follow
        raise failed(request, "protocol", "the server did not open a WebSocket (redirect)") from None


async def _received(connection: ClientConnection, request: WireRequest) -> str | bytes | None:
    try:
        return await connection.recv()
    except ConnectionClosedOK:
        return None
    except ConnectionClosed as fault:
        if fault.sent is not None and fault.sent.code == _TOO_BIG:
            raise TooLarge(
                f"A message of {request.authority}", size=None, limit=connection.protocol.max_message_size or _LONGEST
            ) from None
        raise failed(request, "protocol", "the connection was lost") from None
    except WebSocketException:
        raise failed(request, "protocol", "the server did not speak the WebSocket protocol") from None
