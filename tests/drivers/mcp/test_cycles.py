"""A thousand servers started, asked and killed leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import NOBODY
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json
from kiwi_mcp.drivers.mcp.drive import Mcp

CYCLES, WARM, AT_ONCE = 1_000, 200, 8
GROWTH = 6_000_000
"""How much more memory may be used after the last cycle than when everything was warm, in bytes."""
SERVER = """
import json, os, sys

for line in sys.stdin:
    message = json.loads(line)
    match message["method"]:
        case "initialize":
            version = message["params"]["protocolVersion"]
            info = {"name": "short", "version": "1.0.0"}
            answer = {"result": {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}}
        case "tools/call":
            answer = {"result": {"content": [{"type": "text", "text": str(os.getpid())}]}}
        case _:
            answer = {"error": {"code": -32601, "message": "Method not found"}}
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **answer}), flush=True)
"""


class Bench(Protocol):
    """What the test needs of the bench."""

    space: Space

    def server(self, *habits: str, server_id: str = "hostile", **config: Json) -> Tool: ...

    def chain(self, server: Tool, name: str) -> Chain: ...


async def cycle(chain: Chain, space: Space, number: int) -> None:
    """Connect, call, and let the server be killed: by surprise, politely, or by ourselves."""
    driver = Mcp()
    try:
        plan = replace(driver.bind(chain, {}, space), jail=Jail("trusted"))
        outcome = await driver.drive(plan, chain, space, secrets={}, caller=NOBODY)
        assert outcome.is_success, outcome
        pid = int(str(outcome.result))
        assert pid in children()
        if number % 3:
            os.kill(pid, signal.SIGKILL if number % 3 == 1 else signal.SIGTERM)
    finally:
        await driver.aclose()
    assert pid not in children()


async def cycles(chain: Chain, space: Space, numbers: range) -> None:
    remaining = iter(numbers)

    async def some() -> None:
        for number in remaining:
            await cycle(chain, space, number)

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


def children() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {int(pid) for task in tasks for pid in (task / "children").read_text().split()}


def resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - the names are all that is wanted


@pytest.mark.full
@pytest.mark.req("K-MC-02")
def test_a_thousand_connections_that_are_killed_leave_no_process_no_descriptor_and_no_memory(
    bench: Bench, tmp_path: Path
) -> None:
    script = tmp_path / "short.py"
    script.write_text(SERVER, encoding="utf-8")
    python = getattr(sys, "_base_executable", sys.executable)
    chain = bench.chain(bench.server(server_id="short", command=python, args=["-IS", str(script)]), "pid")
    before = children()

    asyncio.run(cycles(chain, bench.space, range(WARM)))
    memory, open_files = resident(), descriptors()
    asyncio.run(cycles(chain, bench.space, range(WARM, CYCLES)))

    assert children() <= before
    assert descriptors() <= open_files
    assert resident() - memory < GROWTH
