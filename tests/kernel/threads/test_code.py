"""Code mode: a program instead of many calls; each call is an ordinary one, and only the result is returned."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.kernel.threads.test_calls import approved
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.threads.runner import ThreadRunner

pytestmark = [pytest.mark.usefixtures("sandbox", "loopback"), pytest.mark.req("K-CO-05")]
ADD: Json = {
    "type": "object",
    "required": ["a", "b"],
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
ROWS = """import json
print(json.dumps([{"id": n, "text": "x" * 50} for n in range(2000)]))"""


@pytest.fixture
async def tools(agents: Agents) -> Agents:
    """Give tools of every kind: pure, failing, large, and one that waits for the owner."""
    agents.bash_tool("add", 'read -r x; echo "{\\"got\\": $x}"', effect="pure", parameters=ADD)
    agents.bash_tool("my-rows", f"python3 -c '{ROWS}'", effect="pure")
    agents.bash_tool("broken", "echo no >&2; exit 3")
    agents.bash_tool("keep_note", "echo once >> note.txt; echo '{}'", mutates_state=True, needs={"write": ["."]})
    agents.bash_tool("secret_tool", "echo '{}'")
    await agents.sign("add", "my-rows", "broken", "keep_note", "secret_tool")
    return agents


async def run(agents: Agents, code: str, **parameters: Json) -> Answer:
    return await agents.call("execute", action="code", parameters={"code": code, **parameters})


async def test_a_program_calls_typed_functions_and_returns_only_its_result(tools: Agents) -> None:
    code = """
import asyncio
first = await tools.add(a=inputs["start"], b=2)
both = await asyncio.gather(*[tools.add(a=n, b=n) for n in range(2)])
rows = await tools.my_rows()
print("rows", len(rows))
try:
    await tools.broken()
except RuntimeError as error:
    failed = str(error)
{"first": first["got"], "both": [one["got"]["a"] for one in both], "even": len([r for r in rows if r["id"] % 2 == 0]),
 "failed": failed.split(":")[0]}
