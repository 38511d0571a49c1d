"""Recorded threads: written without secrets, run again without a model, and compared with what is expected."""

from __future__ import annotations

import json
from pathlib import Path
from stat import S_IMODE
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents
from tests.plugins.scripted_model import say, use

pytestmark = pytest.mark.usefixtures("loopback")
SECRET = "s3cret-value-of-the-owner"


@pytest.fixture
async def done(agents: Agents) -> dict[str, Any]:
    """A thread that loaded an item, asked the owner, and ended."""
    (agents.user / ".env").write_text(f"SCRIPTED_KEY=scripted-key\nOWN_SECRET={SECRET}\n")
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(
        use("load", item_id="study"), use("ask", question=f"Is it {SECRET}?"), say("Yes."), *[say("Never played.")] * 9
    )
    waiting = await agents.start("study", inputs={"topic": "birds"})
    await agents.call("thread", action="answer", question_id=waiting["questions"][0]["question_id"], answer="yes")
    ended = await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    assert ended.content["status"] == "completed", ended.content
    return dict(ended.content)


async def recorded(agents: Agents, thread_id: str, path: Path) -> dict[str, Any]:
    answer = await agents.call("thread", action="record", thread_id=thread_id, file=str(path))
    assert not answer.is_error, answer.content
    cassette: dict[str, Any] = json.loads(path.read_text())
    return cassette


async def replayed(agents: Agents, target: object) -> dict[str, Any]:
    return dict((await agents.call("thread", action="replay", target=str(target))).content)


async def test_a_cassette_has_requests_and_replies_and_no_secret(
    agents: Agents, done: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "study.json"
    cassette = await recorded(agents, done["thread_id"], path)
    assert SECRET not in path.read_text()
    assert S_IMODE(path.stat().st_mode) == 0o600
    assert cassette["kiwi_cassette"] == 1
    assert [turn["reply"]["stop"] for turn in cassette["turns"]] == ["calls", "calls", "end"]
    assert "Look into birds." in json.dumps(cassette["turns"][0]["request"])
    assert cassette["turns"][1]["request"][-1]["role"] == "tool"
    assert (cassette["answers"], cassette["outcome"]["tools"]) == (["yes"], ["load", "ask"])
    again = await agents.call("thread", action="record", thread_id=done["thread_id"], file=str(path))
    assert again.content["code"] == "conflict", again.content


async def test_a_thread_is_replayed_without_its_model(agents: Agents, done: dict[str, Any]) -> None:
    sent = len(agents.model.requests)
    again = await replayed(agents, done["thread_id"])
    assert (again["passed"], again["differences"]) == (True, []), again
    assert (again["status"], again["result"], *again["tools"]) == ("completed", "Yes.", "load", "ask")
    assert again["thread_id"] != done["thread_id"]
    assert len(agents.model.requests) == sent
    costs = await agents.call("thread", action="costs", thread_id=again["thread_id"])
    assert costs.content["usage"]["spend"] == 0  # type: ignore[index,call-overload]  # an object


async def test_a_replay_shows_what_is_different_now(agents: Agents, done: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    cassette = await recorded(agents, done["thread_id"], path)
    path.write_text(json.dumps({**cassette, "turns": cassette["turns"][:-1]}))
    again = await replayed(agents, path)
    assert not again["passed"]
    assert again["differences"][0] == "status: failed instead of completed"
    path.write_text("{}")
    refused = await agents.call("thread", action="replay", target=str(path))
    assert refused.content["code"] == "invalid_request", refused.content


async def test_children_are_replayed_with_their_own_replies(agents: Agents) -> None:
    agents.directive("lead")
    agents.directive("study")
    await agents.sign("lead", "study")
    agents.model.will_by_text(
        {
            "Look into one.": [say("The child is done.")],
            "Look into kiwis.": [use("spawn", item="study", inputs={"topic": "one"}), use("wait"), say("Both done.")],
        }
    )
    first = await agents.start("lead")
    sent = len(agents.model.requests)
    again = await replayed(agents, first["thread_id"])
    assert again["passed"], again
    assert len(agents.model.requests) == sent
    events = await agents.events(again["thread_id"])
    results = [event["part"]["content"] for event in events if event["kind"] == "result"]
    assert "The child is done." in results[-1]


async def test_an_evaluation_runs_all_cassettes_of_a_folder(
    agents: Agents, done: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "cassettes"
    folder.mkdir()
    cassette = await recorded(agents, done["thread_id"], folder / "a.json")
    expectations = {
        "b": {"contains": "Ye", "tools": ["load", "ask"], "max_spend": 0.01},
        "c": {"result": "No.", "tools": ["load"], "status": "failed"},
    }
    for name, expect in expectations.items():
        (folder / f"{name}.json").write_text(json.dumps({**cassette, "expect": expect}))
    (folder / "d.json").write_text(json.dumps({**cassette, "item": "no_such_item"}))
    answer = await agents.call("thread", action="eval", folder=str(folder))
    content = dict[str, Any](answer.content)
    assert (content["passed"], content["failed"], answer.exit_code) == (2, 2, 1), content
    by_name = {one["target"]: one["differences"] for one in content["cassettes"]}
    assert [line.partition(":")[0] for line in by_name["c.json"]] == ["status", "result", "tools"]
    assert "tool_not_found" in by_name["d.json"][0]
    empty = await agents.call("thread", action="eval", folder=str(agents.project))
    assert empty.is_error
