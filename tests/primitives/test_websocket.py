from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import TypeVar

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from kiwi_mcp.domain.errors import AddressDenied, InvalidRequest, RequestFailed, TooLarge
from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.pool import Network

pytestmark = pytest.mark.usefixtures("loopback")

T = TypeVar("T")
Answer = Callable[[ServerConnection], Awaitable[None]]


async def here(_: str, __: int) -> Sequence[str]:
    return ["127.0.0.1"]


def with_server(answer: Answer, story: Callable[[int], Coroutine[object, object, T]]) -> T:
    async def main() -> T:
        async with serve(answer, "127.0.0.1", 0, close_timeout=1) as server:
            return await story(next(iter(server.sockets)).getsockname()[1])

    return asyncio.run(main())


async def received(spec: HttpSpec, **secrets: str) -> list[str | bytes]:
    return [message async for message in client.websocket(spec, secrets=secrets, through=Network(here))]


async def echo(connection: ServerConnection) -> None:
    first = await connection.recv()
    assert connection.request is not None
    await connection.send(first)
    await connection.send(connection.request.headers["X-Key"])
    await connection.send(b"\x00\xff")


@pytest.mark.req("K-PR-02")
def test_the_body_is_sent_and_messages_are_read_until_the_server_closes() -> None:
    async def story(port: int) -> list[str | bytes]:
        spec = HttpSpec(
            "GET", f"ws://a.test:{port}/x", {"X-Key": "k-${KEY}"}, {"q": "${KEY}"}, has_body=True, granted=("*.test",)
        )
        return await received(spec, KEY="hunter22")

    assert with_server(echo, story) == ['{"q":"[redacted:KEY]"}', "k-[redacted:KEY]", b"\x00\xff"]


async def endless(connection: ServerConnection) -> None:
    for number in range(10_000):
        await connection.send(f"{number}".rjust(1000))


def test_messages_stop_at_their_limit() -> None:
    async def story(port: int) -> list[str | bytes]:
        return await received(HttpSpec("GET", f"ws://a.test:{port}/", max_events=3, granted=("*.test",)))

    assert [int(message) for message in with_server(endless, story)] == [0, 1, 2]


@pytest.mark.parametrize("limit", [10_000, 500])
def test_oversized_messages_and_totals_are_refused(limit: int) -> None:
    async def story(port: int) -> None:
        with pytest.raises(TooLarge):
            await received(HttpSpec("GET", f"ws://a.test:{port}/", max_bytes=limit, granted=("*.test",)))

    with_server(endless, story)


async def silent(connection: ServerConnection) -> None:
    await connection.wait_closed()


def test_silence_times_out() -> None:
    async def story(port: int) -> None:
        with pytest.raises(RequestFailed) as caught:
            await received(HttpSpec("GET", f"ws://a.test:{port}/", timeout=0.3, granted=("*.test",)))
        assert caught.value.details["cause"] == "timeout"

    with_server(silent, story)


@pytest.mark.case("NET-12")
def test_a_websocket_reaches_the_same_hosts_as_a_request() -> None:
    async def story(port: int) -> None:
        with pytest.raises(AddressDenied):
            await received(HttpSpec("GET", f"ws://a.test:{port}/"))
        with pytest.raises(InvalidRequest):
            await received(HttpSpec("GET", f"http://a.test:{port}/", granted=("*.test",)))

    with_server(silent, story)


async def test_a_redirect_or_refusal_is_an_error() -> None:
    async def refuse(connection: ServerConnection, request: Request) -> Response:
        response = connection.respond(302 if request.path == "/moved" else 403, "no")
        response.headers["Location"] = "ws://10.0.0.1/"
        return response

    async with serve(silent, "127.0.0.1", 0, process_request=refuse) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        for path in ("moved", "refused"):
            with pytest.raises(RequestFailed):
                await received(HttpSpec("GET", f"ws://a.test:{port}/{path}", granted=("*.test",)))


def test_a_closed_port_is_a_connection_error() -> None:
    async def story(port: int) -> int:
        return port

    closed = with_server(silent, story)
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(received(HttpSpec("GET", f"ws://a.test:{closed}/", granted=("*.test",))))
    assert caught.value.details["cause"] == "connect"
