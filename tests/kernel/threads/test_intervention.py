"""Messages at the last moment, forks and replays from a turn."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.calls import Caller, CallOrigin, Principal
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.threads import NewEvent, ThreadEvent, ThreadObserver
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.store.threads import Threads

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("loopback")]
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
    told = await agents.call(
        "thread", owner, action="resume", thread_id=begun["thread_id"], message="Hello.", wait=True
    )
    assert (told.content["status"], told.content["waits_for"]) == ("waiting", "message")
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
