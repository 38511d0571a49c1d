"""Connections of the HTTP library: joined writes, bounded reads, and detected ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import httpcore2
import pytest

from kiwi_mcp.primitives.http.pool import Stream, connected

pytestmark = pytest.mark.usefixtures("loopback")

Result = TypeVar("Result")
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(serve: Serve, work: Callable[[Stream], Awaitable[Result]]) -> Result:
    """Serve one connection on this machine, and work with the other end of it."""

    writers: list[asyncio.StreamWriter] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await serve(reader, writer)

    async def both() -> Result:
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(120), server:
            stream = await connected("127.0.0.1", port, 5.0, None, ())
            try:
                return await work(stream)
            finally:
                await stream.aclose()
                for writer in writers:
                    writer.transport.abort()
                await asyncio.sleep(0)

    return asyncio.run(both())


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()


def test_a_head_and_its_body_are_sent_together() -> None:
    pieces: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pieces.append(await reader.read(65_536))
        writer.write(b"heard")

    async def work(stream: Stream) -> bytes:
        await stream.write(b"head ")
        await stream.write(b"body")
        return await stream.read(100, 5.0)

    assert run(serve, work) == b"heard"
    assert pieces == [b"head body"]


def test_written_data_is_sent_without_a_reader() -> None:
    heard = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        if await reader.read(10) == b"alone":
            heard.set()

    async def work(stream: Stream) -> None:
        await stream.write(b"alone")
        await heard.wait()

    run(serve, work)
    assert heard.is_set()


def test_data_beyond_the_buffer_of_the_peer_waits_and_arrives() -> None:
    size = 3_000_000

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        total = 0
        while total < size:
            await asyncio.sleep(0)
            total += len(await reader.read(50_000))
        writer.write(str(total).encode())

    async def work(stream: Stream) -> bytes:
        for _ in range(30):
            await stream.write(b"x" * (size // 30), 10.0)
        return await stream.read(100, 10.0)

    assert run(serve, work) == str(size).encode()


def test_a_slow_reader_causes_no_unbounded_buffer() -> None:
    size = 8_000_000
    begun = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _piece in range(80):
            writer.write(b"x" * (size // 80))
            begun.set()
            await writer.drain()
        writer.close()

    async def work(stream: Stream) -> tuple[int, int]:
        first = len(await stream.read(1, 5.0))
        await begun.wait()
        for _ in range(1_000):
            await asyncio.sleep(0)
        ahead, total = len(stream._flow.data), first  # how far it read ahead is what is asked
        while data := await stream.read(65_536, 5.0):
            total += len(data)
        return ahead, total

    ahead, total = run(serve, work)
    assert total == size
    assert ahead < 1_000_000


def test_silence_ends_at_the_timeout() -> None:
    with pytest.raises(httpcore2.ReadTimeout):
        run(silent, lambda stream: stream.read(10, 0.01))


def test_a_writer_without_a_reader_gets_an_error() -> None:
    async def serve(_: asyncio.StreamReader, __: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async def work(stream: Stream) -> None:
        for _ in range(1_000):
            await stream.write(b"x" * 100_000, 0.05)

    with pytest.raises(httpcore2.WriteTimeout):
        run(serve, work)


def test_an_idle_closed_connection_is_detected_at_once() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"a")
        writer.close()

    async def work(stream: Stream) -> tuple[bytes, bytes, bool]:
        return await stream.read(10, 5.0), await stream.read(10, 5.0), bool(stream.get_extra_info("is_readable"))

    assert run(serve, work) == (b"a", b"", True)


def test_an_idle_connection_has_no_data() -> None:
    async def work(stream: Stream) -> bool:
        return bool(stream.get_extra_info("is_readable"))

    assert run(silent, work) is False


def test_writing_to_a_closed_connection_fails() -> None:
    async def work(stream: Stream) -> None:
        await stream.aclose()
        await stream.write(b"late")

    with pytest.raises(httpcore2.WriteError):
        run(silent, work)


async def test_a_closed_port_is_an_error_of_the_library() -> None:
    async def work() -> None:
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        await connected("127.0.0.1", port, 5.0, None, ())

    with pytest.raises(httpcore2.ConnectError):
        await work()
