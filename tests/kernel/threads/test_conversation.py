"""A conversation: a message starts each turn, a turn can be stopped, and the model can be changed."""

from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.plugins.scripted_model import MODEL, fail, say, stall, use

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.threads import ThreadEvent
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.threads.wake import start_worker

pytestmark = pytest.mark.usefixtures("loopback")


async def talk(agents: Agents, message: str, thread_id: str, **words: Any) -> tuple[str, list[str], dict[str, Any]]:
    """Send a message, and return the streamed text, the kinds of the events, and the answer."""
    request = {"action": "resume", "thread_id": thread_id, "message": message, "wait": True, **words}
    text = ""
    kinds: list[str] = []
    answer: dict[str, Any] = {}
    async for event in agents.kernel.thread_events(request):
        match event:
            case ReplyDelta(text=piece):
                text += piece
            case ThreadEvent(kind=kind):
                kinds.append(kind)
            case Answer(content=content):
                answer = dict(content)
    return text, kinds, answer


async def new(agents: Agents) -> str:
    started = await agents.call("thread", action="start", item_id="chat", conversation=True)
    assert started.content["status"] == "waiting", started.content
    return str(started.content["thread_id"])


async def test_each_message_is_a_turn_that_ends_waiting_for_the_next(agents: Agents) -> None:
    thread_id = await new(agents)
    assert agents.model.requests == []
    agents.model.will(say("Kiwis are birds."), say("They cannot fly."))
    text, kinds, answer = await talk(agents, "What are kiwis?", thread_id)
    assert text == "Kiwis are birds."
    assert kinds == ["injected", "resumed", "model", "asked"]
    assert (answer["status"], answer["waits_for"], answer["usage"]["turns"]) == ("waiting", "message", 1)
    await talk(agents, "Do they fly?", thread_id)
    sent = json.dumps(agents.model.requests[1].messages)
    assert all(text in sent for text in ("What are kiwis?", "Kiwis are birds.", "Do they fly?"))


async def test_a_stopped_turn_keeps_its_text_and_the_conversation_continues(agents: Agents) -> None:
    thread_id = await new(agents)
    agents.model.will(stall("One, two, three, four"), say("Yes."))
    request: JsonObject = {"action": "resume", "thread_id": thread_id, "message": "Count.", "wait": True}
    async with aclosing(agents.kernel.thread_events(request)) as events:
        async for event in events:
            if isinstance(event, ReplyDelta):
                break
    shown: Any = (await agents.call("thread", action="show", thread_id=thread_id)).content
    assert (shown["status"], shown["waits_for"]) == ("waiting", "message")
    (reply,) = [event for event in shown["events"] if event["kind"] == "model"]
    assert reply["is_stopped"]
    assert reply["parts"][0]["text"].startswith("One, ")
    costs: Any = (await agents.call("thread", action="costs", thread_id=thread_id)).content
    reserved, settled = costs["entries"]
    assert settled["kind"] == "settle", "a stopped turn is charged by an estimate, not at its reservation"
    assert costs["usage"]["estimated"]
    assert 0 < settled["output_tokens"] < 10
    assert settled["input_tokens"] < reserved["reserved_tokens"] // 2
    text, _, answer = await talk(agents, "Are you there?", thread_id)
    assert (text, answer["status"]) == ("Yes.", "waiting")
    assert "One, " in json.dumps(agents.model.requests[-1].messages)
    verified = await agents.call("thread", action="verify", thread_id=thread_id)
    assert verified.content["valid"], verified.content


@pytest.mark.usefixtures("sandbox")
async def test_a_call_that_was_stopped_has_a_result_and_is_not_made_again(agents: Agents) -> None:
    agents.bash_tool("nap", "sleep 600")
    await agents.sign("nap")
    thread_id = await new(agents)
    agents.model.will(use("execute", item_id="nap"), say("I stopped."))
    request: JsonObject = {"action": "resume", "thread_id": thread_id, "message": "Sleep.", "wait": True}
    async with aclosing(agents.kernel.thread_events(request)) as events:
        async for event in events:
            if isinstance(event, ThreadEvent) and event.kind == "model":
                break
    text, kinds, _ = await talk(agents, "Go on.", thread_id)
    assert text == "I stopped."
    assert "began" not in kinds
    sent = json.dumps(agents.model.requests[-1].messages)
    assert "was cancelled" in sent or "stopped the turn" in sent, "the run has begun, or not"


