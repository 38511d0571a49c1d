"""`kiwi serve` with preferred tools: a separate process with both stages."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mcp_types as types
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.subscriptions import ToolsListChanged

import kiwi_mcp
from kiwi_mcp.domain.json import Json

META = ["search", "load", "execute", "help"]
HANDSHAKE: Json = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
PATIENCE = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("processes")]


def command(project: Path) -> list[str]:
    return [sys.executable, "-m", "kiwi_mcp", "serve", "--project", str(project)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}


def write_tool(project: Path, name: str, script: str = "echo done") -> None:
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True)
    manifest = {"tool_id": name, "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
                "description": f"Does {name}", "config": {"entrypoint": "main.sh"}}  # fmt: skip
    (folder / "tool.yaml").write_text(json.dumps(manifest))
    (folder / "main.sh").write_text(script)


def prefer(home: Path, text: str) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "preferences.yaml").write_text(text)


@dataclass
class Raw:
    """A server and the lines exchanged with it."""

    process: subprocess.Popen[bytes]
    heard: bytes = field(default=b"")

    def say(self, method: str, params: Json = None, number: int | None = None) -> None:
        more = {"id": number} if number is not None else {}
        message = {"jsonrpc": "2.0", "method": method, **more, **({"params": params} if params is not None else {})}
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        self.heard += line
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, method: str, params: Json = None, number: int = 1) -> dict[str, Any]:
        self.say(method, params, number)
        return self.hear()

    def open(self) -> list[str]:
        """Shake hands, and return the names of the tools that are listed."""
        self.ask("initialize", HANDSHAKE, 0)
        self.say("notifications/initialized")
        return [tool["name"] for tool in self.ask("tools/list", number=1)["result"]["tools"]]

    @property
    def is_in_stage_two(self) -> bool:
        return "pydantic_core" in Path(f"/proc/{self.process.pid}/maps").read_text(encoding="utf-8")


@contextmanager
def served(project: Path) -> Iterator[Raw]:
    with subprocess.Popen(
        command(project), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment()
    ) as process:
        try:
            yield Raw(process)
        finally:
            process.kill()


@pytest.mark.req("D2")
@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_the_official_client_is_notified_of_a_changed_preference_without_a_restart(
    mode: Literal["auto", "legacy"], project: Path, home: Path
) -> None:
    write_tool(project, "weather", "echo sunny")
    heard = asyncio.Event()

    async def hear(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            heard.set()

    async def names(client: Client) -> list[str]:
        return [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]

    async def story() -> None:
        words = command(project)
        server = StdioServerParameters(command=words[0], args=words[1:], env=environment())
        async with asyncio.timeout(PATIENCE), Client(stdio_client(server), mode=mode, message_handler=hear) as client:
            assert await names(client) == META
            if mode == "legacy":
                prefer(home, "always_send: [weather]")
                await heard.wait()
            else:
                async with client.listen(tools_list_changed=True) as news:
                    prefer(home, "always_send: [weather]")
                    assert await anext(news) == ToolsListChanged()
            assert await names(client) == [*META, "weather"]
            said = await client.call_tool("weather", {})
            assert said.content == [types.TextContent(text="sunny")]

    await story()


def test_the_next_start_sends_the_last_list_at_once_and_announces_changes(project: Path, home: Path) -> None:
    write_tool(project, "weather")
    write_tool(project, "mail")
    prefer(home, "always_send: [weather, mail]")

    def settled() -> bool:
        return any((home / ".ai" / "state" / "mcp").glob("tools*.json"))

    with served(project) as first:
        assert first.open() == [*META, "mail", "weather"]
        assert first.is_in_stage_two  # nothing was known of the list, so it was not guessed
        while not settled():
            first.ask("ping", number=2)
    with served(project) as second:
        second.ask("initialize", HANDSHAKE, 0)
        assert not second.is_in_stage_two
        second.say("notifications/initialized")
        second.say("tools/list", number=1)
        assert [tool["name"] for tool in second.hear()["result"]["tools"]] == [*META, "mail", "weather"]
    (project / ".ai" / "tools" / "mail" / "tool.yaml").unlink()
    with served(project) as third:
        assert third.open() == [*META, "mail", "weather"]
        assert third.hear()["method"] == "notifications/tools/list_changed"
        listed = third.ask("tools/list", number=2)["result"]["tools"]
        assert [tool["name"] for tool in listed] == [*META, "weather"]
    with served(project) as fourth:
        assert fourth.open() == [*META, "weather"]


@pytest.mark.req("D5")
@pytest.mark.parametrize(
    ("preferred", "counts"),
    [
        ("", (10, 2_000)),
        ("always_send: [tool_3]", (10, 2_000)),
        pytest.param("always_send: [tool_3]", (10, 10_000), marks=pytest.mark.soak),
    ],
)
def test_the_opening_is_identical_with_few_and_with_many_tools(
    preferred: str, counts: tuple[int, int], home: Path, tmp_path: Path
) -> None:
    if preferred:
        prefer(home, preferred)
    heard = []
    for count in counts:
        place = tmp_path / f"project_{count}"
        for number in range(count):
            write_tool(place, f"tool_{number}")
        with served(place) as raw:
            raw.open()
            heard.append(raw.heard)
    assert heard[0] == heard[1]
