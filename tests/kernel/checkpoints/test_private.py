"""Checkpoints of a project without a repository, and copies made by earlier versions."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.checkpoints import checkpoint, git_store

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
Undo = Callable[..., Answer]
Tool = Callable[..., None]
FORGED = "01JAAAAAAAAAAAAAAAAAAAAAAA"


@pytest.fixture(autouse=True)
def files(project: Path, tool: Tool) -> None:
    (project / "notes" / "deep").mkdir(parents=True)
    (project / "notes" / "one.txt").write_text("one\n")
    (project / "notes" / "deep" / "two.txt").write_text("two\n")
    (project / "notes" / ".env").write_text("KEY=hunter2")
    (project / "single.txt").write_text("single\n")


def private(home: Path) -> Path:
    (found,) = (home / ".ai" / "state" / "checkpoints").iterdir()
    return found


def contents(home: Path) -> list[bytes]:
    """Return all contents of the private repository."""
    words = ["git", f"--git-dir={private(home)}", "cat-file", "--batch-all-objects", "--batch-check"]
    response = subprocess.run(words, capture_output=True, timeout=120, check=True).stdout.decode().split("\n")
    ids = [line.split()[0] for line in response if " blob " in line]
    read = ["git", f"--git-dir={private(home)}", "cat-file", "blob"]
    return [subprocess.run([*read, name], capture_output=True, timeout=120, check=True).stdout for name in ids]


def changed(answer: JsonObject) -> set[str]:
    return {str(as_object(row)["path"]) for row in as_list(as_object(answer["checkpoint"])["changed"])}


def copied(project: Path, run_id: str, tool_id: str, path: str, before: bytes, after: bytes) -> None:
    """Leave a checkpoint as earlier versions kept it: a record and copies below `.ai/state`."""
    folder = project / ".ai" / "state" / "checkpoints"
    (folder / "contents").mkdir(parents=True, exist_ok=True)
    rows = []
    for data in (before, after):
        name = sha256(b"blob %d\0" % len(data) + data).hexdigest()
        (folder / "contents" / name).write_bytes(data)
        rows.append([0o100644, name, len(data)])
    record = {"run_id": run_id, "tool_id": tool_id, "started": 1, "finished": 2, "changes": [[path, *rows]]}
    (folder / f"{run_id}.json").write_text(json.dumps(record))


@pytest.mark.req("K-GI-02")
def test_a_project_without_a_repository_is_restored_and_gets_none(
    project: Path, home: Path, run: Run, undo: Undo
) -> None:
    ran = run(
        "echo 1 > notes/one.txt; rm -r notes/deep; echo 1 > notes/new.txt; rm single.txt; mkdir absent;"
        "echo 1 > absent/came.txt; echo 1 > notes/.env"
    )
    assert changed(ran) == {"notes/one.txt", "notes/deep/two.txt", "notes/new.txt", "single.txt", "absent/came.txt"}
    undone = undo(ran).content
    assert undone["status"] == "undone", undone
    assert (project / "notes" / "one.txt").read_text() == "one\n"
    assert (project / "notes" / "deep" / "two.txt").read_text() == "two\n"
    assert (project / "single.txt").read_text() == "single\n"
    assert not (project / "notes" / "new.txt").exists()
    assert not (project / "absent").exists()
    assert not (project / ".git").exists()
    assert not any(b"hunter2" in data for data in contents(home))
    assert private(home).parent.stat().st_mode & 0o777 == 0o700
    undo(undone)
    assert (project / "notes" / "one.txt").read_text() == "1\n"
    assert not (project / "single.txt").exists()


def test_a_tool_need_not_declare_paths_and_ignored_files_are_unchanged(project: Path, run: Run, undo: Undo) -> None:
    (project / ".gitignore").write_text("big/\n")
    (project / "big").mkdir()
    ran = run("echo 1 > single.txt; echo 1 > big/file; echo 1 > beside.txt")
    assert changed(ran) == {"single.txt", "beside.txt"}
    assert undo(ran).content["status"] == "undone"
    assert (project / "big" / "file").exists()


def test_links_and_permissions_are_restored_and_links_are_not_followed(
    project: Path, home: Path, run: Run, undo: Undo, tmp_path: Path
) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("outside-outside")
    (project / "notes" / "away").symlink_to(tmp_path / "secret")
    (project / "single.txt").chmod(0o600)
    ran = run("rm notes/away; chmod 644 single.txt")
    assert undo(ran).content["status"] == "undone"
    assert (project / "notes" / "away").readlink() == tmp_path / "secret"
    assert (project / "single.txt").stat().st_mode & 0o777 == 0o600
    assert not any(b"outside-outside" in data for data in contents(home))


def test_a_killed_run_is_undone_with_force(
    project: Path, run: Run, undo: Undo, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(self: checkpoint.Checkpoint) -> JsonObject:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoint, "_ended", killed)
        ran = run("echo 1 > single.txt; echo 1 > notes/new.txt")
    assert undo(ran, force=True).content["status"] == "undone"
    assert (project / "single.txt").read_text() == "single\n"
    assert not (project / "notes" / "new.txt").exists()


def test_unused_old_contents_are_removed(
    project: Path, home: Path, run: Run, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 1)
    monkeypatch.setattr(git_store, "_YOUNG", "now")
    for number in range(3):
        run(f"echo {number} > single.txt")
    kept = contents(home)
    assert {b"1\n", b"2\n"} <= {*kept}
    assert b"0\n" not in kept
    assert len(as_list(ask("undo").content["checkpoints"])) == 1


def test_a_project_that_becomes_a_repository_keeps_its_checkpoints(
    project: Path, run: Run, undo: Undo, ask: Ask, home: Path
) -> None:
    ran = run("echo 1 > single.txt")
    subprocess.run(["git", "init", "-q"], cwd=project, check=True, timeout=120)
    later = run("echo 2 > single.txt")
    assert len(as_list(ask("undo").content["checkpoints"])) == 2
    assert undo(later).content["status"] == undo(ran).content["status"] == "undone"
    assert (project / "single.txt").read_text() == "single\n"


def test_a_checkpoint_that_an_earlier_version_stored_as_copies_can_be_undone(
    project: Path, run: Run, ask: Ask, undo: Undo
) -> None:
    ran = run("echo 1 > single.txt", checkpoint=False)
    copied(project, str(ran["run_id"]), "change", "single.txt", b"single\n", b"1\n")
    (listed,) = as_list(ask("undo").content["checkpoints"])
    assert as_object(listed)["run_id"] == ran["run_id"]
    planned = ask("undo", action="apply", run_id=ran["run_id"], dry_run=True).content
    assert "+single" in str(planned["diff"])
    undone = ask("undo", action="apply", run_id=ran["run_id"]).content
    assert undone["status"] == "undone", undone
    assert (project / "single.txt").read_text() == "single\n"
    assert undo(undone).content["status"] == "undone"
    assert (project / "single.txt").read_text() == "1\n"


def test_damaged_copies_are_not_restored(project: Path, run: Run, ask: Ask) -> None:
    ran = run("echo 1 > single.txt", checkpoint=False)
    copied(project, str(ran["run_id"]), "change", "single.txt", b"single\n", b"1\n")
    for path in (project / ".ai" / "state" / "checkpoints" / "contents").iterdir():
        path.write_bytes(b"forged")
    assert ask("undo", action="apply", run_id=ran["run_id"]).content["code"] == "store_damaged"
    assert (project / "single.txt").read_text() == "1\n"


@pytest.mark.case("TR-F16")
def test_a_forged_checkpoint_in_a_project_is_neither_listed_nor_undone(project: Path, run: Run, ask: Ask) -> None:
    run("true", checkpoint=False)
    copied(project, FORGED, "change", ".mcp.json", b'{"mcpServers": {}}', b"")
    (project / ".mcp.json").touch()
    assert as_list(ask("undo").content["checkpoints"]) == []
    refused = ask("undo", action="apply", run_id=FORGED, force=True).content
    assert refused["code"] == "store_damaged", refused
    assert (project / ".mcp.json").read_bytes() == b""


@pytest.mark.case("TR-F16")
def test_a_checkpoint_of_another_project_or_installation_is_ignored(
    project: Path, git: Git, run: Run, ask: Ask, home: Path, tmp_path: Path
) -> None:
    ran = run("echo 1 > single.txt")
    other = tmp_path / "other"
    project.rename(other)
    project.mkdir()
    assert as_list(ask("undo", project_path=str(other)).content["checkpoints"]) == []
    refused = ask("undo", action="apply", run_id=ran["run_id"], force=True, project_path=str(other)).content
    assert refused["code"] == "store_damaged", refused

    project.rmdir()
    other.rename(project)
    (home / ".ai" / "state" / "audit.key").unlink()
    assert as_list(ask("undo").content["checkpoints"]) == []
    assert (project / "single.txt").read_text() == "1\n"
