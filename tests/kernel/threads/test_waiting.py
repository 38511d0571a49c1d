"""Threads that wait: for approvals, answers, children and their first start; and threads that are cancelled."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.kernel.threads import runner
from kiwi_mcp.store import threads
from kiwi_mcp.store.open import open_database

pytestmark = pytest.mark.usefixtures("loopback")


async def test_a_question_waits_in_the_store_and_its_answer_reaches_the_model(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Which colour?", choices=["red", "blue"]), say("Blue it is."))
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "question"), waiting
    (question,) = waiting["questions"]
    refused = await agents.call("thread", action="answer", question_id=question["question_id"], answer="green")
    assert refused.content["code"] == "invalid_request"
    await agents.kernel.call("thread", {"action": "answer", "question_id": question["question_id"], "answer": "blue"})
    done = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done.content["status"], done.content["result"]) == ("completed", "Blue it is.")
    assert "blue" in str(agents.model.requests[-1].json)


@pytest.mark.usefixtures("sandbox")
async def test_a_call_that_needs_approval_waits_and_runs_once_after_the_yes(agents: Agents) -> None:
    agents.directive("study")
    written = agents.project / "note.txt"
    needs = {"write": ["."]}
    agents.bash_tool("keep_note", "echo once >> note.txt; echo '{}'", mutates_state=True, needs=needs)
    await agents.sign("study", "keep_note")
    agents.model.will(use("execute", item_id="keep_note", parameters={}), say("Kept."))
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "approval"), waiting
    assert not written.exists()
    listed = await agents.kernel.call("approvals", {"action": "list"})
    assert f'"{waiting["approvals"][0]}"' in json.dumps(listed.content)
    await agents.call("approvals", action="approve", approval_id=waiting["approvals"][0])
    done = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert done.content["status"] == "completed", done.content
    assert written.read_text() == "once\n"


@pytest.mark.usefixtures("sandbox")
async def test_a_yes_for_a_thread_or_a_directive_holds_there_and_nowhere_else(agents: Agents) -> None:
    for name in ("study", "survey"):
        agents.directive(name)
    needs: Json = {"write": ["."]}
    agents.bash_tool("keep_note", "echo x >> note.txt; echo '{}'", mutates_state=True, needs=needs)
    await agents.sign("study", "survey", "keep_note")

    async def asked(name: str, scope: str = "") -> str:
        """Start a thread that makes three calls; answer the first question, and return what the thread does then."""
        agents.model.will(*(use("execute", item_id="keep_note", parameters={"n": n}) for n in range(3)), say("Kept."))
        begun = await agents.start(name)
        if not scope:
            await agents.call("thread", action="cancel", thread_id=begun["thread_id"])
            return str(begun["status"])
        yes = await agents.call("approvals", action="approve", approval_id=begun["approvals"][0], scope=scope)
        assert not yes.is_error, yes.content
        return str((await agents.read("thread", action="resume", thread_id=begun["thread_id"], wait=True))["status"])

    assert await asked("study", "thread") == "completed"
    assert await asked("study", "directive") == "completed"
    assert await asked("study") == "completed"
    assert await asked("survey") == "waiting"


@pytest.mark.usefixtures("sandbox")
async def test_a_question_that_expires_is_a_result_of_its_own(agents: Agents) -> None:
    agents.directive("study")
    agents.bash_tool("keep_note", "echo x >> note.txt; echo '{}'", mutates_state=True, needs={"write": ["."]})
    await agents.sign("study", "keep_note")
    agents.model.will(use("execute", item_id="keep_note", parameters={}), say("Not kept."))
    waiting = await agents.start("study")
    with closing(open_database(default_url(agents.user))) as database, database.transaction() as transaction:
        transaction.write("update approvals set expires_at = 1", ())
    done = await agents.read("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done["status"], done["result"]) == ("completed", "Not kept."), done
    assert "Expired: the owner" in json.dumps(agents.model.requests[-1].json["messages"][-1])
    assert not (agents.project / "note.txt").exists()


async def test_children_return_their_results_to_their_parent(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into one.": [say("The child is done.")],
            "Look into kiwis.": [use("spawn", item="study", inputs={"topic": "one"}), use("wait"), say("Both done.")],
        }
    )
    done = await agents.start("lead")
    assert (done["status"], done["result"]) == ("completed", "Both done."), done
    events = await agents.events(done["thread_id"])
    results = [event["part"]["content"] for event in events if event["kind"] == "result"]
    assert "The child is done." in results[-1], results


async def test_the_first_start_of_an_unsigned_directive_waits_for_the_owner(agents: Agents) -> None:
    agents.directive("study", folder=agents.project / ".ai")
    waiting = await agents.start("study")
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "start"), waiting
    assert agents.model.requests == []
    (question,) = waiting["questions"]
    assert "Look into kiwis." in question["message"]
    agents.model.will(say("Started."), say("Again."))
    await agents.call("thread", action="answer", question_id=question["question_id"], answer="continue")
    done = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert done.content["status"] == "completed", done.content
    assert (await agents.start("study"))["status"] == "completed"


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_worker_waits_for_the_lease_of_a_process_that_died_elsewhere(
    agents: Agents, monkeypatch: pytest.MonkeyPatch, is_cancelled: bool
) -> None:
    for module in (runner, threads):
        monkeypatch.setattr(module, "STALE_MS", 700)
    agents.directive("study")
    await agents.sign("study")
    started = await agents.call("thread", action="start", item_id="study")
    thread_id = str(started.content["thread_id"])
    with closing(open_database(default_url(agents.user))) as database:
        threads.Threads(database).take(thread_id, "elsewhere/1", time.time_ns() // 1_000_000)
    if is_cancelled:
        cancelled = await agents.call("thread", action="cancel", thread_id=thread_id)
        assert cancelled.content["status"] == "queued"
    agents.model.will(*([] if is_cancelled else [say("Done.")]))
    assert (await agents.call("worker", until_idle=True)).content == {"threads": 1}
    done = await agents.read("thread", action="show", thread_id=thread_id)
    assert done["status"] == ("cancelled" if is_cancelled else "completed"), done


async def test_a_thread_does_not_start_without_its_question(agents: Agents) -> None:
    agents.directive("study", folder=agents.project / ".ai")
    waiting = await agents.start("study")
    with closing(open_database(default_url(agents.user))) as database, database.transaction() as transaction:
        transaction.write("delete from questions", ())
    done = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert (done.content["status"], done.content["code"]) == ("cancelled", "denied"), done.content
    assert agents.model.requests == []


async def test_a_waiting_thread_can_be_cancelled(agents: Agents) -> None:
    agents.directive("study", folder=agents.project / ".ai")
    waiting = await agents.start("study")
    done = await agents.call("thread", action="cancel", thread_id=waiting["thread_id"])
    assert (done.content["status"], done.content["finish_reason"]) == ("cancelled", "cancelled")
    verified = await agents.call("thread", action="verify", thread_id=waiting["thread_id"])
    assert verified.content["valid"] is True, verified.content


async def test_a_running_thread_takes_messages_and_can_be_paused(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    loop = asyncio.get_running_loop()
    commands = [{"action": "inject", "message": "Also look at emus."}, {"action": "pause"}]

    async def command() -> None:
        thread_id = (await agents.read("thread", action="list"))["threads"][0]["thread_id"]
        answer = await agents.kernel.call("thread", {**commands.pop(0), "thread_id": thread_id})
        assert answer.content["status"] == "running", answer.content

    def interrupt(_: object) -> None:
        if commands:
            asyncio.run_coroutine_threadsafe(command(), loop).result(120)

    agents.model.on_request = interrupt
    agents.model.will(say("Kiwis."), use("help", topic="tool"), say("Both."))
    paused = await agents.start("study")
    assert paused["status"] == "paused", paused
    roles = [one["role"] for one in agents.model.requests[1].json["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert "emus" in json.dumps(agents.model.requests[1].json["messages"][-1])
    done = (await agents.call("thread", action="resume", thread_id=paused["thread_id"], wait=True)).content
    assert (done["status"], done["result"]) == ("completed", "Both."), done
    assert (await agents.read("thread", action="verify", thread_id=paused["thread_id"]))["valid"] is True


async def test_a_tree_is_cancelled_from_any_of_its_threads_and_can_be_erased(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into one.": [use("ask", question="Which?")],
            "Look into kiwis.": [use("spawn", item="study", inputs={"topic": "one"}), use("wait")],
        }
    )
    waiting = await agents.start("lead")
    child, root = (await agents.read("thread", action="list"))["threads"]
    refused = await agents.call("thread", action="erase", thread_id=root["thread_id"])
    assert refused.content["code"] == "conflict"
    paused = await agents.read("thread", action="pause", thread_id=child["thread_id"])
    assert (paused["status"], waiting["status"]) == ("paused", "waiting")
    cancelled = await agents.read("thread", action="cancel", thread_id=child["thread_id"], tree=True)
    assert (cancelled["thread_id"], cancelled["status"]) == (root["thread_id"], "cancelled")
    assert (await agents.read("thread", action="show", thread_id=child["thread_id"]))["status"] == "cancelled"
    transcript = agents.project / cancelled["transcript_path"]
    assert transcript.is_file()
    await agents.call("thread", action="erase", thread_id=root["thread_id"])
    shown = await agents.read("thread", action="show", thread_id=root["thread_id"])
    assert not transcript.exists()
    assert all(event.keys() == {"seq", "at", "kind"} for event in shown["events"])
    assert (await agents.read("thread", action="verify", thread_id=root["thread_id"]))["valid"] is True


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("processes", "loopback")
@pytest.mark.parametrize("engine", ["inline", "dbos"])
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
async def test_a_thousand_waiting_threads_cost_an_idle_worker_less_than_two_hundredths_of_a_core(
    agents: Agents, request: pytest.FixtureRequest, store: str, engine: str
) -> None:
    if store == "postgres":
        (agents.user / "registry.yaml").write_text(f"url: {request.getfixturevalue('postgres_url')}\n")
    agents.directive("unsigned", folder=agents.project / ".ai")
    for _ in range(500):
        assert (await agents.read("thread", action="start", item_id="unsigned"))["waits_for"] == "start"
    agents.directive("study")
    await agents.sign("study")
    for _ in range(500):
        made = await agents.read("thread", action="start", item_id="study", conversation=True)
        assert made["waits_for"] == "message", made
    share = await asyncio.to_thread(idle_share, agents, engine)
    sys.stderr.write(f"\n{engine} on {store}: {share:.2%} of a core\n")
    assert share < 0.02
    assert agents.model.requests == []


def idle_share(agents: Agents, engine: str) -> float:
    """Return how much of a core a worker uses that has nothing to do."""
    worker = subprocess.Popen([sys.executable, "-m", "kiwi_mcp", "worker", "--engine", engine], cwd=agents.project)
    try:
        while not agents.kernel._services.store.registry().database.read("select 1 from workers"):
            time.sleep(0.1)
        time.sleep(5)  # the first look reads every journal
        seconds, ticks = time.monotonic(), cpu_ticks(worker.pid)
        time.sleep(30)
        return (cpu_ticks(worker.pid) - ticks) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - seconds)
    finally:
        worker.kill()
        worker.wait()


def cpu_ticks(pid: int) -> int:
    """Return how long a process used the processor."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
