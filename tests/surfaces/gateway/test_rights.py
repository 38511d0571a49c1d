"""Rights of gateway clients, ownership of their data, and removed tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY, ElicitRequestParams, ElicitResult
from mcp_types.version import LATEST_MODERN_VERSION
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.errors import InvalidRequest, TokenRefused, TooManyTries
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.policy.tokens import TokenStore
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.store.tasks import KEPT_MS, Task
from kiwi_mcp.surfaces import start
from kiwi_mcp.surfaces.gateway import mcp as mcp_endpoint
from kiwi_mcp.surfaces.gateway import server
from kiwi_mcp.surfaces.gateway.auth import Authenticator
from kiwi_mcp.surfaces.gateway.oauth import IdentityProvider, TokenVerifier
from kiwi_mcp.surfaces.mcp.tasks import EXTENSION, milliseconds

PATIENCE = 120.0
ASKABLE: JsonObject = {"elicitation": {}, "extensions": {EXTENSION: {}}}
ASKER = """
import json, sys

def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

for line in sys.stdin:
    message = json.loads(line)
    number, params = message.get("id"), message.get("params") or {}
    match message.get("method"):
        case "initialize":
            about = {"name": "asker", "version": "1"}
            say(id=number, result={"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": about})
        case "tools/list":
            say(id=number, result={"tools": [{"name": "ask", "inputSchema": {"type": "object"}}]})
        case "tools/call":
            form = {"message": "Who?", "requestedSchema": {"type": "object", "properties": {}}}
            say(id=f"question {number}", method="elicitation/create", params=form)
        case None if str(number).startswith("question"):
            with open("notes/heard", "a") as heard:
                heard.write(json.dumps(message) + "\\n")
            say(id=int(number.split()[1]), result={"content": [{"type": "text", "text": json.dumps(message)}]})
        case _ if number is not None:
            say(id=number, error={"code": -32601, "message": "No"})
"""


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE):
            await story()

    asyncio.run(in_time())


def add_tool(project: Path, name: str, script: str, more: str = "") -> None:
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True)
    (folder / "main.sh").write_text(script)
    (folder / "tool.yaml").write_text(
        f"tool_id: {name}\ntool_type: script\nversion: 1.0.0\ndescription: A tool called {name}\n"
        f"executor: bash_runtime\nconfig:\n  entrypoint: main.sh\n{more}"
    )


async def asked(
    served: Tools, token: str, method: str, about: str, params: JsonObject, capabilities: JsonObject = ASKABLE
) -> dict[str, Any]:
    """What a request of the newest era is answered with; its header says what it is about."""
    headers = {"mcp_protocol_version": LATEST_MODERN_VERSION, "mcp_method": method, "mcp_name": about}
    meta: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: capabilities}
    body: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    response: dict[str, Any] = (await served.post(token, body, **headers)).json()
    return response


async def called(served: Tools, token: str, verb: str, **arguments: Json) -> dict[str, Any]:
    """The answer to a meta-tool, or another verb, of a client that can neither be asked nor take tasks."""
    response = await asked(served, token, "tools/call", verb, {"name": verb, "arguments": arguments}, {})
    content: dict[str, Any] = response["result"]["structuredContent"]
    return content


async def task_of(served: Tools, token: str, task_id: str) -> dict[str, Any]:
    """The answer about a task."""
    return await asked(served, token, "tasks/get", task_id, {"taskId": task_id})


async def until(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - another process cannot set an event of this one
        await asyncio.sleep(0.01)


def add_sleeper(project: Path, name: str) -> str:
    """Add a tool that sleeps, and return what its process is called: in a sandbox it does not know its own number."""
    mark = f"sleeper-{uuid4().hex}"
    add_tool(project, name, f"exec -a {mark} sleep 60")
    return mark


def is_alive(mark: str) -> bool:
    """Whether a process of that name runs; one that has ended and was not waited for has no words any more."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if path.read_bytes().startswith(mark.encode()):
                return True
    return False


