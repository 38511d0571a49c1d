"""Threads through MCP over HTTP: a caller with a token starts one, gets its result, and sees no other's."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal

import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, write_provider
from tests.plugins.scripted_model import ScriptedModel, say, use
from tests.surfaces.gateway.conftest import ServeTools
from tests.surfaces.gateway.test_mcp import answer_in

from kiwi_mcp.kernel import Kernel


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
        asyncio.timeout(60),
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
