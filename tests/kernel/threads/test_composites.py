"""Composites: steps that call items, as a thread that survives everything, or in memory where all steps are pure."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.threads.runner import ThreadRunner

pytestmark = pytest.mark.usefixtures("sandbox")
GIVE = """printf '"%s"' "$KIWI_PARAM_what" """
NOTE = """echo "$KIWI_PARAM_text" >> notes.txt; echo '"saved"'"""
BROKEN = "echo no >&2; exit 3"


async def composite(agents: Agents, name: str, steps: list[Json], **words: Json) -> None:
    """Write a composite of the owner, and sign it."""
    config: JsonObject = {"steps": steps, **{word: words.pop(word) for word in ("output", "timeout") if word in words}}
    manifest = {
        "tool_id": name,
        "tool_type": "composite",
        "version": "1.0.0",
        "description": f"Runs {name}",
        "config": config,
        **words,
    }
    (agents.user / "tools" / f"{name}.yaml").write_text(json.dumps(manifest))
    await agents.sign(name)


async def tools(agents: Agents, scripts: dict[str, str], **words: Json) -> None:
    """Write bash tools of the owner that may change the project without being asked about, and sign them."""
    for name, script in scripts.items():
        agents.bash_tool(name, script, **{"needs": {"write": ["."]}, **words})
        await agents.call("approvals", action="add_rule", item=f"*/{name}@*")
    await agents.sign(*scripts)


async def run(agents: Agents, name: str, **parameters: Json) -> dict[str, Any]:
    """Execute an item as the owner."""
    return dict((await agents.call("execute", item_id=name, parameters=parameters)).content)


@pytest.mark.req("K-CO-01")
async def test_steps_run_in_the_order_of_what_they_need_and_their_results_keep_their_types(agents: Agents) -> None:
    scripts = {"numbers": """echo '{"list": [1, 2, 3], "name": "n"}'""", "double": "echo $((KIWI_PARAM_value * 2))"}
    await tools(agents, {**scripts, "give": GIVE})
    await composite(
        agents,
        "sums",
        [
            {"id": "read", "tool": "numbers"},
            {"id": "each", "tool": "double", "foreach": "{steps.read.result.list}", "parameters": {"value": "{item}"}},
            {"id": "big", "tool": "give", "when": "steps.each.result.2 > 5", "parameters": {"what": "{limit}"}},
            {"id": "never", "tool": "give", "when": "limit > 100", "parameters": {"what": "1"}},
        ],
        output={
            "doubled": "{steps.each.result}",
            "text": "{steps.read.result.name}={limit}",
            "never": "{steps.never.result}",
        },
        parameters=[{"name": "limit", "type": "integer", "default": 7}],
    )
    done = await run(agents, "sums")
    assert done["status"] == "success", done
    assert done["result"] == {"doubled": [2, 4, 6], "text": "n=7"}
    assert {name: one["status"] for name, one in done["steps"].items()} == {
        "read": "ok", "each": "ok", "big": "ok", "never": "skipped",
    }  # fmt: skip
    assert len(done["steps"]["each"]["runs"]) == 3
    shown = await agents.read("thread", action="show", thread_id=done["thread_id"])
    assert shown["status"] == "completed"
    assert shown["result"]["output"] == done["result"]
    assert not agents.model.requests


async def answer(agents: Agents, thread: str, value: str) -> dict[str, Any]:
    """Answer the question that a thread waits for, and let it continue here."""
    return await agents.read("thread", action="answer", question_id=thread, answer=value, wait=True)


@pytest.mark.req("K-CO-01")
async def test_a_step_asks_the_owner_and_continues_with_the_typed_answer(agents: Agents) -> None:
    await tools(agents, {"note": NOTE})
    await composite(
        agents,
        "careful",
        [
            {"id": "how_many", "ask": {"message": "How many {thing}?", "schema": {"type": "integer", "minimum": 1}}},
            {"id": "sure", "ask": "Write it?", "tool": "note",
             "parameters": {"text": "{steps.how_many.result} {thing}"}},
            {"id": "second", "needs": ["sure"], "tool": "note", "parameters": {"text": "{answer}"},
             "ask": {"message": "Which?", "schema": {"enum": ["a", "b"]}}},
        ],
        output="{steps.how_many.result}",
        parameters=[{"name": "thing", "type": "string", "required": True}],
    )  # fmt: skip
    waiting = await run(agents, "careful", thing="birds")
    assert waiting["code"] == "thread_waiting", waiting
    thread = waiting["thread_id"]
    (question,) = (await agents.read("thread", action="show", thread_id=thread))["questions"]
    assert question["message"] == "How many birds?"
    refused = await agents.call("thread", action="answer", question_id=thread, answer="many")
    assert refused.is_error
    asked = await answer(agents, thread, "3")
    assert (asked["status"], asked["questions"][0]["message"]) == ("waiting", "Write it?"), asked
    asked = await answer(agents, thread, "continue")
    assert asked["questions"][0]["message"] == "Which?", asked
    done = await answer(agents, thread, "b")
    assert (done["status"], done["result"]["output"]) == ("completed", 3), done
    assert (agents.project / "notes.txt").read_text() == "3 birds\nb\n"
    stopped = await run(agents, "careful", thing="cats")
    await answer(agents, stopped["thread_id"], "1")
    stopped = await answer(agents, stopped["thread_id"], "stop")
    assert (stopped["status"], stopped["code"]) == ("failed", "step_failed"), stopped
    assert "sure" in stopped["message"]
    assert stopped["result"]["steps"]["how_many"] == {"status": "ok", "result": 1}


@pytest.mark.req("K-CO-01")
async def test_a_failed_step_is_retried_skipped_or_replaced_by_another(agents: Agents) -> None:
    flaky = """echo x >> tries.txt; test $(wc -l < tries.txt) -ge 3 && echo '"good"'"""
    await tools(agents, {"flaky": flaky, "broken": BROKEN, "give": GIVE})
    await composite(
        agents,
        "sturdy",
        [
            {"id": "tries", "tool": "flaky", "retry": {"attempts": 3, "backoff_ms": 1}},
            {"id": "bad", "tool": "broken", "on_error": "skip"},
            {"id": "main", "tool": "broken", "on_error": "other"},
            {"id": "after", "tool": "give", "parameters": {"what": "after {steps.main.result}"}},
            {"id": "other", "tool": "give", "parameters": {"what": "instead of {steps.main.status}"}},
            {"id": "unused", "tool": "give", "on_error": "spare", "parameters": {"what": "fine"}},
            {"id": "spare", "tool": "broken"},
        ],
        output=["{steps.tries.result}", "{steps.bad.result}", "{steps.after.result}", "{steps.bad.error.message}"],
    )
    done = await run(agents, "sturdy")
    assert done["status"] == "success", done
    assert done["result"][:2] == ["good", "after instead of failed"], done["result"]
    assert "exit" in done["result"][2]
    steps = {name: one["status"] for name, one in done["steps"].items()}
    assert steps["bad"] == steps["main"] == "failed"
    assert steps["spare"] == "skipped"
    assert (agents.project / "tries.txt").read_text() == "x\nx\nx\n"


@pytest.mark.req("K-CO-02")
async def test_a_step_that_fails_hangs_or_is_denied_ends_the_composite_and_what_was_done_stays_known(
    agents: Agents,
) -> None:
    await tools(agents, {"fine": "echo 1", "broken": BROKEN, "hanging": "sleep 60"})
    cases: tuple[tuple[str, JsonObject, str], ...] = (
        ("failing", {"id": "last", "tool": "broken"}, "Step `last` failed"),
        ("slow", {"id": "last", "tool": "hanging", "timeout": 0.2}, "longer than 0.2 seconds"),
        ("lost", {"id": "last", "tool": "fine", "foreach": "{steps.first.result}"}, "`foreach` needs a list"),
        ("typo", {"id": "last", "tool": "fine", "parameters": {"a": "{steps.first.result.titel}"}}, "no `titel`"),
    )
    for name, last, said in cases:
        await composite(agents, name, [{"id": "first", "tool": "fine"}, {**last, "needs": ["first"]}])
        done = await run(agents, name)
        assert (done["status"], done["code"]) == ("error", "execution_failed"), done
        assert said in done["message"], done
        assert done["steps"]["first"] == {"status": "ok", "result": 1, "runs": done["steps"]["first"]["runs"]}
        assert done["steps"]["last"]["status"] == "failed"
    policy = json.loads((agents.user / "policy.yaml").read_text())
    (agents.user / "policy.yaml").write_text(json.dumps({**policy, "items": {"deny": ["*/fine@*"]}}))
    denied = await run(agents, "failing")
    assert denied["steps"]["first"]["code"] == "not_permitted", denied
    await composite(agents, "late", [{"id": "a", "tool": "hanging"}], timeout=0.3)
    late = await run(agents, "late")
    assert "longer than 0.3 seconds" in late["message"], late


@pytest.mark.req("K-CO-02")
async def test_an_approval_of_a_step_waits_while_other_steps_run_and_another_process_continues(agents: Agents) -> None:
    agents.bash_tool("write", NOTE, needs={"write": ["."]})
    await agents.sign("write")
    await tools(agents, {"give": GIVE})
    steps: list[Json] = [
        {"id": "asks", "tool": "write", "parameters": {"text": "written"}},
        {"id": "free", "tool": "give", "parameters": {"what": "free"}},
        {"id": "last", "tool": "give", "parameters": {"what": "{steps.asks.result} {steps.free.result}"}},
    ]
    await composite(agents, "mixed", steps, output="{steps.last.result}")
    waiting = await run(agents, "mixed")
    thread = await agents.read("thread", action="show", thread_id=waiting["thread_id"])
    assert (thread["status"], thread["waits_for"], len(thread["approvals"])) == ("waiting", "approval", 1), thread
    assert [one["kind"] for one in thread["events"]].count("result") == 1
    await agents.call("approvals", action="approve", approval_id=thread["approvals"][0])
    other = Kernel(agents.project, user=agents.user)
    resume = {"action": "resume", "thread_id": thread["thread_id"], "wait": True}
    done: dict[str, Any] = dict((await other.call("thread", resume)).content)
    assert (done["status"], done["result"]["output"]) == ("completed", "saved free"), done
    assert "approvals" not in done
    verified = dict((await other.call("thread", {"action": "verify", "thread_id": thread["thread_id"]})).content)
    await other.aclose()
    assert (agents.project / "notes.txt").read_text() == "written\n"
    assert verified["valid"] is True, verified


@pytest.mark.req("K-CO-01")
async def test_steps_that_need_nothing_run_at_once_up_to_a_limit(agents: Agents) -> None:
    meet = """touch "here_$KIWI_PARAM_n"
