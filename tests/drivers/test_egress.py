"""Sandboxed processes and the network: a long-lived process has its proxy, and none runs without it."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import IsolationUnavailable
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.domain.outcome import Outcome, silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.sandboxed import Sandbox, open_sandbox
from kiwi_mcp.primitives.egress_proxy import TASK
from kiwi_mcp.sandbox.backend import NoSandbox

FETCHES = """
import sys, urllib.request
for line in sys.stdin:
    with urllib.request.urlopen(line.strip(), timeout=120) as answer:
        print(answer.read().decode(), flush=True)
"""


async def welcome(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nwelcome")
    await writer.drain()
    writer.close()


def spec(*argv: str) -> ProcessSpec:
    return ProcessSpec(argv, cwd="/", env={"PATH": "/usr/local/bin:/usr/bin:/bin"}, timeout=20.0)


@pytest.fixture
def space(tmp_path: Path, home: Path) -> Space:
    return Space(tmp_path, home / ".ai", home / ".cache" / "kiwi")


async def hold(space: Space, host: str) -> Sandbox:
    return await open_sandbox(SandboxProfile("sandboxed", hosts=(host,), private_hosts=(host,)), space)


@pytest.mark.usefixtures("sandbox")
async def test_a_stdio_process_reaches_its_hosts_for_its_whole_lifetime(space: Space) -> None:
    server = await asyncio.start_server(welcome, "127.0.0.1", 0)
    host = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    held, heard = await hold(space, host), []
    command = spec(sys.executable, "-I", "-c", FETCHES)
    async with asyncio.timeout(120), held.talking(command, secrets={}, longest_line=1_000) as (peer, _):
        for _ in range(2):
            peer.send(f"http://{host}/\n".encode())
            heard.append(await peer.line())
    server.close()
    network = as_object(held.tell(Outcome("success"), "sandboxed").details["network"])
    assert as_object(as_list(network["hosts"])[0])["count"] == 2
    assert "fault" not in network
    assert heard == [b"welcome", b"welcome"]


@pytest.mark.usefixtures("sandbox")
async def test_an_error_while_talking_to_a_process_is_raised_unchanged(space: Space) -> None:
    async def work() -> None:
        held = await hold(space, "127.0.0.1:1")
        async with held.talking(spec("/bin/cat"), secrets={}, longest_line=100):
            raise LookupError("of the caller")

    with pytest.raises(LookupError, match="of the caller"):
        await work()


@pytest.mark.usefixtures("sandbox")
async def test_a_cancelled_caller_leaves_no_proxy_behind(space: Space) -> None:
    async def work() -> set[str]:
        held = await hold(space, "127.0.0.1:1")
        run = asyncio.create_task(held.run(spec("/bin/sleep", "60"), secrets={}, report=silent))
        done, _ = await asyncio.wait([run], timeout=0.5)
        assert not done
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        return {task.get_name() for task in asyncio.all_tasks()}

    assert TASK not in await asyncio.wait_for(work(), 120)


@pytest.mark.usefixtures("sandbox")
async def test_hosts_are_refused_if_the_backend_has_no_proxy(space: Space, tmp_path: Path) -> None:
    async def work() -> None:
        held = await hold(space, "a.test")
        closed = replace(held, backend_report=replace(held.backend_report, backend=NoSandbox()))
        await closed.run(spec("/bin/touch", str(tmp_path / "ran")), secrets={}, report=silent)

    with pytest.raises(IsolationUnavailable, match=r"needs a\.test, and none gives a process no way to single hosts"):
        await work()
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("hosts", [(), ("a.test",)])
async def test_hosts_are_refused_at_the_strictest_level_before_anything_is_prepared(
    space: Space, hosts: tuple[str, ...]
) -> None:
    async def work() -> str:
        try:
            await open_sandbox(SandboxProfile("restricted", hosts=hosts), space)
        except IsolationUnavailable as refused:
            return json.dumps(refused.to_response())
        return ""

    assert ("has no network" in await work()) is bool(hosts)
