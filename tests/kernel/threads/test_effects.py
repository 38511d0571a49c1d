"""What happens to a call whose process ended before its result was stored: by its effect, its probe, its owner."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.http_server import HttpReply, HttpRequest, http_server
from tests.plugins.scripted_model import say, use
from tests.surfaces.mcp import upstream

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel

pytestmark = pytest.mark.usefixtures("loopback", "sandbox")
SCRIPT = """echo "$KIWI_IDEMPOTENCY_KEY" >> calls.txt; sync calls.txt
if [ "$(wc -l < calls.txt)" = 1 ]; then sleep 60; fi
echo '{"written": true}'"""
NEEDS: Json = {"write": ["."]}


@asynccontextmanager
async def interrupted(agents: Agents) -> AsyncIterator[tuple[Agents, str]]:
    """Start a thread, end its kernel while the first call runs, and give another kernel and the id of the thread."""
    await agents.call("approvals", action="add_rule", item="*/write_line@*")
    task = asyncio.create_task(agents.start("study"))
    async with asyncio.timeout(120):
        while not (agents.project / "calls.txt").exists():
            assert not task.done(), task.result()
            await asyncio.sleep(0.02)
    thread_id = (await agents.read("thread", action="list"))["threads"][0]["thread_id"]
    await agents.kernel.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    other = replace(agents, kernel=Kernel(agents.project, user=agents.user))
    try:
        yield other, thread_id
    finally:
        await other.kernel.aclose()


async def written(agents: Agents, script: str = SCRIPT, **words: Json) -> None:
    agents.directive("study")
    agents.bash_tool("write_line", script, mutates_state=True, needs=NEEDS, **words)
    await agents.sign("study", "write_line")
    agents.model.will(use("execute", item_id="write_line", parameters={"text": "x"}), say("Done."))


async def test_an_idempotent_call_runs_again_with_the_same_key(agents: Agents) -> None:
    await written(agents, effect="idempotent")
    async with interrupted(agents) as (other, thread_id):
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (done["status"], done["result"]) == ("completed", "Done."), done
        first, second = (agents.project / "calls.txt").read_text().split()
        assert first == second
        assert first.startswith(f"{thread_id}/")
        began = [event for event in await other.events(thread_id) if event["kind"] == "began"]
        assert [event["effect"] for event in began] == ["idempotent", "idempotent"]
        assert (await other.read("thread", action="verify", thread_id=thread_id))["valid"] is True


@pytest.mark.parametrize(
    ("answer", "expected", "calls"),
    [
        ("done", "Done: the owner", 1),
        ("not done", "Not done: the owner", 1),
        ("run again", "written", 2),
        ("stop", "", 1),
    ],
)
async def test_the_owner_says_what_became_of_a_call_that_runs_at_most_once(
    agents: Agents, answer: str, expected: str, calls: int
) -> None:
    await written(agents)
    async with interrupted(agents) as (other, thread_id):
        waiting = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (waiting["status"], waiting["waits_for"]) == ("waiting", "question"), waiting
        (question,) = waiting["questions"]
        assert "write_line" in question["message"]
        assert "It runs at most once, so it is not repeated" in question["message"]
        await other.call("thread", action="answer", question_id=question["question_id"], answer=answer)
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert done["status"] == ("cancelled" if answer == "stop" else "completed"), done
        assert answer == "stop" or expected in json.dumps(agents.model.requests[-1].json["messages"][-1])
        assert len((agents.project / "calls.txt").read_text().split()) == calls


@pytest.mark.parametrize(("found", "calls"), [({"done": True, "result": "line 1"}, 1), ({"done": False}, 2)])
async def test_the_probe_of_an_item_is_asked_before_the_owner(agents: Agents, found: Json, calls: int) -> None:
    agents.bash_tool("was_written", f"cat > /dev/null; echo '{json.dumps(found)}'", effect="pure")
    await agents.sign("was_written")
    await written(agents, probe="was_written")
    async with interrupted(agents) as (other, thread_id):
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (done["status"], done["result"]) == ("completed", "Done."), done
        assert len((agents.project / "calls.txt").read_text().split()) == calls
        expected = "line 1" if calls == 1 else "written"
        assert expected in json.dumps(agents.model.requests[-1].json["messages"][-1])


def reply_to(message: dict[str, Any]) -> HttpReply:
    """Return the reply of an MCP server with one tool, of which it says that it may be repeated."""
    match message["method"]:
        case "initialize":
            info = {"capabilities": {"tools": {}}, "serverInfo": {"name": "notes", "version": "1"}}
            result: dict[str, Any] = {"protocolVersion": message["params"]["protocolVersion"], **info}
        case "tools/list":
            tool = {"name": "write_line", "inputSchema": {"type": "object"}, "annotations": {"idempotentHint": True}}
            result = {"tools": [tool]}
        case _:
            result = {"content": [{"type": "text", "text": "written"}]}
    body = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
    return HttpReply(body, headers={"content-type": "application/json"})


@contextmanager
def a_service(agents: Agents) -> Iterator[str]:
    """Serve an API and an MCP server that store the key of each call; the first call gets no answer."""
    closing, calls = threading.Event(), agents.project / "calls.txt"

    def respond(request: HttpRequest) -> HttpReply:
        message = json.loads(request.body or "{}")
        if request.path == "/api":
            key = request.headers["idempotency-key"]
        elif message.get("method") == "tools/call":
            key = message["params"]["_meta"]["kiwi-mcp/idempotency-key"]
        else:
            return reply_to(message) if "id" in message else HttpReply(status=202 if message else 405)
        with calls.open("a") as file:
            file.write(f"{key}\n")
        if calls.read_text().count("\n") == 1:
            closing.wait(20)
        return reply_to(message) if "id" in message else HttpReply(b'"written"')

    with http_server(respond) as host:
        policy = json.loads((agents.user / "policy.yaml").read_text())
        policy["hosts"]["allow"].append(host)
        (agents.user / "policy.yaml").write_text(json.dumps(policy))
        try:
            yield f"http://{host}"
        finally:
            closing.set()


async def trust_hints(agents: Agents, server: str) -> None:
    """Let the hints of a server count, as its owner does."""
    path = agents.project / f".ai/tools/mcp/{server}.yaml"
    path.write_text(path.read_text().replace("config:\n", "config:\n  trust_hints: true\n"))
    accepted = await agents.call("mcp", action="accept", server=server)
    assert not accepted.is_error, accepted.content


@pytest.mark.parametrize("kind", ["api", "mcp"])
async def test_a_service_gets_the_same_key_when_a_call_is_repeated(agents: Agents, kind: str) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("execute", item_id="write_line", parameters={}), say("Done."))
    with a_service(agents) as url:
        if kind == "api":
            config: Json = {"method": "POST", "url": f"{url}/api", "body_template": {}}
            manifest: Json = {
                "tool_id": "write_line", "tool_type": "api", "executor": "http_client", "version": "1.0.0",
                "description": "Writes", "effect": "idempotent", "config": config,
            }  # fmt: skip
            (agents.user / "tools" / "write_line.yaml").write_text(json.dumps(manifest))
            await agents.sign("write_line")
        else:
            await agents.call("mcp", action="add", server="notes", url=f"{url}/mcp")
            await trust_hints(agents, "notes")
        async with interrupted(agents) as (other, thread_id):
            done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
            assert done["status"] == "completed", done
            first, second = (agents.project / "calls.txt").read_text().split()
            assert first == second
            assert first.startswith(f"{thread_id}/")


async def test_hints_of_a_server_count_if_it_can_change_nothing_or_its_owner_trusts_them(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    await agents.call("approvals", action="add_rule", item="*/draw@*")
    await agents.call("approvals", action="add_rule", item="*/measure@*")
    await agents.call("mcp", action="add", server="notes", command=sys.executable, args=[upstream.__file__])

    async def effects() -> list[str]:
        agents.model.will(use("execute", item_id="draw") & use("execute", item_id="measure"), say("Done."))
        done = await agents.start("study")
        assert done["status"] == "completed", done
        return [event["effect"] for event in await agents.events(done["thread_id"]) if event["kind"] == "began"]

    assert await effects() == ["pure", "at_most_once"]
    allowed = await agents.call("mcp", action="allow", server="notes", write=[str(agents.project)])
    assert not allowed.is_error, allowed.content
    assert await effects() == ["at_most_once", "at_most_once"]
    await trust_hints(agents, "notes")
    assert await effects() == ["pure", "at_most_once"]
