"""A client for long conversations over HTTP: how much of an answer is taken, and how often a stream is taken up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

import httpx2
import pytest

from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.primitives import http_channel, http_client

Result = TypeVar("Result")
LIMIT = 100_000


def asking(
    status: int, ask: Callable[[httpx2.AsyncClient, str], Awaitable[Result]], *, streamed: tuple[str, ...], size: int
) -> Result:
    """What comes of asking a server that answers everything with a stream of events of this size."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status} X\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + b"x" * size)
        writer.close()

    async def scenario() -> Result:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
            spec = HttpSpec("POST", url, granted=("127.0.0.1",), max_bytes=LIMIT)
            address, client = http_channel.client(spec, secrets={}, streamed=streamed)
            try:
                async with client, asyncio.timeout(10):
                    return await ask(client, address)
            finally:
                await http_client.aclose()

    return asyncio.run(scenario())


@pytest.mark.case("MCP-13")
@pytest.mark.parametrize(
    ("status", "method", "streamed", "is_whole"),
    [
        (200, "GET", ("GET", "POST"), True),
        (200, "POST", ("GET", "POST"), True),
        (200, "POST", ("GET",), False),
        (307, "GET", ("GET", "POST"), False),
        (400, "POST", ("GET", "POST"), False),
    ],
)
def test_only_a_stream_that_was_asked_for_has_no_limit(
    status: int, method: str, streamed: tuple[str, ...], *, is_whole: bool
) -> None:
    async def ask(client: httpx2.AsyncClient, url: str) -> int:
        return len((await client.request(method, url)).content)

    with nullcontext() if is_whole else pytest.raises(httpx2.StreamError, match=f"{LIMIT:,}"):
        assert asking(status, ask, streamed=streamed, size=3 * LIMIT) == 3 * LIMIT


def test_a_stream_that_always_breaks_off_is_not_taken_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_channel, "RESUMED", 3)

    async def ask(client: httpx2.AsyncClient, url: str) -> list[int]:
        found = [(await client.get(url)).status_code for _ in range(3)]
        with pytest.raises(httpx2.StreamError, match="broke off 3 times in a row"):
            await client.get(url)
        other = await asyncio.create_task(client.get(url))  # another request has a count of its own
        return [*found, other.status_code]

    assert asking(200, ask, streamed=("GET",), size=1) == [200] * 4


def test_a_stream_that_lasts_may_be_taken_up_as_often_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_channel, "RESUMED", 3)
    monkeypatch.setattr(http_channel, "LASTING", 0)

    async def ask(client: httpx2.AsyncClient, url: str) -> list[int]:
        return [(await client.get(url)).status_code for _ in range(10)]

    assert asking(200, ask, streamed=("GET",), size=1) == [200] * 10


@pytest.mark.parametrize(("headers", "is_lost"), [({"mcp-session-id": "s"}, True), ({}, False)])
def test_a_session_that_the_server_forgot_is_told(headers: dict[str, str], *, is_lost: bool) -> None:
    async def ask(client: httpx2.AsyncClient, url: str) -> bytes:
        return (await client.post(url, headers=headers)).content

    said = asking(404, ask, streamed=("GET",), size=1)

    assert (said != b"x") == is_lost
    if is_lost:
        assert http_channel.is_session_lost(json.loads(said)["error"]["data"])
