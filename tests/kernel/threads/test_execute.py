"""`execute` starts threads: `mode: thread` on a directive, a thread item by itself, and inside of another thread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.kernel.provenance import chain_digest

pytestmark = pytest.mark.usefixtures("loopback")
KEPT_NOTE = "echo once >> note.txt; echo '{}'"


def thread_item(agents: Agents, name: str, directive: str) -> None:
    """Write a thread item of the owner."""
    manifest = {
        "tool_id": name,
        "tool_type": "thread",
        "executor": "llm_runtime",
        "version": "1.0.0",
        "description": f"Runs {directive}",
        "config": {"directive": directive},
        "parameters": [{"name": "topic", "type": "string"}],
    }
    (agents.user / "tools" / f"{name}.yaml").write_text(json.dumps(manifest))


@pytest.mark.req("K-TH-01")
async def test_a_directive_is_returned_and_with_mode_thread_it_is_run(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    program = await agents.call("execute", item_id="study", item_type="directive")
    assert "Look into" in json.dumps(program.content["result"])
    assert agents.model.requests == []
    agents.model.will(say("Birds."))
    done = await agents.call("execute", item_id="study", mode="thread", parameters={"topic": "birds"})
    content = done.content
    assert (content["status"], content["result"], content["finish_reason"]) == ("success", "Birds.", "stop"), content
    assert {"tool_id", "action", "execution_time_ms", "thread_id"} <= content.keys()
    assert content["usage"]["turns"] == 1  # type: ignore[index,call-overload]  # it is an object
    assert "Look into birds." in json.dumps(agents.model.requests[0].json)


async def test_a_call_that_does_not_wait_is_answered_at_once(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    started = await agents.call("execute", item_id="study", mode="thread", wait=False)
    content = started.content
    assert content["status"] == "queued"
    assert content["transcript_path"] == f".ai/threads/{content['thread_id']}/transcript.jsonl"
    assert {"thread_id", "status", "started_at", "transcript_path"} <= content.keys()
    assert agents.model.requests == []


async def test_a_thread_item_runs_without_a_mode(agents: Agents) -> None:
    agents.directive("study")
    thread_item(agents, "student", "study")
    await agents.sign("study", "student")
    agents.model.will(say("Birds."))
    done = await agents.call("execute", item_id="student", parameters={"topic": "birds"})
    assert (done.content["status"], done.content["result"]) == ("success", "Birds."), done.content
    assert done.content["thread_id"]
    started = await agents.call("execute", item_id="student", wait=False)
    assert started.content["status"] == "queued", started.content


async def test_a_thread_that_reaches_a_limit_returns_what_it_has(agents: Agents) -> None:
    agents.directive("study", limits="<limits><turns>1</turns></limits>")
    await agents.sign("study")
    agents.model.will(say("Half of it.") & use("help"))
    done = await agents.call("execute", item_id="study", mode="thread")
    assert done.is_error
    assert (done.content["status"], done.content["finish_reason"]) == ("exhausted", "limit"), done.content
    assert (done.content["code"], done.content["result"]) == ("turns_exceeded", "Half of it.")


async def test_a_tool_cannot_run_as_a_thread(agents: Agents) -> None:
    agents.bash_tool("echo", "cat")
    for words in ({"mode": "thread"}, {"wait": False}):
        refused = await agents.call("execute", item_id="echo", **words)
        assert refused.content["code"] == "not_callable", refused.content


@pytest.mark.usefixtures("sandbox")
async def test_a_waiting_thread_item_names_the_approval(agents: Agents) -> None:
    agents.directive("study")
    thread_item(agents, "student", "study")
    agents.bash_tool("keep_note", KEPT_NOTE, mutates_state=True, needs={"write": ["."]})
    await agents.sign("study", "student", "keep_note")
    agents.model.will(*[use("execute", item_id="keep_note", parameters={})] * 2)
    refused = await agents.call("execute", item_id="student")
    listed = await agents.call("approvals", action="list")
    (approval,) = dict[str, Any](listed.content)["approvals"]
    assert (refused.content["code"], refused.exit_code) == ("thread_waiting", 6), refused.content
    assert refused.content["approvals"] == [approval["approval_id"]]
    waiting = await agents.call("execute", item_id="study", mode="thread")
    assert (waiting.content["status"], waiting.content["waits_for"]) == ("waiting", "approval")
    assert waiting.content["approvals"]


async def test_a_thread_inside_of_a_thread_has_its_rights_and_budget(agents: Agents) -> None:
    agents.directive("lead", limits="<limits><tokens>50000</tokens></limits>")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into one.": [say("The child is done.")],
            "Look into kiwis.": [
                use("execute", item_id="study", item_type="directive", parameters={"topic": "two"}),
                use("execute", item_id="study", mode="thread", parameters={"topic": "one"}),
                say("Both done."),
            ],
        }
    )
    done = await agents.start("lead")
    assert (done["status"], done["result"]) == ("completed", "Both done."), done
    events = await agents.events(done["thread_id"])
    program, child = [event["part"]["content"] for event in events if event["kind"] == "result"]
    assert "Look into two." in program
    assert "The child is done." in child
    spawned = [event for event in events if event["kind"] == "spawned"]
    assert len(spawned) == 1
    shown = await agents.call("thread", action="show", thread_id=spawned[0]["thread_id"])
    assert shown.content["parent_id"] == done["thread_id"]
    assert shown.content["limits"]["tokens"] < 50_000  # type: ignore[index,call-overload,operator]  # an object
    assert done["usage"]["input_tokens"] == 400


async def test_a_thread_may_not_start_what_its_directive_does_not_let_it_spawn(agents: Agents) -> None:
    agents.directive("lead", permissions=ALL_TOOLS.replace('<execute resource="spawn"/>', ""))
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will(use("execute", item_id="study", mode="thread"), say("Refused."))
    done = await agents.start("lead")
    events = await agents.events(done["thread_id"])
    (result,) = [event for event in events if event["kind"] == "result"]
    assert result["status"] == "not_permitted", result


async def test_a_changed_directive_is_a_changed_thread_in_plan_chain_and_lock(agents: Agents) -> None:
    agents.directive("study")
    thread_item(agents, "student", "study")
    await agents.sign("study", "student")
    catalog = agents.kernel.catalog()
    digests = [chain_digest(catalog.resolve("student"))]
    plans = [(await agents.read("execute", item_id="student", dry_run=True))["plan"]]
    agents.directive("study", limits="<limits><turns>3</turns></limits>")
    await agents.sign("study")
    digests.append(chain_digest(catalog.resolve("student")))
    plans.append((await agents.read("execute", item_id="student", dry_run=True))["plan"])
    assert digests[0] != digests[1]
    assert plans[0] != plans[1]
    refused = await agents.call("execute", item_id="student", frozen=True)
    assert refused.content["code"] == "lock_mismatch", refused.content
    assert agents.model.requests == []


@pytest.mark.req("K-GI-01")
@pytest.mark.usefixtures("processes")
async def test_git_checkpoint_lists_checkpoints_inside_a_thread(agents: Agents) -> None:
    agents.model.will(use("execute", item_id="checkpoints"), use("return", reason="no_changes", state="unchanged"))
    done = await agents.start("git_checkpoint", inputs={"operation": "change"})
    assert (done["status"], done["result"]["state"]) == ("completed", "unchanged"), done
    assert r"\"checkpoints\":[]" in json.dumps(agents.model.requests[-1].messages)
    agents.directive("study", permissions='<execute resource="tool" id="other"/>')
    await agents.sign("study")
    agents.model.will(use("execute", item_id="checkpoints"), say("Refused."))
    refused = await agents.start("study")
    results = [one for one in await agents.events(refused["thread_id"]) if one["kind"] == "result"]
    assert [one["status"] for one in results] == ["not_permitted"]


async def test_a_newer_version_elsewhere_is_a_warning(agents: Agents) -> None:
    agents.directive("study")
    agents.directive("study", folder=agents.project / ".ai")
    path = agents.user / "directives" / "study.md"
    assert "version_warning" not in await agents.read("execute", item_id="study", item_type="directive")
    path.write_text(path.read_text().replace('version="1.0.0"', 'version="1.2.0"'))
    ran = await agents.read("execute", item_id="study", item_type="directive")
    assert ran["version_warning"] == "user/local/study@1.2.0 is newer than project/local/study@1.0.0, which is used"
    assert ran["status"] == "ready"
    assert (await agents.read("load", item_id="study"))["version_warning"] == ran["version_warning"]
