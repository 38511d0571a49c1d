"""Fast requests: own ids, one answer each, and everything else left to the dispatcher."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Self, TypeVar

import anyio
import pytest
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from mcp_types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.drivers.mcp.rpc import RequestChannel, is_traced

Result = TypeVar("Result")
Answer = Callable[[int], JSONRPCResponse | JSONRPCError]


class Sent:
    """Where messages go: kept, and answered if there is an answer."""

    def __init__(self) -> None:
        self.messages: list[SessionMessage] = []
        self.is_broken = False
        self.came = asyncio.Event()

    async def send(self, item: SessionMessage, /) -> None:
        if self.is_broken:
            raise anyio.BrokenResourceError
        self.messages.append(item)
        self.came.set()

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def run(work: Callable[[RequestChannel, Sent], Coroutine[object, object, Result]]) -> Result:
    async def limited() -> Result:
        sent = Sent()
        async with asyncio.timeout(120):
            return await work(RequestChannel(sent), sent)

    return asyncio.run(limited())


async def asked(lane: RequestChannel, sent: Sent) -> tuple[asyncio.Task[JsonObject], int]:
    """Begin to ask, and return the number that the request has."""
    sent.came.clear()
    task = asyncio.create_task(lane.ask("tools/call", {"name": "echo"}, {"a": "b"}))
    await sent.came.wait()
    message = sent.messages[-1].message
    assert isinstance(message, JSONRPCRequest)
    assert isinstance(message.id, int)
    return task, message.id


def answer(number: int | str, **result: str) -> JSONRPCResponse:
    return JSONRPCResponse(jsonrpc="2.0", id=number, result=dict(result))


def test_a_request_gets_the_answer_to_its_own_number() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> tuple[JsonObject, JsonObject]:
        first, one = await asked(lane, sent)
        second, two = await asked(lane, sent)
        assert one != two
        assert lane.takes(answer(two, of="two"))
        assert lane.takes(answer(one, of="one"))
        return await first, await second

    assert run(work) == ({"of": "one"}, {"of": "two"})


def test_a_request_is_sent_with_its_headers_and_nothing_else() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> str:
        task, number = await asked(lane, sent)
        assert isinstance(sent.messages[0].metadata, ClientMessageMetadata)
        assert sent.messages[0].metadata.headers == {"a": "b"}
        lane.takes(answer(number))
        await task
        return sent.messages[0].message.model_dump_json(by_alias=True, exclude_unset=True).replace(str(number), "N")

    assert run(work) == '{"jsonrpc":"2.0","id":N,"method":"tools/call","params":{"name":"echo"}}'


def test_an_id_that_returns_as_text_is_the_same_id() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> JsonObject:
        task, number = await asked(lane, sent)
        assert lane.takes(answer(str(number), is_it="yes"))
        return await task

    assert run(work) == {"is_it": "yes"}


def test_an_unrelated_message_is_left_to_the_dispatcher() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> None:
        task, number = await asked(lane, sent)
        assert not lane.takes(answer(number + 1))
        assert not lane.takes(JSONRPCRequest(jsonrpc="2.0", id=number, method="ping"))
        assert not lane.takes(JSONRPCNotification(jsonrpc="2.0", method="notifications/progress"))
        assert lane.takes(answer(number, first="yes"))
        assert lane.takes(answer(number, first="no"))
        assert await task == {"first": "yes"}
        assert not lane.takes(answer(number, first="no"))

    run(work)


def test_an_error_of_the_server_is_raised() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> None:
        task, number = await asked(lane, sent)
        lane.takes(JSONRPCError(jsonrpc="2.0", id=number, error=ErrorData(code=-32602, message="No.", data={"a": 1})))
        await task

    with pytest.raises(MCPError, match="No") as refused:
        run(work)
    assert (refused.value.code, refused.value.error.data) == (-32602, {"a": 1})


def test_a_request_is_cancelled_when_its_caller_stops_waiting() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> None:
        task, number = await asked(lane, sent)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        response = sent.messages[-1].message
        assert isinstance(response, JSONRPCNotification)
        assert response.method == "notifications/cancelled"
        assert response.params is not None
        assert response.params["requestId"] == number
        assert not lane.takes(answer(number))

    run(work)


def test_all_waiting_callers_see_the_end_and_no_new_request_starts() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> None:
        waiting = [(await asked(lane, sent))[0] for _ in range(3)]
        lane.end()
        for task in (*waiting, asyncio.create_task(lane.ask("ping", {}, {}))):
            with pytest.raises(MCPError, match="Connection closed"):
                await task

    run(work)


def test_a_broken_transport_is_a_closed_connection() -> None:
    async def work(lane: RequestChannel, sent: Sent) -> None:
        sent.is_broken = True
        await lane.ask("ping", {}, {})

    with pytest.raises(MCPError, match="Connection closed"):
        run(work)


def test_a_call_within_a_trace_carries_the_trace() -> None:
    assert not is_traced()
    span = NonRecordingSpan(SpanContext(1, 2, is_remote=True, trace_flags=TraceFlags(1)))
    with use_span(span):
        assert is_traced()
