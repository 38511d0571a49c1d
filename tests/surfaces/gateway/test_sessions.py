"""The fast path of a call over HTTP: it answers and ends like the SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import httpx2
import pytest
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, LATEST_HANDSHAKE_VERSION, LATEST_MODERN_VERSION
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.surfaces.gateway import mcp
from kiwi_mcp.surfaces.gateway.mcp import Session

ENVELOPE: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}
JSON, EVENTS = "application/json", "text/event-stream"
CALLS: list[JsonObject] = [
    {"name": "help", "arguments": {}},
    {"name": "help", "arguments": {"topic": "nöthing"}},
    {"name": "execute", "arguments": {"item_id": "nothing_of_that_name"}},
    {"name": "nothing_of_that_name", "arguments": {}},
    {"name": "help", "arguments": ["no object"]},
    {"name": "help", "arguments": {}, "_meta": {"progressToken": 7}},
]


def run(serving_tools: ServeTools, project: Path, story: Callable[[Tools, str], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(120), serving_tools(project=project) as served:
            await story(served, served.token())

    asyncio.run(in_time())


async def opened(
    served: Tools, token: str, version: str = LATEST_HANDSHAKE_VERSION, capabilities: JsonObject | None = None
) -> Mapping[str, str]:
    """Open a session, and return the headers of a request in it."""
    params: JsonObject = {"protocolVersion": version, "capabilities": capabilities or {}, "clientInfo": {"name": "a", "version": "1"}}  # fmt: skip  # noqa: E501 - one line of the wire
    answer = await served.post(token, {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params})
    headers = {"mcp_session_id": answer.headers["mcp-session-id"], "mcp_protocol_version": version}
    await served.post(token, {"jsonrpc": "2.0", "method": "notifications/initialized"}, **headers)
    await served.post(token, {"jsonrpc": "2.0", "id": 1, "method": "ping"}, **headers)
    return headers


def a_call(params: JsonObject, number: Json = 5) -> JsonObject:
    return {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}


def modern(params: JsonObject) -> tuple[JsonObject, dict[str, str]]:
    meta = params.get("_meta")
    marked = {**params, "_meta": {**ENVELOPE, **(meta if isinstance(meta, dict) else {})}}
    name = str(params["name"])
    return a_call(marked), {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": "tools/call", "mcp_name": name}


def messages(answer: httpx2.Response) -> list[str]:
    """Return the messages of an answer unchanged, in any form."""
    if answer.headers["content-type"].startswith(EVENTS):
        return [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    return [answer.text]


def long_way(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "_begin", lambda *_: False)
    patch.setattr(mcp, "is_modern_call", lambda _: False)


def add_tool(project: Path, name: str, script: str) -> None:
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True)
    (folder / "main.sh").write_text(script)
    (folder / "tool.yaml").write_text(
        f"tool_id: {name}\ntool_type: script\nversion: 1.0.0\ndescription: A tool called {name}\n"
        "executor: bash_runtime\nconfig:\n  entrypoint: main.sh\n"
    )


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process cannot set an event of this one
        await asyncio.sleep(0.01)


def add_sleeper(project: Path, seconds: float) -> str:
    """Add a tool that sleeps, and return what its process is called: in a sandbox it does not know its own number."""
    mark = f"sleeper-{uuid4().hex}"
    add_tool(project, "sleeper", f"exec -a {mark} sleep {seconds}")
    return mark


def is_alive(mark: str) -> bool:
    """Whether a process of that name runs; one that has ended and was not waited for has no words any more."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(mark.encode()):
                return True
    return False


@pytest.mark.parametrize("version", HANDSHAKE_PROTOCOL_VERSIONS)
def test_a_session_answers_like_the_sdk_in_plain_json(
    version: str, serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Tools, token: str) -> None:
        headers = await opened(served, token, version)
        for params in CALLS:
            short = await served.post(token, a_call(params), **headers)
            with monkeypatch.context() as patch:
                long_way(patch)
                long = await served.post(token, a_call(params), **headers)
            assert short.headers["content-type"] == JSON
            assert long.headers["content-type"].startswith(EVENTS)
            assert messages(short) == messages(long)
            assert short.headers["mcp-session-id"] == headers["mcp_session_id"]

    run(serving_tools, project, story)


def test_a_modern_call_is_answered_like_the_sdk(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Tools, token: str) -> None:
        for params in CALLS:
            body, headers = modern(params)
            wrong: list[dict[str, str]] = [{}, {"mcp_name": "other"}, {"mcp_method": "ping"}, {"accept": JSON}]
            for words in wrong:
                short = await served.post(token, body, **{**headers, **words})
                with monkeypatch.context() as patch:
                    long_way(patch)
                    long = await served.post(token, body, **{**headers, **words})
                assert (short.status_code, short.text) == (long.status_code, long.text)
                assert short.headers.get("content-type") == long.headers.get("content-type")

    run(serving_tools, project, story)


