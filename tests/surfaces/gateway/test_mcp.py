"""MCP over streamable HTTP: what the official client of either era does through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal, Protocol

import httpx2
import pytest
from mcp import Client
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY, CallToolResult
from mcp_types.version import LATEST_MODERN_VERSION

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint
from kiwi_mcp.surfaces.gateway.tokens import Tokens

Mode = Literal["auto", "legacy"]
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
PATIENCE = 45.0
ENVELOPE: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}


class Served(Protocol):
    url: str
    tokens: Tokens
    endpoint: mcp_endpoint.McpEndpoint

    def token(self, name: str = "ada") -> str: ...
    def stop(self) -> None: ...
    def client(self, token: str, *, mode: Mode = "auto") -> AbstractAsyncContextManager[Client]: ...
    async def post(self, token: str, body: Json, **headers: str) -> httpx2.Response: ...


class Serve(Protocol):
    def __call__(
        self, *, project: Path | None = None, is_read_only: bool = False
    ) -> AbstractAsyncContextManager[Served]: ...


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE):
            await story()

    asyncio.run(in_time())


def add_tool(project: Path, name: str, script: str) -> None:
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True)
    (folder / "main.sh").write_text(script)
    (folder / "tool.yaml").write_text(
        f"tool_id: {name}\ntool_type: script\nversion: 1.0.0\ndescription: A tool called {name}\n"
        "executor: bash_runtime\nconfig:\n  entrypoint: main.sh\n"
    )


def answer_in(result: CallToolResult) -> dict[str, Any]:
    assert result.structured_content is not None, result
    return dict(result.structured_content)


def call(name: str, number: int = 1, **arguments: Json) -> JsonObject:
    params: JsonObject = {"name": name, "arguments": arguments, "_meta": ENVELOPE}
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def modern(name: str) -> dict[str, str]:
    return {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "tools/call", "mcp_name": name}


def add_sleeper(project: Path) -> str:
    """Add a tool that sleeps for a while of its own; in its jail it has another number, so that tells it apart."""
    mark = f"60.{token_hex(4)}".translate(str.maketrans("abcdef", "123456"))
    add_tool(project, "sleeper", f"exec sleep {mark}")
    return mark


def asleep(mark: str) -> int:
    """How many processes of the machine sleep for so long."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += mark.encode() in (entry / "cmdline").read_bytes()
    return count


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process cannot set an event of this one
        await asyncio.sleep(0.01)


@EACH_ERA
@pytest.mark.req("K-PR-04")
def test_the_official_client_finds_and_runs_a_tool_and_hears_its_progress(
    mode: Mode, serving_tools: Serve, project: Path
) -> None:
    add_tool(project, "teller", "echo '::progress 1/2 half'; sleep 0.2; echo told")
    heard: list[float] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(progress)

    async def story() -> None:
        async with serving_tools() as served, served.client(served.token(), mode=mode) as client:
            assert client.protocol_version == ("2026-07-28" if mode == "auto" else "2025-11-25")
            assert [tool.name for tool in (await client.list_tools()).tools] == ["search", "load", "execute", "help"]
            where = {"project_path": str(project)}
            found = answer_in(await client.call_tool("search", {"query": "teller", **where}))
            assert found["results"][0]["name"] == "teller"
            ran = await client.call_tool("execute", {"item_id": "teller", **where}, progress_callback=hear)
            assert not ran.is_error, ran
            unnamed = await client.call_tool("search", {"query": "teller"})
            assert answer_in(unnamed)["results"] == []
            of_a_project = await client.call_tool("search", {"query": "teller", "source": "project"})
            assert answer_in(of_a_project)["code"] == "project_path_required"

    run(story)
    assert heard
    assert heard == sorted(set(heard))


def test_the_project_of_the_server_is_that_of_calls_that_name_none(serving_tools: Serve, project: Path) -> None:
    add_tool(project, "teller", "echo told")

    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token()) as client:
            (execute,) = [tool for tool in (await client.list_tools()).tools if tool.name == "execute"]
            assert "project_path" not in execute.input_schema.get("required", [])
            assert answer_in(await client.call_tool("execute", {"item_id": "teller"}))["status"] == "success"

    run(story)


@EACH_ERA
def test_who_called_stands_in_the_runs_and_sees_no_others(mode: Mode, serving_tools: Serve, project: Path) -> None:
    add_tool(project, "large", "head -c 300000 /dev/zero | tr '\\0' x")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            ada, bob = served.token("ada"), served.token("bob")
            async with served.client(ada, mode=mode) as client:
                ran = answer_in(await client.call_tool("execute", {"item_id": "large"}))
                page = {"item_type": "output", "item_id": ran["result_handle"]}
                assert answer_in(await client.call_tool("load", page))["content"].startswith("xxx")
                (one,) = answer_in(await client.call_tool("runs", {}))["runs"]
                shown = answer_in(await client.call_tool("runs", {"action": "show", "run_id": one["id"]}))
                assert shown["actor"].startswith("token:ada:")
            async with served.client(bob, mode=mode) as client:
                assert answer_in(await client.call_tool("runs", {}))["runs"] == []
                assert answer_in(await client.call_tool("runs", {"actor": "ada"}))["code"] == "not_permitted"

    run(story)
    told = asyncio.run(Kernel(project).call("runs", {"actor": "ada"})).content
    assert [as_object(one)["tool_id"] for one in as_list(told["runs"])] == ["large"]


