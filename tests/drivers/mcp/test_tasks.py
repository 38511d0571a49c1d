"""Server tasks: followed to their end, and cancelled when no caller waits."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.calls import Answers, Questions
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome, Progress
from kiwi_mcp.drivers.mcp.driver import LATEST, SOONEST, USUAL, poll_after

QUESTION: JsonObject = {"method": "elicitation/create", "params": {"message": "Sure?"}}
YES: JsonObject = {"action": "accept", "content": {}}


@pytest.mark.usefixtures("processes")
def test_a_task_is_followed_to_its_end_and_reports_progress(bench: Bench) -> None:
    response: list[Progress] = []
    chain = bench.chain(bench.server("modern", "tasks"), "task")
    outcome = bench.run(bench.call(chain, {"polls": 2}, report=response.append))

    assert (outcome.status, outcome.result) == ("success", "{}")
    assert outcome.passed == {"content": [{"type": "text", "text": "{}"}]}
    assert [step.message for step in response] == ["begun", "1 left", "0 left"]
    assert [step.done for step in response] == [1, 2, 3]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("end", "status", "words", "details"),
    [
        ("failed", "error", "it broke", {"task": "failed", "mcp_code": -32601}),
        ("cancelled", "cancelled", "by the administrator", {"task": "cancelled"}),
        ("gone", "unavailable", "Task not found", {"task": "gone", "mcp_code": -32602}),
    ],
)
def test_each_end_of_a_task_has_its_own_status(
    bench: Bench, end: str, status: str, words: str, details: JsonObject
) -> None:
    outcome = bench.ask(bench.server("modern", "tasks"), "task", {"end": end})

    assert (outcome.status, outcome.details) == (status, details)
    assert words in outcome.message
    assert outcome.suggestion


@pytest.mark.usefixtures("processes")
def test_a_task_asks_each_question_once_and_continues_with_the_answer(bench: Bench) -> None:
    heard: list[Questions] = []

    async def ask(questions: Questions) -> Answers:
        heard.append(questions)
        return dict.fromkeys(questions, YES)

    chain = bench.chain(bench.server("modern", "tasks"), "task")
    outcome = bench.run(bench.call(chain, {"questions": {"a": QUESTION, "b": QUESTION}, "polls": 3}, ask=ask))

    assert json.loads(str(outcome.result)) == {"a": YES, "b": YES}
    assert [sorted(questions) for questions in heard] == [["a", "b"]]


@pytest.mark.usefixtures("processes")
def test_a_task_with_an_unanswerable_question_is_cancelled(bench: Bench) -> None:
    outcome = bench.ask(bench.server("modern", "tasks"), "task", {"questions": {"a": QUESTION}})

    assert (outcome.status, outcome.details["input_required"]) == ("error", True)
    assert "tasks/cancel null" in bench.notes


@pytest.mark.usefixtures("processes")
@pytest.mark.req("I4")
def test_a_task_that_times_out_is_cancelled(bench: Bench) -> None:
    outcome = bench.ask(bench.server("modern", "tasks"), "task", {"polls": 10_000}, timeout=0.5)

    assert outcome.status == "timeout"
    assert "tasks/cancel null" in bench.notes


@pytest.mark.usefixtures("processes")
def test_a_task_is_cancelled_when_its_caller_leaves(bench: Bench) -> None:
    async def scenario() -> None:
        begun = asyncio.Event()
        chain = bench.chain(bench.server("modern", "tasks"), "task")
        call = asyncio.create_task(bench.call(chain, {"polls": 10_000}, report=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 120)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    bench.run(scenario())
    assert "tasks/cancel null" in bench.notes


@pytest.mark.usefixtures("processes")
def test_tasks_of_a_server_without_the_extension_are_not_followed(bench: Bench) -> None:
    """The client did not declare tasks, so the server may not answer with one."""

    async def scenario() -> Outcome:
        return await bench.call(bench.chain(bench.server("modern"), "task"))

    outcome = bench.run(scenario())
    assert (outcome.status, "does not know" in outcome.message) == ("error", True)


@pytest.mark.parametrize(
    ("interval", "seconds"),
    [
        (None, USUAL), ("5", USUAL), (True, USUAL), (0, SOONEST), (-1, SOONEST), (5_000, 5.0), (10**400, LATEST),
        (float("nan"), LATEST), (float("inf"), LATEST),
    ],
)  # fmt: skip
def test_a_task_is_polled_within_bounds(interval: float, seconds: float) -> None:
    assert poll_after({"status": "working", "pollIntervalMs": interval}) == seconds
