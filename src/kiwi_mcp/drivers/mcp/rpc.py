"""JSON-RPC with a server: requests by number, their envelope, and a filter and rate limit for what comes in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from contextvars import Context
from functools import partial
from itertools import count
from time import monotonic
from typing import Final, TypeAlias

import anyio
from anyio.abc import TaskGroup
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import (
    MCP_METHOD_HEADER,
    MCP_NAME_HEADER,
    MCP_PROTOCOL_VERSION_HEADER,
    NAME_BEARING_METHODS,
    encode_header_value,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    x_mcp_header_map,
)
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    CONNECTION_CLOSED,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
    RequestId,
)
from msgspec import Struct, field
from opentelemetry.propagate import inject
from opentelemetry.trace import SpanKind, get_current_span, get_tracer

from kiwi_mcp.domain.calls import NO_CALLER, Caller, unheard
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.mcp import Era
from kiwi_mcp.drivers.mcp.transport import Incoming, Outgoing

ProgressCallback: TypeAlias = Callable[[float, float | None, str], None]
"""Takes how far a request is, out of how much, and a message."""
_PARTING = 5.0
"""How many seconds it may take to tell a server that no caller waits any more."""
_LAST_ANSWER = 1.0
"""How many seconds it may take to answer an open request of a server when the connection closes."""
_tracer = get_tracer("kiwi_mcp")


def is_traced() -> bool:
    """Whether a call is part of a trace, which its requests then continue."""
    return get_current_span().get_span_context().is_valid


class _Waiting(Struct, frozen=True):
    """A request without an answer."""

    answer: asyncio.Future[JSONRPCResponse | JSONRPCError | None]
    progress: ProgressCallback | None


class RequestChannel:
    """The requests to one server, each with its answer."""

    def __init__(self, outgoing: Outgoing) -> None:
        self._outgoing = outgoing
        self._numbers = count(1)
        self._waiting: dict[str | int, _Waiting] = {}
        self._has_ended = False

    def number(self) -> int:
        """Return a number for a request, which no other has."""
        return next(self._numbers)

    async def ask(
        self,
        method: str,
        params: JsonObject,
        headers: dict[str, str],
        number: int | None = None,
        *,
        progress: ProgressCallback | None = None,
        is_cancellable: bool = True,
    ) -> JsonObject:
        """Return the result of a request; what the server refuses is raised as the SDK's error.

        A server is notified when no caller waits any more, unless the request must not be cancelled.
        """
        number = self.number() if number is None else number
        if progress is not None:
            params = _with_meta(params, {"progressToken": number})
        if not is_traced():
            return await self._ask(method, params, headers, number, progress, is_cancellable=is_cancellable)
        attributes = {"mcp.method.name": method, "jsonrpc.request.id": str(number)}
        with _tracer.start_as_current_span(f"MCP send {method}", kind=SpanKind.CLIENT, attributes=attributes):
            trace: dict[str, Json] = {}
            inject(trace)
            params = _with_meta(params, trace)
            return await self._ask(method, params, headers, number, progress, is_cancellable=is_cancellable)

    async def _ask(
        self,
        method: str,
        params: JsonObject,
        headers: dict[str, str],
        number: int,
        progress: ProgressCallback | None,
        *,
        is_cancellable: bool,
    ) -> JsonObject:
        if self._has_ended:
            raise _closed()
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[number] = _Waiting(waiting, progress)
        request = JSONRPCRequest.model_construct(jsonrpc="2.0", id=number, method=method, params=dict(params))
        try:
            await self._outgoing.send(SessionMessage(request, ClientMessageMetadata(headers=headers)))
            answer = await waiting
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise _closed() from None
        except asyncio.CancelledError:
            if is_cancellable:
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

    async def notify(self, method: str, headers: dict[str, str]) -> None:
        """Send a notification without parameters."""
        message = JSONRPCNotification(jsonrpc="2.0", method=method)
        try:
            await self._outgoing.send(SessionMessage(message, ClientMessageMetadata(headers=headers)))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise _closed() from None

    def takes(self, message: JSONRPCMessage) -> bool:
        """Take an answer to one of the requests, and return whether it was one."""
        if not isinstance(message, JSONRPCResponse | JSONRPCError) or message.id is None:
            return False
        waiting = self._waiting.get(coerce_request_id(message.id))
        if waiting is not None and not waiting.answer.done():  # a second answer is ignored
            waiting.answer.set_result(message)
        return waiting is not None

    def note_progress(self, params: JsonObject) -> None:
        """Pass progress to the caller of the request that it belongs to."""
        match params:
            case {"progressToken": str() | int() as token, "progress": int() | float() as done} if (
                not isinstance(token, bool)
                and not isinstance(done, bool)
                and (waiting := self._waiting.get(coerce_request_id(token))) is not None
                and waiting.progress is not None
            ):
                total, message = params.get("total"), as_text(params.get("message"))
                waiting.progress(float(done), float(total) if isinstance(total, int | float) else None, message)

    def end(self) -> None:
        """Tell everyone who waits that no answer will come."""
        self._has_ended = True
        for waiting in self._waiting.values():
            if not waiting.answer.done():
                waiting.answer.set_result(None)

    async def _call_off(self, number: int) -> None:
        params = {"requestId": number, "reason": "caller cancelled"}
        message = JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params)
        with anyio.move_on_after(_PARTING, shield=True):
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._outgoing.send(SessionMessage(message))


def _with_meta(params: JsonObject, meta: JsonObject) -> JsonObject:
    return {**params, "_meta": {**as_object(params.get("_meta")), **meta}} if meta else params


def _closed() -> MCPError:
    return MCPError(code=CONNECTION_CLOSED, message="Connection closed")


RATE = 200.0
"""Notifications that a server may send for each second, in the long run."""
BURST = 1_000.0
"""Notifications that it may send at once."""
_HEARD = frozenset(
    {"notifications/progress", "notifications/cancelled", "notifications/message"}
    | {f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources")}
)
"""The notifications that Kiwi uses."""
FLOOD = 10_000
"""Notifications too many after which a server is no longer listened to."""


class Dispatcher:
    """Reads what a server sends, and brings each message to the one who handles it.

    A notification goes to its handler with the context of the request that it belongs to, if that is known; those that
    are too many, or that Kiwi does not use, are dropped. `on_answer` gets the number of each answered request, and
    `on_end` why the stream ended.
    """

    def __init__(
        self,
        incoming: Incoming,
        outgoing: Outgoing,
        channel: RequestChannel,
        *,
        on_request: Callable[[str, JsonObject], Awaitable[JsonObject]],
        on_notification: Callable[[str, JsonObject, Context | None], None],
        on_answer: Callable[[RequestId], None],
        on_end: Callable[[Exception | None], None],
    ) -> None:
        self._incoming, self._outgoing, self._channel = incoming, outgoing, channel
        self._on_request, self._on_notification = on_request, on_notification
        self._on_answer, self._on_end = on_answer, on_end
        self._open: dict[str | int, anyio.CancelScope] = {}
        self._left, self._at = BURST, monotonic()
        self.dropped = 0
        self.last_heard = monotonic()

    async def run(self) -> None:
        """Read until the stream ends; requests of the server that are still open then are answered with an error."""
        async with self._outgoing, anyio.create_task_group() as group:
            try:
                async with aclosing(self._incoming):
                    while (message := await self._received()) is not None:
                        self._dispatch(message, group)
            finally:
                self._channel.end()  # also while the server is greeted: an ended stream brings no answer
                group.cancel_scope.cancel()

    async def _received(self) -> JSONRPCMessage | None:
        """Return the next message to handle; None at the end of the stream, which is reported, however it happens."""
        try:
            while True:
                item = await self._incoming.receive()
                self.last_heard = monotonic()
                if isinstance(item, SessionMessage) and self._passes(item.message):
                    return item.message
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._on_end(None)
        except Exception as fault:  # noqa: BLE001 - whatever the wire raises is why the connection ended
            self._on_end(fault)
        return None

    def _passes(self, message: JSONRPCMessage) -> bool:
        if not isinstance(message, JSONRPCNotification):
            number = message.id if isinstance(message, JSONRPCResponse | JSONRPCError) else None
            if number is not None:
                self._on_answer(coerce_request_id(number))
            return not self._channel.takes(message)
        self._left = min(BURST, self._left + (self.last_heard - self._at) * RATE) - 1
        self._at = self.last_heard
        if self._left >= 0:
            return message.method in _HEARD
        self._left = 0
        self.dropped += 1
        if self.dropped > FLOOD:
            raise Unavailable(
                f"it sent more than {FLOOD:,} notifications too many.", suggestion="The server is at fault: report it."
            )
        return False

    def _dispatch(self, message: JSONRPCMessage, group: TaskGroup) -> None:
        # Only some transports know which request a message belongs to.
        context: Context | None = getattr(self._incoming, "last_context", None)
        match message:
            case JSONRPCRequest():
                scope = self._open[coerce_request_id(message.id)] = anyio.CancelScope()
                # A question belongs to the call that it came with, as far as the transport knows that.
                start = partial(group.start_soon, self._answer, message, scope)
                start() if context is None else context.run(start)
            case JSONRPCNotification(method="notifications/cancelled", params=params):
                number = as_object(params).get("requestId")
                asked = self._open.get(coerce_request_id(number)) if isinstance(number, str | int) else None
                if asked is not None:
                    asked.cancel()
            case JSONRPCNotification(method="notifications/progress", params=params):
                self._channel.note_progress(as_object(params))
            case JSONRPCNotification(method=method, params=params):
                self._on_notification(method, as_object(params), context)

    async def _answer(self, request: JSONRPCRequest, scope: anyio.CancelScope) -> None:
        """Answer a request of the server; one that the server cancelled gets no answer."""
        answer: JSONRPCResponse | JSONRPCError | None = None
        try:
            with scope:
                try:
                    result = await self._on_request(request.method, as_object(request.params))
                    answer = JSONRPCResponse(jsonrpc="2.0", id=request.id, result=dict(result))
                except MCPError as refusal:
                    answer = JSONRPCError(jsonrpc="2.0", id=request.id, error=refusal.error)
        except asyncio.CancelledError:
            closed = JSONRPCError(jsonrpc="2.0", id=request.id, error=_closed().error)
            with anyio.move_on_after(_LAST_ANSWER, shield=True):
                await self._send(closed)
            raise
        finally:
            if self._open.get(coerce_request_id(request.id)) is scope:
                del self._open[coerce_request_id(request.id)]
        if answer is not None:
            await self._send(answer)

    async def _send(self, answer: JSONRPCResponse | JSONRPCError) -> None:
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._outgoing.send(SessionMessage(answer))


NOTE_LEVEL = "info"
"""The least important lines that servers are asked for."""
GRANT_OF_CAPABILITY: Final[Mapping[str, str]] = {"roots": "roots", "sampling": "sampling", "elicitation": "questions"}
"""What the owner has to allow a server, by the capability of a client that it uses."""

TASKS: Final = "io.modelcontextprotocol/tasks"
"""The extension that lets a call continue as a task at its server."""
_NAMED_BY: Final[Mapping[str, str]] = {
    **NAME_BEARING_METHODS,
    **dict.fromkeys(("tasks/get", "tasks/update", "tasks/cancel"), "taskId"),
}
"""The parameter of a request that is its name in a header."""


class Envelope(Struct, frozen=True):
    """The marks of one conversation."""

    version: str = ""
    meta: Mapping[str, Json] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    """What the server may ask of its callers."""

    @classmethod
    def of(cls, era: Era, version: str, client: JsonObject, offered: JsonObject, allowed: tuple[str, ...]) -> Envelope:
        """Return the marks that a revision wants, by the server's capabilities and what it may ask of its callers."""
        if era == "legacy":
            return cls(version)
        ours: JsonObject = {"extensions": {TASKS: {}}} if TASKS in as_object(offered.get("extensions")) else {}
        meta: JsonObject = {
            PROTOCOL_VERSION_META_KEY: version,
            CLIENT_INFO_META_KEY: client,
            CLIENT_CAPABILITIES_META_KEY: ours,
        }
        return cls(version, meta, allowed)

    @property
    def has_tasks(self) -> bool:
        """Whether the extension of tasks is among the marks."""
        return TASKS in as_object(as_object(self.meta.get(CLIENT_CAPABILITIES_META_KEY)).get("extensions"))

    def params(self, params: JsonObject, caller: Caller = NO_CALLER) -> JsonObject:
        """Return the parameters of a request with the marks on them."""
        if not self.meta:
            return params
        meta = {**as_object(params.get("_meta")), **self.meta}
        # Of the capabilities of a client, a server may use those that its owner allowed it to ask for.
        usable = {
            name: one for name, one in caller.capabilities.items() if GRANT_OF_CAPABILITY.get(name) in self.allowed
        }
        if usable:
            meta[CLIENT_CAPABILITIES_META_KEY] = {**as_object(meta[CLIENT_CAPABILITIES_META_KEY]), **usable}
        if caller.note is not unheard:
            meta[LOG_LEVEL_META_KEY] = NOTE_LEVEL
        return {**params, "_meta": meta}

    def headers(self, method: str, params: JsonObject, schema: Json = None) -> dict[str, str]:
        """Return the headers of a request; a transport without headers leaves them out."""
        found = {MCP_PROTOCOL_VERSION_HEADER: self.version}
        if not self.meta:
            return found
        found[MCP_METHOD_HEADER] = method
        if name := as_text(params.get(_NAMED_BY.get(method, ""))):
            found[MCP_NAME_HEADER] = encode_header_value(name)
        # Which words may be names of headers only a sound schema tells.
        if isinstance(schema, Mapping) and find_invalid_x_mcp_header(schema) is None:
            found |= mcp_param_headers(x_mcp_header_map(schema), as_object(params.get("arguments")))
        return found
