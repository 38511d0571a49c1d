"""`kiwi undo`: the list of runs that can be undone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from tests.surfaces.cli.conftest import Kiwi


@pytest.fixture
def kiwi(project: Path, kiwi: Kiwi) -> Kiwi:
    """Run a command in a repository with one tool."""
    folder = project / ".ai" / "tools" / "change"
    folder.mkdir(parents=True)
    (folder / "main.sh").write_text('echo changed > "$KIWI_PROJECT/notes.txt"\n')
    (folder / "tool.yaml").write_text(
        "tool_id: change\ntool_type: script\nexecutor: bash_runtime\nversion: 1.0.0\ndescription: Change a note\n"
        "mutates_state: true\nneeds: {write: [.]}\nconfig: {entrypoint: main.sh}\n"
    )
    (project / "notes.txt").write_text("mine\n")
    subprocess.run(["git", "init", "-q"], cwd=project, timeout=120, check=True)

    assert kiwi("approvals", "rules", "add", "project/local/change@*").code == 0
    return kiwi


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
def test_a_run_is_saved_listed_shown_and_undone(project: Path, kiwi: Kiwi) -> None:
    assert "No run of this project can be undone." in kiwi("undo").err
    assert "`checkpoint: true` (`--checkpoint`)" in kiwi("run", "change").err
    (project / "notes.txt").write_text("mine\n")
    ran = kiwi("run", "change", "--checkpoint")
    (hint,) = (line for line in ran.err.splitlines() if "kiwi undo" in line)
    run_id = hint.split("`")[1].removeprefix("kiwi undo ")
    listed = kiwi("undo")
    assert (listed.code, listed.out.split()) == (0, [run_id, "change", "notes.txt"])
    rehearsed = kiwi("undo", run_id, "--dry-run")
    assert rehearsed.out == "--- notes.txt\n+++ notes.txt\n@@ -1 +1 @@\n-changed\n+mine\n"
    undone = kiwi("undo", run_id)
    assert undone.code == 0
    assert "restored  notes.txt" in undone.err
    assert (project / "notes.txt").read_text() == "mine\n"
    assert json.loads(kiwi("undo", "--json").out)["checkpoints"][0]["undoes"] == run_id


@pytest.mark.usefixtures("sandbox")
def test_a_changed_file_is_reported_with_the_command_to_force(project: Path, kiwi: Kiwi) -> None:
    run_id = json.loads(kiwi("run", "change", "--checkpoint", "--json").out)["checkpoint"]["undo"]
    (project / "notes.txt").write_text("mine since\n")
    ended = kiwi("undo", run_id)
    assert ended.code == 8
    assert "1 of its paths changed since: notes.txt" in ended.err
    assert "--force" in ended.err
    assert "+mine since" in ended.err
    assert kiwi("undo", run_id, "--force").code == 0
    assert (project / "notes.txt").read_text() == "mine\n"
