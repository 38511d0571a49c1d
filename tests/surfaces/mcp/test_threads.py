"""Threads through MCP over stdio: progress for each turn, questions as forms, tasks, and what only the owner may do."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import ElicitResult
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, write_provider
from tests.plugins.scripted_model import ScriptedModel, ScriptedTurn, say, stall, use
from tests.surfaces.mcp.test_approvals import answer_in
from tests.surfaces.mcp.test_task_processes import environment, eventually, served

from kiwi_mcp.kernel import Answer

pytestmark = [pytest.mark.usefixtures("processes", "loopback"), pytest.mark.timeout(240)]
PATIENCE = 120.0
EACH_ERA = pytest.mark.parametrize("mode", ["auto", "legacy"])
START = {"item_id": "study", "mode": "thread"}
KEEP_NOTE = {
    "tool_id": "keep_note", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
    "description": "Keeps a note", "config": {"entrypoint": "main.sh"}, "mutates_state": True,
    "needs": {"write": ["."]},
}  # fmt: skip


@pytest.fixture(autouse=True)
def study(home: Path, ask: Callable[..., Answer], scripted_model: ScriptedModel, sandbox: None) -> None:
    """A directive and a tool that the owner has signed."""
    user = home / ".ai"
    (user / "directives").mkdir(parents=True)
    folder = user / "tools" / "keep_note"
    folder.mkdir(parents=True)
    write_provider(user, scripted_model, "openai_chat")
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)
    (folder / "tool.yaml").write_text(json.dumps(KEEP_NOTE))
    (folder / "main.sh").write_text("echo once >> note.txt; echo '{}'")
    for name in ("study", "keep_note"):
        assert not ask("execute", action="sign", item_id=name).is_error


def client_of(project: Path, mode: Literal["auto", "legacy"] = "auto", **more: Any) -> Client:
    words = ["-m", "kiwi_mcp", "serve", "--project", str(project)]
    return Client(
        stdio_client(StdioServerParameters(command=sys.executable, args=words, env=environment())), mode=mode, **more
    )


@EACH_ERA
async def test_a_client_gets_the_result_and_the_progress_of_each_turn(
    mode: Literal["auto", "legacy"], project: Path, scripted_model: ScriptedModel
) -> None:
    scripted_model.will(use("help", topic="tool"), say("Birds."))
    heard: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with asyncio.timeout(PATIENCE), client_of(project, mode) as client:
        done = answer_in(await client.call_tool("execute", START, progress_callback=hear))
    assert (done["status"], done["result"], done["finish_reason"]) == ("success", "Birds.", "stop"), done
    assert (done["usage"]["turns"], len(done["thread_id"])) == (2, 26)
    assert any("turn" in message for message in heard), heard


@EACH_ERA
async def test_a_call_of_a_thread_is_approved_in_a_form(
    mode: Literal["auto", "legacy"], project: Path, scripted_model: ScriptedModel
) -> None:
    scripted_model.will(use("execute", item_id="keep_note"), say("Kept."))
    asked: list[str] = []

    async def elicited(_: object, params: Any) -> ElicitResult:
        asked.append(params.message)
        return ElicitResult(action="accept", content={"approve": True, "always": "none"})

    async with asyncio.timeout(PATIENCE), client_of(project, mode, elicitation_callback=elicited) as client:
        done = answer_in(await client.call_tool("execute", START))
    assert (done["status"], done["result"], len(asked)) == ("success", "Kept.", 1), done
    assert (project / "note.txt").read_text() == "once\n"


@EACH_ERA
async def test_a_question_of_a_thread_is_answered_in_a_form(
    mode: Literal["auto", "legacy"], project: Path, scripted_model: ScriptedModel
) -> None:
    scripted_model.will(use("ask", question="Which colour?", choices=["red", "blue"]), say("Blue it is."))
    scripted_model.will(use("ask", question="And which bird?"), say("Never."))
    forms: list[Any] = []
    answers = iter([("accept", {"answer": "blue"}), ("decline", None)])

    async def elicited(_: object, params: Any) -> ElicitResult:
        forms.append(params)
        action, content = next(answers)
        return ElicitResult(action=action, content=content)  # type: ignore[arg-type]  # two of the three actions

    async with asyncio.timeout(PATIENCE), client_of(project, mode, elicitation_callback=elicited) as client:
        done = answer_in(await client.call_tool("execute", START))
        declined = answer_in(await client.call_tool("execute", START))
    assert (done["status"], done["result"]) == ("success", "Blue it is."), done
    assert forms[0].requested_schema["properties"]["answer"]["enum"] == ["red", "blue"]
    assert "Which colour?" in forms[0].message
    assert (declined["status"], declined["waits_for"], len(forms)) == ("waiting", "question", 2), declined


async def test_a_model_gets_the_id_of_an_approval_and_cannot_answer_for_the_owner(
    project: Path, scripted_model: ScriptedModel
) -> None:
    scripted_model.will(use("execute", item_id="keep_note"), use("ask", question="Which?"), *[say("Never.")] * 2)
    async with asyncio.timeout(PATIENCE), client_of(project) as client:

        async def call(tool: str, **arguments: Any) -> dict[str, Any]:
            return answer_in(await client.call_tool(tool, arguments))

        waiting = await call("execute", **START)
        assert (waiting["status"], waiting["waits_for"]) == ("waiting", "approval"), waiting
        (approval,) = waiting["approvals"]
        asking = await call("execute", **START)
        (question,) = asking["questions"]
        refused = [
            await call("approvals", action="approve", approval_id=approval),
            await call("thread", action="answer", question_id=question["question_id"], answer="this"),
            await call("thread", action="replay", target=asking["thread_id"]),
        ]
        assert [one["code"] for one in refused] == ["not_permitted"] * 3, refused
        resumed = await call("thread", action="resume", thread_id=asking["thread_id"], wait=True)
        assert resumed["status"] == "waiting"
        assert (await call("thread", action="cancel", thread_id=asking["thread_id"]))["status"] == "cancelled"
    assert not (project / "note.txt").exists()


def test_cancelling_a_task_cancels_its_thread(project: Path, home: Path, scripted_model: ScriptedModel) -> None:
    (home / ".ai" / "preferences.yaml").write_text("task_after: 0.2\n", encoding="utf-8")
    scripted_model.will(use("help", topic="tool"), ScriptedTurn(how="silent"))
    with served(project) as raw:
        created = raw.execute(**START)
        assert created["resultType"] == "task", created
        eventually(lambda: raw.task(created["taskId"]).get("statusMessage"))
        raw.ask("tasks/cancel", taskId=created["taskId"])
        eventually(lambda: raw.task(created["taskId"])["status"] == "cancelled")
        listed = raw.ask("tools/call", name="thread", arguments={"action": "list"})["result"]["structuredContent"]
        assert [one["status"] for one in listed["threads"]] == ["cancelled"]
        raw.leave()


@pytest.mark.parametrize("has_tasks", [True, False])
def test_a_thread_continues_when_its_client_is_killed_and_the_next_client_sees_it(
    project: Path, home: Path, scripted_model: ScriptedModel, *, has_tasks: bool
) -> None:
    (home / ".ai" / "preferences.yaml").write_text(f"task_after: {0.2 if has_tasks else 60}\n", encoding="utf-8")
    asked = threading.Event()
    scripted_model.on_request = lambda _: asked.set()
    scripted_model.will(stall("Never whole. "), say("Birds."))
    task_id = ""
    with served(project) as raw:
        if has_tasks:
            task_id = raw.execute(**START)["taskId"]
        else:
            raw.send("tools/call", name="execute", arguments=START)
        assert asked.wait(PATIENCE)
        raw.leave()  # the pipe of a client that was killed is closed
    with served(project) as raw:
        listed = raw.ask("tools/call", name="thread", arguments={"action": "list"})["result"]["structuredContent"]
        (thread_id,) = (one["thread_id"] for one in listed["threads"])
        assert task_id in {thread_id, ""}
        done = eventually(lambda: (now := raw.task(thread_id))["status"] == "completed" and now)
        assert done["result"]["structuredContent"]["result"] == "Birds.", done
        assert raw.ask("tasks/get", taskId=thread_id[:-1] + "0")["error"]["code"] == -32602
        raw.leave()
