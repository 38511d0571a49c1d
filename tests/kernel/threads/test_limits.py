"""Limits of threads: a limit of n allows exactly n, and what happens when one is reached."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, write_provider
from tests.plugins.scripted_model import MODEL, ModelRequest, ScriptedTurn, fail, say, use

from kiwi_mcp.domain.calls import Caller, Principal

pytestmark = pytest.mark.usefixtures("loopback")
SIZES: Mapping[str, Any] = {"context": 32_768, "max_output": 100}


def cost(agents: Agents, price: object, **config: Any) -> None:
    """Write the provider with a price, or with none that is known."""
    model = {**SIZES, **({"price": price} if price else {})}
    write_provider(agents.user, agents.model, "openai_chat", models={MODEL: model}, **config)


def forever(name: str = "help", **arguments: object) -> Callable[[ModelRequest], ScriptedTurn]:
    """Return a model that calls a tool in every turn, each time with other arguments."""
    count = iter(range(10_000))
    return lambda _: use(name, **(arguments or {"topic": f"topic {next(count)}"}))


async def answered(agents: Agents, waiting: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Answer the question of a thread, and run it again until it ends or waits."""
    (question,) = waiting["questions"]
    await agents.call("thread", action="answer", question_id=question["question_id"], answer=answer)
    done = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    return dict(done.content)


async def limit_events(agents: Agents, thread_id: str) -> list[dict[str, Any]]:
    return [event for event in await agents.events(thread_id) if event["kind"] == "limit"]


@pytest.mark.req("K-TH-03")
@pytest.mark.parametrize("limit", [1, 3])
async def test_a_limit_of_n_turns_allows_exactly_n(agents: Agents, limit: int) -> None:
    agents.directive("study", limits=f"<limits><turns>{limit}</turns></limits>")
    await agents.sign("study")
    calls = forever()
    agents.model.default = lambda request: say("Half.") & calls(request)
    done = await agents.start("study")
    assert (done["status"], done["finish_reason"], done["code"]) == ("exhausted", "limit", "turns_exceeded")
    assert done["result"] == "Half.", "the partial result is kept"
    assert done["usage"]["turns"] == len(agents.model.requests) == limit


@pytest.mark.parametrize("limit", [0, 2])
async def test_a_limit_of_n_tool_calls_allows_exactly_n(agents: Agents, limit: int) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("help") & use("help", topic="a") & use("help", topic="b"))
    done = await agents.start("study", limits={"tool_calls": limit})
    assert (done["status"], done["code"], done["usage"]["tool_calls"]) == ("exhausted", "tool_calls_exceeded", limit)


async def test_a_thread_with_as_many_calls_as_its_limit_ends_well(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("help") & use("help", topic="a"), say("Done."))
    done = await agents.start("study", limits={"tool_calls": 2, "turns": 2})
    assert (done["status"], done["result"]) == ("completed", "Done.")


