"""Lines of a server as messages, however many there are of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import anyio
import pytest

from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.drivers.mcp import messages
from kiwi_mcp.drivers.mcp.messages import Inbound

PING = b'{"jsonrpc": "2.0", "id": 1, "method": "ping"}'


def inbound(lines: Iterable[bytes]) -> Inbound:
    waiting = iter(lines)

    async def line() -> bytes | None:
        return next(waiting, None)

    return Inbound(line)


def batch(size: int) -> bytes:
    return b"[" + b",".join([PING] * size) + b"]"


async def count(heard: Inbound) -> int:
    return len([message async for message in heard])


def test_a_batch_is_heard_message_by_message() -> None:
    assert asyncio.run(count(inbound([batch(1_000), PING]))) == 1_001


@pytest.mark.case("MCP-05")
def test_a_batch_over_the_limit_ends_the_conversation() -> None:
    with pytest.raises(Unavailable, match="more than 1,000 messages in one line"):
        asyncio.run(count(inbound([batch(1_001)])))


def test_others_have_their_turn_while_a_batch_is_taken() -> None:
    async def scenario() -> int:
        turns = 0
        counting = asyncio.create_task(count(inbound([batch(1_000)])))
        while not counting.done():
            turns += 1
            await asyncio.sleep(0)
        return turns

    assert asyncio.run(scenario()) > 20


@pytest.mark.parametrize("line", [b"", b"progress", b"[]"])
def test_lines_without_messages_end_the_conversation_after_many(monkeypatch: pytest.MonkeyPatch, line: bytes) -> None:
    monkeypatch.setattr(messages, "MOST_NOISE", 100)

    assert asyncio.run(count(inbound([*[line] * 100, PING, *[line] * 100]))) == 1
    with pytest.raises(Unavailable, match="more than 100 lines in a row"):
        asyncio.run(count(inbound([line] * 101)))


def test_the_end_of_the_lines_is_the_end_of_the_stream() -> None:
    with pytest.raises(anyio.EndOfStream):
        asyncio.run(inbound([]).receive())