for _ in $(seq 600); do [ "$(ls here_* | wc -l)" -ge 3 ] && echo true && exit 0; sleep 0.05; done; exit 1"""
    count = """touch "on_$KIWI_PARAM_n"; ls on_* | wc -l; sleep 0.05; rm "on_$KIWI_PARAM_n" """
    await tools(agents, {"meet": meet, "count": count})
    await composite(agents, "meeting", [{"id": f"m{n}", "tool": "meet", "parameters": {"n": n}} for n in range(3)])
    met = await run(agents, "meeting")
    assert met["result"] == {"m0": True, "m1": True, "m2": True}, met
    await composite(
        agents, "many", [{"id": "all", "tool": "count", "foreach": list(range(20)), "parameters": {"n": "{item}"}}],
        output="{steps.all.result}",
    )  # fmt: skip
    many = await run(agents, "many")
    assert max(many["result"]) <= 8, many
    assert len(many["result"]) == 20


async def test_pure_steps_run_in_memory_and_leave_no_thread(agents: Agents) -> None:
    give = """printf '"%s"' "$KIWI_PARAM_what" """
    await tools(
        agents, {"give": give, "broken": BROKEN, "huge": "head -c 200000 /dev/zero | tr '\\0' x"}, effect="pure"
    )
    steps: list[Json] = [
        {"id": "a", "tool": "give", "parameters": {"what": "{word}"}},
        {"id": "b", "tool": "broken", "on_error": "c", "retry": {"attempts": 2, "backoff_ms": 1}},
        {"id": "c", "tool": "give", "parameters": {"what": "{steps.a.result}!"}},
    ]
    words: list[Json] = [{"name": "word", "type": "string"}]
    await composite(agents, "quick", steps, output="{steps.b.result}", parameters=words)
    await composite(
        agents, "outer", [{"id": "in", "tool": "quick", "parameters": {"word": "hi"}}], output="{steps.in.result}"
    )
    done = await run(agents, "outer")
    assert (done["status"], done["result"]) == ("success", "hi!"), done
    assert "thread_id" not in done
    await composite(agents, "failing", [{"id": "x", "tool": "broken"}])
    failed = await run(agents, "failing")
    assert (failed["code"], failed["steps"]["x"]["status"]) == ("execution_failed", "failed"), failed
    assert (await agents.read("thread", action="list"))["threads"] == []
    # A result that is too large to be answered whole is read from the journal of a thread.
    await composite(
        agents,
        "large",
        [{"id": "x", "tool": "huge"}, {"id": "y", "tool": "give", "parameters": {"what": "{steps.x.status}"}}],
    )
    large = await run(agents, "large")
    assert large["thread_id"], large


@pytest.mark.req("K-CO-02")
async def test_a_thread_calls_a_composite_as_any_tool_and_gives_it_no_right_that_it_has_not(agents: Agents) -> None:
    await tools(agents, {"note": NOTE, "other": NOTE})
    await composite(
        agents,
        "inner",
        [{"id": "n", "tool": "note", "parameters": {"text": "{text}"}}],
        parameters=[{"name": "text", "type": "string"}],
    )
    await composite(
        agents,
        "outer",
        [
            {"id": "i", "tool": "inner", "parameters": {"text": "deep"}},
            {"id": "o", "tool": "other", "parameters": {"text": "o"}, "needs": ["i"]},
        ],
    )
    agents.directive("full")
    agents.directive(
        "narrow",
        permissions="".join(f'<execute resource="tool" id="{name}"/>' for name in ("outer", "inner", "note")),
    )
    await agents.sign("full", "narrow")
    agents.model.will(use("execute", item_id="outer"), say("Done."))
    done = await agents.start("full")
    assert done["status"] == "completed", done
    assert (agents.project / "notes.txt").read_text() == "deep\no\n"
    assert done["usage"]["turns"] == 2
    agents.model.will(use("execute", item_id="outer"), say("Refused."))
    refused = await agents.start("narrow")
    assert refused["result"] == "Refused.", refused
    assert (agents.project / "notes.txt").read_text() == "deep\no\ndeep\n"
    assert "no rule of" in json.dumps(await agents.events(refused["thread_id"]))


async def test_a_composite_is_cancelled_with_the_call_that_runs(agents: Agents) -> None:
    await tools(agents, {"hang": "touch began; sleep 60", "note": NOTE})
    await composite(agents, "long", [{"id": "h", "tool": "hang"}, {"id": "n", "tool": "note", "needs": ["h"]}])
    task = asyncio.create_task(run(agents, "long"))
    async with asyncio.timeout(20):
        while not (agents.project / "began").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.02)
    (thread,) = (await agents.read("thread", action="list"))["threads"]
    await agents.call("thread", action="cancel", thread_id=thread["thread_id"])
    done = await task
    assert "cancelled" in done["message"], done
    assert not (agents.project / "notes.txt").exists()


async def test_a_question_without_an_answer_in_time_is_no_refusal(agents: Agents) -> None:
    await composite(agents, "asking", [{"id": "q", "ask": {"message": "Well?", "expires": 1}, "on_error": "skip"}])
    waiting = await run(agents, "asking")
    question = (await agents.read("thread", action="show", thread_id=waiting["thread_id"]))["questions"][0]
    stores = agents.kernel._services.one(ThreadRunner).stores
    stores.questions.expire(now_ms() + 2_000)
    assert stores.questions.get(question["question_id"]).status == "expired"
    done = await agents.read("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert done["result"]["steps"]["q"]["code"] == "timeout", done
    assert "no refusal" in done["result"]["steps"]["q"]["message"]


async def test_a_dry_run_shows_the_whole_plan_and_why_draws_the_tree(agents: Agents) -> None:
    await tools(agents, {"give": GIVE, "note": NOTE})
    agents.bash_tool("write", NOTE, needs={"write": ["."]})
    await agents.sign("write")
    steps: list[Json] = [
        {"id": "a", "tool": "give", "parameters": {"what": "{word}"}},
        {"id": "b", "tool": "write", "parameters": {"text": "x"}},
        {"id": "c", "tool": "note", "parameters": {"text": "{steps.a.result}"}, "ask": "Now?"},
    ]
    await composite(agents, "inner", steps, parameters=[{"name": "word", "type": "string", "required": True}])
    await composite(agents, "outer", [{"id": "i", "tool": "inner", "parameters": {"word": "w"}}])
    policy = json.loads((agents.user / "policy.yaml").read_text())
    (agents.user / "policy.yaml").write_text(json.dumps({**policy, "items": {"deny": ["*/note@*"]}}))
    planned = await agents.read("execute", item_id="outer", dry_run=True)
    (inner,) = planned["steps"]
    first, second, third = inner["steps"]
    assert first["plan"]["inputs"] == {"what": "w"}
    assert (first["approval"]["needed"], second["approval"]["needed"]) == (False, True)
    assert (third["needs"], third["refused"]["code"]) == (["a"], "not_permitted"), third
    assert not (agents.project / "notes.txt").exists()
    why = await agents.read("execute", action="why", item_id="outer")
    (shown,) = why["steps"]
    assert [link["tool_id"] for link in shown["steps"][0]["chain"]] == ["give", "bash_runtime", "subprocess"]
    assert shown["steps"][2]["ask"] == "Now?"
    assert "'note' may not run" in shown["steps"][2]["refused"]


@pytest.mark.req("K-CO-02")
async def test_a_composite_is_no_way_to_more_rights(agents: Agents) -> None:
    await tools(agents, {"note": NOTE})
    await tools(agents, {"peek": "echo secret"}, effect="pure")
    await composite(agents, "writes", [{"id": "n", "tool": "note", "parameters": {"text": "x"}}])
    await composite(agents, "looks", [{"id": "p", "tool": "peek"}])
    await composite(agents, "ends", [{"id": "r", "tool": "return"}, {"id": "m", "tool": "memory_list"}])
    delegated = '<execute resource="tool" id="note" delegate="true"/><execute resource="tool" id="writes"/>'
    agents.directive("lead", permissions=f'{delegated}<execute resource="tool" id="looks"/>')
    await agents.sign("lead")
    calls = use("execute", item_id="writes") & use("execute", item_id="looks") & use("execute", item_id="note")
    agents.model.will(calls, say("Done."))
    done = await agents.start("lead")
    results = [one for one in await agents.events(done["thread_id"]) if one["kind"] == "result"]
    assert len(results) == 3
    assert all(one["part"]["is_error"] for one in results), results
    assert "secret" not in json.dumps(results)
    assert not (agents.project / "notes.txt").exists()
    ended = await run(agents, "ends")  # the tools of a thread's model are not for steps; others of Kiwi's own are
    assert {name: one["status"] for name, one in ended["steps"].items()} == {"r": "failed", "m": "ok"}, ended


async def test_a_retried_step_starts_a_new_child_and_a_step_may_be_a_thread(agents: Agents) -> None:
    flaky = """echo x >> tries.txt; test $(wc -l < tries.txt) -ge 2 && echo '"good"'"""
    await tools(agents, {"flaky": flaky})
    await composite(agents, "inner", [{"id": "f", "tool": "flaky"}], output="{steps.f.result}")
    agents.directive("study")
    manifest = {
        "tool_id": "student", "tool_type": "thread", "executor": "llm_runtime", "version": "1.0.0",
        "description": "Studies", "config": {"directive": "study"}, "parameters": [{"name": "topic", "type": "string"}],
    }  # fmt: skip
    (agents.user / "tools" / "student.yaml").write_text(json.dumps(manifest))
    await agents.sign("study", "student")
    steps: list[Json] = [
        {"id": "i", "tool": "inner", "retry": {"attempts": 2, "backoff_ms": 1}},
        {"id": "s", "tool": "student", "parameters": {"topic": "{steps.i.result} birds"}},
    ]
    await composite(agents, "outer", steps, output=["{steps.i.result}", "{steps.s.result}"])
    agents.model.will(say("Birds."))
    done = await run(agents, "outer")
    assert done["result"] == ["good", "Birds."], done
    assert "Look into good birds." in json.dumps(agents.model.requests[0].json)
    listed = (await agents.read("thread", action="list"))["threads"]
    assert sorted(one["status"] for one in listed) == ["completed", "completed", "completed", "failed"]
