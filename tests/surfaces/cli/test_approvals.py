"""`kiwi approvals`, and `kiwi run` where the owner has to be asked: on a terminal, without one, and with `--yes`."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen

import pytest
from tests.surfaces.cli.conftest import Kiwi

import kiwi_mcp


@pytest.fixture
def kiwi(sent: list[str], kiwi: Kiwi) -> Kiwi:
    """Run a command in the project, without a terminal."""
    return partial(kiwi, given="")


@pytest.mark.req("K4")
def test_a_command_without_a_terminal_waits_and_the_owner_answers_later(kiwi: Kiwi, sent: list[str]) -> None:
    waiting = kiwi("run", "post_note", "text=hi", "--json")
    assert waiting.code == 6
    approval = json.loads(waiting.out)["approval_id"]
    listed = kiwi("approvals", "list")
    assert listed.out.startswith("  1  pending   project/local/post_note@1.0.0")
    shown = kiwi("approvals", "show", "1")
    assert kiwi("approvals", "show", approval[:12]).out == shown.out
    assert "parameters:\n  > text: hi\n" in shown.out
    assert re.search(r"[0-9a-f]{64}", shown.out) is None
    assert "question 1: pending" in shown.err
    nameless = kiwi("approvals", "approve")
    assert (nameless.code, sent) == (2, [])
    assert "needs the number of a question" in nameless.err
    done = kiwi("approvals", "approve", "1", "--run")
    assert "  > text: hi\n" in done.err
    assert (done.code, sent) == (0, ['{"text":"hi"}'])
    assert kiwi("approvals", "list").err == "Nothing waits for you.\n"
    assert "used" in kiwi("approvals", "list", "--all").out


@pytest.mark.smoke
def test_yes_counts_as_an_answer_of_the_owner(kiwi: Kiwi, sent: list[str]) -> None:
    assert kiwi("run", "post_note", "text=hi", "--yes").code == 0
    assert kiwi("run", "post_note", "text=hi").code == 6
    assert sent == ['{"text":"hi"}']


def test_a_denial_is_shown_with_its_reason(kiwi: Kiwi, sent: list[str]) -> None:
    approval = json.loads(kiwi("run", "post_note", "text=hi", "--json").out)["approval_id"]
    assert kiwi("approvals", "deny", approval, "--reason", "not yours").code == 0
    refused = kiwi("run", "post_note", "text=hi")
    assert (refused.code, sent) == (6, [])
    assert "The owner said no to 'post_note': not yours." in refused.err
    assert "`kiwi approvals approve 1`" in refused.err
    assert kiwi("run", "post_note", "text=hi", "--yes").code == 0
    assert "It was not run" in kiwi("approvals", "approve", approval, "--run").err
    assert kiwi("run", "post_note", "text=hi").code == 0
    assert len(sent) == 2


def test_rules_are_added_shown_in_why_and_removed(kiwi: Kiwi, project: Path, sent: list[str]) -> None:
    assert kiwi("sign", "post_note").code == 0
    assert kiwi("approvals", "rules").err.startswith("There are no rules")
    added = json.loads(kiwi("approvals", "rules", "add", "post_note", "--host", "127.0.0.1", "--json").out)
    rule = added["rule_id"]
    assert kiwi("approvals", "rules").out == (
        f'{rule}  project/local/post_note@1.0.0  project={project}  hosts=["127.0.0.1"]\n'
    )
    assert f"needs no approval, by your rule {rule}" in kiwi("why", "post_note", "text=hi").out
    assert kiwi("run", "post_note", "text=hi").code == 0
    assert kiwi("approvals", "rules", "remove", rule).code == 0
    assert "asks you first: it may send data to 127.0.0.1:" in kiwi("why", "post_note", "text=hi").out
    assert kiwi("run", "post_note", "text=hi").code == 6
    assert len(sent) == 1
    assert kiwi("approvals", "show", "nothing").code == 3
    assert kiwi("approvals", "rules", "add", "post_note", "--path", "notes/**").code == 0
    assert f'paths=["{project}/notes/**"]' in kiwi("approvals", "rules").out
    assert kiwi("approvals", "rules", "add", "x").code == 3


@pytest.mark.usefixtures("processes")
@pytest.mark.case("APPR-05")
@pytest.mark.parametrize(("typed", "count"), [("y", 1), ("n", 0), ("", 0)])
def test_a_question_on_a_terminal_contains_no_control_characters(
    typed: str, count: int, project: Path, sent: list[str], kiwi: Kiwi
) -> None:
    assert kiwi("sign", "post_note").code == 0
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "run", "post_note", "text=a\x1b[2J\u202eb"]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        seen = _until(own, b"[N]o: ")
        os.write(own, f"{typed}\n".encode())
        code = process.wait(120)
    os.close(own)
    assert b"\x1b[2J" not in seen
    assert rb"a\u001b[2J\u202eb" in seen
    assert (code, len(sent)) == (0 if count else 6, count)


@pytest.mark.usefixtures("processes")
def test_input_before_the_question_is_not_an_answer(project: Path, sent: list[str], kiwi: Kiwi) -> None:
    assert kiwi("sign", "post_note").code == 0
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "run", "post_note", "text=hi"]
    os.write(own, b"y\n")
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        _until(own, b"[N]o: ")
        os.write(own, b"n\n")
        code = process.wait(120)
    os.close(own)
    assert (code, sent) == (6, [])


def test_yes_to_a_question_shows_the_question(kiwi: Kiwi) -> None:
    approval = json.loads(kiwi("run", "post_note", "text=hi", "--json").out)["approval_id"]
    said = kiwi("approvals", "approve", approval[:8], "--always")
    assert "  > text: hi\n" in said.err
    refused = kiwi("approvals", "approve", "1", "--server")
    assert (refused.code, "not a tool of an MCP server" in refused.err) == (4, True)
    assert "may run once, exactly so" in said.out + said.err


@pytest.mark.usefixtures("processes")
def test_watch_shows_questions_as_they_come_and_takes_answers(kiwi: Kiwi, project: Path, sent: list[str]) -> None:
    assert kiwi("sign", "post_note").code == 0
    for text in ("one", "two", "three"):
        assert kiwi("run", "post_note", f"text={text}").code == 6
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "approvals", "watch"]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=theirs) as process:
        os.close(theirs)
        for text, typed in (("one", b"y\n"), ("two", b"n\n"), ("three", b"\n")):
            assert f"> text: {text}".encode() in _until(own, b"later: ")
            os.write(own, typed)
        assert kiwi("run", "post_note", "text=four").code == 6
        assert b"question 4" in _until(own, b"later: ")
        process.terminate()
        process.wait(120)
    os.close(own)
    answered = json.loads(kiwi("approvals", "list", "--all", "--json").out)["approvals"]
    assert [one["status"] for one in answered] == ["pending", "pending", "denied", "approved"]
    assert [one["number"] for one in answered] == [4, 3, 2, 1]


def _until(terminal: int, wanted: bytes) -> bytes:
    """Read from a terminal until something stands there."""
    seen, end = b"", time.monotonic() + 120
    while wanted not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 65_536)
    assert wanted in seen, seen
    return seen


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(("typed", "integrity"), [("y", "hashed"), ("n", "unsigned")])
def test_a_terminal_asks_whether_a_new_file_is_yours(typed: str, integrity: str, project: Path) -> None:
    (project / ".ai" / "tools").mkdir(parents=True, exist_ok=True)
    manifest = "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Greet\n"
    (project / ".ai" / "tools" / "greet.sh").write_text(f"{manifest}echo hello\n")
    own, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1]), "TERM": "dumb"}
    command = [sys.executable, "-m", "kiwi_mcp", "run", "greet", "--json"]
    with Popen(command, cwd=project, env=env, stdin=theirs, stderr=theirs, stdout=PIPE) as process:
        os.close(theirs)
        assert b"tools/greet.sh is new and unsigned: is it yours?" in _until(own, b"[N]o: ")
        os.write(own, f"{typed}\n".encode())
        answer = json.loads(process.communicate(timeout=120)[0])
    os.close(own)
    assert (answer["result"], answer["integrity"]) == ("hello", integrity)
    assert answer["isolation"]["used"] == ("sandboxed" if typed == "y" else "restricted")


@pytest.mark.usefixtures("sandbox")
def test_without_a_terminal_a_new_file_runs_restricted_and_stays_unsigned(kiwi: Kiwi, project: Path) -> None:
    (project / ".ai" / "tools").mkdir(parents=True, exist_ok=True)
    manifest = "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Greet\n"
    (project / ".ai" / "tools" / "greet.sh").write_text(f"{manifest}echo hello\n")
    for words in ((), ("--yes",)):
        answer = json.loads(kiwi("run", "greet", "--json", *words).out)
        assert (answer["integrity"], answer["isolation"]["used"]) == ("unsigned", "restricted")