@pytest.mark.usefixtures("sandbox")
def test_a_token_named_like_the_owner_sees_no_item_of_the_owner(serving_tools: ServeTools, project: Path) -> None:
    add_tool(project, "large", "head -c 300000 /dev/zero | tr '\\0' x")

    async def story() -> None:
        owners = Kernel(project)
        ran = (await owners.call("execute", {"item_id": "large"})).content
        own = as_object(as_list((await owners.call("runs", {})).content["runs"])[0])
        await owners.aclose()
        async with serving_tools(project=project) as served:
            token = served.token(getuser())
            assert (await called(served, token, "runs"))["runs"] == []
            assert (await called(served, token, "runs", action="show", run_id=own["id"]))["code"] == "run_not_found"
            page = await called(served, token, "load", item_type="output", item_id=ran["result_handle"])
            assert page["code"] == "not_found"

    run(story)


@pytest.mark.usefixtures("sandbox")
def test_outputs_of_one_client_are_not_readable_by_another(serving_tools: ServeTools, project: Path) -> None:
    add_tool(project, "small", "echo secret")
    add_tool(project, "large", "head -c 300000 /dev/zero | tr '\\0' x")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            ada, bob = served.token("ada"), served.token("bob")
            ran = await called(served, ada, "execute", item_id="large")
            page: JsonObject = {"item_type": "output", "item_id": ran["result_handle"]}
            assert (await called(served, bob, "load", **page))["code"] == "not_found"
            assert (await called(served, ada, "load", **page))["content"].startswith("xxx")
            await called(served, ada, "execute", item_id="small")
            [file] = (project / ".ai" / "outputs" / "tools" / "small").iterdir()
            page = {"item_type": "output", "item_id": f"small/{file.stem}"}  # which is easy to guess
            assert (await called(served, bob, "load", **page))["code"] == "not_found"
            assert (await called(served, ada, "load", **page))["content"] == "secret"

    run(story)


@pytest.fixture
def at_once(home: Path) -> None:
    """Have every call of a client that takes tasks become one at once."""
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "preferences.yaml").write_text("task_after: 0\n")


async def a_task(served: Tools, token: str, item_id: str) -> str:
    """The id of the task that a call becomes."""
    words: JsonObject = {"name": "execute", "arguments": {"item_id": item_id}}
    response = await asked(served, token, "tools/call", "execute", words)
    return str(response["result"]["taskId"])


@pytest.mark.usefixtures("at_once", "sandbox")
def test_a_reused_token_name_inherits_neither_runs_nor_tasks(serving_tools: ServeTools, project: Path) -> None:
    add_tool(project, "slow", "sleep 0.3")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token("ada")
            task = await a_task(served, token, "slow")
            while (await task_of(served, token, task))["result"]["status"] == "working":  # noqa: ASYNC110 - it polls
                await asyncio.sleep(0.05)
            assert len((await called(served, token, "runs"))["runs"]) == 1
            served.tokens.remove("ada")
            other = served.token("ada")
            assert (await called(served, other, "runs"))["runs"] == []
            assert "No such task" in (await task_of(served, other, task))["error"]["message"]

    run(story)
    # The owner finds them all by the name that people know.
    response = asyncio.run(Kernel(project).call("runs", {"actor": "ada"})).content
    assert [as_object(one)["tool_id"] for one in as_list(response["runs"])] == ["slow"]


def test_a_token_named_like_another_surface_reads_none_of_its_tasks(serving_tools: ServeTools, project: Path) -> None:
    async def story() -> None:
        kernel = Kernel(project)
        now = milliseconds()
        kernel.tasks().add(Task("a" * 32, STDIO, "tools/call", "say", "here", now, now, now + KEPT_MS, now))
        await kernel.aclose()
        async with serving_tools(project=project) as served:
            response = await task_of(served, served.token(STDIO), "a" * 32)
            assert "No such task" in response["error"]["message"]

    run(story)


@pytest.mark.usefixtures("at_once", "sandbox")
def test_a_removed_token_ends_its_tasks(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)
    marks = {name: add_sleeper(project, f"sleeper_{name}") for name in ("eve", "ada")}

    async def story() -> None:
        async with serving_tools(project=project) as served:
            for name in marks:
                await a_task(served, served.token(name), f"sleeper_{name}")
            await until(lambda: all(map(is_alive, marks.values())))
            served.tokens.remove("eve")
            await until(lambda: not is_alive(marks["eve"]))
            assert is_alive(marks["ada"])

    run(story)


