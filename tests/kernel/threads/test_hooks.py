"""Hooks of threads: the first that fits runs as a child thread, and its action decides."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import closing
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.kernel.threads.test_limits import answered, forever
from tests.plugins.scripted_model import ScriptedTurn, fail, say, use

from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.threads import Threads

pytestmark = pytest.mark.usefixtures("loopback")
ACTION = '<outputs><output name="action" type="string" required="true">What to do</output></outputs>'


def hook(when: str, directive: str = "guard", inner: str = "") -> str:
    """Return the XML of one hook."""
    return f"<hook><when>{when}</when><directive>{directive}</directive>{inner}</hook>"


async def hooked(agents: Agents, *hooks: str, limits: str = "", guard: str = "") -> None:
    """Write a directive with hooks, and the directive `guard` that they run."""
    agents.directive("study", limits=f"{limits}<hooks>{''.join(hooks)}</hooks>")
    agents.directive("guard", limits=guard, outputs=ACTION, permissions="")
    await agents.sign("guard", "study")


async def hook_events(agents: Agents, thread_id: str) -> list[dict[str, Any]]:
    return [event for event in await agents.events(thread_id) if event["kind"] == "hooked"]


BEFORE_STEP = "event.name == 'before_step'"
BEFORE = hook(BEFORE_STEP)
EXPECTED = {
    "continue": ("completed", "stop"),
    "retry": ("completed", "stop"),
    "skip": ("completed", "stop"),
    "fail": ("failed", "error"),
    "abort": ("cancelled", "cancelled"),
    "dance": ("failed", "error"),
}


@pytest.mark.req("K-TH-04")
@pytest.mark.parametrize("action", EXPECTED)
async def test_the_action_of_a_hook_before_a_step_decides(agents: Agents, action: str) -> None:
    await hooked(agents, BEFORE)
    agents.model.will(use("return", action=action), say("Done."))
    done = await agents.start("study")
    assert (done["status"], done["finish_reason"]) == EXPECTED[action], done
    assert len(agents.model.requests) == (2 if action in {"continue", "retry"} else 1)
    (event,) = await hook_events(agents, done["thread_id"])
    assert event["action"] == ("fail" if action == "dance" else action)


async def test_a_hook_runs_as_a_child_with_a_small_budget(agents: Agents) -> None:
    await hooked(agents, BEFORE)
    agents.model.will(use("return", action="continue"), say("Done."))
    done = await agents.start("study", limits={"spawns": 0})
    assert done["status"] == "completed", done
    listed = await agents.read("thread", action="list")
    child: Any = listed["threads"][0]
    shown = await agents.read("thread", action="show", thread_id=child["thread_id"])
    assert shown["parent_id"] == done["thread_id"]
    limits: Any = shown["limits"]
    assert (limits["turns"], limits["spend"], limits["spawns"]) == (5, 0.1, 0)


async def test_escalate_asks_the_owner_and_suspend_pauses(agents: Agents) -> None:
    await hooked(agents, BEFORE)
    agents.model.will(use("return", action="escalate"), say("Done."))
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "question")
    done = await answered(agents, waiting, "continue")
    assert (done["status"], done["result"]) == ("completed", "Done.")
    agents.model.will(use("return", action="suspend"), say("Done."))
    paused = await agents.start("study")
    assert paused["status"] == "paused"
    resumed = await agents.call("thread", action="resume", thread_id=paused["thread_id"], wait=True)
    assert resumed.content["status"] == "completed", resumed.content


@pytest.mark.parametrize("fault", ["missing", "hangs", "fails", "no action"])
async def test_a_hook_before_a_step_that_does_not_work_stops_the_step(agents: Agents, fault: str) -> None:
    agents.directive("study", limits=f"<hooks>{BEFORE}</hooks>")
    agents.directive("guard", limits="<limits><duration>1</duration></limits>", outputs=ACTION, permissions="")
    await agents.sign("guard", "study")
    if fault == "missing":
        (agents.user / "directives" / "guard.md").unlink()
    agents.model.will({"hangs": ScriptedTurn(how="silent"), "fails": fail(400)}.get(fault, say("I do not know.")))
    agents.model.will(say("Still not."))
    done = await agents.start("study")
    assert (done["status"], done["code"]) == ("failed", "hook_failed"), done
    assert all("guard" in json.dumps(request.json) for request in agents.model.requests)


async def test_a_child_has_the_hooks_before_a_step_of_its_parent(agents: Agents) -> None:
    deny_child = hook("event.name == 'before_step' and directive.name == 'below'")
    await hooked(agents, deny_child)
    agents.directive("below")
    await agents.sign("below")
    spawn = use("spawn", item="below", inputs={"topic": "one"})
    study = [spawn, use("wait"), say("Done.")]
    agents.model.will_by_text({"Do guard": [use("return", action="abort")], "Do study": study})
    done = await agents.start("study")
    assert done["status"] == "completed", done
    events = await agents.events(done["thread_id"])
    results = [event["part"]["content"] for event in events if event["kind"] == "result"]
    assert '"cancelled"' in results[-1], results


async def test_the_first_hook_that_fits_decides_and_expressions_see_cost_and_limits(agents: Agents) -> None:
    agents.directive("lead")
    names = ("cost.turns &gt; 5", "cost.turns == 1 and limits.turns == 4", BEFORE_STEP)
    await hooked(
        agents,
        hook(names[0], "lead"),
        *(hook(f"event.name == 'before_step' and {when}") for when in names[1:]),
        limits="<limits><turns>4</turns></limits>",
    )
    agents.model.will(
        use("return", action="continue"), use("help"), use("return", action="abort"), say("never"),
    )  # fmt: skip
    done = await agents.start("study")
    assert (done["status"], done["usage"]["turns"]) == ("cancelled", 1), done


async def test_a_hook_for_errors_sees_the_code_and_gets_inputs(agents: Agents) -> None:
    inner = "<inputs><topic>{event.code} of {event.detail}</topic></inputs>"
    await hooked(agents, hook("event.name == 'error' and event.code == 'not_found'", inner=inner))
    agents.model.will(use("nonsense"), use("return", action="fail"))
    done = await agents.start("study")
    assert (done["status"], done["code"]) == ("failed", "hook_failed"), done
    assert "not_found of nonsense" in json.dumps(agents.model.requests[-1].json)


async def test_a_hook_may_have_the_model_asked_again(agents: Agents) -> None:
    await hooked(agents, hook("event.name == 'error' and event.code == 'model_failed'"))
    agents.model.will(fail(400), use("return", action="retry"), say("Done."))
    done = await agents.start("study")
    assert (done["status"], done["result"]) == ("completed", "Done.")


@pytest.mark.parametrize(("action", "turns"), [("continue", 4), ("fail", 2)])
async def test_a_hook_for_limits_decides_before_the_directive(agents: Agents, action: str, turns: int) -> None:
    await hooked(agents, hook("event.name == 'limit'"), limits="<limits><turns>2</turns></limits>")
    calls = forever()
    agents.model.default = lambda request: (
        use("return", action=action) if "Do guard" in json.dumps(request.json) else calls(request)
    )
    done = await agents.start("study")
    assert (done["status"], done["usage"]["turns"]) == ("exhausted", turns), done


async def test_a_resumed_thread_still_has_its_hooks(agents: Agents) -> None:
    await hooked(agents, hook("event.name == 'before_step' and cost.turns == 1"))
    agents.model.will(use("ask", question="Which?"), use("return", action="abort"))
    waiting = await agents.start("study")
    done = await answered(agents, waiting, "this")
    assert done["status"] == "cancelled", done


@pytest.mark.req("K-TH-04")
async def test_a_hook_in_which_the_process_died_continues_and_decides(agents: Agents) -> None:
    await hooked(agents, BEFORE)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()

    def note(_: object) -> None:
        loop.call_soon_threadsafe(asked.set)

    agents.model.on_request = note
    agents.model.will(ScriptedTurn(how="silent"), use("return", action="abort"))
    first = Kernel(agents.project, user=agents.user)
    running = asyncio.create_task(first.call("thread", {"action": "start", "item_id": "study", "wait": True}))
    await asked.wait()
    await first.aclose()
    await asyncio.wait({running})
    child, thread = (await agents.read("thread", action="list"))["threads"]
    assert (await hook_events(agents, thread["thread_id"])) == []
    resumed = await agents.call("thread", action="resume", thread_id=thread["thread_id"], wait=True)
    assert resumed.content["status"] == "cancelled", resumed.content
    assert [one["thread_id"] for one in (await agents.read("thread", action="list"))["threads"]] == [
        child["thread_id"],
        thread["thread_id"],
    ]
    kinds = [event["kind"] for event in await agents.events(thread["thread_id"])]
    assert (kinds.count("hook_began"), kinds.count("spawned"), kinds.count("hooked")) == (2, 1, 1)


@pytest.mark.parametrize("effect", ["at_most_once", "idempotent"])
@pytest.mark.usefixtures("sandbox")
async def test_a_tool_of_a_hook_runs_again_only_if_its_effect_allows_it(agents: Agents, effect: str) -> None:
    called = '<action item_type="tool" item_id="gate_step"/>'
    agents.directive("study", limits=f'<hooks><hook event="before_step">{called}</hook></hooks>')
    agents.bash_tool("gate_step", """echo '{"action": "continue"}'""", effect=effect)
    await agents.sign("study", "gate_step")
    started = await agents.call("thread", action="start", item_id="study")
    thread_id = str(started.content["thread_id"])
    with closing(open_database(default_url(agents.user))) as database:
        rows = Threads(database)
        taken = rows.take(thread_id, "elsewhere/1", time.time_ns() // 1_000_000)
        rows.append(taken, [NewEvent("hook_began", {"key": "before_step", "event": "before_step"})])
        rows.release(taken)
    agents.model.will(*([say("Done.")] if effect == "idempotent" else []))
    done = (await agents.call("thread", action="resume", thread_id=thread_id, wait=True)).content
    assert done["status"] == ("completed" if effect == "idempotent" else "failed"), done
    assert (done.get("code") == "hook_failed") is (effect == "at_most_once")