"""
    answer = await run(tools, code, inputs={"start": 1})
    assert answer.content["result"] == {
        "value": {"first": {"a": 1, "b": 2}, "both": [0, 1], "even": 1000, "failed": "error"},
        "printed": "rows 2000\n",
    }, answer.content
    assert len(json.dumps(answer.content)) < 2_000
    receipts = (await tools.read("audit", action="export"))["receipts"]
    details = [json.loads(one["detail"] or "{}") for one in receipts]
    inner = [one["thread"] for one in details if one.get("run") == answer.content["run_id"]]
    assert inner == [answer.content["thread_id"]] * 5, receipts


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("x = 1\nawait tools.add(a='one', b=2)", "main.py:2:17"),
        ("await tools.add(a=1)", "main.py:1"),
        ("tools.add(a=1, b=2)['got']", "main.py:1"),
        ("await tools.no_such_tool()", "no attribute `no_such_tool`"),
        ("def broken(:", "main.py:1"),
        ("import subprocess", "subprocess"),
        ("open('/etc/passwd')", "open"),
    ],
)
async def test_a_program_that_does_not_fit_its_tools_is_refused_before_anything_runs(
    tools: Agents, code: str, found: str
) -> None:
    answer = await run(tools, f"{code}\nawait tools.keep_note()" if "def" not in code else code)
    assert (answer.content["code"], found in str(answer.content["message"])) == ("invalid_program", True), (
        answer.content
    )
    assert not (await tools.read("approvals", action="list"))["approvals"]


async def test_a_call_that_waits_for_approval_continues_in_another_process_after_the_yes(tools: Agents) -> None:
    code = "before = await tools.add(a=1, b=1)\nawait tools.keep_note()\nprint('kept')\nbefore['got']['a'] + 1"
    waiting = await run(tools, f"print('start')\n{code}")
    assert waiting.content["code"] == "thread_waiting", waiting.content
    (approval,) = waiting.content["approvals"]  # type: ignore[misc,str-unpack]
    assert not (tools.project / "note.txt").exists()
    other = Kernel(tools.project, user=tools.user)
    await other.call("approvals", {"action": "approve", "approval_id": approval})
    thread: str = waiting.content["thread_id"]  # type: ignore[assignment]
    done = await other.call("thread", {"action": "resume", "thread_id": thread, "wait": True})
    assert done.content["result"] == {"value": 2, "printed": "start\nkept\n"}, done.content
    assert (tools.project / "note.txt").read_text() == "once\n"
    await other.aclose()


async def test_a_thread_sends_one_program_and_gets_one_result(tools: Agents) -> None:
    tools.directive("study", permissions='<execute resource="tool" id="add"/><execute resource="tool" id="keep_note"/>')
    await tools.sign("study")
    code = "got = await tools.add(a=1, b=1)\nawait tools.keep_note()\ngot"
    denied = use("execute", item_id="code", parameters={"code": "await tools.secret_tool()"})
    tools.model.will(use("execute", action="code", parameters={"code": code}), denied, say("Done."))
    waiting = await tools.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "child"), waiting
    (child,) = [one for one in await tools.events(waiting["thread_id"]) if one["kind"] == "spawned"]
    await approved(tools, {**waiting, "waits_for": "approval", "thread_id": child["thread_id"]})
    done = await tools.read("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done["status"], done["result"]) == ("completed", "Done."), done
    first, second = [one for one in await tools.events(done["thread_id"]) if one["kind"] == "result"]
    assert json.loads(first["part"]["content"]) == {"value": {"got": {"a": 1, "b": 1}}}
    assert second["status"] == "not_permitted"
    assert len(tools.model.requests) == 3


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    pass",
        "x = [0]\nwhile True:\n    x = x + x",
        "9 ** 9 ** 9",
        "def f(n: int) -> int:\n    return f(n + 1)\nf(0)",
        "().__class__.__bases__[0].__subclasses__()",
        "eval(\"__import__('os').system('id')\")",
        "import os\nos.listdir('/')",
        "await eval(\"_call('secret_tool', {})\")",
        "await eval(\"_call('builtin/kiwi/code', {'code': '1'})\")",
        "await tools.add(a=1, b=eval('{1, 2}'))",
        "'x' * 5_000_000",
        "float('nan')",
    ],
)
async def test_no_way_out_of_a_program(tools: Agents, code: str) -> None:
    answer = await run(tools, code, items=["add"])
    assert answer.is_error, answer.content
    runs = (await tools.read("runs", action="list"))["runs"]
    assert {one["tool_id"] for one in runs} <= {"code"}, runs


@pytest.mark.parametrize("item", ["code", "spawn", "builtin/kiwi/return"])
async def test_a_program_cannot_call_code_or_the_tools_of_threads(tools: Agents, item: str) -> None:
    answer = await run(tools, "1", items=[item])
    assert answer.content["code"] == "not_permitted", answer.content


async def test_items_narrow_what_a_program_may_call_and_rules_hold(tools: Agents) -> None:
    (tools.user / "policy.yaml").write_text(json.dumps({"items": {"deny": ["*/secret_tool@*"]}}))
    answer = await run(tools, "await tools.secret_tool()")
    assert answer.content["code"] == "not_permitted", answer.content
    unknown = await run(tools, "1", items=["no/such"])
    assert unknown.content["code"] == "tool_not_found", unknown.content


async def test_a_snapshot_that_was_changed_in_the_store_is_not_loaded(tools: Agents) -> None:
    waiting = await run(tools, "await tools.keep_note()\n'done'")
    thread: str = waiting.content["thread_id"]  # type: ignore[assignment]
    database = tools.kernel._services.store.registry().database
    stores = tools.kernel._services.one(ThreadRunner).stores
    event = next(one for one in stores.threads.events(thread) if one.kind == "model")
    forged: dict[str, Any] = {**event.body, "snapshot": base64.b64encode(b"forged").decode()}
    with database.transaction() as transaction:  # as one who can write the file can
        transaction.write("drop trigger thread_events_never_change")
        transaction.write(
            "update thread_events set body = ? where thread_id = ? and seq = ?", (json.dumps(forged), thread, event.seq)
        )
    (approval,) = waiting.content["approvals"]  # type: ignore[misc,str-unpack]
    await tools.call("approvals", action="approve", approval_id=approval)
    other = Kernel(tools.project, user=tools.user)
    done = await other.call("thread", {"action": "resume", "thread_id": thread, "wait": True})
    assert (done.content["status"], "changed" in str(done.content["message"])) == ("failed", True), done.content
    await other.aclose()


async def test_only_the_item_starts_a_program(tools: Agents) -> None:
    answer = await tools.call("code_tools", action="run", arguments={"code": "1"})
    assert answer.content["code"] == "not_permitted", answer.content


async def test_an_item_of_a_server_is_named_after_the_server(tools: Agents) -> None:
    folder = tools.project / ".ai" / "tools" / "notes"
    folder.mkdir(parents=True)
    source = resources.files("kiwi_mcp.data") / "new" / "mcp" / "server.py"
    (folder / "server.py").write_text(source.read_text().replace("{name}", "notes"))
    config = {"transport": "stdio", "command": "python3", "args": [".ai/tools/notes/server.py"]}
    manifest = {"tool_id": "notes", "tool_type": "mcp_server", "executor": "subprocess", "version": "1.0.0"}
    own = {"description": "A server", "config": config}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, **own}))
    await tools.call("mcp", action="refresh", server="notes", yes=True)
    await tools.call("mcp", action="accept", server="notes")
    answer = await run(tools, "[await tools.notes.echo(text='a'), await tools.notes.echo(text='b')]")
    assert answer.content.get("result") == {"value": ["a", "b"]}, answer.content
