"""Threads through MCP over HTTP: a caller with a token starts one, gets its result, and sees no other's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Literal

import httpx2
import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, Agents, write_provider
from tests.plugins.scripted_model import ModelRequest, ScriptedModel, say, use
from tests.surfaces.gateway.conftest import ServeTools
from tests.surfaces.gateway.test_mcp import answer_in

from kiwi_mcp.domain.calls import NO_CALLER, Caller, CallOrigin
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.verbs import thread
from kiwi_mcp.policy.tokens import TokenStore


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_caller_of_the_gateway_starts_a_thread_and_sees_its_own_only(
    mode: Literal["auto", "legacy"], serving_tools: ServeTools, project: Path, home: Path, scripted_model: ScriptedModel
) -> None:
    user = home / ".ai"
    (user / "directives").mkdir(parents=True)
    (user / "tools").mkdir()
    write_provider(user, scripted_model, "openai_chat")
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)
    kernel = Kernel(project, user=user)
    await kernel.call("execute", {"action": "sign", "item_id": "study"})
    scripted_model.will(say("The owner's."), use("help", topic="tool"), say("Birds."))
    own = await kernel.call("thread", {"action": "start", "item_id": "study", "wait": True})
    assert own.content["result"] == "The owner's.", own.content
    heard: list[str] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message or "")

    async with (
        asyncio.timeout(120),
        serving_tools(project=project) as served,
        served.client(served.token(), mode=mode) as client,
    ):
        start = {"item_id": "study", "mode": "thread"}
        done = answer_in(await client.call_tool("execute", start, progress_callback=hear))
        assert (done["status"], done["result"]) == ("success", "Birds."), done
        listed = answer_in(await client.call_tool("thread", {"action": "list"}))
        assert [one["thread_id"] for one in listed["threads"]] == [done["thread_id"]]
        for action in ("show", "cancel", "costs", "resume", "export"):
            foreign = {"action": action, "thread_id": own.content["thread_id"]}
            assert answer_in(await client.call_tool("thread", foreign))["code"] == "not_permitted"
    await kernel.aclose()
    assert any("turn" in message for message in heard), heard


@pytest.mark.req("K-TH-02")
@pytest.mark.usefixtures("processes", "sandbox")
async def test_a_thread_of_a_token_runs_in_the_worker_with_the_rights_of_the_token(
    serving_tools: ServeTools, project: Path, home: Path, scripted_model: ScriptedModel
) -> None:
    user = home / ".ai"
    (user / "directives").mkdir(parents=True)
    (user / "tools").mkdir()
    write_provider(user, scripted_model, "openai_chat")
    policy = json.loads((user / "policy.yaml").read_text())
    policy["actors"] = {"ada": {"items": {"allow": ["*/study@*", "*/one@*", "builtin/*"]}}}
    (user / "policy.yaml").write_text(json.dumps(policy))
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)
    kernel = Kernel(project, user=user)
    agents = Agents(project, user, scripted_model, kernel)
    for name in ("one", "two"):
        agents.bash_tool(name, f"echo '\"{name} ran\"'")
    await agents.sign("study", "one", "two")
    one, two = (use("execute", item_id=name, parameters={}) for name in ("one", "two"))
    scripted_model.will(one & two & use("approvals"), one, say("Not sent."))
    async with asyncio.timeout(120), serving_tools(project=project) as served:
        tokens = TokenStore(user)

        def revoke(request: ModelRequest) -> None:
            if "one ran" in json.dumps(request.json) and tokens.all()[-1].name == "ada":
                tokens.remove("ada")

        scripted_model.on_request = revoke
        async with served.client(served.token()) as client:
            started = answer_in(await client.call_tool("thread", {"action": "start", "item_id": "study"}))
        assert started["status"] == "queued", started
        done = (await kernel.call("thread", {"action": "watch", "thread_id": started["thread_id"]})).content
    assert (done["status"], done["code"]) == ("failed", "not_permitted"), done
    events = await agents.events(started["thread_id"])
    results = sorted((one for one in events if one["kind"] == "result"), key=lambda event: event["part"]["id"])
    # The last call is made after the token was removed, and the next request to the model is not sent.
    assert [one["status"] for one in results] == ["ok", "not_found", "not_found", "not_permitted"], results
    assert "was removed" in results[-1]["part"]["content"]
    assert len(scripted_model.requests) == 2
    runs = await kernel.call("runs", {"action": "list", "actor": "ada"})
    assert "one" in json.dumps(runs.content), runs.content
    await kernel.aclose()


@pytest.mark.usefixtures("processes")
async def test_no_tool_call_answers_a_question_and_a_token_that_may_manage_does(
    serving_tools: ServeTools,
    project: Path,
    home: Path,
    scripted_model: ScriptedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(thread, "start_worker", lambda *_: None)
    user = home / ".ai"
    (user / "tools").mkdir(parents=True)
    write_provider(user, scripted_model, "openai_chat")
    agents = Agents(project, user, scripted_model, Kernel(project, user=user))
    agents.directive("study")
    await agents.sign("study")
    scripted_model.will(use("ask", question="Sure?"), say("Done."))
    waiting = await agents.start("study")
    question = waiting["questions"][0]["question_id"]
    answer: dict[str, Json] = {"action": "answer", "question_id": question, "answer": "yes"}
    approve: dict[str, Json] = {"action": "approve", "approval_id": "1"}
    asking = Caller(origin=CallOrigin(waiting["thread_id"]))
    for caller in (NO_CALLER, Caller(is_owner=True), asking):  # also not the owner's own call of `execute`
        for given in (answer, approve):
            assert (await agents.call("execute", caller, **given)).is_error
    async with asyncio.timeout(120), serving_tools(project=project) as served:
        for kind in ("owner", "agent", "service"):
            token = served.tokens.add(f"a-{kind}", (), can_write=False, can_use_tools=True, can_author=True, kind=kind)
            async with served.client(token) as client:
                for tool, given in (
                    ("execute", answer),
                    ("thread", answer),
                    ("execute", approve),
                    ("approvals", approve),
                ):
                    assert (await client.call_tool(tool, given)).is_error, (kind, tool)
        assert (await agents.read("thread", action="show", thread_id=waiting["thread_id"]))["questions"]
        manager = served.tokens.add("ci", (), can_write=False, can_use_tools=True, kind="owner", can_manage=True)
        address = f"{served.url.removesuffix('/mcp')}/v1/thread/answer"
        async with httpx2.AsyncClient(
            trust_env=False, verify=False, headers={"Authorization": f"Bearer {manager}"}
        ) as client:
            body = {"question_id": question, "answer": "yes"}
            first, second = [await client.post(address, json=body) for _ in range(2)]
        assert (first.status_code, second.json()["code"]) == (200, "invalid_request"), first.text
    done = await agents.read("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done["status"], done["result"]) == ("completed", "Done."), done
    assert "yes" in json.dumps(scripted_model.requests[-1].json)
    await agents.kernel.aclose()
