"""Messages at the last moment, forks and replays from a turn."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import ModelRequest, say, stall, use
from tests.surfaces.mcp.test_task_processes import eventually

from kiwi_mcp.domain.calls import NO_CALLER, Caller, CallOrigin, Principal
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.threads import NewEvent, ThreadEvent, ThreadObserver
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.threads import runner as runner_module
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.work import Step
from kiwi_mcp.store.threads import ThreadFilter, Threads

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("loopback")]
SLEEP = "sleep 297.53"
OUTPUTS = '<outputs><output name="answer" type="string" required="true">It</output></outputs>'


def threads_of(agents: Agents) -> Threads:
    return agents.kernel._services.one(ThreadRunner).stores.threads


def injecting(agents: Agents, kind: str, text: str) -> ThreadObserver:
    """Inject a message, as another process does, when the first event of a kind was stored."""
    threads, left = threads_of(agents), [text]

    def observe(event: ThreadEvent | ReplyDelta) -> None:
        if isinstance(event, ThreadEvent) and event.kind == kind and left:
            threads.append(threads.get(event.thread_id), [NewEvent("injected", {"text": left.pop()})])

    return observe


@pytest.mark.parametrize("kind", ["model", "returned"])
async def test_a_message_at_the_last_moment_is_answered(agents: Agents, kind: str) -> None:
    agents.directive("study", outputs=OUTPUTS if kind == "returned" else "")
    await agents.sign("study")
    first, last = (
        (use("return", answer="early"), use("return", answer="late"))
        if kind == "returned"
        else (say("early"), say("late"))
    )
    agents.model.will(first, last)
    ended = await agents.start("study", Caller(is_owner=True, observe=injecting(agents, kind, "One more thing.")))
    assert ended["status"] == "completed", ended
    assert ended["result"] == ({"answer": "late"} if kind == "returned" else "late")
    assert agents.model.requests[-1].messages[-1]["content"] == "One more thing."


async def test_a_message_at_the_end_of_a_turn_of_a_conversation_is_answered(agents: Agents) -> None:
    agents.model.will(say("First."), say("Second."))
    begun = await agents.read("thread", action="start", item_id="chat", conversation=True)
    owner = Caller(is_owner=True, observe=injecting(agents, "model", "And?"))
    answer = await agents.call(
        "thread", owner, action="resume", thread_id=begun["thread_id"], message="Hello.", wait=True
    )
    assert (answer.content["status"], answer.content["waits_for"]) == ("waiting", "message")
    assert [event["stop"] for event in await agents.events(begun["thread_id"]) if event["kind"] == "model"] == [
        "end"
    ] * 2


async def forked(agents: Agents, thread_id: str, caller: Caller | None = None, **words: Any) -> dict[str, Any]:
    given = {"action": "fork", "thread_id": thread_id, "wait": True, **words}
    return dict((await agents.kernel.call("thread", given, caller or Caller(is_owner=True))).content)


async def test_a_thread_is_forked_and_replayed_from_a_completed_turn(agents: Agents) -> None:
    agents.directive("study", limits='<limits turns="4" spend="0.5"/>')
    await agents.sign("study")
    agents.model.will(use("load", item_id="study"), use("search", query="birds"), say("Birds."))
    done = await agents.start("study", inputs={"topic": "birds"})
    events = await agents.events(done["thread_id"])
    first = next(event["seq"] for event in events if event["kind"] == "result")

    agents.model.will(say("Fish."))
    made = await forked(agents, done["thread_id"], at=first, message="Look for fish instead.", limits={"turns": 9})
    assert (made["status"], made["result"], made["limits"]["turns"]) == ("completed", "Fish.", 4), made
    assert made["usage"]["turns"] == 1  # its budget is its own
    sent = agents.model.requests[-1].messages
    assert sent[: len(agents.model.requests[1].messages)] == agents.model.requests[1].messages
    assert sent[-1]["content"] == "Look for fish instead."
    journal = await agents.events(made["thread_id"])
    assert (journal[0]["forked_from"], journal[0]["forked_seq"]) == (done["thread_id"], first)
    threads = threads_of(agents)
    assert threads.get(made["thread_id"]).rights == threads.get(done["thread_id"]).rights
    assert (await agents.read("thread", action="verify", thread_id=made["thread_id"]))["valid"]
    again = await forked(agents, made["thread_id"])  # the model had finished there
    assert (again["status"], again["result"], again["usage"]["turns"]) == ("completed", "Fish.", 0)

    asked = len(agents.model.requests)
    replayed = await agents.read("thread", action="replay", target=done["thread_id"], at=first)
    assert (replayed["passed"], replayed["result"], *replayed["tools"]) == (True, "Birds.", "load", "search"), replayed
    assert len(agents.model.requests) == asked

    wrong = await forked(agents, done["thread_id"], at=2)
    assert (wrong["code"], f"Turns end at {first}," in wrong["suggestion"]) == ("invalid_request", True), wrong
    stranger = Caller(name="other", identity=Principal("agent", "other"))
    assert (await forked(agents, done["thread_id"], stranger))["code"] == "not_permitted"
    inside = Caller(is_owner=True, origin=CallOrigin(done["thread_id"], "", 1))
    assert (await forked(agents, done["thread_id"], inside))["code"] == "not_permitted"


async def test_a_running_and_a_waiting_thread_are_forked(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    made: list[dict[str, Any]] = []
    agents.model.will(use("load", item_id="study"), use("ask", question="Sure?"))
    waiting = await agents.start("study")
    assert waiting["waits_for"] == "question"
    agents.model.will(say("Without asking."))
    made.append(await forked(agents, waiting["thread_id"], message="Do not ask."))
    assert (made[0]["status"], made[0]["result"]) == ("completed", "Without asking."), made
    assert "Sure?" not in json.dumps(agents.model.requests[-1].messages)
    threads = threads_of(agents)
    assert threads.get(waiting["thread_id"]).status == "waiting"
    threads.take(waiting["thread_id"], "elsewhere/abc", threads.get(waiting["thread_id"]).updated_at + 60_000)
    agents.model.will(say("Beside it."))
    assert (await forked(agents, waiting["thread_id"]))["result"] == "Beside it."


@pytest.fixture
async def client(agents: Agents) -> AsyncIterator[Kernel]:
    """An MCP server in another process than the one that runs the threads."""
    kernel = Kernel(agents.project, user=agents.user, is_owner=False, surface="mcp")
    yield kernel
    await kernel.aclose()


def is_running(command: str) -> bool:
    """Whether a process with these words runs."""
    wanted = command.replace(" ", "\0").encode()
    found = False
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found = found or path.read_bytes().startswith(wanted)
    return found


async def started(agents: Agents, client: Kernel, item: str) -> tuple[str, asyncio.Task[Step]]:
    """Start a thread over MCP, and let the other process run it."""
    answer = await client.call("thread", {"action": "start", "item_id": item})
    thread_id = str(answer.content["thread_id"])
    return thread_id, agents.kernel._services.one(ThreadRunner).start(thread_id, NO_CALLER)


@pytest.mark.req("K-TH-06")
async def test_a_client_steers_a_running_thread_of_another_process(agents: Agents, client: Kernel) -> None:
    agents.directive("study")
    await agents.sign("study")
    loop = asyncio.get_running_loop()
    asked: asyncio.Queue[tuple[str, threading.Event]] = asyncio.Queue()

    def hold(request: ModelRequest) -> None:
        go_on = threading.Event()
        loop.call_soon_threadsafe(asked.put_nowait, (json.dumps(request.messages), go_on))
        go_on.wait(20)

    async def call(**words: Json) -> dict[str, Any]:
        return dict((await client.call("thread", {"thread_id": thread_id, **words})).content)

    agents.model.on_request = hold
    agents.model.will(
        use("load", item_id="study"), use("help", topic="tool"), say("Emus."), say("Apart."), say("Never.")
    )
    thread_id, running = await started(agents, client, "study")
    _, first = await asked.get()
    listed = (await client.call("thread", {"action": "list"})).content["threads"]
    assert [one["thread_id"] for one in listed] == [thread_id]  # type: ignore[index,call-overload,union-attr]
    assert (await call(action="inject", message="Look at emus."))["status"] == "running"
    assert (await call(action="watch", seconds=0))["status"] == "running"
    first.set()
    sent, second = await asked.get()
    assert "Look at emus." in sent
    assert (await call(action="pause"))["status"] == "running"
    second.set()
    await running
    assert (await call(action="watch"))["status"] == "paused"
    answered = await client.call("thread", {"action": "answer", "question_id": thread_id, "answer": "yes"})
    assert answered.content["code"] == "not_permitted"
    assert (await call(action="resume"))["status"] == "queued"  # it was this client that paused it

    running = agents.kernel._services.one(ThreadRunner).start(thread_id, NO_CALLER)
    _, third = await asked.get()
    turns = [event["seq"] for event in await agents.events(thread_id) if event["kind"] == "result"]
    fork = await call(action="fork", at=turns[0], message="Apart.")
    third.set()
    await running
    assert (await call(action="show"))["result"] == "Emus."
    apart = agents.kernel._services.one(ThreadRunner).start(fork["thread_id"], NO_CALLER)
    (await asked.get())[1].set()
    await apart
    assert (await call(action="show", thread_id=fork["thread_id"]))["result"] == "Apart."

    await agents.call("thread", action="fork", thread_id=thread_id, at=turns[0], message="By the owner.")
    owned = (await agents.read("thread", action="list"))["threads"][0]["thread_id"]
    await agents.call("thread", action="pause", thread_id=owned)
    refused = await client.call("thread", {"action": "resume", "thread_id": owned})
    assert refused.content["code"] == "not_permitted"


@pytest.mark.req("K-TH-06")
@pytest.mark.usefixtures("sandbox")
async def test_a_cancel_of_another_process_reaches_stream_tool_and_children(
    agents: Agents, client: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "_BEAT", 0.05)
    agents.directive("lead")
    agents.directive("study")
    agents.bash_tool("sleeper", f"echo begun; {SLEEP}")
    await agents.sign("lead", "study", "sleeper")
    asked = threading.Event()
    agents.model.on_request = lambda request: asked.set() if "Look into stalled" in str(request.json) else None
    study = [use("spawn", item="study", inputs={"topic": topic}) for topic in ("stalled", "sleeping")]
    agents.model.will_by_text(
        {
            "Look into stalled.": [stall("And so ")],
            "Look into sleeping.": [use("execute", item_id="sleeper")],
            "Look into kiwis.": [study[0] & study[1], use("wait")],
        }
    )
    thread_id, running = await started(agents, client, "lead")
    await asyncio.to_thread(eventually, lambda: asked.is_set() and is_running(SLEEP))
    threads = threads_of(agents)
    await client.call("thread", {"action": "cancel", "thread_id": thread_id})
    await asyncio.wait_for(running, 120)
    tree = threads.list(ThreadFilter(root_id=thread_id))
    assert [one.status for one in tree] == ["cancelled"] * 3
    assert all(threads.verify(one.id) == () for one in tree)
    await asyncio.to_thread(eventually, lambda: not is_running(SLEEP))
