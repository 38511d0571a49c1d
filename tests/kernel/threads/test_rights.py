"""Rights of threads: owner, starter, directive and parent, all at once, at every call."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import ModelRequest, say, use

from kiwi_mcp.domain.calls import Caller, Principal
from kiwi_mcp.domain.grants import Allow, Grant, Rights, Rules, empty_grant
from kiwi_mcp.domain.threads import Thread, ThreadLimits
from kiwi_mcp.kernel.threads.start import grants_of, rights_of
from kiwi_mcp.manifest.program import DirectiveProgram

ANN = Caller(name="ann", identity=Principal("agent", "ann"))
ONE = '<execute resource="tool" id="one"/><execute resource="spawn"/>'
BOTH = '<execute resource="tool" id="one"/><execute resource="tool" id="two"/><execute resource="spawn"/>'


def run(name: str) -> Any:
    return use("execute", item_id=name, parameters={})


@pytest.fixture
async def tools(agents: Agents, sandbox: None, loopback: None) -> Agents:
    """Two signed tools."""
    for name in ("one", "two"):
        agents.bash_tool(name, f"echo '\"{name} ran\"'")
    await agents.sign("one", "two")
    return agents


async def statuses(agents: Agents, thread_id: str) -> list[str]:
    """Return how each call of a thread ended, in the order in which the model asked for them."""
    results = [event for event in await agents.events(thread_id) if event["kind"] == "result"]
    return [event["status"] for event in sorted(results, key=lambda event: event["part"]["id"])]


@pytest.mark.req("K-TH-02", "F3")
async def test_a_directive_uses_only_the_tools_that_it_names(tools: Agents) -> None:
    tools.directive("study", permissions=ONE)
    await tools.sign("study")
    tools.model.will(run("one") & run("two"), say("Done."))
    done = await tools.start("study")
    assert await statuses(tools, done["thread_id"]) == ["ok", "not_permitted"]


@pytest.mark.req("K-TH-02")
async def test_a_directive_without_permissions_uses_nothing(tools: Agents) -> None:
    tools.directive("study", permissions="")
    await tools.sign("study")
    tools.model.will(run("one") & use("search", query="one"), say("Done."))
    done = await tools.start("study")
    assert await statuses(tools, done["thread_id"]) == ["not_permitted", "not_permitted"]


@pytest.mark.req("K-TH-02")
async def test_a_narrow_starter_gets_no_more_from_a_broad_directive(tools: Agents) -> None:
    policy = json.loads((tools.user / "policy.yaml").read_text())
    policy["actors"] = {"ann": {"items": {"allow": ["*/study@*", "*/one@*", "builtin/*"]}}}
    (tools.user / "policy.yaml").write_text(json.dumps(policy))
    tools.directive("study", permissions=BOTH)
    await tools.sign("study")
    tools.model.will(run("one") & run("two"), say("Done."))
    done = await tools.start("study", ANN)
    found = await statuses(tools, done["thread_id"])
    assert found[0] == "ok"
    assert found[1] in {"not_permitted", "not_found"}


@pytest.mark.req("K-TH-02")
@pytest.mark.parametrize("denied", [{"items": {"deny": ["*/scripted_llm@*"]}}, {"hosts": {"deny": ["127.0.0.1"]}}])
async def test_a_starter_who_is_denied_the_model_starts_no_thread(agents: Agents, denied: Any) -> None:
    policy = json.loads((agents.user / "policy.yaml").read_text())
    (agents.user / "policy.yaml").write_text(json.dumps({**policy, "actors": {"ann": denied}}))
    agents.directive("study")
    await agents.sign("study")
    done = await agents.start("study", ANN)
    assert (done["status"], done["code"]) == ("failed", "not_permitted"), done
    assert agents.model.requests == []
    agents.model.will(say("Done."))
    assert (await agents.start("study"))["status"] == "completed"


@pytest.mark.req("K-TH-02")
@pytest.mark.case("PERM-03")
async def test_a_rule_that_the_owner_adds_stops_the_next_call(tools: Agents) -> None:
    tools.directive("study", permissions=BOTH)
    await tools.sign("study")

    def revoke(request: ModelRequest) -> None:
        if "one ran" in json.dumps(request.json):
            policy = json.loads((tools.user / "policy.yaml").read_text())
            (tools.user / "policy.yaml").write_text(json.dumps({**policy, "items": {"deny": ["*/one@*"]}}))

    tools.model.on_request = revoke
    tools.model.will(run("one"), run("one"), say("Done."))
    done = await tools.start("study")
    assert await statuses(tools, done["thread_id"]) == ["ok", "not_permitted"]


@pytest.mark.req("K-TH-02")
async def test_a_child_has_no_more_rights_than_its_parent(tools: Agents) -> None:
    tools.directive("lead", permissions=ONE)
    tools.directive("work", permissions=BOTH)
    await tools.sign("lead", "work")
    tools.model.will_by_text(
        {
            "Look into child.": [run("one") & run("two"), say("Child done.")],
            "Look into kiwis.": [use("spawn", item="work", inputs={"topic": "child"}), use("wait"), say("Done.")],
        }
    )
    done = await tools.start("lead")
    assert done["status"] == "completed", done
    listed = await tools.call("thread", action="list")
    child = next(one["thread_id"] for one in listed.content["threads"] if one["thread_id"] != done["thread_id"])  # type: ignore[union-attr,index,call-overload]
    assert await statuses(tools, str(child)) == ["ok", "not_permitted"]


@pytest.mark.req("K-TH-02")
async def test_a_coordinator_passes_on_what_it_may_not_use_itself(tools: Agents) -> None:
    delegated = '<execute resource="tool" id="one" delegate="true"/><execute resource="spawn"/>'
    tools.directive("lead", permissions=delegated)
    tools.directive("work", permissions=ONE)
    await tools.sign("lead", "work")
    tools.model.will_by_text(
        {
            "Look into child.": [run("one"), say("Child done.")],
            "Look into kiwis.": [
                run("one"),
                use("spawn", item="work", inputs={"topic": "child"}),
                use("wait"),
                say("Done."),
            ],
        }
    )
    done = await tools.start("lead")
    assert (await statuses(tools, done["thread_id"]))[0] == "not_permitted"
    listed = await tools.call("thread", action="list")
    child = next(one["thread_id"] for one in listed.content["threads"] if one["thread_id"] != done["thread_id"])  # type: ignore[union-attr,index,call-overload]
    assert await statuses(tools, str(child)) == ["ok"]


@pytest.mark.req("K-TH-02")
@pytest.mark.case("PERM-06")
async def test_a_thread_id_in_a_request_gives_no_rights_and_is_recorded(agents: Agents) -> None:
    for payload in (
        {"item_id": "return", "parameters": {"thread_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}},
        {"item_id": "spawn", "parameters": {"item": "study", "thread": "01ARZ3NDEKTSV4RRFFQ69G5FAV"}},
    ):
        answer = await agents.call("execute", **payload)  # type: ignore[arg-type]  # requests as a model sends them
        assert answer.is_error
    forged = await agents.call("thread_tools", action="return", arguments={}, origin={"thread": "x"})
    assert forged.content["code"] == "invalid_request"
    direct = await agents.call("thread_tools", action="return", arguments={})
    assert direct.content["code"] == "not_permitted"
    receipts = await agents.call("audit", action="list")
    assert "return" in json.dumps(receipts.content)


patterns = st.lists(st.sampled_from(["*", "*/one@*", "*/two@*", "user/*", "user/local/one@1.0.0"]), max_size=3)
grants = st.builds(
    lambda allow, deny: Grant(items=Rules(tuple(allow), tuple(deny)), name="directive"), patterns, patterns
)
ITEMS = ["user/local/one@1.0.0", "user/local/two@1.0.0", "project/local/one@2.0.0"]


def program(grant: Grant) -> DirectiveProgram:
    return DirectiveProgram(
        name="d", version="1.0.0", description="", text="", system="", before="", after="", inputs={},
        input_schema={}, outputs={}, permissions=(grant,), delegates=(grant,),
    )  # fmt: skip


def thread(rights: Any) -> Thread:
    return Thread("t", "thread", "i", "d", "", "", "", ThreadLimits(), 0, rights=rights)


@pytest.mark.req("K-TH-02")
@given(chain=st.lists(grants, min_size=2, max_size=6))
def test_no_thread_in_a_tree_may_use_what_one_above_it_may_not(chain: list[Grant]) -> None:
    parent: Thread | None = None
    allowed = set(ITEMS)
    for grant in chain:
        parent = thread(rights_of(program(grant), parent))
        mine = Rights((Grant(), *grants_of(parent)))
        now = {item for item in ITEMS if isinstance(mine.item_verdict([item]), Allow)}
        assert now <= allowed
        allowed = now


def test_a_thread_with_no_grant_for_items_has_its_own_tools_only() -> None:
    mine = Rights((Grant(), *grants_of(thread(rights_of(program(empty_grant("d")), None)))))
    assert isinstance(mine.item_verdict(["builtin/kiwi/return@1.0.0"]), Allow)
    assert not isinstance(mine.item_verdict(["builtin/kiwi/subprocess@1.0.0"]), Allow)
