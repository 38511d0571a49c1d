"""Calls of threads: at once or in turn, failures as results, loaded tools, checkpoints, text from outside."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from secrets import token_hex
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.kernel.threads.test_limits import answered, forever, limit_rate
from tests.plugins.scripted_model import MODEL, OTHER_MODEL, ModelRequest, ScriptedTurn, say, use, use_text

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel

pytestmark = pytest.mark.usefixtures("loopback")


def run(item: str, **parameters: object) -> ScriptedTurn:
    """Execute an item."""
    return use("execute", item_id=item, parameters=parameters)


async def results(agents: Agents, thread_id: str) -> list[dict[str, Any]]:
    return [event for event in await agents.events(thread_id) if event["kind"] == "result"]


@pytest.mark.req("N7", "F5", "F6")
@pytest.mark.usefixtures("sandbox")
async def test_provider_model_and_tool_are_swapped_by_configuration_alone(agents: Agents) -> None:
    tool = f"tool_{token_hex(4)}"  # a name that nothing can know
    agents.directive("study")
    await agents.sign("study")
    for dialect, model, output in (("openai_chat", MODEL, "A kiwi."), ("anthropic", OTHER_MODEL, "An owl.")):
        tiers: Json = dict.fromkeys(("fast", "balanced", "powerful"), model)
        known: Json = {model: {"context": 32_768, "max_output": 4_096, "price": "free"}}
        write_provider(agents.user, agents.model, dialect, name=f"{dialect}_llm", models=known, tiers=tiers)
        (agents.user / "config.yaml").write_text(f"provider_adapter: {dialect}_llm\n")
        agents.bash_tool(tool, f"echo '{output}'")
        await agents.sign(tool)
        agents.model.will(run(tool), say("Done."))
        done = await agents.start("study")
        assert done["status"] == "completed", done
        asked, last = agents.model.requests[-2:]
        assert (last.dialect, last.json["model"]) == (dialect, model)
        assert output in json.dumps(last.messages[-1])
        # The definitions, the instructions and the conversation are in every request.
        assert asked.tool_names == last.tool_names != []
        assert "Look into kiwis." in last.body.decode()


@pytest.mark.req("B7", "F7")
@pytest.mark.usefixtures("sandbox")
async def test_every_failure_is_a_result_and_the_model_gets_another_turn(agents: Agents) -> None:
    agents.directive("study", permissions='<execute resource="tool" id="allowed"/>')
    agents.bash_tool("forbidden", "echo '{}'")
    await agents.sign("study", "forbidden")
    agents.model.will(
        use_text("execute", "{not json") & use_text("execute", "[1]") & use("no_such_tool", x=1),
        run("does_not_exist") & run("forbidden") & use("execute", nonsense=1),
        say("All failed."),
    )
    done = await agents.start("study")
    assert (done["status"], done["result"]) == ("completed", "All failed."), done
    found = await results(agents, done["thread_id"])
    statuses = [one["status"] for one in found]
    assert statuses[:3] == ["invalid_input", "invalid_input", "not_found"]
    assert set(statuses[3:]) <= {"not_found", "not_permitted", "denied", "invalid_input"}, statuses
    assert all(one["part"]["is_error"] and one["part"]["content"] for one in found)
    assert len(agents.model.requests) == 3
    sent = json.dumps(agents.model.requests[1].messages)
    assert "not JSON" in sent
    assert "no_such_tool" in sent


@pytest.mark.usefixtures("sandbox")
async def test_a_rate_limit_is_a_result_that_says_when_to_call_again(agents: Agents) -> None:
    agents.directive("study")
    agents.bash_tool("once", "echo '{}'")
    await agents.sign("study", "once")
    limit_rate(agents, "*/once@*")
    agents.model.will(run("once"), run("once"), say("Later."))
    done = await agents.start("study")
    assert (done["status"], done["result"]) == ("completed", "Later."), done
    first, second = await results(agents, done["thread_id"])
    assert (first["status"], second["status"]) == ("ok", "unavailable")
    refused = json.loads(second["part"]["content"])
    assert refused["code"] == "rate_limited"
    assert 50 <= refused["retry_after"] <= 60


@pytest.mark.req("F4")
@pytest.mark.usefixtures("sandbox")
async def test_three_tools_that_wait_for_each_other_all_finish(agents: Agents) -> None:
    agents.directive("study")
    meeting = agents.project / "meeting"
    meeting.mkdir()
    script = f"""
