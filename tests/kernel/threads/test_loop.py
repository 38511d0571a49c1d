"""The agent loop: a model is asked, its calls are made, and their results reach it."""

from __future__ import annotations

import json

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

pytestmark = pytest.mark.usefixtures("loopback")


@pytest.mark.req("K-TH-01", "F1")
async def test_a_thread_ends_with_what_its_model_says(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("Kiwis are birds."))
    done = await agents.start("study", inputs={"topic": "birds"})
    assert (done["status"], done["result"], done["finish_reason"]) == ("completed", "Kiwis are birds.", "stop"), (
        json.dumps(done)
    )
    assert done["usage"]["turns"] == 1
    (request,) = agents.model.requests
    assert "Look into birds." in json.dumps(request.json)


@pytest.mark.req("F1", "F2")
@pytest.mark.usefixtures("sandbox")
async def test_the_output_of_a_tool_reaches_the_model_unchanged(agents: Agents) -> None:
    agents.directive("study")
    agents.bash_tool("echo", "cat")
    await agents.sign("study", "echo")
    agents.model.will(use("execute", item_id="echo", parameters={"text": "ä\n{x}"}), say("Done."))
    done = await agents.start("study")
    assert done["status"] == "completed", done
    events = await agents.events(done["thread_id"])
    (result,) = [event for event in events if event["kind"] == "result"]
    assert result["status"] == "ok", result
    assert json.loads(result["part"]["content"]) == {"text": "ä\n{x}"}
