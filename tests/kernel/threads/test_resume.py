"""Resuming a thread that another process had."""

from __future__ import annotations

import time

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.store.kernel_lock import KernelLock
from kiwi_mcp.store.threads import STALE_MS

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("loopback")]


async def test_the_lease_of_a_lost_process_is_reported_and_waited_for(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Sure?"), say("Done."))
    waiting = await agents.start("study", Caller(is_owner=True))
    threads = agents.kernel._services.one(ThreadRunner).stores.threads
    question = waiting["questions"][0]["question_id"]
    await agents.call("thread", Caller(is_owner=True), action="answer", question_id=question, answer="yes")
    steps: list[Progress] = []
    beat_at = time.time_ns() // 1_000_000 - STALE_MS + 700
    threads.take(waiting["thread_id"], "elsewhere/abc", beat_at)
    owner = Caller(steps.append, is_owner=True)
    done = await agents.call("thread", owner, action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done.content["status"], done.content["result"]) == ("completed", "Done.")
    assert steps[0].message.startswith("another process has the thread until ")
    assert sum("another process" in step.message for step in steps) == 1


async def test_a_thread_that_a_living_process_runs_is_refused(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Sure?"))
    waiting = await agents.start("study", Caller(is_owner=True))
    threads = agents.kernel._services.one(ThreadRunner).stores.threads
    thread_id = waiting["thread_id"]

    def beat(_: Progress) -> None:
        threads.beat([thread_id], "elsewhere/abc", time.time_ns() // 1_000_000)

    threads.take(thread_id, "elsewhere/abc", time.time_ns() // 1_000_000 - 5)
    refused = await agents.call("thread", Caller(beat, is_owner=True), action="resume", thread_id=thread_id)
    assert refused.content["code"] == "thread_taken"


async def test_a_thread_of_a_process_that_was_killed_here_continues_at_once(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Sure?"))
    waiting = await agents.start("study", Caller(is_owner=True))
    killed = KernelLock(agents.user)
    threads = agents.kernel._services.one(ThreadRunner).stores.threads
    threads.take(waiting["thread_id"], killed.name(), time.time_ns() // 1_000_000)
    killed.close()  # as the system does
    steps: list[Progress] = []
    owner = Caller(steps.append, is_owner=True)
    resumed = await agents.call("thread", owner, action="resume", thread_id=waiting["thread_id"], wait=True)
    assert resumed.content["waits_for"] == "question", resumed.content
    assert not any("another process" in step.message for step in steps)