@pytest.mark.parametrize("text", ["{", "[]", '{"jsonrpc":"2.0","id":1.5,"method":"tools/call"}', "🥝"])
def test_an_invalid_message_is_left_to_the_sdk(
    text: str, serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(served: Tools, token: str) -> None:
        session = await opened(served, token)
        for headers in (session, modern(CALLS[0])[1]):
            short = await served.post(token, text, **headers)
            with monkeypatch.context() as patch:
                long_way(patch)
                long = await served.post(token, text, **headers)
            assert (short.status_code, short.text) == (long.status_code, long.text)
            assert "result" not in short.text

    run(serving_tools, project, story)


def test_a_client_that_can_be_asked_gets_a_stream(serving_tools: ServeTools, project: Path) -> None:
    async def story(served: Tools, token: str) -> None:
        headers = await opened(served, token, capabilities={"elicitation": {}})
        answer = await served.post(token, a_call(CALLS[0]), **headers)
        assert answer.headers["content-type"].startswith(EVENTS)

    run(serving_tools, project, story)


@pytest.mark.usefixtures("sandbox")
def test_a_message_before_the_answer_makes_it_a_stream(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_tool(project, "teller", "echo '::progress 1/2 half'; sleep 0.2; echo done")
    params: JsonObject = {"name": "execute", "arguments": {"item_id": "teller"}, "_meta": {"progressToken": "t"}}

    async def story(served: Tools, token: str) -> None:
        body, headers = modern(params)
        for answer in (
            await served.post(token, a_call(params), **await opened(served, token)),
            await served.post(token, body, **headers),
        ):
            assert answer.headers["content-type"] == EVENTS
            response = [json.loads(message) for message in messages(answer)]
            assert response[0]["method"] == "notifications/progress"
            assert response[-1]["result"]["isError"] is False

    run(serving_tools, project, story)


@pytest.mark.usefixtures("sandbox")
def test_a_long_silence_is_interrupted_by_comments(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp, "PING_SECONDS", 0.05)
    add_tool(project, "slow", "sleep 0.4")
    params: JsonObject = {"name": "execute", "arguments": {"item_id": "slow"}}

    async def story(served: Tools, token: str) -> None:
        body, headers = modern(params)
        for answer in (
            await served.post(token, a_call(params), **await opened(served, token)),
            await served.post(token, body, **headers),
        ):
            assert answer.text.startswith(": ping")
            assert json.loads(messages(answer)[-1])["result"]["isError"] is False

    run(serving_tools, project, story)


async def _sleeping(served: Tools, token: str, mark: str, headers: Mapping[str, str]) -> asyncio.Task[httpx2.Response]:
    """Call the tool that sleeps, and return the call under way when its process runs."""
    params: JsonObject = {"name": "execute", "arguments": {"item_id": "sleeper"}}
    calling = asyncio.create_task(served.post(token, a_call(params, 9), **headers))
    await until(lambda: is_alive(mark))
    return calling


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-PR-04")
def test_a_cancelled_call_is_stopped_and_reported(serving_tools: ServeTools, project: Path) -> None:
    mark = add_sleeper(project, 60)

    async def story(served: Tools, token: str) -> None:
        headers = await opened(served, token)
        calling = await _sleeping(served, token, mark, headers)
        off: JsonObject = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
        assert (await served.post(token, off, **headers)).status_code == 202
        assert (await calling).json()["error"] == {"code": -32800, "message": "Request cancelled"}
        assert not is_alive(mark)
        assert (await served.post(token, a_call(CALLS[0], 9), **headers)).json()["id"] == 9

    run(serving_tools, project, story)


@pytest.mark.usefixtures("sandbox")
def test_the_end_of_a_session_ends_its_calls(serving_tools: ServeTools, project: Path) -> None:
    mark = add_sleeper(project, 60)

    async def story(served: Tools, token: str) -> None:
        headers = await opened(served, token)
        calling = await _sleeping(served, token, mark, headers)
        words = {"Authorization": f"Bearer {token}", "mcp-session-id": headers["mcp_session_id"]}
        assert (await served.bare.delete(served.url, headers=words)).status_code == 200
        assert (await calling).status_code == 500
        assert not is_alive(mark)

    run(serving_tools, project, story)


@pytest.mark.usefixtures("sandbox")
def test_the_request_id_of_another_session_cancels_nothing(serving_tools: ServeTools, project: Path) -> None:
    mark = add_sleeper(project, 1)

    async def story(served: Tools, token: str) -> None:
        headers, other = await opened(served, token), served.token("bob")
        theirs = await opened(served, other)
        calling = await _sleeping(served, token, mark, headers)
        off: JsonObject = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 9}}
        assert (await served.post(other, off, **headers)).status_code == 404
        assert (await served.post(other, off, **theirs)).status_code == 202
        assert (await calling).json()["result"]["isError"] is False

    run(serving_tools, project, story)


async def _statuses(served: Tools, token: str) -> list[str]:
    """The statuses of the runs of a token."""
    body, headers = modern({"name": "runs", "arguments": {}})
    response = (await served.post(token, body, **headers)).json()["result"]["structuredContent"]
    return [one["status"] for one in response["runs"]]


@pytest.mark.usefixtures("sandbox")
def test_a_handshake_client_that_disconnects_does_not_end_its_call(serving_tools: ServeTools, project: Path) -> None:
    mark = add_sleeper(project, 1)

    async def story(served: Tools, token: str) -> None:
        calling = await _sleeping(served, token, mark, await opened(served, token))
        calling.cancel()
        await until(lambda: not is_alive(mark))
        # A run that changes nothing is recorded when it ends, which is a moment after its process has ended.
        while (statuses := await _statuses(served, token)) in ([], ["started"]):  # noqa: ASYNC110 - it polls
            await asyncio.sleep(0.05)
        assert statuses == ["success"]

    run(serving_tools, project, story)
