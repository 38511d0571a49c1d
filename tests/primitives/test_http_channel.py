"""Long HTTP connections: response limits, and resumption of streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import TypeVar

import httpx2
import pytest

from kiwi_mcp.domain.plan import HttpSpec
from kiwi_mcp.domain.secret import Secret
from kiwi_mcp.primitives.http import client as http_client
from kiwi_mcp.primitives.http import origin_client

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
            address, client = origin_client.client(spec, secrets={}, streamed=streamed)
            try:
                async with client, asyncio.timeout(120):
                    return await ask(client, address)
            finally:
                await http_client.aclose()

    return asyncio.run(scenario())


@pytest.mark.usefixtures("loopback")
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
def test_only_a_requested_stream_has_no_timeout(
    status: int, method: str, streamed: tuple[str, ...], *, is_whole: bool
) -> None:
    async def ask(client: httpx2.AsyncClient, url: str) -> int:
        return len((await client.request(method, url)).content)

    with nullcontext() if is_whole else pytest.raises(httpx2.StreamError, match=f"{LIMIT:,}"):
        assert asking(status, ask, streamed=streamed, size=3 * LIMIT) == 3 * LIMIT


@pytest.mark.usefixtures("loopback")
def test_a_stream_that_always_breaks_is_not_resumed_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_client, "RESUMED", 3)

    async def ask(client: httpx2.AsyncClient, url: str) -> list[int]:
        found = [(await client.get(url)).status_code for _ in range(3)]
        with pytest.raises(httpx2.StreamError, match="broke off 3 times in a row"):
            await client.get(url)
        other = await asyncio.create_task(client.get(url))  # another request has a count of its own
        return [*found, other.status_code]

    assert asking(200, ask, streamed=("GET",), size=1) == [200] * 4


@pytest.mark.usefixtures("loopback")
def test_a_long_stream_may_be_resumed_after_each_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_client, "RESUMED", 3)
    monkeypatch.setattr(origin_client, "LASTING", 0)

    async def ask(client: httpx2.AsyncClient, url: str) -> list[int]:
        return [(await client.get(url)).status_code for _ in range(10)]

    assert asking(200, ask, streamed=("GET",), size=1) == [200] * 10


@pytest.mark.usefixtures("loopback")
@pytest.mark.parametrize(("headers", "is_lost"), [({"mcp-session-id": "s"}, True), ({}, False)])
def test_a_session_that_the_server_forgot_is_reported(headers: dict[str, str], *, is_lost: bool) -> None:
    async def ask(client: httpx2.AsyncClient, url: str) -> bytes:
        return (await client.post(url, headers=headers)).content

    said = asking(404, ask, streamed=("GET",), size=1)

    assert (said != b"x") == is_lost
    if is_lost:
        assert origin_client.is_session_lost(json.loads(said)["error"]["data"])


class Scripted:
    """A token source: the first token, and the next one when it is refused."""

    def __init__(self, first: str, following: str = "") -> None:
        self._first = first
        self._following = following
        self.refused: list[str] = []

    async def token(self) -> Secret | None:
        return Secret(self._first) if self._first else None

    def is_asked(self, status: int, challenge: str) -> bool:
        return status == 401

    async def instead(self, token: Secret | None, status: int, challenge: str) -> Secret | None:
        self.refused.append(token.reveal() if token else "")
        return Secret(self._following) if self._following else None


def guarded(bearer: Scripted, right: str, body: Callable[[str], list[bytes]]) -> tuple[int, bytes]:
    """What comes of posting to a server that takes one token only, and answers with these pieces."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        sent = head.partition("authorization: bearer ")[2].partition("\r\n")[0]
        await reader.readexactly(int(head.partition("content-length: ")[2].partition("\r\n")[0]))
        kind = "text/event-stream" if sent == right else "text/plain"
        status = "200 OK" if sent == right else "401 No"
        writer.write(f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode())
        for piece in body(sent):
            writer.write(piece)
            await writer.drain()
        writer.close()

    async def scenario() -> tuple[int, bytes]:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
            spec = HttpSpec("POST", url, granted=("127.0.0.1",), max_bytes=LIMIT)
            address, client = origin_client.client(spec, secrets={}, bearer=bearer)
            try:
                async with client, asyncio.timeout(120):
                    reply = await client.post(address, content=b"asked")
                    return reply.status_code, reply.content
            finally:
                await http_client.aclose()

    return asyncio.run(scenario())


@pytest.mark.usefixtures("loopback")
def test_a_refused_token_is_retried_once_with_another() -> None:
    bearer = Scripted("old-token", "new-token")

    assert guarded(bearer, "new-token", lambda _: [b"data: x\n\n"]) == (200, b"data: x\n\n")
    assert bearer.refused == ["old-token"]


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("MCP-13")
@pytest.mark.parametrize(
    ("first", "following", "refused"),
    [("", "", [""]), ("old-token", "", ["old-token"]), ("old-token", "new-token", ["old-token", "new-token"])],
)
def test_a_server_that_refuses_every_token_needs_a_login(first: str, following: str, refused: list[str]) -> None:
    bearer = Scripted(first, following)

    status, said = guarded(bearer, "another", lambda _: [b"no"])

    assert status == 401
    assert origin_client.is_login_wanted(json.loads(said)["error"]["data"])
    assert bearer.refused == refused


def test_a_server_cannot_claim_that_a_login_is_needed() -> None:
    assert not origin_client.is_login_wanted({"login_required": True, "http_status": 401})


@pytest.mark.usefixtures("loopback")
@pytest.mark.case("SEC-05")
@pytest.mark.parametrize("cut", range(0, 40, 3))
def test_the_token_is_redacted_across_chunks(cut: int) -> None:
    said = b"data: you sent access-token-value\n\n"

    _, heard = guarded(Scripted("access-token-value"), "access-token-value", lambda _: [said[:cut], said[cut:]])

    assert heard == b"data: you sent [redacted:ACCESS_TOKEN]\n\n"


@pytest.mark.usefixtures("loopback")
def test_an_endless_line_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin_client, "_HELD", 1_000)
    line = b"x" * 10_000 + b"access-token-value" + b"y" * 10_000

    _, heard = guarded(Scripted("access-token-value"), "access-token-value", lambda _: [line])

    assert heard == b"x" * 10_000 + b"[redacted:ACCESS_TOKEN]" + b"y" * 10_000
