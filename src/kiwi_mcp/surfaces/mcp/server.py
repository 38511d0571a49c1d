"""The SDK server object, what it would answer as text, and `tools/call` past its dispatcher."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import cached_property, partial
from typing import Any, Final, TypeAlias

import anyio
import mcp_types as types
from mcp.server.caching import CacheableMethod, CacheHint
from mcp.server.connection import Connection, NotifyOnlyOutbound
from mcp.server.lowlevel import NotificationOptions, Server
from mcp.server.models import InitializationOptions
from mcp.server.runner import ServerRunner, modern_error_data, serve_one
from mcp.shared import jsonrpc_dispatcher as dispatcher
from mcp.shared.dispatcher import CallOptions, Outbound, coerce_request_id
from mcp.shared.exceptions import NoBackChannelError
from mcp.shared.inbound import InboundModernRoute, classify_inbound_request
from mcp.shared.message import MessageMetadata, SessionMessage
from mcp.shared.transport_context import TransportContext
from mcp_types.version import LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from msgspec import Struct, field

from kiwi_mcp import __version__
from kiwi_mcp.domain.json import JsonObject, as_object, compact
from kiwi_mcp.kernel.verbs import INSTRUCTIONS
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.handlers import Handlers
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi, connection_of
from kiwi_mcp.surfaces.mcp.running_call import TIDY_SECONDS, is_unhurried, set_level
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

_LIST = CacheHint(5_000)
"""A client that gets no notifications sees changes of the owner's preferences soon after."""
_HINTS: dict[CacheableMethod, CacheHint] = {
    "server/discover": CacheHint(300_000),
    "resources/read": CacheHint(),
    "tools/list": _LIST,
    "prompts/list": _LIST,
    "resources/list": _LIST,
    "resources/templates/list": _LIST,
}
_CLIENT: JsonObject = {"name": "rehearsal", "version": "0"}
ENVELOPE: JsonObject = {
    "_meta": {
        types.PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION,
        types.CLIENT_CAPABILITIES_META_KEY: {},
        types.CLIENT_INFO_META_KEY: _CLIENT,
    }
}
"""What every request of the modern era carries."""
_log = logging.getLogger("kiwi")
METHOD: Final = "tools/call"
"""The one request that is worth a way of its own."""
_PARTING = 1.0
"""How long a client may keep us waiting with the last words to it, in seconds."""
_FAULT_OF_HANDLER = 0
"""The code under which the SDK tells a client of the handshake era that a handler failed."""
Answer: TypeAlias = types.JSONRPCResponse | types.JSONRPCError
Work: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
"""Gives the result of a request."""


class McpServer(Server[dict[str, object]]):
    """The SDK's server, which says in every handshake that its lists may change, and knows who has shaken hands."""

    @cached_property
    def _runners(self) -> dict[str | None, ServerRunner[dict[str, object]]]:
        return {}

    def opened(self, connection: Connection) -> None:
        """Note that a client of the handshake era is ready, for as long as it stays."""
        if connection.session_id not in self._runners:
            self._runners[connection.session_id] = ServerRunner(self, connection, {})
            connection.exit_stack.callback(self._runners.pop, connection.session_id)

    def open_runner(self, session_id: str | None) -> ServerRunner[dict[str, object]] | None:
        """Return what answers the client of a session, or the one without, if it has shaken hands."""
        return self._runners.get(session_id)

    def create_initialization_options(
        self,
        notification_options: NotificationOptions | None = None,
        experimental_capabilities: dict[str, dict[str, object]] | None = None,
        extensions: dict[str, dict[str, object]] | None = None,
    ) -> InitializationOptions:
        """Return what a handshake is answered with."""
        everything = NotificationOptions(prompts_changed=True, resources_changed=True, tools_changed=True)
        return super().create_initialization_options(
            notification_options or everything, experimental_capabilities, extensions
        )


def build_server(
    kernel: KernelApi, *, calls: Calls, changes: ToolListWatcher, name: str = "kiwi", instructions: str = INSTRUCTIONS
) -> McpServer:
    """Return the server that passes everything on to the kernel; its user must close `calls` and `changes`."""
    handlers = Handlers(kernel, changes, calls)
    server = McpServer(
        name,
        version=__version__,
        title="Kiwi",
        instructions=instructions,
        cache_hints=_HINTS,
        get_tool_input_schema=handlers.schema_of,
        on_list_tools=handlers.list_tools,
        on_list_prompts=handlers.list_prompts,
        on_list_resources=handlers.list_resources,
        on_list_resource_templates=handlers.list_templates,
        on_completion=handlers.complete,
    )
    # What may be answered with a question or a task first has more results than the constructor's types know.
    server.add_request_handler("tools/call", types.CallToolRequestParams, handlers.call_tool)
    server.add_request_handler("prompts/get", types.GetPromptRequestParams, handlers.get_prompt)
    server.add_request_handler("resources/read", types.ReadResourceRequestParams, handlers.read_resource)
    server.add_request_handler("logging/setLevel", types.SetLevelRequestParams, set_level)

    async def greeted(context: Context, params: types.NotificationParams) -> None:
        server.opened(connection_of(context))
        await changes.greeted(context, params)

    server.add_notification_handler("notifications/initialized", types.NotificationParams, greeted)
    changes.serve(server)
    calls.serve(server)
    return server


