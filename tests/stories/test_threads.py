"""Threads through the command line: started, followed, answered and approved, in processes of their own."""

from __future__ import annotations

import fcntl
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, write_provider
from tests.plugins.scripted_model import DIALECT_NAMES, ScriptedModel, ScriptedTurn, fail, say, use

from kiwi_mcp.kernel import Answer

pytestmark = pytest.mark.usefixtures("processes", "loopback")
PATIENCE = 120
USAGE = {
    "turns", "input_tokens", "cache_read_tokens", "cache_write_tokens", "output_tokens", "spend", "currency",
    "estimated",
}  # fmt: skip


@dataclass(frozen=True)
class Terminal:
    """The command line in a project with the signed directive `study`."""

    project: Path
    user: Path
    model: ScriptedModel

    def run(self, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a command."""
        done = subprocess.run(
            [sys.executable, "-m", "kiwi_mcp", *words],
            cwd=self.project, capture_output=True, text=True, check=False, timeout=PATIENCE,
        )  # fmt: skip
        assert code is None or done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done

    def json(self, *words: str, code: int | None = 0) -> dict[str, Any]:
        """Run a command with `--json` and return what it prints."""
        response: dict[str, Any] = json.loads(self.run(*words, "--json", code=code).stdout)
        return response

    def worker_has_ended(self) -> bool:
        """Wait until no worker runs: it has a lock as long as it runs."""
        with (self.user / "state" / "worker.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        return True


@pytest.fixture
def terminal(home: Path, project: Path, scripted_model: ScriptedModel, ask: Callable[..., Answer]) -> Terminal:
    user = home / ".ai"
    (user / "directives").mkdir(parents=True)
    (user / "tools").mkdir()
    write_provider(user, scripted_model, "openai_chat")
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)
    signed = ask("execute", action="sign", item_id="study")
    assert not signed.is_error, signed.content
    return Terminal(project, user, scripted_model)


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
@pytest.mark.req("K-TH-01")
def test_a_thread_runs_to_its_end_in_every_dialect(terminal: Terminal, dialect: str) -> None:
    write_provider(terminal.user, terminal.model, dialect)
    terminal.model.will(use("help", topic="tool"), say("Birds."))
    done = terminal.json("thread", "start", "study", "--input", "topic=birds", "--limit", "spend=0.50", "--wait")
    assert (done["status"], done["result"], done["finish_reason"]) == ("completed", "Birds.", "stop")
    assert len(done["thread_id"]) == 26
    assert done["usage"].keys() >= USAGE
    assert (done["usage"]["turns"], done["usage"]["currency"]) == (2, "USD")
    assert done["limits"]["spend"] == 0.5


def test_a_thread_in_the_background_is_run_by_a_worker_that_ends(terminal: Terminal) -> None:
    terminal.model.default = lambda _: say("Birds.")
    started = [terminal.json("thread", "start", "study") for _ in range(2)]
    for one in started:
        assert one.keys() == {"thread_id", "status", "started_at", "transcript_path"}
        assert one["status"] == "queued"
        done = terminal.json("thread", "watch", one["thread_id"])
        assert (done["status"], done["result"]) == ("completed", "Birds.")
    assert terminal.worker_has_ended()
    thread_id = started[0]["thread_id"]
    assert (terminal.project / started[0]["transcript_path"]).is_file()
    shown = terminal.json("thread", "show", thread_id)
    assert shown["status"] == "completed"
    assert [event["kind"] for event in shown["events"]][-1] == "ended"
    listed = terminal.json("thread", "list", "--status", "completed")
    assert {one["thread_id"] for one in listed["threads"]} == {one["thread_id"] for one in started}
    costs = terminal.json("thread", "costs", thread_id)
    assert costs["usage"]["turns"] == 1
    assert costs["entries"]
    assert terminal.json("thread", "verify", thread_id)["valid"] is True
    assert '"type":"completed"' in terminal.run("thread", "export", thread_id).stdout


@pytest.mark.req("K-TH-07")
def test_a_home_with_a_schedule_sleeps_until_its_time_and_wakes_for_a_thread(terminal: Terminal) -> None:
    asked = Event()
    terminal.model.default = lambda _: say("Birds.")
    terminal.model.on_request = lambda _: asked.set()
    terminal.run("schedule", "add", "tick", "study", "* * * * * *")
    assert asked.wait(PATIENCE)
    terminal.run("schedule", "remove", "tick")
    assert terminal.worker_has_ended()
    terminal.run("schedule", "add", "yearly", "study", "0 0 1 1 *", "--zone", "Europe/Zurich")
    due = terminal.user / "state" / "worker.due"
    started = terminal.json("thread", "start", "study")["thread_id"]
    assert terminal.json("thread", "watch", started)["status"] == "completed"
    listed = terminal.json("schedule", "list")
    assert (listed["schedules"][0]["next_at"][11:], listed.get("warnings")) == ("23:00:00.000Z", None)
    terminal.run("schedule", "remove", "yearly")
    assert terminal.worker_has_ended()
    assert not due.exists()


def test_only_one_worker_runs_for_a_home(terminal: Terminal) -> None:
    (terminal.user / "state").mkdir(exist_ok=True)
    with (terminal.user / "state" / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = terminal.json("thread", "start", "study")
        assert terminal.json("worker", "--while-pending") == {"threads": 0}
    assert terminal.json("thread", "show", started["thread_id"])["status"] == "queued"
    assert terminal.json("thread", "cancel", started["thread_id"])["status"] == "cancelled"


def keep_note(terminal: Terminal) -> dict[str, Any]:
    """Start a thread with a call that waits for approval, and return the thread."""
    folder = terminal.user / "tools" / "keep_note"
    folder.mkdir()
    manifest = {
        "tool_id": "keep_note", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
        "description": "Keeps a note", "config": {"entrypoint": "main.sh"}, "mutates_state": True,
        "needs": {"write": ["."]},
    }  # fmt: skip
    (folder / "tool.yaml").write_text(json.dumps(manifest))
    (folder / "main.sh").write_text("echo once >> note.txt; echo '{}'")
    terminal.run("sign", "keep_note")
    terminal.model.will(use("execute", item_id="keep_note"), say("Kept."))
    waiting = terminal.json("thread", "start", "study", "--wait", code=6)
    assert (waiting["status"], waiting["waits_for"]) == ("waiting", "approval")
    assert not (terminal.project / "note.txt").exists()
    return waiting


@pytest.mark.usefixtures("sandbox")
def test_an_approval_wakes_the_thread_that_waits_for_it(terminal: Terminal) -> None:
    waiting = keep_note(terminal)
    (approval,) = waiting["approvals"]
    for words in (["approvals", "list"], ["approvals"]):
        assert [asked["approval_id"] for asked in terminal.json(*words)["approvals"]] == [approval]
    terminal.run("approvals", "approve", approval)
    done = terminal.json("thread", "watch", waiting["thread_id"])
    assert (done["status"], done["result"]) == ("completed", "Kept.")
    assert (terminal.project / "note.txt").read_text() == "once\n"
    assert terminal.worker_has_ended()


@pytest.mark.usefixtures("sandbox")
def test_a_call_runs_once_that_is_approved_three_days_after_all_processes_ended(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = keep_note(terminal)
    (library,) = {*Path("/usr/lib").glob("*/faketime/libfaketime.so.1")}  # `scripts/setup.sh --test` installs it
    for name, value in {"LD_PRELOAD": str(library), "FAKETIME": "+3d"}.items():
        monkeypatch.setenv(name, value)
    terminal.run("approvals", "approve", *waiting["approvals"])
    done = terminal.json("thread", "watch", waiting["thread_id"])
    assert (done["status"], done["result"]) == ("completed", "Kept.")
    assert (terminal.project / "note.txt").read_text() == "once\n"
    days = datetime.fromisoformat(done["ended_at"]) - datetime.fromisoformat(done["started_at"])
    assert days > timedelta(days=3)
    assert terminal.worker_has_ended()


def test_an_answer_continues_a_thread_in_the_background(terminal: Terminal) -> None:
    terminal.model.will(use("ask", question="Which colour?"), say("Blue it is."), use("ask", question="Sure?"))
    waiting = terminal.json("thread", "start", "study", "--wait", code=9)
    assert waiting["status"] == "waiting"
    question = waiting["questions"][0]["question_id"]
    answered = terminal.run("thread", "answer", question, "dark", "blue").stderr
    assert "Answered; the thread continues." in answered
    assert f"hint: `kiwi thread watch {waiting['thread_id']}` follows it." in answered
    done = terminal.json("thread", "watch", waiting["thread_id"])
    assert (done["status"], done["result"]) == ("completed", "Blue it is.")
    assert "dark blue" in json.dumps(terminal.model.requests[-1].messages)
    again = terminal.json("thread", "start", "study", "--wait", code=9)
    cancelled = terminal.json("thread", "cancel", again["thread_id"])
    assert (cancelled["status"], cancelled["finish_reason"]) == ("cancelled", "cancelled")
    refused = terminal.json("thread", "resume", again["thread_id"], "--wait", code=None)
    assert refused["code"] == "thread_ended", refused


@pytest.mark.parametrize("continuing", ["resume", "cancel"])
def test_threads_of_a_worker_that_was_killed_are_continued_at_once(terminal: Terminal, continuing: str) -> None:
    asked = Event()
    terminal.model.on_request = lambda _: asked.set()
    terminal.model.will(ScriptedTurn(how="silent"), say("Birds."), say("Birds."))
    (terminal.user / "state").mkdir(exist_ok=True)
    with (terminal.user / "state" / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread_id = terminal.json("thread", "start", "study")["thread_id"]
    worker = subprocess.Popen([sys.executable, "-m", "kiwi_mcp", "worker", "--until-idle"], cwd=terminal.project)
    assert asked.wait(PATIENCE)
    worker.kill()
    worker.wait(PATIENCE)
    assert terminal.json("thread", "show", thread_id)["status"] == "running"
    done = terminal.json("thread", continuing, thread_id)
    if continuing == "cancel":
        assert (done["status"], done["finish_reason"]) == ("cancelled", "cancelled")
        return
    done = terminal.json("thread", "watch", thread_id)
    assert (done["status"], done["result"], done["usage"]["estimated"]) == ("completed", "Birds.", True)
    assert terminal.json("thread", "verify", thread_id)["valid"] is True
    assert terminal.worker_has_ended()


def test_run_with_mode_thread_prints_the_result(terminal: Terminal) -> None:
    terminal.model.will(say("Birds."))
    done = terminal.run("run", "study", "--mode", "thread", "topic=birds")
    assert done.stdout.strip() == "Birds."
    with (terminal.user / "state" / "worker.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = terminal.json("run", "study", "--mode", "thread", "--no-wait")
    assert (started["status"], len(started["thread_id"])) == ("queued", 26)


def test_a_pipe_gets_the_result_alone_and_the_exit_code_says_how_it_ended(terminal: Terminal) -> None:
    terminal.model.will(use("execute", item_id="lost"), say("Birds."), use("help"), fail(401))
    done = terminal.run("thread", "start", "study", "--wait", "--limit", "turns=99")
    assert done.stdout == "Birds.\n"
    lines = [re.sub(r"\d+\.\d s|[0-9A-Z]{26}", "…", line) for line in done.stderr.splitlines()]
    assert lines == [
        "turn 1: execute",
        '[1] execute {"item_id": "lost"}  not_found …',
        "turn 2: answer",
        "warning: The limit `turns` is 25, not 99: a start can only lower the limits.",
        "thread …: completed; 2 turns, 240 tokens, 0.0000 USD",
    ]
    assert terminal.json("thread", "start", "study", "--wait", "--limit", "turns=1", code=10)["status"] == "exhausted"
    assert terminal.json("thread", "start", "study", "--wait", code=1)["status"] == "failed"
    for limit in ("turns=-1", "trns=3"):
        assert "Traceback" not in terminal.run("thread", "start", "study", "--limit", limit, code=4).stderr


def test_the_first_start_of_an_unsigned_directive_shows_what_it_may_do(terminal: Terminal) -> None:
    permissions = '<execute resource="tool" id="count_words"/><read resource="filesystem" path="docs/**"/>'
    text = DIRECTIVE.format(name="stranger", permissions=permissions, limits="", outputs="", model="")
    folder = terminal.project / ".ai" / "directives"
    folder.mkdir(parents=True)
    (folder / "stranger.md").write_text(text.replace("Look into", "Limits: none\u202e\nMay it start? Look into"))
    waiting = terminal.run("thread", "start", "stranger", "--wait", code=9).stderr
    asked = waiting.partition("question: ")[2].partition("hint:")[0]
    assert "  |    Limits: none\\u{202e}\n  |    May it start? Look into kiwis.\n" in asked
    assert "\u202e" not in asked
    assert {"It may:", "  - run items: count_words", "  - read files: docs/**"} <= {*asked.splitlines()}
    assert "\nLimits: 25 turns, 200,000 tokens, 1.00 USD, 1800 seconds, 200 tool calls, 10 child threads.\n" in asked
    assert '"allow"' not in asked
    assert "Cancelled." in terminal.run("thread", "cancel", terminal.run("thread").stdout.split()[0]).stderr
