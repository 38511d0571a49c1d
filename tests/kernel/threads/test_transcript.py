"""The transcript of a thread: a copy of the journal in the project, and its export."""

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


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def studied(agents: Agents) -> dict[str, Any]:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(say("Looking.") & use("help", topic="tool"), say(f"Done, {SECRET}."))
    return await agents.start("study")


@pytest.fixture(autouse=True)
def secret(agents: Agents) -> None:
    (agents.user / ".env").write_text(f"SCRIPTED_KEY=scripted-key\nOWN_SECRET={SECRET}\n")


async def test_a_thread_of_a_project_has_a_transcript_without_secrets(agents: Agents) -> None:
    done = await studied(agents)
    assert done["result"] == f"Done, {SECRET}."
    path = agents.project / done["transcript_path"]
    assert path == agents.project / ".ai" / "threads" / done["thread_id"] / "transcript.jsonl"
    assert S_IMODE(path.stat().st_mode) == 0o600
    turn = ["turn_start", "assistant_message", "cost_update", "turn_end"]
    rows = lines_of(path)
    assert [row["type"] for row in rows] == [
        "user_message", *turn[:2], "tool_call", *turn[2:], "tool_result", *turn, "completed",
    ]  # fmt: skip
    assert all(row["ts"] for row in rows)
    assert len(rows[3]["arguments_sha256"]) == 64
    assert SECRET not in path.read_text()
    assert "[redacted:OWN_SECRET]" in path.read_text()


async def test_a_deleted_transcript_is_written_again_from_the_journal(agents: Agents) -> None:
    agents.directive("study")
    await agents.sign("study")
    agents.model.will(use("ask", question="Which?"), say("Done."))
    waiting = await agents.start("study")
    path = agents.project / waiting["transcript_path"]
    path.unlink()
    await agents.call("thread", action="answer", question_id=waiting["questions"][0]["question_id"], answer="this")
    await agents.call("thread", action="resume", thread_id=waiting["thread_id"], wait=True)
    kinds = [row["type"] for row in lines_of(path)]
    assert (kinds[0], kinds[-1], kinds.count("tool_call")) == ("user_message", "completed", 1)
    exported = await agents.call("thread", action="export", thread_id=waiting["thread_id"])
    assert exported.content["lines"] == path.read_text().splitlines()


async def test_a_link_on_the_way_is_not_followed(agents: Agents, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (agents.project / ".ai" / "threads").symlink_to(elsewhere)
    done = await studied(agents)
    assert done["status"] == "completed"
    assert [*elsewhere.iterdir()] == []


async def test_a_transcript_can_be_exported_in_the_form_of_ryeos(agents: Agents) -> None:
    done = await studied(agents)
    exported = await agents.call("thread", action="export", thread_id=done["thread_id"], format="ryeos")
    rows = [json.loads(line) for line in dict[str, Any](exported.content)["lines"]]
    kinds = [row["event_type"] for row in rows]
    assert kinds[:3] == ["thread_started", "system_prompt", "cognition_in"]
    assert {"tool_call_start", "tool_call_result", "cognition_out"} <= {*kinds}
    assert kinds[-1] == "thread_completed"
    assert all(row["thread_id"] == done["thread_id"] for row in rows)
    assert SECRET not in json.dumps(rows)
