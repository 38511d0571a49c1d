"""Undo: only the changes of the run, not those of others, by the owner only, and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.checkpoints import checkpoint

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
Undo = Callable[..., Answer]


def listed(ask: Ask) -> list[JsonObject]:
    return [as_object(one) for one in as_list(ask("undo").content["checkpoints"])]


def test_changes_of_others_to_other_paths_stay(project: Path, git: Git, run: Run, undo: Undo) -> None:
    ran = run("echo 1 > kept.txt")
    (project / "src" / "code.py").write_text("mine since\n")
    (project / "mine.txt").write_text("mine\n")
    assert undo(ran).content["status"] == "undone"
    assert (project / "kept.txt").read_text() == "kept\n"
    assert (project / "src" / "code.py").read_text() == "mine since\n"
    assert (project / "mine.txt").read_text() == "mine\n"


def test_a_path_that_was_changed_since_is_not_undone_without_force(
    project: Path, git: Git, run: Run, undo: Undo
) -> None:
    ran = run("echo tool > kept.txt; echo tool > new.txt")
    (project / "kept.txt").write_text("tool\nmine\n")
    refused = undo(ran).content
    assert (refused["code"], refused["paths"]) == ("conflict", ["kept.txt"])
    assert "+mine" in as_text(refused["diff"])
    assert (project / "new.txt").read_text() == "tool\n"
    forced = undo(ran, force=True).content
    assert forced["status"] == "undone"
    assert (project / "kept.txt").read_text() == "kept\n"
    undo(forced)
    assert (project / "kept.txt").read_text() == "tool\nmine\n"


def test_a_dry_run_shows_the_difference_and_changes_nothing(project: Path, git: Git, run: Run, undo: Undo) -> None:
    ran = run("echo tool > kept.txt; printf '\\000\\001' > new.bin")
    (project / "new.bin").write_bytes(b"\x02")
    response = undo(ran, dry_run=True).content
    assert response["status"] == "planned"
    diff = as_text(response["diff"])
    assert "-tool\n+kept\n" in diff
    assert "-\\u0002" in diff
    assert "changed since: new.bin" in as_text(as_list(response["doubts"])[0])
    assert (project / "kept.txt").read_text() == "tool\n"


def test_a_path_that_is_already_restored_needs_no_work(project: Path, git: Git, run: Run, undo: Undo) -> None:
    ran = run("echo 1 > kept.txt; echo 2 > new.txt")
    (project / "kept.txt").write_text("kept\n")
    assert undo(ran).content["message"] == f"1 path put back as before {as_object(ran['checkpoint'])['undo']}"
    assert undo(ran).content["status"] == "unchanged"


def test_a_model_lists_checkpoints_and_cannot_undo(project: Path, git: Git, run: Run) -> None:
    ran = run("echo 1 > kept.txt")

    async def story() -> tuple[Answer, Answer]:
        kernel = Kernel(project, is_owner=False)
        try:
            refused = await kernel.call("undo", {"action": "apply", "run_id": as_text(ran["run_id"])})
            return await kernel.call("undo", {}), refused
        finally:
            await kernel.aclose()

    response, refused = asyncio.run(story())
    assert [as_object(one)["run_id"] for one in as_list(response.content["checkpoints"])] == [ran["run_id"]]
    assert refused.content["code"] == "not_permitted"
    assert (project / "kept.txt").read_text() == "1\n"


def test_an_undo_is_a_recorded_run(git: Git, run: Run, undo: Undo, ask: Ask, project: Path) -> None:
    ran = run("echo 1 > kept.txt")
    undone = undo(ran).content
    shown = ask("runs", action="show", run_id=undone["undo"]).content
    assert (shown["tool_id"], shown["status"], shown["project"]) == ("undo", "success", str(project))
    assert as_text(ran["run_id"]) in as_text(shown["message"])
    newest, oldest = listed(ask)
    assert (newest["undoes"], oldest["tool_id"]) == (ran["run_id"], "change")


def test_an_unambiguous_prefix_of_an_id_is_enough(git: Git, run: Run, ask: Ask) -> None:
    run_id = as_text(run("echo 1 > kept.txt")["run_id"])
    assert ask("undo", action="apply", run_id=run_id[:20].lower(), dry_run=True).content["status"] == "planned"
    run("echo 2 > kept.txt")
    assert ask("undo", action="apply", run_id=run_id[:6], dry_run=True).content["code"] == "invalid_request"


@pytest.mark.parametrize("run_id", ["", "01", "../../HEAD", "01K" + "0" * 23, "x" * 300, "\x00abcdef"])
def test_a_run_without_a_checkpoint_is_reported(git: Git, run: Run, ask: Ask, run_id: str) -> None:
    run("echo 1 > kept.txt")
    assert ask("undo", action="apply", run_id=run_id).content["code"] in {"not_found", "invalid_request"}


def test_a_run_of_another_project_names_that_project(git: Git, run: Run, ask: Ask, tmp_path: Path) -> None:
    run_id = run("echo 1 > kept.txt")["run_id"]
    (tmp_path / "elsewhere").mkdir()
    response = ask("undo", action="apply", run_id=run_id, project_path=str(tmp_path / "elsewhere")).content
    assert "--project" in as_text(response["suggestion"])


@pytest.mark.usefixtures("sandbox")
def test_concurrent_runs_are_reported_and_undone_only_with_force(
    project: Path, git: Git, tool: object, ask: Ask
) -> None:
    (project / "ignored").mkdir()

    async def story() -> list[JsonObject]:
        kernel = Kernel(project)
        wait = "until [ -e ignored/both ]; do [ -e ignored/a -a -e ignored/b ] && touch ignored/both; sleep 0.01; done"
        calls = [
            kernel.call(
                "execute",
                {
                    "item_id": "change",
                    "parameters": {"do": f"touch ignored/{name}; {wait}; echo {name} > {name}.txt"},
                    "checkpoint": True,
                },
            )
            for name in ("a", "b")
        ]
        try:
            return [answer.content for answer in await asyncio.gather(*calls)]
        finally:
            await kernel.aclose()

    for ran in asyncio.run(story()):
        response = as_object(ran["checkpoint"])
        assert len(as_list(response["beside"])) == 1
        refused = ask("undo", action="apply", run_id=response["undo"])
        assert "at the same time" in as_text(refused.content["message"])


def test_a_killed_run_is_undone_with_force(
    project: Path, git: Git, run: Run, undo: Undo, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def killed(self: checkpoint.Checkpoint) -> JsonObject:
        raise TimeoutError

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.Checkpoint, "_ended", killed)
        ran = run("echo 1 > kept.txt; echo 1 > new.txt")
    assert "are unknown" in as_text(as_list(ran["warnings"])[0])
    assert [one.get("unfinished") for one in listed(ask)] == [True]
    assert "did not come to its end" in as_text(undo(ran).content["message"])
    assert undo(ran, force=True).content["status"] == "undone"
    assert ((project / "kept.txt").read_text(), (project / "new.txt").exists()) == ("kept\n", False)
    assert (project / "src" / "code.py").exists()


def test_the_oldest_checkpoints_are_removed(git: Git, run: Run, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "KEPT", 2)
    runs = [run(f"echo {number} > kept.txt")["run_id"] for number in range(4)]
    assert [one["run_id"] for one in listed(ask)] == [runs[3], runs[2]]


def test_a_forged_record_is_refused_and_nothing_is_written(
    project: Path, git: Git, run: Run, undo: Undo, tmp_path: Path
) -> None:
    ran = run("echo 1 > kept.txt")
    ref = git("for-each-ref", "--format=%(refname)", "refs/kiwi").strip()
    text = git("log", "-1", "--format=%B", ref)
    for forged in (text.replace("kept.txt", "../out.txt"), text.replace("kept.txt", ".git/hooks/x"), "no record"):
        commit = git("commit-tree", f"{ref}^{{tree}}", "-m", forged).strip()
        git("update-ref", ref, commit)
        assert undo(ran).content["code"] == "store_damaged"
    assert not (tmp_path / "out.txt").exists()
    assert (project / "kept.txt").read_text() == "1\n"
