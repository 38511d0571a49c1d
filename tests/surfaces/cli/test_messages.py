"""CLI output about runs, remotes, tokens and mistakes: readable, correct, and with a next step."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.plugins.machines import Machine
from tests.surfaces.cli.conftest import Kiwi

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.tasks import KEPT_MS, Task


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path / "ann", namespaces=["acme"])
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(machine.project)
    return machine


@pytest.fixture
def kiwi(machine: Machine, command: Kiwi) -> Kiwi:
    """Run a command in the machine's project."""
    assert machine.project == Path.cwd()
    return command


@pytest.mark.usefixtures("sandbox")
def test_a_run_is_shown_in_lines_and_found_by_an_id_prefix(kiwi: Kiwi, machine: Machine) -> None:
    machine.script("tick", says="hello")
    run_id = json.loads(kiwi("run", "tick", "--json")[1])["run_id"]

    code, out, _ = kiwi("runs", run_id[:20].lower())
    assert (code, out.splitlines()[0]) == (0, f"id:            {run_id}")
    assert "status:        success" in out.splitlines()
    assert out.endswith("result:\n  hello\n")
    assert kiwi("runs", "ZZZZZZ")[0] == 3
    assert kiwi("runs", run_id[:5])[0] == 3
    kiwi("run", "tick")
    code, _, talk = kiwi("runs", run_id[:6])
    assert (code, "several runs" in talk, run_id in talk) == (4, True, True)


@pytest.mark.usefixtures("sandbox")
def test_a_large_result_is_shown_by_its_beginning_with_the_command_that_continues(kiwi: Kiwi, machine: Machine) -> None:
    machine.script("many", says="$(seq 20000)")
    run_id = json.loads(kiwi("run", "many", "--json")[1])["run_id"]
    _, _, talk = kiwi("runs", run_id)
    hint = talk.splitlines()[-1].removeprefix("hint: kiwi ").split()
    code, out, _ = kiwi(*hint)
    assert (code, len(out) > 60_000) == (0, True)


@pytest.mark.usefixtures("sandbox")
def test_runs_of_an_unused_tool_name_the_tools_that_ran(kiwi: Kiwi, machine: Machine) -> None:
    machine.script("tick")
    kiwi("run", "tick")
    assert "Did you mean `tick`?" in kiwi("runs", "--tool", "tik")[2]
    assert "tick" in kiwi("runs", "--tool", "project/local/tick@1.0.0")[1]
    assert kiwi("runs", "--prune")[1] == "0 runs and 0 large results removed\n"


@pytest.mark.usefixtures("sandbox")
def test_a_run_creates_no_ai_folder_and_its_output_is_in_the_user_space(
    kiwi: Kiwi, machine: Machine, tmp_path: Path
) -> None:
    machine.script("tick")
    kiwi("load", "tick", "--destination", "user")
    bare = tmp_path / "bare"
    bare.mkdir()
    response = json.loads(kiwi("run", "tick", "--project", str(bare), "--json")[1])
    assert [*bare.iterdir()] == []
    assert Path(response["output_path"]).is_relative_to(machine.user / "outputs")
    assert kiwi("runs", response["run_id"])[1].endswith("result:\n  hi\n")


@pytest.mark.usefixtures("sandbox")
def test_a_warning_is_shown_when_the_run_fails_too(kiwi: Kiwi, machine: Machine) -> None:
    machine.publish("tick", says="x; exit 3")
    machine.do("deprecate", "tick@1.0.0", {"reason": "use tock"})
    code, _, talk = kiwi("run", "tick")
    assert (code, "deprecated: use tock" in talk) == (1, True)


def test_a_remote_is_added_with_the_name_of_a_variable_and_never_with_a_token(kiwi: Kiwi, machine: Machine) -> None:
    file = machine.user / "registry.yaml"
    for token in ("kiwi_Zm9v", "s3cret", "a b"):
        code, out, talk = kiwi("registry", "add", "team", "https://kiwi.example.com", "--token", token)
        assert (code, token in out + talk, token in file.read_text()) == (4, False, False)
    assert kiwi("registry", "add", "team", "ftp://kiwi.example.com")[0] == 4
    assert kiwi("registry", "add", "team", "https://kiwi.example.com", "--token", "TEAM_TOKEN")[0] == 0
    assert "${TEAM_TOKEN}" in file.read_text()
    assert kiwi("registry", "remove", "team")[:2] == (0, "team is forgotten\n")
    assert kiwi("registry", "remove", "team")[0] == 3


def test_a_space_that_cannot_be_written_is_reported_without_a_traceback(
    kiwi: Kiwi, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (machine.home / "file").write_text("in the way")
    monkeypatch.setenv("USER_SPACE", str(machine.home / "file" / ".ai"))
    for words in (("up", "token", "add", "bob"), ("registry", "add", "team", "https://kiwi.example.com")):
        code, _, talk = kiwi(*words)
        assert (code, "cannot be" in talk, "hint: " in talk) == (7, True, True)


@pytest.mark.usefixtures("sandbox")
def test_doctor_shows_the_fix_of_each_issue_in_the_settings(kiwi: Kiwi, machine: Machine) -> None:
    (machine.user / "registry.yaml").write_text("urls: x\nruns: {days: 0}\n")
    _, out, _ = kiwi("doctor")
    assert f"{machine.user}/registry.yaml has 2 issues" in out
    assert "urls: Use one of: url, actor, namespaces, remotes, runs, audit, search, remember. runs.days: Write" in out


def test_help_texts_list_the_valid_values(kiwi: Kiwi) -> None:
    assert "[[" not in kiwi("diff", "--help")[1] + kiwi("runs", "--help")[1]
    assert "registry" in kiwi("search", "--help")[1]
    assert "registry" in kiwi("load", "--help")[1]


@pytest.mark.parametrize("words", [("run",), ("serch", "x"), ("search", "x", "--limit", "many"), ("prefer", "add")])
def test_a_mistyped_command_is_a_json_answer_too(kiwi: Kiwi, words: tuple[str, ...]) -> None:
    code, out, _ = kiwi(*words, "--json")
    response = json.loads(out)
    assert (code, response["code"]) == (2, "invalid_request")
    assert response["message"]
    assert "--help" in response["suggestion"]


@pytest.mark.usefixtures("sandbox")
def test_an_unreadable_store_is_a_warning_of_a_search(kiwi: Kiwi, machine: Machine) -> None:
    machine.script("tick", says="hello")
    kiwi("run", "tick")
    store = next(machine.user.rglob("*.db"))
    store.write_bytes(b"this is no database at all" * 1_000)
    code, out, talk = kiwi("search", "tick")
    assert (code, out.split()[0]) == (0, "tick")
    assert "warning: " in talk
    assert kiwi("search", "nothing_like_this")[2].startswith("warning: ")


def test_a_task_is_shown_with_its_client_and_progress(kiwi: Kiwi, machine: Machine) -> None:
    kernel, now = Kernel(machine.project), time.time_ns() // 1_000_000
    task = Task("abcd" * 8, "ada", "tools/call", "say", "here", now, now, now + KEPT_MS, now, message="half (2/4)")
    kernel.tasks().add(task)
    asyncio.run(kernel.aclose())
    assert kiwi("tasks")[1].rstrip().endswith("working         say  for ada  half (2/4)")
    assert kiwi("tasks", "abcd")[0] == 0
    code, _, talk = kiwi("tasks", "abc")
    assert code != 0
    assert "at least 4 characters" in talk
