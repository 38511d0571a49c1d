"""`tools/call` past the SDK's dispatcher."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final, TypeAlias

import anyio
from mcp.server.connection import Connection, NotifyOnlyOutbound
from mcp.server.runner import modern_error_data, serve_one
from mcp.shared.dispatcher import CallOptions, Outbound, coerce_request_id
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.inbound import InboundModernRoute, classify_inbound_request
from mcp.shared.jsonrpc_dispatcher import (
    cancelled_request_id_from_params,
    handler_exception_to_error_data,
    progress_token_from_params,
)
from mcp.shared.message import MessageMetadata, SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types import (
    CONNECTION_CLOSED,
    PROTOCOL_VERSION_META_KEY,
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)
from msgspec import Struct, field

from kiwi_mcp.domain.json import as_object
from kiwi_mcp.surfaces.mcp.running_call import TIDY_SECONDS, is_unhurried
from kiwi_mcp.surfaces.mcp.server import McpServer

_log = logging.getLogger("kiwi")

METHOD: Final = "tools/call"
"""The one request that is worth a way of its own."""
_PARTING = 1.0
"""How long a client may keep us waiting with the last words to it, in seconds."""
_FAULT_OF_HANDLER = 0
"""The code under which the SDK tells a client of the handshake era that a handler failed."""

Tell: TypeAlias = Callable[[JSONRPCNotification], Awaitable[None]]
"""Sends a client what belongs to a request, before its answer."""
Answer: TypeAlias = JSONRPCResponse | JSONRPCError
Work: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
"""Gives the result of a request."""


class FastRequest(Struct):
    """One request on the short way, as the SDK's runner wants to know of it: a `DispatchContext`."""

    request: JSONRPCRequest
    tell: Tell
    back: Outbound | None = None
    """By which the client is asked while it waits; None where it cannot be."""
    message_metadata: MessageMetadata = None
    transport: TransportContext = TransportContext(kind="jsonrpc", can_send_request=False)
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    is_over: bool = False

    @property
    def request_id(self) -> RequestId | None:
        """The number of the request."""
        return self.request.id

    @property
    def key(self) -> RequestId:
        """The number, as it is compared with others."""
        return coerce_request_id(self.request.id)

    @property
    def can_send_request(self) -> bool:
        """Whether the client can be asked."""
        return self.back is not None and not self.is_over

    async def send_raw_request(
        self, method: str, params: Mapping[str, Any] | None, opts: CallOptions | None = None
    ) -> dict[str, Any]:
        """Ask the client."""
        if self.back is None or self.is_over:
            raise NoBackChannelError(method)
        return await self.back.send_raw_request(method, params, opts)

    async def notify(self, method: str, params: Mapping[str, Any] | None, _opts: CallOptions | None = None) -> None:
        """Tell the client something that belongs to the request; once that is answered, nothing does."""
        if not self.is_over:
            said = {} if params is None else {"params": dict(params)}
            await self.tell(JSONRPCNotification(jsonrpc="2.0", method=method, **said))

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell the client how far the request is, if it asked for progress."""
        if (token := progress_token_from_params(self.request.params)) is not None:
            params = {"progressToken": token, "progress": progress, "total": total, "message": message}
            given = {key: value for key, value in params.items() if value is not None}
            await self.notify("notifications/progress", given)

    async def answer(self, work: Work, *, is_modern: bool = False) -> Answer:
        """Return the answer to the request, however the work ends; in a task of its own."""
        number = self.request.id
        is_unhurried.set(True)  # `call_off` and `stop` cancel that task once
        try:
            return JSONRPCResponse(jsonrpc="2.0", id=number, result=await work())
        except Exception as fault:  # noqa: BLE001 - the edge of the protocol: every fault has an answer
            error = modern_error_data(fault) if is_modern else handler_exception_to_error_data(fault)
            if error is None:
                _log.error("a call failed", exc_info=fault)
                error = ErrorData(code=_FAULT_OF_HANDLER, message=str(fault))
            return JSONRPCError(jsonrpc="2.0", id=number, error=error)
        finally:
            self.is_over = True

    def call_off(self, task: asyncio.Task[Any]) -> None:
        """Stop the task that sees to the request, since its client wants no answer; an answer on its way goes out."""
        if not self.is_over and not task.cancelling():
            self.cancel_requested.set()
            task.cancel()


class FastPath:
    """The calls of one conversation over lines that take the short way."""

    def __init__(self, server: McpServer, send: Callable[[SessionMessage], Awaitable[None]]) -> None:
        self._server = server
        self._send = send
        self._is_modern: bool | None = None
        self._exchanges: dict[RequestId, tuple[FastRequest, asyncio.Task[None]]] = {}

    def takes(self, message: JSONRPCMessage) -> bool:
        """Read a message, and return whether it is handled here; the SDK gets all others."""
        match message:
            case JSONRPCNotification(method="notifications/cancelled"):
                number = cancelled_request_id_from_params(message.params)
                known = self._exchanges.get(coerce_request_id(number)) if number is not None else None
                if known is not None:
                    known[0].call_off(known[1])
            case JSONRPCRequest() if self._is_modern is None:
                # The first request opens the connection in its era, and the SDK must also process it.
                self._is_modern = message.method != "initialize" and _route(message) is not None
            case JSONRPCRequest(method="tools/call"):
                exchange = FastRequest(message, self._tell)
                key = exchange.key
                if key in self._exchanges or (work := self._work(exchange)) is None:
                    return False
                task = asyncio.create_task(self._see_to(exchange, work))
                self._exchanges[key] = exchange, task
                task.add_done_callback(lambda _: self._exchanges.pop(key))
                return True
        return False

    async def aclose(self) -> None:
        """Stop what is under way; callers that wait get an error that there will be no answer."""
        await stop(*(task for _, task in self._exchanges.values()))

    def _work(self, exchange: FastRequest) -> Work | None:
        """Return what answers a request; None where it is not for the short way."""
        params = exchange.request.params
        if self._is_modern:
            route = _route(exchange.request)
            return None if route is None else partial(self._serve_one, exchange, route)
        runner = self._server.open_runner(None)
        if runner is None or PROTOCOL_VERSION_META_KEY in as_object((params or {}).get("_meta")):
            return None
        exchange.back = runner.connection.outbound
        return partial(runner.on_request, exchange, METHOD, params)

    def _serve_one(self, exchange: FastRequest, route: InboundModernRoute) -> Awaitable[dict[str, Any]]:
        connection = Connection.from_envelope(
            route.protocol_version, route.client_info, route.client_capabilities, outbound=NotifyOnlyOutbound(exchange)
        )
        params = exchange.request.params
        return serve_one(self._server, exchange, METHOD, params, connection=connection, lifespan_state={})

    async def _see_to(self, exchange: FastRequest, work: Work) -> None:
        try:
            answer = await exchange.answer(work, is_modern=self._is_modern is True)
        except asyncio.CancelledError:  # unless the client itself has called it off
            error = ErrorData(code=CONNECTION_CLOSED, message="Connection closed")
            answer = JSONRPCError(jsonrpc="2.0", id=exchange.request.id, error=error)
        if not exchange.cancel_requested.is_set():
            await self._tell(answer)

    async def _tell(self, message: JSONRPCMessage) -> None:
        try:
            await self._send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            _log.debug("a client left before the answer")


async def stop(*tasks: asyncio.Task[Any]) -> None:
    """Stop tasks, and wait until they have tidied up; one that was called off before does so in peace."""
    ending = {task for task in tasks if not task.done()}
    for task in ending:
        if not task.cancelling():
            task.cancel()
    if ending:
        with anyio.CancelScope(shield=True):
            await asyncio.wait(ending, timeout=TIDY_SECONDS + _PARTING)


def _route(request: JSONRPCRequest) -> InboundModernRoute | None:
    """Return what a request of the modern era says about its client; None for every other."""
    found = classify_inbound_request({"method": request.method, "params": request.params})
    return found if isinstance(found, InboundModernRoute) else None
