"""Attacks on threads, and faults that must not leave one stuck."""

from __future__ import annotations

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use, use_text

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.errors import LeaseLost
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.work import ThreadWork

pytestmark = pytest.mark.usefixtures("loopback")


async def test_a_provider_that_a_model_wrote_is_never_used(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    config = {**agents.model.config("openai_chat")}
    manifest: JsonObject = {
        "tool_id": "evil_llm", "tool_type": "runtime", "executor": "http_client", "version": "1.0.0",
        "description": "x", "config": config, "location": "user",
    }  # fmt: skip
    model = Kernel(agents.project, user=agents.user, is_owner=False, surface="mcp")
    try:
        made = await model.call("execute", {"action": "create", "item_id": "evil_llm", "parameters": manifest})
        assert not made.is_error, made.content
        done = await agents.start("study", model="evil_llm/scripted-1")
    finally:
        await model.aclose()
    assert (done["status"], done["code"]) == ("failed", "signature_refused"), done
    assert agents.model.requests == []


async def test_a_model_cannot_touch_the_threads_of_the_owner(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Which?"))
    waiting = await agents.start("study")
    model = Kernel(agents.project, user=agents.user, is_owner=False, surface="mcp")
    try:
        for action in ("show", "resume", "cancel", "export"):
            answer = await model.call("thread", {"action": action, "thread_id": waiting["thread_id"]})
            assert answer.content["code"] == "not_permitted", answer.content
        listed = await model.call("thread", {"action": "list"})
    finally:
        await model.aclose()
    assert listed.content["threads"] == []


async def test_a_thread_cannot_start_an_unsigned_directive(agents: Agents) -> None:
    agents.directive("study")
    agents.directive("planted", folder=agents.project / ".ai")
    await agents.sign("study")
    agents.model.will(use("spawn", item="planted"), say("Done."))
    done = await agents.start("study")
    (result,) = [event for event in await agents.events(done["thread_id"]) if event["kind"] == "result"]
    assert result["status"] == "not_permitted", result


async def test_arguments_that_are_nested_too_deeply_are_a_result(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use_text("help", "[" * 5_000 + "]" * 5_000), say("Done."))
    done = await agents.start("study")
    assert done["status"] == "completed", done


async def test_a_process_that_lost_its_lease_writes_nothing(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Which?"))
    waiting = await agents.start("study")
    services = agents.kernel._services
    runner = services.one(ThreadRunner)
    threads = runner.stores.threads
    first = threads.take(waiting["thread_id"], "first", 0)
    second = threads.take(waiting["thread_id"], "second", 10_000_000_000_000)
    work = ThreadWork(services, runner.stores, runner, first, NO_CALLER, lambda _: None)
    await work.sync()
    with pytest.raises(LeaseLost):
        await work.append(NewEvent("resumed", {}))
    assert threads.get(first.id).lease == second.lease


async def test_a_paused_thread_continues_in_the_background_once_it_is_resumed(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Which?"))
    waiting = await agents.start("study")
    runner = agents.kernel._services.one(ThreadRunner)
    threads = runner.stores.threads
    taken = threads.take(waiting["thread_id"], "test", 0)
    paused = threads.append(taken, [NewEvent("limit", {"paused": True})], ThreadChanges(status="paused"))
    threads.release(paused)
    assert await runner.due() == ([], [])
    await agents.call("thread", action="resume", thread_id=waiting["thread_id"])
    assert [one.id for one in (await runner.due())[0]] == [waiting["thread_id"]]
