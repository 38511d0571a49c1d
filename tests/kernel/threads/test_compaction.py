"""Compaction: a conversation that fills the context is summarized, its journal stays, and it cannot go on forever."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.kernel.threads.test_limits import answered, forever
from tests.plugins.scripted_model import MODEL, ModelRequest, ScriptedTurn, say, use

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import Message, TextPart, ToolCallPart, ToolResultPart
from kiwi_mcp.kernel.threads.state import ThreadState

pytestmark = pytest.mark.usefixtures("loopback")
WINDOW = 32_768
FULL = (28_000, 0, 20)
SUMMARY = "You have summarized it."


def is_summary(request: ModelRequest) -> bool:
    return "Summarize this part" in json.dumps(request.messages[0])


async def kinds(agents: Agents, thread_id: str) -> list[str]:
    return [event["kind"] for event in await agents.events(thread_id)]


@pytest.fixture
async def study(agents: Agents) -> Agents:
    model: JsonObject = {"context": WINDOW, "max_output": 200, "price": "free"}
    write_provider(agents.user, agents.model, "openai_chat", models={MODEL: model})
    agents.directive("study", limits="<limits><tokens>10000000</tokens></limits>")
    await agents.sign("study")
    return agents


async def test_a_full_conversation_is_compacted_and_the_program_and_the_last_turns_stay(study: Agents) -> None:
    topics = iter("abcdefgh")

    def answer(request: ModelRequest) -> ScriptedTurn:
        if is_summary(request):
            return say(SUMMARY)
        topic = next(topics)
        if topic == "f":
            return say("Done.")
        turn = use("help", topic=f"topic-{topic}")
        return replace(turn, usage=FULL) if topic == "d" else turn

    study.model.default = answer
    done = await study.start("study", inputs={"topic": "birds"})
    assert (done["status"], done["usage"]["turns"]) == ("completed", 6), done
    assert (await kinds(study, done["thread_id"])).count("compacted") == 1
    (summary,) = [request for request in study.model.requests if is_summary(request)]
    assert summary.json.get("tools") in (None, [])
    assert "topic-a" in json.dumps(summary.json)
    assert "topic-c" not in json.dumps(summary.json), "the last two turns are not summarized"
    after = json.dumps(study.model.requests[5].messages)
    assert "Look into birds." in after
    assert SUMMARY in after
    assert "topic-a" not in after
    assert "topic-c" in after
    assert "topic-d" in after
    assert "topic-a" in json.dumps(await study.events(done["thread_id"])), "the journal stays"
    verified = await study.read("thread", action="verify", thread_id=done["thread_id"])
    assert verified["valid"]


async def test_a_message_of_the_owner_is_never_summarized(study: Agents) -> None:
    study.model.will(use("ask", question="Which?"))
    waiting = await study.start("study")
    calls = forever()

    def answer(request: ModelRequest) -> ScriptedTurn:
        if is_summary(request):
            return say(SUMMARY)
        if SUMMARY in json.dumps(request.messages):
            return say("Done.")
        return replace(calls(request), usage=FULL if len(request.messages) > 8 else (100, 0, 20))

    study.model.default = answer
    await study.call("thread", action="resume", thread_id=waiting["thread_id"], message="Only the brown ones!")
    done = await answered(study, waiting, "this")
    assert done["status"] == "completed", done
    assert "compacted" in await kinds(study, done["thread_id"])
    assert "Only the brown ones!" in json.dumps(study.model.requests[-1].messages)


async def test_a_model_that_always_fills_the_window_is_asked_about(study: Agents) -> None:
    calls, numbers = forever(), itertools.count()

    def answer(request: ModelRequest) -> ScriptedTurn:
        turn = say(f"{SUMMARY} {next(numbers)}") if is_summary(request) else calls(request)
        is_first = len(request.messages) < 7 and SUMMARY not in json.dumps(request.messages)
        return turn if is_first else replace(turn, usage=FULL)

    study.model.default = answer
    waiting = await study.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "budget"), waiting
    assert (await kinds(study, waiting["thread_id"])).count("compacted") == 2, "two that gain too little"
    more = await answered(study, waiting, "continue")
    assert (more["status"], more["usage"]["turns"]) == ("waiting", waiting["usage"]["turns"] + 1)
    done = await answered(study, more, "stop")
    assert (done["status"], done["code"]) == ("exhausted", "context_exceeded")


async def test_a_first_message_that_fills_the_window_is_asked_about(study: Agents) -> None:
    study.model.default = lambda _: say("never")
    waiting = await study.start("study", inputs={"topic": "x" * 150_000})
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "budget"), waiting
    assert study.model.requests == []


def test_calls_and_results_stay_together() -> None:
    def turn(number: int) -> list[Any]:
        return [
            Message("assistant", (ToolCallPart(f"c{number}", "help", "{}"),)),
            Message("tool", (ToolResultPart(f"c{number}", "help", "x"),)),
        ]

    said = Message("user", (TextPart("Mind the gap."),))
    state = ThreadState(messages=[Message("user", (TextPart("program"),)), *turn(1), said, *turn(2), *turn(3)])
    pinned, middle, tail = state.split()
    assert (pinned, middle, tail) == ([said], turn(1), [*turn(2), *turn(3)])