async def add_asker(project: Path) -> None:
    """Put a server behind Kiwi that asks its callers and takes notes, and have the owner agree to both."""
    (project / "notes").mkdir()
    kernel = Kernel(project)
    words: JsonObject = {"action": "add", "server": "asker", "command": sys.executable, "args": ["-c", ASKER]}
    added = await kernel.call("mcp", {**words, "write": ["notes"], "questions": True})
    assert not added.is_error, added.content
    ruled = await kernel.call("approvals", {"action": "add_rule", "item": "mcp/asker/ask"})
    assert not ruled.is_error, ruled.content
    await kernel.aclose()


def heard(project: Path) -> list[dict[str, Any]]:
    """What the server behind Kiwi heard to its questions."""
    file = project / "notes" / "heard"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.usefixtures("sandbox")
def test_a_removed_token_ends_its_calls_that_wait_for_answers(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)

    async def story() -> None:
        await add_asker(project)
        async with serving_tools(project=project) as served:
            words: JsonObject = {"name": "execute", "arguments": {"item_id": "mcp/asker/ask"}}
            token = served.token("eve")
            response = await asked(served, token, "tools/call", "execute", words, {"elicitation": {}})
            assert response["result"]["resultType"] == "input_required", response
            assert heard(project) == []
            served.tokens.remove("eve")
            await until(lambda: bool(heard(project)))
            assert "ended before" in heard(project)[0]["error"]["message"]

    run(story)


@pytest.mark.usefixtures("sandbox")
def test_a_question_ends_when_its_handshake_client_leaves(serving_tools: ServeTools, project: Path) -> None:
    async def story() -> None:
        await add_asker(project)
        is_asked = asyncio.Event()

        async def think(context: object, params: ElicitRequestParams) -> ElicitResult:
            is_asked.set()
            await asyncio.Event().wait()
            return ElicitResult(action="accept")

        async with serving_tools(project=project) as served:
            words = {"Authorization": f"Bearer {served.token()}"}

            async def call() -> None:
                async with (
                    httpx2.AsyncClient(headers=words, trust_env=False, verify=False, timeout=120) as bare,
                    streamable_http_client(served.url, http_client=bare, terminate_on_close=False) as (
                        incoming,
                        outgoing,
                    ),
                    ClientSession(incoming, outgoing, elicitation_callback=think) as session,
                ):
                    await session.initialize()
                    await session.call_tool("execute", {"item_id": "mcp/asker/ask"})

            calling = asyncio.create_task(call())
            await is_asked.wait()
            calling.cancel()
            await asyncio.wait({calling})
            await until(lambda: bool(heard(project)))
            assert "error" in heard(project)[0]

    run(story)


def test_a_server_of_one_project_serves_no_other(serving_tools: ServeTools, project: Path, tmp_path: Path) -> None:
    other, link = tmp_path / "other", tmp_path / "link"
    (other / ".ai").mkdir(parents=True)
    link.symlink_to(project)

    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.token(can_author=True)
            for verb in ("search", "load", "execute", "doctor", "init", "mcp", "runs"):
                items = {name: {"item_id": "x"} for name in ("load", "execute")}
                words: JsonObject = {"search": {"query": "x"}, **items}.get(verb, {})
                response = await called(served, token, verb, **words, project_path=str(other))
                assert response["code"] == "not_permitted", verb
            assert (await called(served, token, "migrate", path=str(other)))["code"] == "not_permitted"
            by_path: JsonObject = {"action": "validate", "parameters": {"path": str(other / "tool.yaml")}}
            assert (await called(served, token, "execute", **by_path))["code"] == "not_permitted"
            for same in (project, link):
                assert "results" in await called(served, token, "search", query="x", project_path=str(same))
        async with serving_tools(project=project, is_wide=True) as served:
            token = served.token("bob")
            assert "results" in await called(served, token, "search", query="x", project_path=str(other))

    run(story)


MAKING: tuple[tuple[str, JsonObject], ...] = (
    ("execute", {"action": "create", "item_id": "evil", "parameters": {"tool_type": "script"}}),
    ("execute", {"action": "update", "item_id": "quick"}),
    ("execute", {"action": "delete", "item_id": "quick"}),
    ("execute", {"action": "sign", "item_id": "quick"}),
    ("execute", {"action": "publish", "item_id": "quick"}),
    ("execute", {"action": "pull", "item_id": "quick"}),
    ("execute", {"action": "rollback", "item_id": "quick"}),
    ("load", {"item_id": "quick", "destination": "user"}),
    ("registry", {"action": "push", "remote": "team"}),
    ("init", {}),
    ("migrate", {}),
)


