"""MCP over streamable HTTP: the official client of either era through the gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import httpx2
import pytest
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY, CallToolResult
from mcp_types.version import LATEST_MODERN_VERSION
from tests.surfaces.gateway.conftest import ServeTools

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint

Mode = Literal["auto", "legacy"]
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
PATIENCE = 120.0
ENVELOPE: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}


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
    """Add a tool that sleeps for a time of its own, by which its process is found: its sandbox gives it another pid."""
    mark = f"60.{token_hex(4)}".translate(str.maketrans("abcdef", "123456"))
    add_tool(project, "sleeper", f"exec sleep {mark}")
    return mark


def asleep(mark: str) -> int:
    """The number of processes on the machine that sleep for this time."""
    count = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            count += mark.encode() in (entry / "cmdline").read_bytes()
    return count


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process cannot set an event of this one
        await asyncio.sleep(0.01)


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@EACH_ERA
@pytest.mark.req("K-PR-04")
def test_the_official_client_finds_and_runs_a_tool_and_gets_its_progress(
    mode: Mode, serving_tools: ServeTools, project: Path
) -> None:
    add_tool(project, "teller", "echo '::progress 1/2 half'; sleep 0.2; echo done")
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


@pytest.mark.usefixtures("sandbox")
def test_calls_without_a_project_use_the_project_of_the_server(serving_tools: ServeTools, project: Path) -> None:
    add_tool(project, "teller", "echo done")

    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token()) as client:
            (execute,) = [tool for tool in (await client.list_tools()).tools if tool.name == "execute"]
            assert "project_path" not in execute.input_schema.get("required", [])
            assert answer_in(await client.call_tool("execute", {"item_id": "teller"}))["status"] == "success"

    run(story)


@pytest.mark.usefixtures("sandbox")
@EACH_ERA
def test_runs_are_recorded_and_listed_per_caller(mode: Mode, serving_tools: ServeTools, project: Path) -> None:
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
    response = asyncio.run(Kernel(project).call("runs", {"actor": "ada"})).content
    assert [as_object(one)["tool_id"] for one in as_list(response["runs"])] == ["large"]


@pytest.mark.usefixtures("sandbox")
@EACH_ERA
def test_a_call_that_its_client_cancels_is_stopped(mode: Mode, serving_tools: ServeTools, project: Path) -> None:
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
def test_sixty_four_concurrent_calls_are_all_answered(mode: Mode, serving_tools: ServeTools, project: Path) -> None:
    async def story() -> None:
        async with serving_tools(project=project) as served, served.client(served.token(), mode=mode) as client:
            asked = [f"word{number}" for number in range(64)]
            answers = await asyncio.gather(*(client.call_tool("search", {"query": word}) for word in asked))
            assert [answer_in(answer)["query"] for answer in answers] == asked

    run(story)


def test_clients_of_both_eras_use_one_address_concurrently(serving_tools: ServeTools, project: Path) -> None:
    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token()
            async with served.client(token) as new, served.client(token, mode="legacy") as old:
                answers = await asyncio.gather(*(client.call_tool("help", {}) for client in (new, old, new, old)))
                assert {answer_in(answer)["topic"] for answer in answers} == {"overview"}

    run(story)


@pytest.mark.usefixtures("sandbox")
def test_a_quick_answer_is_json_and_one_with_progress_a_stream(serving_tools: ServeTools, project: Path) -> None:
    add_tool(project, "teller", "echo '::progress 1/2 half'; sleep 0.2; echo done")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token()
            quick = await served.post(token, call("help"), **modern("help"))
            assert quick.headers["content-type"] == "application/json"
            assert quick.json()["result"]["structuredContent"]["topic"] == "overview"
            slow = call("execute", item_id="teller")
            slow = {**slow, "params": {**as_object(slow["params"]), "_meta": {**ENVELOPE, "progressToken": "t"}}}
            response = await served.post(token, slow, **modern("execute"))
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
            assert lines[0]["method"] == "notifications/progress"
            assert "result" in lines[-1]

    run(story)


@pytest.mark.usefixtures("sandbox")
def test_a_modern_client_that_leaves_cancels_its_call(serving_tools: ServeTools, project: Path) -> None:
    mark = add_sleeper(project)

    async def story() -> None:
        async with serving_tools(project=project) as served:
            body, headers = call("execute", item_id="sleeper"), modern("execute")
            asking = asyncio.create_task(served.post(served.token(), body, **headers))
            await until(lambda: asleep(mark) > 0)
            asking.cancel()
            await until(lambda: not asleep(mark))

    run(story)


@pytest.mark.usefixtures("sandbox")
@EACH_ERA
def test_a_server_that_stops_ends_its_calls_first(mode: Mode, serving_tools: ServeTools, project: Path) -> None:
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


@pytest.mark.usefixtures("sandbox")
@EACH_ERA
def test_a_removed_token_ends_its_calls(
    mode: Mode, serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.usefixtures("sandbox")
def test_listeners_are_closed_after_a_time_and_calls_are_not(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.usefixtures("sandbox")
def test_no_process_is_left_when_many_clients_leave_at_once(serving_tools: ServeTools, project: Path) -> None:
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