name=$(cat | tr -dc a-c); touch {meeting}/$name
for _ in $(seq 600); do [ "$(ls {meeting} | wc -l)" -ge 3 ] && echo '{{"met": true}}' && exit 0; sleep 0.05; done
exit 1
"""
    for name in "abc":
        agents.bash_tool(f"meet_{name}", script.replace("$(cat | tr -dc a-c)", name), needs={"write": [str(meeting)]})
    await agents.sign("study", *(f"meet_{name}" for name in "abc"))
    agents.model.will(run("meet_a") & run("meet_b") & run("meet_c"), say("Met."))
    done = await agents.start("study")
    done = await approved(agents, done)
    assert done["status"] == "completed", done
    found = await results(agents, done["thread_id"])
    assert [one["status"] for one in found] == ["ok"] * 3, found


async def approved(agents: Agents, waiting: dict[str, Any]) -> dict[str, Any]:
    """Approve what a thread waits for, until it waits for nothing more."""
    while waiting.get("waits_for") == "approval":
        for approval in waiting["approvals"]:
            await agents.call("approvals", action="approve", approval_id=approval)
        answer = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
        waiting = dict(answer.content)
    return waiting


@pytest.mark.usefixtures("sandbox")
async def test_calls_that_change_the_project_run_one_after_another(agents: Agents) -> None:
    agents.directive("study")
    script = "[ -e busy ] && exit 1; touch busy; sleep 0.2; rm busy; echo '{}'"
    agents.bash_tool("change", script, mutates_state=True, needs={"write": ["."]})
    await agents.sign("study", "change")
    agents.model.will(run("change", n=1) & run("change", n=2), run("change", n=3), say("Changed."), say("Changed."))
    # Either thread can be the first to go on; the scripted model tells them apart by their first message.
    waiting = [await agents.start("study", inputs={"topic": topic}) for topic in ("kiwis", "moas")]
    for approval in (one for thread in waiting for one in thread["approvals"]):
        await agents.call("approvals", action="approve", approval_id=approval)
    other = Kernel(agents.project, user=agents.user)
    resume = [{"action": "resume", "thread_id": one["thread_id"], "wait": True} for one in waiting]
    done = await asyncio.gather(agents.kernel.call("thread", resume[0]), other.call("thread", resume[1]))
    assert [one.content["status"] for one in done] == ["completed"] * 2, done
    made = [one for thread in waiting for one in await results(agents, thread["thread_id"])]
    assert [one["status"] for one in made] == ["ok"] * 3
    await other.aclose()


@pytest.mark.usefixtures("sandbox")
async def test_a_tool_that_fails_is_called_once(agents: Agents) -> None:
    agents.directive("study")
    agents.bash_tool("broken", "echo once >&2; exit 3")
    await agents.sign("study", "broken")
    agents.model.will(run("broken"), say("It failed."))
    done = await agents.start("study")
    assert (done["status"], done["usage"]["tool_calls"]) == ("completed", 1)
    runs = await agents.read("runs", action="list")
    assert len(runs["runs"]) == 1, runs


@pytest.mark.usefixtures("sandbox")
async def test_a_tool_that_takes_longer_than_the_thread_may_is_stopped(agents: Agents) -> None:
    agents.directive("study")
    agents.bash_tool("slow", "sleep 60; echo '{}'")
    await agents.sign("study", "slow")
    agents.model.will(run("slow"))
    done = await agents.start("study", limits={"seconds": 2})
    assert (done["status"], done["code"]) == ("exhausted", "duration_exceeded"), done


@pytest.mark.req("D1", "E4")
@pytest.mark.parametrize("mode", ["frozen", "grow"])
@pytest.mark.usefixtures("sandbox")
async def test_a_loaded_tool_is_in_the_request_only_where_tools_grow(agents: Agents, mode: str) -> None:
    write_provider(agents.user, agents.model, "openai_chat", tools=mode)
    agents.directive("study")
    agents.bash_tool("echo", "cat")
    await agents.sign("study", "echo")
    agents.model.will(use("load", item_id="echo", item_type="tool"))
    if mode == "grow":
        agents.model.will(use("echo", text="hi") & use("load", item_id="echo", item_type="tool"))
    agents.model.will(say("Done."))
    done = await agents.start("study")
    assert done["status"] == "completed", done
    first, *_, last = agents.model.requests
    assert last.tool_names == [*first.tool_names, *(["echo"] if mode == "grow" else [])]
    if mode == "grow":
        found = {one["part"]["name"]: one["part"] for one in await results(agents, done["thread_id"])}
        assert json.loads(found["echo"]["content"]) == {"text": "hi"}, found


@pytest.mark.req("D1")
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("dialect", ["openai_chat", "anthropic"])
async def test_fifty_requests_begin_with_the_request_before(agents: Agents, dialect: str) -> None:
    write_provider(agents.user, agents.model, dialect, tools="grow")
    agents.directive("study", limits="<limits><turns>60</turns><tokens>9000000</tokens></limits>")
    for number in range(5):
        agents.bash_tool(f"tool_{number}", "cat")
    await agents.sign("study", *(f"tool_{number}" for number in range(5)))

    def answer(request: ModelRequest) -> ScriptedTurn:
        number = len(agents.model.requests)
        if number == 20:
            return use("ask", question="Which?")
        if number >= 50:
            return say("Done.")
        if number % 10 == 5:
            return use("load", item_id=f"tool_{number // 10}", item_type="tool") & use("help", topic=f"{number}")
        return use("help", topic=f"a{number}") & use("help", topic=f"b{number}")

    agents.model.default = answer
    waiting = await agents.start("study")
    await agents.call("thread", action="resume", thread_id=waiting["thread_id"], message="Carry on.")
    done = await answered(agents, waiting, "this")
    assert (done["status"], done["usage"]["turns"]) == ("completed", 50), done
    assert agents.model.faults == []
    assert len(agents.model.requests[-1].tool_names) == len(agents.model.requests[0].tool_names) + 5


async def test_a_hundred_turns_keep_nothing_but_the_conversation(agents: Agents) -> None:
    limits = "<limits><turns>120</turns><tokens>90000000</tokens></limits>"
    agents.directive("study", limits=limits)
    await agents.sign("study")
    sizes: dict[int, int] = {}
    calls = forever()

    def answer(request: ModelRequest) -> ScriptedTurn:
        number = len(agents.model.requests)
        if number in {40, 70, 100}:
            taken = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/kiwi_mcp/*")])
            sizes[number] = sum(one.size for one in taken.statistics("filename"))
        agents.model.requests[-1] = ModelRequest(request.dialect, {}, b"", None)  # the script keeps less, too
        return calls(request) if number < 101 else say("Done.")

    agents.model.default = answer
    tracemalloc.start()
    try:
        done = await agents.start("study")
    finally:
        tracemalloc.stop()
    assert (done["status"], done["usage"]["turns"]) == ("completed", 101), done
    # What is loaded once grows in one half alone.
    assert min(sizes[70] - sizes[40], sizes[100] - sizes[70]) < 30 * 4_000, sizes


@pytest.mark.req("K-GI-01")
@pytest.mark.parametrize("mode", ["auto", "disabled"])
@pytest.mark.usefixtures("sandbox")
async def test_the_checkpoint_mode_of_a_directive_holds_for_its_calls(agents: Agents, mode: str) -> None:
    agents.directive("study", limits=f'<git_checkpoint mode="{mode}"/>')
    extra = {"checkpoint": "auto"} if mode == "disabled" else {}
    agents.bash_tool("change", "echo hi > made.txt; echo '{}'", mutates_state=True, needs={"write": ["."]}, **extra)
    await agents.sign("study", "change")
    agents.model.will(run("change"), say("Changed."))
    done = await approved(agents, await agents.start("study"))
    assert done["status"] == "completed", done
    listed = await agents.read("undo", action="list", project_path=str(agents.project))
    assert len(listed["checkpoints"]) == (1 if mode == "auto" else 0), listed


OUTSIDE = "was called after words from outside were read"


async def share_and_read(agents: Agents) -> None:
    """Write a tool that reads from outside, and one that writes and sends, which a rule of the owner allows."""
    reader = {
        "tool_id": "get_note",
        "tool_type": "http",
        "executor": "http_client",
        "version": "1.0.0",
        "description": "Read a note",
        "config": {"method": "GET", "url": f"http://{agents.model.host}/note"},
    }
    (agents.user / "tools" / "get_note.yaml").write_text(json.dumps(reader))
    (agents.project / "notes").mkdir()
    agents.bash_tool("share", "echo '{}'", needs={"write": ["notes"], "hosts": ["api.example.com"]})
    await agents.sign("get_note", "share")
    await agents.call("approvals", action="add_rule", item="*")


async def asked_reasons(agents: Agents) -> list[str]:
    listed = await agents.read("approvals", action="list")
    return [reason for one in listed["approvals"] for reason in one["reasons"]]


@pytest.mark.case("PINJ-05")
@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("reader", ["no thread", "the thread", "its child", "its parent"])
async def test_text_from_outside_marks_a_thread_its_children_and_its_parent(agents: Agents, reader: str) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    await share_and_read(agents)
    spawn = use("spawn", item="study", inputs={"topic": "one"})
    lead, child = {
        "no thread": ([run("share")], []),
        "the thread": ([run("get_note"), run("share")], []),
        "its child": ([spawn, use("wait"), run("share")], [run("get_note")]),
        "its parent": ([run("get_note"), spawn, use("wait")], [run("share")]),
    }[reader]
    agents.model.will_by_text({"Look into kiwis": [*lead, say("Done.")], "Look into one": [*child, say("Child.")]})
    done = await agents.start("lead")
    if reader == "no thread":
        assert done["status"] == "completed", done
        assert await asked_reasons(agents) == []
    else:
        assert done["status"] == "waiting", done
        assert OUTSIDE in await asked_reasons(agents)
        shown = await agents.read("thread", action="show", thread_id=done["thread_id"])
        assert shown["approvals"], "also those of children are shown at the root"


@pytest.mark.case("PINJ-05")
@pytest.mark.usefixtures("sandbox")
async def test_a_thread_stays_marked_when_another_process_continues_it(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    await share_and_read(agents)
    agents.model.will(run("get_note"), use("ask", question="Which?"), run("share"), say("Done."))
    waiting = await agents.start("study")
    other = Agents(agents.project, agents.user, agents.model, Kernel(agents.project, user=agents.user))
    again = await answered(other, waiting, "this")
    assert (again["status"], again["waits_for"]) == ("waiting", "approval"), again
    assert OUTSIDE in await asked_reasons(other)
    await other.kernel.aclose()