@EACH_ERA
def test_a_call_that_its_client_cancels_is_ended(mode: Mode, serving_tools: Serve, project: Path) -> None:
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token(), mode=mode) as client:
            calling = asyncio.create_task(client.call_tool("execute", {"item_id": "sleeper"}))
            await until(lambda: asleep(mark) > 0)
            calling.cancel()
            await until(lambda: not asleep(mark))
            assert answer_in(await client.call_tool("help", {}))["topic"]

    run(story)


@EACH_ERA
def test_sixty_four_calls_at_once_are_all_answered(mode: Mode, serving_tools: Serve, project: Path) -> None:
    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token(), mode=mode) as client:
            asked = [f"word{number}" for number in range(64)]
            answers = await asyncio.gather(*(client.call_tool("search", {"query": word}) for word in asked))
            assert [answer_in(answer)["query"] for answer in answers] == asked

    run(story)


def test_clients_of_both_eras_use_one_address_at_the_same_time(serving_tools: Serve, project: Path) -> None:
    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token()
            async with served.client(token) as new, served.client(token, mode="legacy") as old:
                answers = await asyncio.gather(*(client.call_tool("help", {}) for client in (new, old, new, old)))
                assert {answer_in(answer)["topic"] for answer in answers} == {"overview"}

    run(story)


def test_a_quick_answer_is_json_and_one_that_tells_its_progress_a_stream(serving_tools: Serve, project: Path) -> None:
    add_tool(project, "teller", "echo '::progress 1/2 half'; sleep 0.2; echo told")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token()
            quick = await served.post(token, call("help"), **modern("help"))
            assert quick.headers["content-type"] == "application/json"
            assert quick.json()["result"]["structuredContent"]["topic"] == "overview"
            slow = call("execute", item_id="teller")
            slow = {**slow, "params": {**as_object(slow["params"]), "_meta": {**ENVELOPE, "progressToken": "t"}}}
            told = await served.post(token, slow, **modern("execute"))
            assert told.headers["content-type"].startswith("text/event-stream")
            lines = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: ")]
            assert lines[0]["method"] == "notifications/progress"
            assert "result" in lines[-1]

    run(story)


def test_a_client_of_the_newest_era_that_leaves_ends_its_call(serving_tools: Serve, project: Path) -> None:
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served:
            body, headers = call("execute", item_id="sleeper"), modern("execute")
            asking = asyncio.create_task(served.post(served.token(), body, **headers))
            await until(lambda: asleep(mark) > 0)
            asking.cancel()
            await until(lambda: not asleep(mark))

    run(story)


@EACH_ERA
def test_a_server_that_ends_ends_its_calls_first(mode: Mode, serving_tools: Serve, project: Path) -> None:
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token(), mode=mode) as client:
            calling = asyncio.create_task(client.call_tool("execute", {"item_id": "sleeper"}))
            await until(lambda: asleep(mark) > 0)
            served.stop()
            await until(lambda: not asleep(mark))
            await asyncio.wait({calling})
            assert calling.exception()

    run(story)


@EACH_ERA
def test_a_token_that_is_removed_takes_its_calls_with_it(
    mode: Mode, serving_tools: Serve, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token("eve"), mode=mode) as client:
            calling = asyncio.create_task(client.call_tool("execute", {"item_id": "sleeper"}))
            await until(lambda: asleep(mark) > 0)
            served.tokens.remove("eve")
            await until(lambda: not asleep(mark))
            await asyncio.wait({calling})
            assert calling.exception()

    run(story)


def test_what_listens_is_ended_after_a_while_and_calls_are_not(
    serving_tools: Serve, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LISTENING_SECONDS", 0.1)
    add_tool(project, "slow", "sleep 0.5; echo done")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            listen: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen"}
            words: JsonObject = {"_meta": ENVELOPE, "notifications": {"toolsListChanged": True}}
            headers = {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "subscriptions/listen"}
            with pytest.raises(httpx2.RemoteProtocolError):
                await served.post(served.token("listener"), {**listen, "params": words}, **headers)
            async with served.client(served.token()) as client:
                assert answer_in(await client.call_tool("execute", {"item_id": "slow"}))["status"] == "success"

    run(story)


def test_no_process_is_left_when_many_clients_leave_at_once(serving_tools: Serve, project: Path) -> None:
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served:
            token, body = served.token(), call("execute", item_id="sleeper")
            asking = [asyncio.create_task(served.post(token, body, **modern("execute"))) for _ in range(8)]
            await until(lambda: asleep(mark) == 8)
            for one in asking:
                one.cancel()
            await until(lambda: not asleep(mark))

    run(story)
