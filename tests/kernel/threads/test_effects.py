"""What happens to a call whose process ended before its result was stored: by its effect, its probe, its owner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Kernel

pytestmark = pytest.mark.usefixtures("loopback", "sandbox")
SCRIPT = """echo "$KIWI_IDEMPOTENCY_KEY" >> calls.txt; sync calls.txt
if [ "$(wc -l < calls.txt)" = 1 ]; then sleep 60; fi
echo '{"written": true}'"""
NEEDS: Json = {"write": ["."]}


@asynccontextmanager
async def interrupted(agents: Agents) -> AsyncIterator[tuple[Agents, str]]:
    """Start a thread, end its kernel while the first call runs, and give another kernel and the id of the thread."""
    await agents.call("approvals", action="add_rule", item="*/write_line@*")
    task = asyncio.create_task(agents.start("study"))
    async with asyncio.timeout(20):
        while not (agents.project / "calls.txt").exists():
            assert not task.done(), task.result()
            await asyncio.sleep(0.02)
    thread_id = (await agents.read("thread", action="list"))["threads"][0]["thread_id"]
    await agents.kernel.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    other = replace(agents, kernel=Kernel(agents.project, user=agents.user))
    try:
        yield other, thread_id
    finally:
        await other.kernel.aclose()


async def written(agents: Agents, script: str = SCRIPT, **words: Json) -> None:
    agents.directive("study")
    agents.bash_tool("write_line", script, mutates_state=True, needs=NEEDS, **words)
    await agents.sign("study", "write_line")
    agents.model.will(use("execute", item_id="write_line", parameters={"text": "x"}), say("Done."))


async def test_an_idempotent_call_runs_again_with_the_same_key(agents: Agents) -> None:
    await written(agents, effect="idempotent")
    async with interrupted(agents) as (other, thread_id):
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (done["status"], done["result"]) == ("completed", "Done."), done
        first, second = (agents.project / "calls.txt").read_text().split()
        assert first == second
        assert first.startswith(f"{thread_id}/")
        began = [event for event in await other.events(thread_id) if event["kind"] == "began"]
        assert [event["effect"] for event in began] == ["idempotent", "idempotent"]
        assert (await other.read("thread", action="verify", thread_id=thread_id))["valid"] is True


@pytest.mark.parametrize(
    ("answer", "told", "calls"),
    [
        ("done", "Done: the owner", 1),
        ("not done", "Not done: the owner", 1),
        ("run again", "written", 2),
        ("stop", "", 1),
    ],
)
async def test_the_owner_says_what_became_of_a_call_that_runs_at_most_once(
    agents: Agents, answer: str, told: str, calls: int
) -> None:
    await written(agents)
    async with interrupted(agents) as (other, thread_id):
        waiting = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (waiting["status"], waiting["waits_for"]) == ("waiting", "question"), waiting
        (question,) = waiting["questions"]
        assert "write_line" in question["message"]
        await other.call("thread", action="answer", question_id=question["question_id"], answer=answer)
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert done["status"] == ("cancelled" if answer == "stop" else "completed"), done
        assert answer == "stop" or told in json.dumps(agents.model.requests[-1].json["messages"][-1])
        assert len((agents.project / "calls.txt").read_text().split()) == calls


@pytest.mark.parametrize(("found", "calls"), [({"done": True, "result": "line 1"}, 1), ({"done": False}, 2)])
async def test_the_probe_of_an_item_is_asked_before_the_owner(agents: Agents, found: Json, calls: int) -> None:
    agents.bash_tool("was_written", f"cat > /dev/null; echo '{json.dumps(found)}'", effect="pure")
    await agents.sign("was_written")
    await written(agents, probe="was_written")
    async with interrupted(agents) as (other, thread_id):
        done = await other.read("thread", action="resume", thread_id=thread_id, wait=True)
        assert (done["status"], done["result"]) == ("completed", "Done."), done
        assert len((agents.project / "calls.txt").read_text().split()) == calls
        told = "line 1" if calls == 1 else "written"
        assert told in json.dumps(agents.model.requests[-1].json["messages"][-1])
