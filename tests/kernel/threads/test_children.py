"""Children: results, what they have when a wait times out, how many there may be, and detached ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import ScriptedTurn, say, stall, use

from kiwi_mcp.domain.calls import NO_CALLER
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.threads import runner as runner_module
from kiwi_mcp.kernel.threads import wake
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.verbs import thread_tools
from kiwi_mcp.store.threads import ThreadFilter

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("loopback")]


def spawn(topic: str, **words: object) -> ScriptedTurn:
    return use("spawn", item="study", inputs={"topic": topic}, **words)


async def results(agents: Agents, thread_id: str) -> list[dict[str, Any]]:
    events = await agents.events(thread_id)
    return [json.loads(event["part"]["content"]) for event in events if event["kind"] == "result"]


async def test_a_wait_that_times_out_returns_what_there_is_and_detached_children_continue(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into quick.": [say("Quick.")],
            "Look into slow.": [say("So far: nothing.") & use("load", item_id="study"), stall("And now ")],
            "Look into later.": [say("Later.")],
            "Look into kiwis.": [
                spawn("quick") & spawn("slow") & spawn("later", detached=True),
                use("wait", timeout=0.5),
                say("Enough."),
            ],
        }
    )
    done = await agents.start("lead")
    assert (done["status"], done["result"]) == ("completed", "Enough."), done
    waited = (await results(agents, done["thread_id"]))[-1]
    assert waited["status"] == "timeout"
    assert [(one["status"], one["result"]) for one in waited["threads"]] == [
        ("completed", "Quick."),
        ("running", "So far: nothing."),
    ]
    runner = agents.kernel._services.one(ThreadRunner)
    tree = ThreadFilter(root_id=done["thread_id"])
    later, slow, quick, _ = runner.stores.threads.list(tree)
    assert (quick.status, slow.status, later.status) == ("completed", "cancelled", "queued")
    await agents.call("worker", until_idle=True)
    later = runner.stores.threads.get(later.id)
    assert (later.status, later.result) == ("completed", "Later.")
    for one in runner.stores.threads.list(tree):
        assert (one.reserved, runner.stores.threads.verify(one.id)) == (0, ())


async def test_a_tree_is_cancelled_with_its_detached_children(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text({"Look into kiwis.": [spawn("later", detached=True), use("ask", question="Go on?")]})
    waiting = await agents.start("lead")
    threads = agents.kernel._services.one(ThreadRunner).stores.threads
    await agents.call("thread", action="cancel", thread_id=waiting["thread_id"])
    later, root = threads.list(ThreadFilter(root_id=waiting["thread_id"]))
    assert (root.status, later.status) == ("cancelled", "queued")
    await agents.call("thread", action="cancel", thread_id=waiting["thread_id"], tree=True)
    assert threads.get(later.id).status == "cancelled"


@pytest.mark.parametrize(("limits", "made", "named"), [({}, 5, "children"), ({"threads": 2}, 2, "threads")])
async def test_children_at_once_and_threads_of_a_tree_are_limited(
    agents: Agents, limits: dict[str, int], made: int, named: str
) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    several = spawn("one")
    for _ in range(5):
        several &= spawn("one")
    asked = [use("ask", question="Which?")] * 6
    agents.model.will_by_text({"Look into kiwis.": [several, say("Done.")], "Look into one.": asked})
    done = await agents.start("lead", limits=limits)
    found = await results(agents, done["thread_id"])
    assert [one.get("status") for one in found].count("started") == made
    refused = [one for one in found if one.get("code") == "budget_exceeded"]
    assert len(refused) == 6 - made
    assert f"`{named}`" in refused[0]["message"]


async def test_a_wait_for_a_child_that_asks_ends_in_the_worker(agents: Agents, monkeypatch: pytest.MonkeyPatch) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into one.": [say("Half. ") & use("ask", question="Which?")],
            "Look into kiwis.": [spawn("one"), use("wait", timeout=3_600), say("Enough.")],
        }
    )
    woken: list[object] = []
    monkeypatch.setattr(wake, "start_worker", woken.append)
    waiting = await agents.start("lead")
    assert (waiting["waits_for"], woken) == ("child", [agents.user])
    runner = agents.kernel._services.one(ThreadRunner)
    due_at = runner.stores.threads.get(waiting["thread_id"]).wake_at
    assert due_at > now_ms()
    assert (await runner.due())[0] == []
    for module in (runner_module, thread_tools):
        monkeypatch.setattr(module, "now_ms", lambda: due_at)
    ((thread, *_), _) = await runner.due()
    assert thread.id == waiting["thread_id"]
    await runner.run(thread.id, NO_CALLER)
    done = await agents.read("thread", action="show", thread_id=thread.id)
    assert (done["status"], done["result"]) == ("completed", "Enough.")
    waited = (await results(agents, thread.id))[-1]
    assert (waited["status"], waited["threads"][0]["result"]) == ("timeout", "Half. ")