@pytest.mark.usefixtures("sandbox")
def test_changing_items_is_a_separate_right(serving_tools: ServeTools, project: Path, home: Path) -> None:
    add_tool(project, "quick", "echo done")
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "registry.yaml").write_text("remotes: {team: {url: https://kiwi.example.com}}\n")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            user, author = served.token("user"), served.token("author", can_author=True)
            for verb, words in MAKING:
                response = await called(served, user, verb, **words)
                assert (response["code"], "--author" in response["suggestion"]) == ("not_permitted", True), (
                    verb,
                    words,
                )
            for words in ({"action": "validate"}, {"action": "why"}, {"action": "versions"}, {"action": "run"}):
                response = await called(served, user, "execute", item_id="quick", **words)
                assert response.get("code") != "not_permitted", words
            assert (await called(served, author, "execute", action="sign", item_id="quick")).get("code") is None

    run(story)
    assert not (home / ".ai" / "tools").exists()


@pytest.mark.usefixtures("sandbox")
def test_a_call_with_a_removed_token_is_refused(
    serving_tools: ServeTools, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mcp_endpoint, "_LOOK_SECONDS", 0.05)
    mark = add_sleeper(project, "sleeper")

    async def story() -> None:
        async with serving_tools(project=project) as served:
            meta: JsonObject = {PROTOCOL_VERSION_META_KEY: LATEST_MODERN_VERSION, CLIENT_CAPABILITIES_META_KEY: {}}
            body: JsonObject = {"name": "execute", "arguments": {"item_id": "sleeper"}, "_meta": meta}
            message: JsonObject = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": body}
            headers = {
                "mcp_protocol_version": LATEST_MODERN_VERSION,
                "mcp_method": "tools/call",
                "mcp_name": "execute",
            }
            calling = asyncio.create_task(served.post(served.token("eve"), message, **headers))
            await until(lambda: is_alive(mark))
            served.tokens.remove("eve")
            answer = await calling
            assert answer.status_code == 401
            assert "was removed" in answer.text
            assert "retry-after" not in answer.headers

    run(story)


def test_wrong_access_tokens_count_as_wrong_tokens(home: Path) -> None:
    async def story() -> None:
        settings = IdentityProvider("http://127.0.0.1:9", "https://kiwi.test/mcp")
        access = TokenVerifier(settings)
        tokens = TokenStore(home / ".ai")
        right = tokens.add("ada", [], can_write=False)
        door = Authenticator(tokens, host="127.0.0.1", names=[], is_read_only=False, is_open=False, access=access)
        found: list[type[TokenRefused]] = []
        for number in range(40):
            with pytest.raises(TokenRefused) as refused:
                await door.admit({"authorization": f"Bearer {number}.b.c"})
            found.append(type(refused.value))
        assert found == [TokenRefused] * 30 + [TooManyTries] * 10
        assert (await door.admit({"authorization": f"Bearer {right}"})).actor.name == "ada"
        await access.aclose()

    run(story)


def test_one_client_uses_at_most_a_quarter_of_the_connections() -> None:
    assert 2 * mcp_endpoint._AT_ONCE <= server._CONNECTIONS / 4


def test_a_token_that_may_author_may_use_tools(home: Path) -> None:
    with pytest.raises(InvalidRequest, match="use them too"):
        TokenStore(home / ".ai").add("ada", [], can_write=False, can_author=True)
    secret = TokenStore(home / ".ai").add("ada", [], can_write=False, can_use_tools=True, can_author=True)
    token = TokenStore(home / ".ai").find(secret)
    assert token is not None
    assert (token.can_use_tools, token.can_author) == (True, True)
    assert token.principal == f"token:ada:{token.sha256[:8]}"


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run `kiwi up` in this process, and return what it writes to standard output and to standard error."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["kiwi", "up", *words])
        with pytest.raises(SystemExit) as ended:
            start.main()
        assert not ended.value.code
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_a_new_token_for_tools_comes_with_a_warning(up: Callable[..., tuple[str, str]]) -> None:
    assert "everyone who has it can run here what you can run" in up("token", "add", "ada", "--tools", "--author")[1]
    assert "warning" not in up("token", "add", "bob")[1]
    assert "tools author" in up("token", "list")[0]
