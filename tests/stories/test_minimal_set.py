"""The smallest deployment that does real work: files, a skill, git, and the owner's approval; no code, no network."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from tests.kernel.threads.conftest import Agents, agents
from tests.plugins.scripted_model import say, use

from kiwi_mcp.domain.calls import Caller

__all__ = ["agents"]
pytestmark = pytest.mark.usefixtures("sandbox", "processes", "loopback")
SET = ("files_read", "files_write", "files_edit", "files_delete", "files_search", "files_list",
       "git_init", "git_commit", "git_diff", "git_log", "git_status", "skill")  # fmt: skip
BELOW = ("python_runtime", "subprocess", "http_client", "chat")
"""What the set, the loop and the model API need."""
SKILL = f"""---
name: interview
description: Finds out what a person wants by questions, and writes a spec that they approve
allowed-tools: {" ".join(SET)}
---
Ask one question at a time: who it is for, what it must do. Then write docs/spec.md, and commit it once it is saved.
"""
SPEC = "# Spec\n\nFor the club. It counts kiwis.\n"


def git(agents: Agents, *words: str) -> str:
    argv = ["git", "-C", str(agents.project), *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout


async def say_to(agents: Agents, thread_id: str, message: str = "") -> dict[str, Any]:
    words: dict[str, Any] = {"message": message} if message else {}
    answer = await agents.call("thread", action="resume", thread_id=thread_id, wait=True, **words)
    assert not answer.is_error, answer.content
    return dict(answer.content)


async def decide(agents: Agents, waiting: dict[str, Any], decision: str) -> tuple[str, dict[str, Any]]:
    """Answer the one question of a thread; return what the owner was shown, and how the thread continued."""
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "approval"), waiting
    (number,) = waiting["approvals"]
    shown = await agents.read("approvals", action="show", approval_id=number)
    answered = await agents.call("approvals", Caller(), action=decision, approval_id=number)
    assert not answered.is_error, answered.content
    return str(shown["preview"]), await say_to(agents, waiting["thread_id"])


@pytest.mark.req("A11", "J6")
async def test_an_interview_becomes_a_spec_that_is_approved_saved_and_committed(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = [f"builtin/*/{name}*" for name in (*SET, *BELOW)] + [
        "user/local/scripted_llm*",
        "project/local/interview*",
    ]
    deployment = agents.user / "deployment.yaml"
    deployment.write_text(json.dumps({"deployment": "managed", "items": {"allow": allowed}}))
    monkeypatch.setenv("KIWI_DEPLOYMENT", str(deployment))
    skill = agents.project / ".ai" / "skills" / "interview" / "SKILL.md"
    skill.parent.mkdir(parents=True)
    skill.write_text(SKILL)
    await agents.sign("interview")
    assert [one for one in agents.project.rglob("*") if one.suffix in {".py", ".sh", ".js"}] == []

    started = await agents.call("thread", action="start", item_id="chat", conversation=True)
    thread = str(started.content["thread_id"])
    agents.model.will(use("skill", name="interview"), say("Who is it for?"))
    await say_to(agents, thread, "I need a spec.")
    assert "Ask one question at a time" in json.dumps(agents.model.requests[-1].messages)
    agents.model.will(say("What must it do?"))
    await say_to(agents, thread, "For the club.")

    write = use("execute", item_id="files_write", parameters={"path": "docs/spec.md", "content": SPEC})
    agents.model.will(
        use("execute", item_id="memory_write", parameters={"path": "a.md", "content": "x"}),
        use("execute", item_id="files_list", parameters={}),
        write,
        say("You said no. Shall I write it again?"),
    )
    waiting = await say_to(agents, thread, "It counts kiwis.")
    assert "not_permitted" in json.dumps(agents.model.requests[4].messages[-1])
    preview, refused = await decide(agents, waiting, "deny")
    assert "  | +For the club. It counts kiwis." in preview
    assert (refused["waits_for"], (agents.project / "docs").exists()) == ("message", False)
    assert "denied" in json.dumps(agents.model.requests[-1].messages[-1])

    agents.model.will(
        use("execute", item_id="files_write", parameters={"path": "docs/spec.md", "content": f"{SPEC}\nSoon.\n"}),
        use("execute", item_id="git_init", parameters={}),
        use("execute", item_id="git_commit", parameters={"message": "Add the spec", "paths": ["docs/spec.md"]}),
        say("It is in docs/spec.md."),
    )
    saving = await say_to(agents, thread, "Yes, and say that it is for soon.")
    _, making = await decide(agents, saving, "approve")
    assert (agents.project / "docs" / "spec.md").read_text() == f"{SPEC}\nSoon.\n"
    _, committing = await decide(agents, making, "approve")
    preview, done = await decide(agents, committing, "approve")
    assert "  > message: Add the spec" in preview
    assert done["waits_for"] == "message"
    assert agents.model.faults == []

    assert git(agents, "log", "--format=%s", "--name-only") == "Add the spec\n\ndocs/spec.md\n"
    assert git(agents, "show", "HEAD:docs/spec.md") == f"{SPEC}\nSoon.\n"
    receipts = (await agents.read("audit", action="list", limit=100))["receipts"]
    acted = [one["item"].partition("@")[0].rpartition("/")[2] for one in receipts if one["action"] == "run"]
    assert {"files_write", "git_init", "git_commit", "skill"} <= {*acted}
    assert (await agents.read("thread", action="verify", thread_id=thread))["valid"] is True