async def test_a_limit_of_tokens_shortens_the_reply_and_then_stops(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("One."))
    first = await agents.start("study")
    events = await agents.events(first["thread_id"])
    assert first["usage"]["input_tokens"] + first["usage"]["output_tokens"] == 120
    (prompt,) = [event for event in events if event["kind"] == "prompt"]
    size = len(prompt["system"].encode()) + len(json.dumps(prompt["tools"], ensure_ascii=False).encode())
    agents.model.will(say("One."))
    done = await agents.start("study", limits={"tokens": size + 2_000})
    assert done["status"] == "completed"
    assert agents.model.requests[-1].json["max_completion_tokens"] < 4_096
    done = await agents.start("study", limits={"tokens": size // 2})
    assert (done["status"], done["code"]) == ("exhausted", "tokens_exceeded")
    assert len(agents.model.requests) == 2, "nothing was sent that the limit does not pay for"


@pytest.mark.req("K-TH-03")
async def test_a_limit_of_money_allows_exactly_what_the_worst_case_costs(agents: Agents) -> None:
    cost(agents, {"input": 0, "output": 10_000})  # one cent for each token of the reply
    agents.directive("study")
    await agents.sign("study")
    agents.model.default = lambda _: ScriptedTurn("One.", usage=(100, 0, 16))
    done = await agents.start("study", limits={"spend": 0.16})
    assert (done["status"], done["usage"]["spend"]) == ("completed", 0.16)
    assert agents.model.requests[-1].json["max_completion_tokens"] == 16
    done = await agents.start("study", limits={"spend": 0.159999})
    assert (done["status"], done["code"]) == ("exhausted", "spend_exceeded")
    assert len(agents.model.requests) == 1


async def test_a_limit_of_seconds_stops_a_model_that_does_not_answer(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(ScriptedTurn(how="silent"))
    done = await agents.start("study", limits={"seconds": 1})
    assert (done["status"], done["code"]) == ("exhausted", "duration_exceeded")
    ledger = await agents.read("thread", action="costs", thread_id=done["thread_id"])
    kinds = [entry["kind"] for entry in ledger["entries"]]
    assert kinds == ["reserve", "charge_maximum"], "a lost reply is charged at its reservation"


async def test_a_limit_of_no_seconds_allows_nothing(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    done = await agents.start("study", limits={"seconds": 0})
    assert (done["status"], done["code"], agents.model.requests) == ("exhausted", "duration_exceeded", [])


@pytest.mark.req("K-TH-03")
async def test_a_limit_of_n_spawns_allows_exactly_n_and_the_next_is_a_result(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    spawn = use("spawn", item="study", inputs={"topic": "one"})
    agents.model.will_by_text(
        {"Look into kiwis": [spawn & spawn & spawn, use("wait"), say("Done.")], "Look into one": [say("Child.")] * 3}
    )
    done = await agents.start("lead", limits={"spawns": 2})
    assert done["status"] == "completed", done
    events = await agents.events(done["thread_id"])
    assert sum(event["kind"] == "spawned" for event in events) == 2
    failed = [event for event in events if event["kind"] == "result" and event["status"] != "ok"]
    assert len(failed) == 1
    assert "spawns" in failed[0]["part"]["content"]


async def test_a_limit_of_depth_one_allows_children_and_no_grandchildren(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    spawn = use("spawn", item="study", inputs={"topic": "below"})
    agents.model.will_by_text(
        {"Look into kiwis": [spawn, use("wait"), say("Done.")], "Look into below": [spawn, say("Alone.")]}
    )
    done = await agents.start("lead", limits={"depth": 1})
    assert done["status"] == "completed", done
    text = json.dumps(await agents.events(done["thread_id"]))
    assert "Alone." in text
    listed = await agents.read("thread", action="list")
    assert len(listed["threads"]) == 2


async def test_escalate_asks_and_each_yes_raises_the_limit_by_its_original_amount(agents: Agents) -> None:
    agents.directive("study", limits="<limits><turns>2</turns><on_exceeded>escalate</on_exceeded></limits>")
    await agents.sign("study")
    agents.model.default = forever()
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "budget"), waiting
    assert waiting["questions"][0]["kind"] == "budget"
    for turns in (4, 6):
        waiting = await answered(agents, waiting, "continue")
        assert (waiting["status"], waiting["usage"]["turns"], waiting["limits"]["turns"]) == ("waiting", turns, turns)
    done = await answered(agents, waiting, "stop")
    assert (done["status"], done["code"], done["usage"]["turns"]) == ("exhausted", "turns_exceeded", 6)
    verified = await agents.read("thread", action="verify", thread_id=done["thread_id"])
    assert verified["valid"], verified


async def test_warn_continues_once_and_then_stops(agents: Agents) -> None:
    agents.directive("study", limits="<limits><turns>2</turns><on_exceeded>warn</on_exceeded></limits>")
    await agents.sign("study")
    agents.model.default = forever()
    done = await agents.start("study")
    assert (done["status"], done["usage"]["turns"]) == ("exhausted", 4)
    first, last = await limit_events(agents, done["thread_id"])
    assert (first["limit"], first["raised"], last.get("raised")) == ("turns", True, None)


async def test_a_warning_never_raises_money(agents: Agents) -> None:
    cost(agents, {"input": 0, "output": 10_000})
    agents.directive("study", limits="<limits><spend>0.05</spend><on_exceeded>warn</on_exceeded></limits>")
    await agents.sign("study")
    done = await agents.start("study")
    assert (done["status"], done["code"], agents.model.requests) == ("exhausted", "spend_exceeded", [])


@pytest.mark.parametrize(("answer", "status"), [("continue", "completed"), ("stop", "exhausted")])
async def test_a_price_that_is_not_known_is_asked_about(agents: Agents, answer: str, status: str) -> None:
    cost(agents, None)
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("One."))
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"], agents.model.requests) == ("waiting", "budget", [])
    done = await answered(agents, waiting, answer)
    assert done["status"] == status, done


async def test_calls_that_repeat_are_asked_about(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.default = forever("help", topic="same")
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"], waiting["usage"]["turns"]) == ("waiting", "question", 3)
    again = await answered(agents, waiting, "continue")
    assert (again["status"], again["usage"]["turns"]) == ("waiting", 4), again
    done = await answered(agents, again, "stop")
    assert (done["status"], done["code"]) == ("exhausted", "loop_exceeded")


@pytest.mark.parametrize("who", ["owner", "starter"])
async def test_a_day_has_a_limit_for_the_owner_and_for_each_starter(agents: Agents, who: str) -> None:
    cost(agents, {"input": 0, "output": 10_000})
    policy = json.loads((agents.user / "policy.yaml").read_text())
    spending = {"owner": {"per_day": 1.20}, "starter": {"per_starter": 1.20}}[who]
    (agents.user / "policy.yaml").write_text(json.dumps({**policy, "spending": spending}))
    agents.directive("study")
    await agents.sign("study")
    agents.model.default = lambda _: say("One.")
    caller = Caller(name="bob", identity=Principal("agent", "bob")) if who == "starter" else Caller()
    for _ in range(6):
        done = await agents.start("study", caller)
        assert done["status"] == "completed", done
    done = await agents.start("study", caller)
    assert (done["status"], done["code"]) == ("exhausted", f"{who}_day_exceeded"), done
    assert "policy.yaml" in done["message"]


@pytest.mark.req("K-TH-03")
async def test_children_that_compete_for_the_last_cents_never_overspend(agents: Agents) -> None:
    cost(agents, {"input": 0, "output": 1_000})  # a tenth of a cent for each token of the reply
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    spawn = use("spawn", item="study", inputs={"topic": "one"}, limits={"spend": 0.04, "tokens": 40_000})
    spawns = spawn
    for _ in range(49):
        spawns = spawns & spawn
    agents.model.will_by_text(
        {"Look into kiwis": [spawns, use("wait"), say("Done.")], "Look into one": [say("Child.")] * 50}
    )
    counts = "".join(f"<{name}>50</{name}>" for name in ("spawns", "children", "threads"))
    limits = f"<limits>{counts}<spend>1.00</spend><tokens>10000000</tokens></limits>"
    agents.directive("lead", limits=limits)
    await agents.sign("lead")
    done = await agents.start("lead")
    assert done["usage"]["spend"] <= 1.00
    ledger = await agents.read("thread", action="costs", thread_id=done["thread_id"])
    entries: Any = ledger["entries"]
    settled = sum(entry["spend"] for entry in entries if entry["kind"] != "return")
    assert settled == round(done["usage"]["spend"] * 1_000_000)
    listed = await agents.read("thread", action="list", limit=100)
    ends = [one["status"] for one in listed["threads"]]
    assert "exhausted" in ends, "some got too little for a request"
    assert ends.count("completed") > 10
    verified = await agents.read("thread", action="verify", thread_id=done["thread_id"])
    assert verified["valid"], verified


async def test_a_reply_that_was_lost_is_charged_and_a_refusal_is_not(agents: Agents) -> None:
    cost(agents, {"input": 0, "output": 10_000})
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(ScriptedTurn())
    done = await agents.start("study")
    assert (done["status"], done["usage"]["spend"]) == ("failed", 1.0), done
    agents.model.will(fail(401))
    done = await agents.start("study")
    assert (done["status"], done["usage"]["spend"]) == ("failed", 0.0), done


async def test_a_child_that_asks_is_seen_at_its_root_and_ends_with_it(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into kiwis": [use("spawn", item="study", inputs={"topic": "one"}), use("wait")],
            "Look into one": [use("ask", question="Which?")],
        }
    )
    waiting = await agents.start("lead")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "child"), waiting
    shown = await agents.read("thread", action="show", thread_id=waiting["thread_id"])
    (question,) = shown["questions"]
    assert question["message"] == "Which?"
    await agents.call("thread", action="cancel", thread_id=waiting["thread_id"])
    listed = await agents.read("thread", action="list")
    assert {one["status"] for one in listed["threads"]} == {"cancelled"}


def limit_rate(agents: Agents, items: str) -> None:
    """Let the owner allow one call of some items in a minute."""
    policy = json.loads((agents.user / "policy.yaml").read_text())
    rule = {"items": items, "per_minute": 1}
    (agents.user / "policy.yaml").write_text(json.dumps({**policy, "conditions": [rule]}))


@pytest.mark.parametrize("by", ["the provider", "the owner"])
async def test_requests_to_a_provider_wait_for_the_next_minute(agents: Agents, by: str) -> None:
    if by == "the provider":
        cost(agents, "free", requests_per_minute=1)
    else:
        limit_rate(agents, "*/scripted_llm@*")
    agents.directive("study")
    await agents.sign("study")
    agents.model.default = forever()
    done = await agents.start("study", limits={"seconds": 1})
    assert (done["status"], len(agents.model.requests)) == ("exhausted", 1)
