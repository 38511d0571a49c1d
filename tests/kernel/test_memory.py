"""Memory: a process does not grow with the number of calls."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.kernel import Kernel

AT_ONCE = 64
MB = 1_000_000


def resident() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def ask(kernel: Kernel, calls: int) -> None:
    numbers = iter(range(calls))

    async def caller() -> None:
        for number in numbers:
            payload: JsonObject = {"item_id": "mcp/echo/echo", "parameters": {"text": f"{number:0100}"}}
            assert not (await kernel.call("execute", payload)).content.get("error")

    await asyncio.gather(*(caller() for _ in range(AT_ONCE)))


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thousands_of_concurrent_calls_do_not_grow_the_process(tmp_path: Path) -> None:
    echo = Path(__file__).parents[2] / "benchmarks" / "echo.py"
    (tmp_path / "project" / ".ai").mkdir(parents=True)

    async def story() -> None:
        kernel = Kernel(tmp_path / "project", user=tmp_path / "user", cache=tmp_path / "cache")
        try:
            server = {"server": "echo", "command": sys.executable, "args": ["-IS", str(echo)]}
            await kernel.call("mcp", {"action": "add", **server})
            await ask(kernel, 2_000)  # what is kept is kept by now, but for pages of the store
            before = resident()
            await ask(kernel, 2_000)
            assert resident() - before < 10 * MB
        finally:
            await kernel.aclose()

    asyncio.run(story())
