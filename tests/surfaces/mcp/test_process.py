"""`kiwi serve` as a separate process, used by the official client and with raw lines."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CallToolResult, ElicitResult

import kiwi_mcp
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel

COMMAND = [sys.executable, "-m", "kiwi_mcp", "serve"]
HANDSHAKE: Json = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
PATIENCE = 120.0


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), **more}


def bash_tool(name: str, text: str) -> dict[str, Json]:
    """The parameters that create a tool of one shell script."""
    return {
        "tool_id": name,
        "tool_type": "script",
        "executor": "bash_runtime",
        "manifest": {"version": "1.0.0", "description": f"A tool called {name}", "config": {"entrypoint": "main.sh"}},
        "files": {"main.sh": text},
    }


def answer_in(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None
    answer: dict[str, Any] = result.structured_content
    return answer


@pytest.mark.usefixtures("processes")
@pytest.mark.req("K-PR-04")
@pytest.mark.case("SEC-01")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_creates_finds_and_runs_a_tool(
    mode: Literal["auto", "legacy"], project: Path
) -> None:
    script = "echo '::progress 1/2 half'; printenv; tr '\\0' '\\n' </proc/self/environ; sleep 0.2"
    heard: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)

    async def agree(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    async def story() -> None:
        server = StdioServerParameters(command=COMMAND[0], args=COMMAND[1:], env=environment(KIWI_CANARY="tweet"))
        async with Client(stdio_client(server), mode=mode, elicitation_callback=agree) as client:
            assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "load", "execute", "help"]
            where = {"project_path": str(project)}
            create = {"action": "create", "parameters": bash_tool("teller", script), **where}
            made = await client.call_tool("execute", create)
            assert not made.is_error, made
            found = answer_in(await client.call_tool("search", {"query": "teller", **where}))
            assert found["results"][0]["name"] == "teller"
            ran = await client.call_tool("execute", {"item_id": "teller", **where}, progress_callback=hear)
            assert not ran.is_error, ran
            assert "tweet" not in json.dumps(answer_in(ran))
            assert "PATH=" in json.dumps(answer_in(ran))
            missing = await client.call_tool("execute", {"item_id": "no_such_tool", **where})
            assert missing.is_error
            assert answer_in(missing)["code"] == "tool_not_found"
            assert answer_in(missing)["suggestion"]
            unnamed = await client.call_tool("search", {"query": "teller", "source": "project"})
            assert answer_in(unnamed)["code"] == "project_path_required"
            unlisted = answer_in(await client.call_tool("doctor", where))
            assert "code" not in unlisted

    async with asyncio.timeout(PATIENCE):
        await story()
    assert heard
    assert heard == sorted(set(heard))


@dataclass
class Raw:
    """A server and the lines exchanged with it."""

    process: subprocess.Popen[bytes]

    def say(self, method: str, params: Json = None, number: int | None = None) -> None:
        message = {"jsonrpc": "2.0", "method": method}
        more = {"id": number} if number is not None else {}
        self.write(json.dumps({**message, **more, **({"params": params} if params is not None else {})}).encode())

    def write(self, line: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        return reply

    def ask(self, method: str, params: Json = None, number: int = 1) -> dict[str, Any]:
        self.say(method, params, number)
        return self.hear()

    def greet(self) -> None:
        self.ask("initialize", HANDSHAKE, 0)
        self.say("notifications/initialized")

    def leave(self) -> int:
        assert self.process.stdin
        self.process.stdin.close()
        return self.process.wait(PATIENCE)


@contextmanager
def served(*words: str) -> Iterator[Raw]:
    with subprocess.Popen(
        [*COMMAND, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        try:
            yield Raw(process)
        finally:
            process.kill()


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether something becomes true in time; the other side has no way to tell us."""
    end = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)
    return holds()


@pytest.mark.smoke
@pytest.mark.usefixtures("processes")
def test_a_client_that_only_lists_is_served_by_stage_one_alone() -> None:
    with served() as raw:
        raw.greet()
        assert raw.ask("ping", number=5) == {"jsonrpc": "2.0", "id": 5, "result": {}}
        maps = Path(f"/proc/{raw.process.pid}/maps").read_text(encoding="utf-8")
        assert "pydantic_core" not in maps
        assert raw.leave() == 0


@pytest.mark.usefixtures("processes")
def test_a_conversation_sent_in_one_burst_is_answered_by_both_stages(project: Path) -> None:
    with served("--project", str(project)) as raw:
        raw.greet()
        raw.say("tools/list", number=1)
        raw.write(b"<html>\n\xef\xbb\xbf\n")
        raw.say("tools/call", {"name": "search", "arguments": {"query": "anything"}}, 2)
        tools, *faults, found = (raw.hear() for _ in range(4))
        assert "project_path" not in json.dumps(
            [tool["inputSchema"].get("required") for tool in tools["result"]["tools"]]
        )
        assert [fault["error"]["code"] for fault in faults] == [-32700, -32700]
        assert found["result"]["isError"] is False
        assert raw.leave() == 0


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_process_that_is_asked_to_stop_ends_cleanly(stage: int) -> None:
    with served() as raw:
        raw.greet()
        if stage == 2:
            raw.ask("tools/list")
            raw.ask("tools/call", {"name": "help", "arguments": {}})
        raw.process.send_signal(signal.SIGTERM)
        assert raw.process.wait(PATIENCE) == 0


def alive(mark: str) -> list[str]:
    """The processes of that name; one that has ended and was not waited for has no words any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(mark.encode()):
                found.append(path.parent.name)
    return found


def create_as_owner(project: Path, tool: Json) -> None:
    async def create() -> None:
        kernel = Kernel(project)
        made = await kernel.call("execute", {"action": "create", "parameters": tool})
        await kernel.aclose()
        assert not made.is_error, made

    asyncio.run(create())


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("how", ["cancelled", "left", "terminated"])
def test_a_cancelled_call_leaves_no_process_behind(how: str, project: Path) -> None:
    # In its sandbox no process knows its own number; each has a name instead.
    mark = f"napper-{uuid4().hex}"
    nap = f"exec -a {mark} sleep 600"
    create_as_owner(project, bash_tool("napper", f"({nap}) & setsid bash -c '{nap}' & {nap}"))
    with served("--project", str(project)) as raw:
        raw.greet()
        raw.say("tools/call", {"name": "execute", "arguments": {"item_id": "napper"}}, 2)
        assert eventually(lambda: len(alive(mark)) == 3)
        if how == "cancelled":
            raw.say("notifications/cancelled", {"requestId": 2})
            assert eventually(lambda: not alive(mark))
            assert raw.ask("ping", number=3)["id"] == 3
            assert raw.leave() == 0
        elif how == "left":
            assert raw.leave() == 0
        else:
            raw.process.send_signal(signal.SIGTERM)
            assert raw.process.wait(PATIENCE) == 0
        assert not alive(mark)