def handshake(version: str) -> JsonObject:
    """Return the parameters of a handshake."""
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": _CLIENT}


async def tool_lists(server: McpServer) -> dict[str, str]:
    """Return the list of tools, by era."""
    return {
        "legacy": await answer(server, "tools/list", {}, is_legacy=True),
        "modern": await answer(server, "tools/list", ENVELOPE),
    }


async def answer(server: McpServer, method: str, params: JsonObject, *, is_legacy: bool = False) -> str:
    """Return the result that a new client would get."""
    to_server, inbound = anyio.create_memory_object_stream[SessionMessage | Exception](4)
    outbound, from_server = anyio.create_memory_object_stream[SessionMessage](4)

    async def send(method: str, params: JsonObject) -> None:
        request = types.JSONRPCRequest(jsonrpc="2.0", id=1, method=method, params=dict(params))
        await to_server.send(SessionMessage(request))

    async with to_server, from_server, anyio.create_task_group() as tasks:
        tasks.start_soon(server.run, inbound, outbound, server.create_initialization_options())
        if is_legacy:
            await send("initialize", handshake(LATEST_HANDSHAKE_VERSION))
            await from_server.receive()
        await send(method, params)
        reply = json.loads((await from_server.receive()).message.model_dump_json(by_alias=True, exclude_unset=True))
        tasks.cancel_scope.cancel()
    return compact(reply["result"])


class FastRequest(Struct):
    """One request on the short way, as the SDK's runner wants to know of it: a `DispatchContext`."""

    request: types.JSONRPCRequest
    tell: Callable[[types.JSONRPCNotification], Awaitable[None]]
    """Sends the client what belongs to the request, before its answer."""
    back: Outbound | None = None
    """By which the client is asked while it waits; None where it cannot be."""
    message_metadata: MessageMetadata = None
    transport: TransportContext = TransportContext(kind="jsonrpc", can_send_request=False)
    cancel_requested: anyio.Event = field(default_factory=anyio.Event)
    is_over: bool = False

    @property
    def request_id(self) -> types.RequestId | None:
        """The number of the request."""
        return self.request.id

    @property
    def key(self) -> types.RequestId:
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
            await self.tell(types.JSONRPCNotification(jsonrpc="2.0", method=method, **said))

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Tell the client how far the request is, if it asked for progress."""
        if (token := dispatcher.progress_token_from_params(self.request.params)) is not None:
            params = {"progressToken": token, "progress": progress, "total": total, "message": message}
            given = {key: value for key, value in params.items() if value is not None}
            await self.notify("notifications/progress", given)

    async def answer(self, work: Work, *, is_modern: bool = False) -> Answer:
        """Return the answer to the request, however the work ends; in a task of its own."""
        number = self.request.id
        is_unhurried.set(True)  # `call_off` and `stop` cancel that task once
        try:
            return types.JSONRPCResponse(jsonrpc="2.0", id=number, result=await work())
        except Exception as fault:  # noqa: BLE001 - the edge of the protocol: every fault has an answer
            error = modern_error_data(fault) if is_modern else dispatcher.handler_exception_to_error_data(fault)
            if error is None:
                _log.error("a call failed", exc_info=fault)
                error = types.ErrorData(code=_FAULT_OF_HANDLER, message=str(fault))
            return types.JSONRPCError(jsonrpc="2.0", id=number, error=error)
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
        self._exchanges: dict[types.RequestId, tuple[FastRequest, asyncio.Task[None]]] = {}

    def takes(self, message: types.JSONRPCMessage) -> bool:
        """Read a message, and return whether it is handled here; the SDK gets all others."""
        match message:
            case types.JSONRPCNotification(method="notifications/cancelled"):
                number = dispatcher.cancelled_request_id_from_params(message.params)
                known = self._exchanges.get(coerce_request_id(number)) if number is not None else None
                if known is not None:
                    known[0].call_off(known[1])
            case types.JSONRPCRequest() if self._is_modern is None:
                # The first request opens the connection in its era, and the SDK must also process it.
                self._is_modern = message.method != "initialize" and _route(message) is not None
            case types.JSONRPCRequest(method="tools/call"):
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
        if runner is None or types.PROTOCOL_VERSION_META_KEY in as_object((params or {}).get("_meta")):
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
            error = types.ErrorData(code=types.CONNECTION_CLOSED, message="Connection closed")
            answer = types.JSONRPCError(jsonrpc="2.0", id=exchange.request.id, error=error)
        if not exchange.cancel_requested.is_set():
            await self._tell(answer)

    async def _tell(self, message: types.JSONRPCMessage) -> None:
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


def _route(request: types.JSONRPCRequest) -> InboundModernRoute | None:
    """Return what a request of the modern era says about its client; None for every other."""
    found = classify_inbound_request({"method": request.method, "params": request.params})
    return found if isinstance(found, InboundModernRoute) else None
