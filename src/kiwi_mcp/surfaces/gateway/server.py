"""`kiwi up`: settings to a listening uvicorn; connection limits."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from kiwi_mcp import __version__
from kiwi_mcp.catalog.release import seed
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, Unavailable
from kiwi_mcp.kernel.settings import RegistrySettings
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.primitives.local_socket import is_own_peer
from kiwi_mcp.primitives.local_socket import listening as listening_at
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.surfaces.gateway.app import gateway
from kiwi_mcp.surfaces.gateway.auth import Authenticator, VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import MCP, McpEndpoint, principal
from kiwi_mcp.surfaces.gateway.oauth import LOOPBACK, IdentityProvider, TokenVerifier
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import build_server
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

PORT = 8765
_CONNECTIONS = 512
_HEAD_BYTES = 16_384
_HEAD_SECONDS = 10.0
"""How long a connection may take to send the head of its first request."""
_IDLE_SECONDS = 15
_GRACE_SECONDS = 10
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class GatewayConfig(Struct, frozen=True):
    """Where the gateway listens, whether it is read-only, and for which project and which users it runs tools."""

    host: str = "127.0.0.1"
    port: int = PORT
    """0 takes a port that is free."""
    names: tuple[str, ...] = ()
    """Further names under which it is reached: behind a proxy, or from other machines."""
    is_read_only: bool = False
    project: Path | None = None
    """The project of calls that name none."""
    oauth: IdentityProvider | None = None
    """The identity provider; its access tokens are accepted as well."""
    is_wide: bool = False
    """Whether calls may name other projects than that one."""
    always_sent: int = 0
    """How many tools clients see without searching, once that is known."""
    socket: Path | None = None
    """The socket that it listens at instead of a port: then only processes of its own user reach it."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK

    @property
    def url(self) -> str:
        """Its address; behind a socket, the one that requests name."""
        if self.socket is not None:
            return "http://localhost"
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def mcp_url(self) -> str | None:
        """Where MCP clients use tools: under the address that the owner gave it, or its own; None if they cannot."""
        if self.is_read_only:
            return None
        return self.oauth.audience if self.oauth else f"{self.url}{MCP}"


def serve(
    user: Path, settings: RegistrySettings, listening: GatewayConfig, announce: Callable[[GatewayConfig], None]
) -> None:
    """Serve until SIGTERM or SIGINT; `announce` is called once requests are answered."""
    access = TokenVerifier(listening.oauth) if listening.oauth and not listening.is_read_only else None
    door = _door(TokenStore(user), listening, access)
    database = open_database(settings.url)
    try:
        registry = Registry(database, settings.actor)
        seed(registry, __version__)  # what others push depends on what ships with Kiwi, which only the server provides
        asyncio.run(_serve(user, registry, door, access, listening, announce))
    finally:
        database.close()


async def _serve(
    user: Path,
    registry: Registry,
    door: Authenticator,
    access: TokenVerifier | None,
    listening: GatewayConfig,
    announce: Callable[[GatewayConfig], None],
) -> None:
    async with AsyncExitStack() as stack:
        if access is not None:
            stack.push_async_callback(access.aclose)
        mcp, kernel = None, None
        if not listening.is_read_only:
            kernel = VisitedKernel(listening.project, user=user, is_wide=listening.is_wide)
            mcp = await stack.enter_async_context(tools(door, kernel))
            with suppress(KiwiError):  # preferences that cannot be read: every list says so, and the meta-tools stay
                listening = replace(listening, always_sent=len((await kernel.offers()).tools))
        app = gateway(registry, door, mcp=mcp, kernel=kernel)
        server = GatewayServer(
            _config(app, listening),
            announce=lambda port: announce(replace(listening, port=port or listening.port)),
            leave=mcp.end if mcp is not None else None,
        )
        listener = [listening_at(listening.socket)] if listening.socket is not None else None
        try:
            await server.serve(listener)
        finally:
            if listening.socket is not None:
                listening.socket.unlink(missing_ok=True)


@asynccontextmanager
async def tools(door: Authenticator, kernel: VisitedKernel) -> AsyncIterator[McpEndpoint]:
    """Yield the MCP server of one kernel for all users that are authenticated; it ends with the kernel."""
    calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=principal, kernel=kernel)
    changes = ToolListWatcher(kernel, view=kernel.seen)
    server = build_server(kernel, calls=calls, changes=changes)
    endpoint = McpEndpoint(server, door, calls)
    async with AsyncExitStack() as stack:
        for close in (kernel.aclose, calls.aclose, changes.aclose):  # the last of them is closed first
            stack.push_async_callback(close)
        await stack.enter_async_context(endpoint.running())
        stack.callback(calls.leave)
        yield endpoint


def _door(tokens: TokenStore, listening: GatewayConfig, access: TokenVerifier | None) -> Authenticator:
    has_tokens = bool(tokens.all())
    if not has_tokens and access is None and not (listening.is_read_only and listening.is_local):
        raise InvalidRequest(
            "There is no token yet, so no client could use this server.",
            suggestion="Make one with `kiwi up token add NAME --tools`, or `--namespaces public --write` for the "
            "registry, or let everybody on this machine read what is public with `kiwi up --read-only`.",
        )
    return Authenticator(
        tokens,
        host=listening.host,
        names=(*listening.names, access.settings.host) if access else listening.names,
        is_read_only=listening.is_read_only,
        is_open=not has_tokens and access is None,
        access=access,
    )


def _config(app: ASGIApp, listening: GatewayConfig) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=listening.host,
        port=listening.port,
        http=_Impatient,
        ws="none",
        lifespan="off",
        access_log=False,  # addresses and their parameters are private
        log_config=None,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_CONNECTIONS,
        timeout_keep_alive=_IDLE_SECONDS,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        h11_max_incomplete_event_size=_HEAD_BYTES,
    )


class GatewayServer(uvicorn.Server):
    """A server that says where it listens, and ends in order when it is asked to."""

    def __init__(
        self,
        config: uvicorn.Config,
        *,
        announce: Callable[[int], None],
        leave: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        super().__init__(config)
        self._announce = announce
        self._leave = leave
        # The libraries log a lot about themselves; our own errors report what goes wrong.
        for library in ("uvicorn", "mcp", "sse_starlette"):
            logging.getLogger(library).setLevel(logging.CRITICAL)

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Listen, and say where."""
        try:
            await super().startup(sockets)
        except SystemExit:
            raise Unavailable(
                f"Nothing can listen on {self.config.host}, port {self.config.port}: it is taken, or not ours to use.",
                suggestion="Choose another port, or `--port 0` for one that is free.",
            ) from None
        self._announce(0 if sockets else self.servers[0].sockets[0].getsockname()[1])

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """End calls first: a client that waits for one would keep the server from ending."""
        if self._leave is not None:
            await self._leave()
        await super().shutdown(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop in order at the first signal, and return as from any other end."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


class _Impatient(H11Protocol):
    """A connection that has to be used: one that sends no request, or only half of a head, is closed."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in the library
        """Start the clock, unless it is another user of this machine who has come to a socket that is not theirs."""
        super().connection_made(transport)
        if not is_own_peer(transport):
            transport.abort()
            return
        self.loop.call_later(_HEAD_SECONDS, self._look, None)

    def _look(self, last: RequestResponseCycle | None) -> None:
        """Close the connection if it has waited for a request since the last look."""
        now: RequestResponseCycle | None = self.cycle
        is_waiting = now is None or now.response_complete
        if is_waiting and now is last:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(_HEAD_SECONDS, self._look, now)