async def test_a_failed_request_leaves_the_conversation_open(agents: Agents) -> None:
    thread_id = await new(agents)
    agents.model.will(fail(401), say("Here."))
    _, kinds, answer = await talk(agents, "Hello", thread_id)
    assert (kinds[-2:], answer["status"]) == (["model_failed", "asked"], "waiting")
    assert (await talk(agents, "Again", thread_id))[0] == "Here."


async def test_another_model_is_used_from_the_next_turn_on(agents: Agents) -> None:
    write_provider(agents.user, agents.model, "anthropic", name="other_llm")
    thread_id = await new(agents)
    agents.model.will(say("One."), say("Two."))
    await talk(agents, "First", thread_id)
    _, kinds, answer = await talk(agents, "", thread_id, model=f"other_llm/{MODEL}")
    assert (kinds, answer["model"]) == ([], f"other_llm/{MODEL}")
    await talk(agents, "Second", thread_id)
    assert [request.dialect for request in agents.model.requests] == ["openai_chat", "anthropic"]


async def test_a_question_of_the_model_is_answered_in_the_conversation(agents: Agents) -> None:
    thread_id = await new(agents)
    agents.model.will(use("ask", question="Which one?", choices=["red", "green"]), say("Green it is."))
    _, _, waiting = await talk(agents, "Paint it.", thread_id)
    (question,) = waiting["questions"]
    assert question["choices"] == ["red", "green"]
    request = {"action": "answer", "question_id": question["question_id"], "answer": "green", "wait": True}
    events = [event async for event in agents.kernel.thread_events(request)]
    assert "".join(event.text for event in events if isinstance(event, ReplyDelta)) == "Green it is."


async def test_a_thread_yields_its_events_and_then_its_answer(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("Kiwis are birds."))
    events = [event async for event in agents.kernel.thread("study", {"topic": "birds"}, limits={"turns": 3})]
    assert "".join(event.text for event in events if isinstance(event, ReplyDelta)) == "Kiwis are birds."
    assert [e.kind for e in events if isinstance(e, ThreadEvent)] == ["created", "prompt", "resumed", "model", "ended"]
    last = events[-1]
    assert isinstance(last, Answer)
    assert (last.content["status"], last.content["result"]) == ("completed", "Kiwis are birds.")


async def test_leaving_the_loop_early_cancels_the_thread(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(stall("One, two, three, four"))
    async with aclosing(agents.kernel.thread("study")) as events:
        thread_id = (await anext(events)).thread_id  # type: ignore[union-attr]
        async for event in events:
            if isinstance(event, ReplyDelta):
                break
    shown = await agents.call("thread", action="show", thread_id=thread_id)
    assert shown.content["status"] == "cancelled"


@pytest.mark.usefixtures("processes")
async def test_a_watcher_sees_the_text_while_the_worker_runs_the_thread(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(stall("One, two, three, four"))
    started = (await agents.call("thread", action="start", item_id="study")).content
    start_worker(agents.user)
    seen, kinds = "", []
    async with aclosing(agents.kernel.thread_events(_watch(started["thread_id"]))) as events:
        async for event in events:
            if isinstance(event, ThreadEvent):
                kinds.append(event.kind)
            if isinstance(event, ReplyDelta):
                seen += event.text
                if "two" in seen:
                    break
    assert kinds == ["created", "prompt", "resumed"]
    assert seen.startswith("One, two")
    running = await agents.call("thread", action="show", thread_id=started["thread_id"])
    assert running.content["status"] == "running"
    await agents.call("thread", action="cancel", thread_id=started["thread_id"])
    ended = [event async for event in agents.kernel.thread_events(_watch(started["thread_id"]))]
    assert isinstance(ended[-1], Answer)
    assert ended[-1].content["status"] == "cancelled"


def _watch(thread_id: Any) -> dict[str, Any]:
    return {"action": "watch", "thread_id": thread_id, "seconds": 60}
