"""Lines of a server as messages, in any number."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import anyio
import pytest

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.drivers.mcp import transport
from kiwi_mcp.drivers.mcp.transport import ServerReader

PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'


def inbound(lines: Iterable[bytes]) -> ServerReader:
    waiting = iter(lines)

    async def line() -> bytes | None:
        return next(waiting, None)

    return ServerReader(line)


def batch(size: int) -> bytes:
    return b"[" + b",".join([PING] * size) + b"]"


async def count(heard: ServerReader) -> int:
    return len([message async for message in heard])


async def test_a_batch_is_processed_message_by_message() -> None:
    assert await count(inbound([batch(1_000), PING])) == 1_001


@pytest.mark.case("MCP-05")
async def test_a_batch_over_the_limit_ends_the_connection() -> None:
    with pytest.raises(Unavailable, match="more than 1,000 messages in one line"):
        await count(inbound([batch(1_001)]))


async def test_other_tasks_run_while_a_batch_is_processed() -> None:
    turns = 0
    counting = asyncio.create_task(count(inbound([batch(1_000)])))
    while not counting.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 20


@pytest.mark.parametrize("line", [b"", b"progress", b"[]"])
async def test_many_lines_without_messages_end_the_connection(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(transport, "MOST_NOISE", 100)

    assert await count(inbound([*[line] * 100, PING, *[line] * 100])) == 1
    with pytest.raises(Unavailable, match="more than 100 lines in a row"):
        await count(inbound([line] * 101))


async def test_the_stream_ends_with_its_input() -> None:
    with pytest.raises(anyio.EndOfStream):
        await inbound([]).receive()
