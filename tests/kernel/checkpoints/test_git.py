"""Checkpoints in a repository: changes of a run are undone, and the git state of the user is not touched."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
State = Callable[[], object]
Undo = Callable[..., Answer]


def changed(answer: JsonObject) -> dict[str, str]:
    """Return what happened to each path that an answer tells of."""
    response = as_object(answer.get("checkpoint")) or answer
    rows = map(as_object, as_list(response.get("changed")))
    return {as_text(row["path"]): as_text(row["change"]) for row in rows}


def refs(git: Git) -> list[str]:
    return git("for-each-ref", "--format=%(refname)", "refs/kiwi").split()


@pytest.mark.smoke
@pytest.mark.req("K-GI-02")
def test_a_dirty_tree_with_staged_changes_is_restored_with_its_git_state(
    project: Path, git: Git, state: State, run: Run, undo: Undo
) -> None:
    (project / "kept.txt").write_text("staged\n")
    git("add", "kept.txt")
    (project / "kept.txt").write_text("staged, then changed\n")
    (project / "new.txt").write_text("untracked\n")
    (project / "src" / "code.py").unlink()
    git("stash", "list")
    before = state()
    ran = run("echo x >> kept.txt; rm new.txt; mkdir -p made/deep; echo y > made/deep/er.txt")
    assert ran["status"] == "success", ran
    assert changed(ran) == {"kept.txt": "changed", "new.txt": "deleted", "made/deep/er.txt": "created"}
    assert len(refs(git)) == 1
    undone = undo(ran).content
    assert undone["status"] == "undone"
    assert changed(undone) == {"kept.txt": "restored", "new.txt": "restored", "made/deep/er.txt": "removed"}
    assert state() == before
    assert (project / "kept.txt").read_text() == "staged, then changed\n"
    assert (project / "new.txt").read_text() == "untracked\n"
    assert not (project / "made").exists()
    assert not (project / "src" / "code.py").exists()


@pytest.mark.req("K-GI-02")
def test_an_undo_can_be_undone_and_redone(project: Path, git: Git, run: Run, undo: Undo) -> None:
    ran = run("echo two > kept.txt; echo new > new.txt; rm src/code.py")
    first = undo(ran).content
    assert ((project / "kept.txt").read_text(), (project / "new.txt").exists()) == ("kept\n", False)
    second = undo(first).content
    assert ((project / "kept.txt").read_text(), (project / "new.txt").read_text()) == ("two\n", "new\n")
    assert not (project / "src" / "code.py").exists()
    undo(second)
    assert ((project / "kept.txt").read_text(), (project / "new.txt").exists()) == ("kept\n", False)
    assert (project / "src" / "code.py").read_text() == "print('one')\n"


@pytest.mark.req("K-GI-02")
def test_ignored_files_and_secrets_are_never_saved(project: Path, git: Git, run: Run, home: Path) -> None:
    (project / "ignored").mkdir()
    for name in (".env", ".env.local", "server.pem", "id_ed25519", "src/prod.key", "ignored/secret.txt"):
        (project / name).write_text("hunter2-hunter2")
    (home / ".config" / "git").mkdir(parents=True)
    (home / ".config" / "git" / "ignore").write_text("mine.txt\n")
    (project / "mine.txt").write_text("hunter2-hunter2")
    ran = run("echo hunter2-hunter2 >> .env; echo 1 > kept.txt; echo hunter2-hunter2 > .env.new")
    assert changed(ran) == {"kept.txt": "changed"}
    everything = git("cat-file", "--batch-all-objects", "--batch", "--unordered")
    assert "kept" in everything
    assert "hunter2-hunter2" not in everything


@pytest.mark.req("K-GI-02")
def test_submodules_and_nested_repositories_are_skipped_and_reported(
    project: Path, git: Git, state: State, run: Run, tmp_path: Path, undo: Undo
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git("init", "-q", cwd=other)
    (other / "theirs.txt").write_text("theirs\n")
    git("add", "-A", cwd=other)
    git("commit", "-q", "-m", "Begin", cwd=other)
    git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "module")
    git("clone", "-q", str(other), "nested")
    before = state()
    ran = run("echo z > module/theirs.txt; echo z > nested/theirs.txt; echo z > kept.txt")
    assert changed(ran) == {"kept.txt": "changed"}
    assert as_object(ran["checkpoint"])["left_out"] == ["module", "nested"]
    response = undo(ran).content
    assert response["left_out"] == ["module", "nested"]
    assert (project / "module" / "theirs.txt").read_text() == "z\n"
    git("submodule", "--quiet", "foreach", "git checkout -q -- .")
    assert state() == before


def test_no_program_that_a_repository_names_is_started(project: Path, git: Git, run: Run, undo: Undo) -> None:
    (project / ".ai" / "hooks").mkdir()
    spy = f"touch {project}/.ai/started"
    for hook in ("reference-transaction", "post-index-change", "pre-commit", "post-commit", "fsmonitor-watchman"):
        for folder in (project / ".ai" / "hooks", project / ".git" / "hooks"):
            folder.mkdir(exist_ok=True)
            (folder / hook).write_text(f"#!/bin/sh\n{spy}\n")
            (folder / hook).chmod(0o755)
    (project / ".gitattributes").write_text("*.txt filter=spy diff=spy text eol=crlf\n")
    for setting in (
        "core.fsmonitor", "filter.spy.clean", "filter.spy.smudge", "filter.spy.process", "diff.spy.textconv",
        "diff.external", "core.pager", "core.editor", "gpg.program", "core.sshCommand", "core.askPass",
    ):  # fmt: skip
        git("config", setting, spy)
    git("config", "core.hooksPath", str(project / ".ai" / "hooks"))
    git("config", "commit.gpgSign", "true")
    git("config", "core.autocrlf", "true")
    git("config", "extensions.partialClone", "away")
    git("config", "remote.away.url", "ssh://127.0.0.1/nowhere")
    git("config", "remote.away.promisor", "true")
    (project / ".ai" / "started").unlink(missing_ok=True)
    (project / "kept.txt").write_bytes(b"mixed\r\nends\n")
    ran = run("printf 'gone' > kept.txt; echo n > n.txt")
    assert changed(ran) == {"kept.txt": "changed", "n.txt": "created"}, ran
    assert undo(ran).content["status"] == "undone"
    assert (project / "kept.txt").read_bytes() == b"mixed\r\nends\n"
    assert not (project / ".ai" / "started").exists()


def test_links_are_saved_as_links_and_never_followed(
    project: Path, git: Git, run: Run, undo: Undo, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("outside-outside")
    (project / "folder").symlink_to(outside)
    (project / "file").symlink_to(outside / "secret.txt")
    ran = run("rm folder file; mkdir folder; echo 1 > folder/secret.txt; echo 2 > file; ln -s / root")
    assert changed(ran) == {
        "folder": "deleted", "folder/secret.txt": "created", "file": "changed", "root": "created",
    }  # fmt: skip
    assert undo(ran).content["status"] == "undone"
    assert (project / "folder").readlink() == outside
    assert (project / "file").readlink() == outside / "secret.txt"
    assert not (project / "root").is_symlink()
    assert (outside / "secret.txt").read_text() == "outside-outside"
    assert "outside-outside" not in git("cat-file", "--batch-all-objects", "--batch")


def test_an_undo_does_not_write_through_a_new_link(
    project: Path, git: Git, run: Run, undo: Undo, tmp_path: Path
) -> None:
    ran = run("echo changed > src/code.py")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "code.py").write_text("theirs")
    (project / "src" / "code.py").unlink()
    (project / "src").rmdir()
    (project / "src").symlink_to(outside)
    assert undo(ran).content["code"] == "conflict"
    assert undo(ran, force=True).is_error
    assert (outside / "code.py").read_text() == "theirs"


@pytest.mark.parametrize("mode", [0o600, 0o755, 0o640])
def test_permissions_are_restored(project: Path, git: Git, run: Run, undo: Undo, mode: int) -> None:
    (project / "kept.txt").chmod(mode)
    ran = run("chmod 666 kept.txt; rm src/code.py")
    assert changed(ran) == {"kept.txt": "changed", "src/code.py": "deleted"}
    undo(ran)
    assert (project / "kept.txt").stat().st_mode & 0o777 == mode
    assert (project / "src" / "code.py").stat().st_mode & 0o777 == 0o644


def test_a_file_in_place_of_a_folder_and_the_reverse_are_restored(
    project: Path, git: Git, run: Run, undo: Undo
) -> None:
    ran = run("rm -r src; echo file > src; rm kept.txt; mkdir kept.txt; echo in > kept.txt/inner")
    undone = undo(ran)
    assert undone.content["status"] == "undone", undone.content
    assert (project / "src" / "code.py").read_text() == "print('one')\n"
    assert (project / "kept.txt").read_text() == "kept\n"


def test_names_of_any_bytes_are_restored(project: Path, git: Git, run: Run, undo: Undo) -> None:
    names = [b"new\nline", b'quo"te', b"\xff\xfe", "ünï".encode(), b"back\\slash", b" space ", b"-dash", b":(top)x"]
    for name in names:
        (project / os.fsdecode(name)).write_bytes(name)
    ran = run('for f in *; do [ -f "$f" ] && echo changed > "./$f"; done')
    assert len(changed(ran)) == len(names) + 1
    assert undo(ran).content["status"] == "undone"
    assert [(project / os.fsdecode(name)).read_bytes() for name in names] == names


@pytest.mark.req("K-GI-02")
def test_files_that_become_visible_during_a_run_are_neither_saved_nor_removed(
    project: Path, git: Git, run: Run, undo: Undo
) -> None:
    (project / "ignored" / "deep").mkdir(parents=True)
    (project / "ignored" / "deep" / "mine.txt").write_text("hunter2-hunter2")
    (project / "mine.txt").write_text("mine\n")
    git("init", "-q", "nested")
    (project / "nested" / "theirs.txt").write_text("hunter2-hunter2")
    ran = run("echo mine.txt > .gitignore; rm -rf nested/.git; echo 1 > mine.txt")
    assert changed(ran) == {".gitignore": "changed", "mine.txt": "changed"}
    assert undo(ran).content["status"] == "undone"
    assert (project / "mine.txt").read_text() == "mine\n"
    assert (project / "ignored" / "deep" / "mine.txt").exists()
    assert (project / "nested" / "theirs.txt").exists()
    assert "hunter2-hunter2" not in git("cat-file", "--batch-all-objects", "--batch")


def test_a_file_that_cannot_be_saved_is_not_overwritten_without_force(
    project: Path, git: Git, run: Run, undo: Undo
) -> None:
    ran = run("truncate -s 64000001 kept.txt; rm src/code.py; mkfifo src/code.py")
    refused = undo(ran).content
    assert "would be lost: kept.txt, src/code.py" in as_text(refused["message"])
    assert (project / "kept.txt").stat().st_size == 64_000_001
    assert undo(ran, force=True).content["status"] == "undone"
    assert (project / "kept.txt").read_text() == "kept\n"
    assert (project / "src" / "code.py").is_file()


def test_a_run_that_changes_nothing_leaves_no_checkpoint(git: Git, run: Run) -> None:
    ran = run("true")
    assert ran["checkpoint"] == {"saved": True, "changed": []}
    assert refs(git) == []


def test_a_failed_run_can_be_undone(project: Path, git: Git, run: Run, undo: Undo) -> None:
    ran = run("echo half > kept.txt; exit 3")
    assert ran["status"] == "error"
    undo(ran)
    assert (project / "kept.txt").read_text() == "kept\n"


@pytest.mark.usefixtures("sandbox")
def test_a_cancelled_run_can_be_undone(project: Path, git: Git, tool: object, undo: Undo) -> None:
    (project / "ignored").mkdir()
    os.mkfifo(project / "ignored" / "news")

    async def story() -> str:
        kernel = Kernel(project)
        words: JsonObject = {
            "item_id": "change",
            "parameters": {"do": "echo half > kept.txt; echo done > ignored/news; sleep 60"},
        }
        task = asyncio.create_task(kernel.call("execute", {**words, "checkpoint": True}))
        async with asyncio.timeout(120):
            await asyncio.to_thread((project / "ignored" / "news").read_text)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        listed = (await kernel.call("undo", {})).content
        await kernel.aclose()
        (one,) = map(as_object, as_list(listed["checkpoints"]))
        return as_text(one["run_id"])

    assert undo({"undo": asyncio.run(story())}).content["status"] == "undone"
    assert (project / "kept.txt").read_text() == "kept\n"


def test_a_project_within_a_repository_is_saved_without_the_rest(
    project: Path, git: Git, run: Run, tmp_path: Path
) -> None:
    git("init", "-q", cwd=tmp_path)
    (project / ".git").rename(tmp_path / "gone")
    (tmp_path / "beside.txt").write_text("beside\n")
    ran = run("echo 1 > kept.txt; echo 1 > ../beside.txt")
    assert changed(ran) == {"kept.txt": "changed"}
    listed = git("for-each-ref", "--format=%(refname)", "refs/kiwi", cwd=tmp_path).split()
    assert len(listed) == 1
    assert git("ls-tree", "-r", "--name-only", listed[0], cwd=tmp_path).split() == ["after/kept.txt", "before/kept.txt"]


def test_sha256_repositories_and_empty_ones_work(project: Path, git: Git, run: Run, undo: Undo) -> None:
    (project / ".git").rename(project.parent / "gone")
    git("init", "-q", "--object-format=sha256")
    ran = run("echo 1 > kept.txt")
    undo(ran)
    assert (project / "kept.txt").read_text() == "kept\n"


def test_a_file_that_is_too_large_is_skipped_and_reported(
    project: Path, git: Git, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (project / "large.bin").open("wb") as file:
        file.truncate(64_000_001)
    ran = run("echo 1 > kept.txt; truncate -s 1 large.bin")
    assert as_object(ran["checkpoint"])["left_out"] == ["large.bin"]
    assert changed(ran) == {"kept.txt": "changed"}
