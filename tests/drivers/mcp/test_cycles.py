"""Servers that are started, called and killed a thousand times leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.calls import NO_CALLER, Space
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.drivers.mcp.driver import McpDriver

AT_ONCE = 8
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


async def cycle(chain: Chain, space: Space, number: int) -> None:
    """Connect, call, and let the server be killed: by surprise, politely, or by ourselves."""
    driver = McpDriver()
    try:
        plan = replace(driver.bind(chain, {}, space), profile=SandboxProfile("trusted"))
        outcome = await driver.drive(plan, chain, space, secrets={}, caller=NO_CALLER, dispatch=AsyncMock())
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


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-MC-02")
def test_killed_connections_leave_no_process_and_no_descriptor(bench: Bench, tmp_path: Path) -> None:
    chain, before = short(bench, tmp_path), children()

    asyncio.run(cycles(chain, bench.space, range(AT_ONCE)))
    open_files = descriptors()
    asyncio.run(cycles(chain, bench.space, range(AT_ONCE, 5 * AT_ONCE)))

    assert children() <= before
    assert descriptors() <= open_files


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.req("K-MC-02")
def test_a_thousand_killed_connections_leave_no_process_no_descriptor_and_no_memory(
    bench: Bench, tmp_path: Path
) -> None:
    chain, before = short(bench, tmp_path), children()

    asyncio.run(cycles(chain, bench.space, range(200)))
    memory, open_files = resident(), descriptors()
    asyncio.run(cycles(chain, bench.space, range(200, 1_000)))

    assert children() <= before
    assert descriptors() <= open_files
    assert resident() - memory < GROWTH


def short(bench: Bench, folder: Path) -> Chain:
    """A tool of a server that starts as fast as a Python program can."""
    script = folder / "short.py"
    script.write_text(SERVER, encoding="utf-8")
    python = getattr(sys, "_base_executable", sys.executable)
    return bench.chain(bench.server(server_id="short", command=python, args=["-IS", str(script)]), "pid")
