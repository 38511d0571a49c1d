"""Checkpoints outside a repository: copies of the paths that a tool says it changes, and of nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.checkpoints import checkpoint, copies

Ask = Callable[..., Answer]
Run = Callable[..., JsonObject]
Undo = Callable[..., Answer]
Tool = Callable[..., None]


@pytest.fixture(autouse=True)
def paths(project: Path, tool: Tool) -> None:
    tool(checkpoint={"mode": "auto", "paths": ["notes", "single.txt", "absent"]})
    (project / "notes" / "deep").mkdir(parents=True)
    (project / "notes" / "one.txt").write_text("one\n")
    (project / "notes" / "deep" / "two.txt").write_text("two\n")
    (project / "notes" / ".env").write_text("KEY=hunter2")
    (project / "single.txt").write_text("single\n")
    (project / "other.txt").write_text("other\n")


def contents(project: Path) -> list[Path]:
    return [*project.joinpath(*copies.FOLDER, "contents").iterdir()]


@pytest.mark.req("K-GI-02")
def test_the_paths_of_a_tool_come_back_and_no_others(project: Path, run: Run, undo: Undo) -> None:
    ran = run(
        "echo 1 > notes/one.txt; rm -r notes/deep; echo 1 > notes/new.txt; rm single.txt; echo 1 > other.txt;"
        "mkdir absent; echo 1 > absent/came.txt; echo 1 > notes/.env",
        checkpoint=False,
    )
    assert {as_object(row)["path"] for row in as_list(as_object(ran["checkpoint"])["changed"])} == {
        "notes/one.txt", "notes/deep/two.txt", "notes/new.txt", "single.txt", "absent/came.txt",
    }  # fmt: skip
    undone = undo(ran).content
    assert undone["status"] == "undone", undone
    assert (project / "notes" / "one.txt").read_text() == "one\n"
    assert (project / "notes" / "deep" / "two.txt").read_text() == "two\n"
    assert (project / "single.txt").read_text() == "single\n"
    assert not (project / "notes" / "new.txt").exists()
    assert not (project / "absent").exists()
    assert (project / "other.txt").read_text() == "1\n"
    assert not any(b"hunter2" in path.read_bytes() for path in contents(project))
    undo(undone)
    assert (project / "notes" / "one.txt").read_text() == "1\n"
    assert not (project / "single.txt").exists()


def test_links_and_permissions_come_back_and_links_are_not_followed(
    project: Path, run: Run, undo: Undo, tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("outside-outside")
    (project / "notes" / "away").symlink_to(tmp_path / "secret")
    (project / "absent").symlink_to(tmp_path / "secret")
    (project / "single.txt").chmod(0o600)
    ran = run("rm notes/away absent; chmod 644 single.txt")
    assert undo(ran).content["status"] == "undone"
    assert (project / "notes" / "away").readlink() == tmp_path / "secret"
    assert (project / "absent").readlink() == tmp_path / "secret"
    assert (project / "single.txt").stat().st_mode & 0o777 == 0o600
    assert not any(b"outside-outside" in path.read_bytes() for path in contents(project))


def test_what_is_not_a_file_does_not_stop_it(project: Path, run: Run, undo: Undo) -> None:
    os.mkfifo(project / "notes" / "pipe")
    ran = run("echo 1 > notes/one.txt")
    assert as_object(ran["checkpoint"])["left_out"] == ["notes/pipe"]
    assert undo(ran).content["status"] == "undone"


def test_damaged_contents_are_not_put_back(project: Path, run: Run, undo: Undo) -> None:
    ran = run("echo 1 > single.txt")
    for path in contents(project):
        path.write_bytes(b"forged")
    assert undo(ran).content["code"] == "store_damaged"
    assert (project / "single.txt").read_text() == "1\n"


def test_a_run_that_was_killed_is_undone_for_its_paths_alone(
    project: Path, run: Run, undo: Undo, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(self: checkpoint.Checkpoint) -> JsonObject:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoint, "_ended", killed)
        ran = run("echo 1 > single.txt; echo 1 > notes/new.txt; echo 1 > other.txt")
    assert undo(ran, force=True).content["status"] == "undone"
    assert (project / "single.txt").read_text() == "single\n"
    assert not (project / "notes" / "new.txt").exists()
    assert (project / "other.txt").read_text() == "1\n"


def test_what_no_checkpoint_needs_goes_with_the_last_that_did(
    project: Path, run: Run, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 1)
    monkeypatch.setattr(copies, "_YOUNG", -1.0)
    for number in range(3):
        run(f"echo {number} > single.txt")
    kept = {path.read_bytes() for path in contents(project)}
    assert kept == {b"1\n", b"2\n"}
    assert len(as_list(ask("undo").content["checkpoints"])) == 1
