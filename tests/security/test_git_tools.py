"""The git tools start no program that a repository names, and follow nothing that leads out of the project."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kiwi_mcp.domain.json import as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
pytestmark = [pytest.mark.case("TR-GIT"), pytest.mark.usefixtures("sandbox", "processes")]


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=Ann", "-c", "user.email=ann@example.test", "-c", "protocol.file.allow=always")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *words], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout


@pytest.fixture
def repository(project: Path) -> Path:
    """The project as a repository with two commits, a change in a tracked file, and an untracked file."""
    git(project, "init", "-q", "-b", "main")
    (project / ".gitignore").write_text(".ai\n")
    for text in ("one", "two", "three"):
        (project / "a.txt").write_text(f"{text}\n")
        if text != "three":
            git(project, "add", ".")
            git(project, "commit", "-qm", text)
    (project / "new.txt").write_text("new\n")
    return project


def call(ask: Ask, item: str, **parameters: Any) -> dict[str, Any]:
    answer = ask("execute", item_id=item, parameters=parameters)
    return dict(as_object(answer.content.get("result")) or answer.content)


def use_all(ask: Ask) -> list[dict[str, Any]]:
    """Call every git tool; the owner agrees to what needs an approval."""
    return [
        call(ask, "git_status"),
        call(ask, "git_diff"),
        call(ask, "git_diff", commit="HEAD~1"),
        call(ask, "git_diff", staged=True),
        call(ask, "git_log", path="a.txt"),
        call(ask, "git_commit", message="fourth"),
        call(ask, "git_init"),
    ]


def program(folder: Path) -> Path:
    """Write a program that leaves a file behind wherever it may, and says so on every stream."""
    path = folder / "evil.sh"
    places = " ".join(str(one) for one in (folder / "PWNED", folder / "project" / "PWNED"))
    path.write_text(f"#!/bin/sh\nfor one in {places}; do touch $one; done\necho PWNED; echo PWNED >&2\n")
    path.chmod(0o755)
    return path


SETTINGS = (
    "core.fsmonitor", "diff.external", "core.pager", "pager.log", "core.editor", "core.sshCommand", "gpg.program",
    "credential.helper", "diff.evil.command", "diff.evil.textconv", "filter.evil.clean", "filter.evil.smudge",
    "filter.evil.process", "merge.evil.driver", "core.alternateRefsCommand", "uploadpack.packObjectsHook",
    "core.gitProxy", "sequence.editor", "interactive.diffFilter", "trailer.evil.command", "alias.status",
)  # fmt: skip
HOOKS = (
    "pre-commit", "commit-msg", "prepare-commit-msg", "post-commit", "post-index-change", "reference-transaction",
    "post-checkout", "pre-auto-gc", "fsmonitor-watchman", "pre-applypatch", "post-rewrite",
)  # fmt: skip


def spoil(repository: Path, evil: Path) -> None:
    """Let every setting, hook and attribute of a repository name the program."""
    for name in SETTINGS:
        git(repository, "config", name, f"!{evil}" if name.startswith("alias") else str(evil))
    for name in ("commit.gpgSign", "log.showSignature", "filter.evil.required", "core.untrackedCache"):
        git(repository, "config", name, "true")
    for folder in (repository / ".git" / "hooks", repository / "hooks"):
        folder.mkdir(exist_ok=True)
        for name in HOOKS:
            shutil.copy(evil, folder / name)
    git(repository, "config", "core.hooksPath", str(repository / "hooks"))
    for place in (repository / ".git" / "info" / "attributes", repository / ".gitattributes"):
        place.write_text("* filter=evil diff=evil merge=evil\n")


def assert_nothing_ran(folder: Path, answers: list[dict[str, Any]]) -> None:
    assert not [*folder.rglob("PWNED")]
    assert "PWNED" not in str([{**one, "message": ""} for one in answers])


def test_no_program_that_a_repository_names_is_started(ask: Ask, repository: Path, tmp_path: Path) -> None:
    spoil(repository, program(tmp_path))
    config = (repository / ".git" / "config").read_bytes()
    status, diff, older, staged, log, commit, init = answers = use_all(ask)
    assert_nothing_ran(tmp_path, answers)
    assert {"path": "a.txt", "unstaged": "changed"} in status["changes"]
    assert "-two\n+three\n" in diff["diff"]
    assert "-one\n+three\n" in older["diff"]
    assert staged["diff"] == ""
    assert [one["message"] for one in log["commits"]] == ["two", "one"]
    assert "a.txt" in commit["files"]
    assert "already_exists" in init["message"]
    assert (repository / ".git" / "config").read_bytes() == config
    assert git(repository, "cat-file", "blob", "HEAD:a.txt") == "three\n"
    subprocess.run(["git", "diff", "HEAD~1"], cwd=repository, capture_output=True, timeout=120, check=False)
    assert (repository / "PWNED").exists()


def test_settings_that_are_included_from_elsewhere_start_nothing(ask: Ask, repository: Path, tmp_path: Path) -> None:
    evil = program(tmp_path)
    (tmp_path / "more.config").write_text(
        f"[core]\n\tfsmonitor = {evil}\n\thooksPath = {tmp_path}\n[filter \"evil\"]\n\tclean = {evil}\n"
        f"[diff]\n\texternal = {evil}\n"
    )  # fmt: skip
    shutil.copy(evil, tmp_path / "reference-transaction")
    (repository / ".gitattributes").write_text("* filter=evil\n")
    git(repository, "config", "include.path", str(tmp_path / "more.config"))
    git(repository, "config", "includeIf.gitdir:/.path", str(tmp_path / "more.config"))
    answers = use_all(ask)
    assert_nothing_ran(tmp_path, answers)
    assert answers[5]["branch"] == "main"
    git(repository, "diff", "HEAD~1")
    assert (repository / "PWNED").exists()


@pytest.mark.parametrize("kind", ["a link", "a file", "a common folder", "refs", "objects", "alternates", "a worktree"])
def test_a_git_folder_that_leads_elsewhere_is_not_followed(
    kind: str, ask: Ask, repository: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "-q", "-b", "main")
    (other / "secret.txt").write_text("SECRET\n")
    git(other, "add", ".")
    git(other, "commit", "-qm", "SECRET")
    own, theirs = repository / ".git", other / ".git"
    match kind:
        case "a link":
            shutil.rmtree(own)
            own.symlink_to(theirs)
        case "a file":
            shutil.rmtree(own)
            own.write_text(f"gitdir: {theirs}\n")
        case "a common folder":
            (own / "commondir").write_text(f"{theirs}\n")
        case "refs" | "objects":
            shutil.rmtree(own / kind)
            (own / kind).symlink_to(theirs / kind)
        case "alternates":
            (own / "objects" / "info").mkdir(exist_ok=True)
            (own / "objects" / "info" / "alternates").write_text(f"{theirs / 'objects'}\n")
            (own / "refs" / "heads" / "main").write_text(git(other, "rev-parse", "HEAD"))
        case _:
            git(repository, "config", "core.worktree", str(other))
    before = contents(other)
    answers = use_all(ask)
    assert "SECRET" not in str(answers)
    assert contents(other) == before
    if kind == "a worktree":
        assert "-two\n+three\n" in answers[1]["diff"]


def test_a_submodule_is_neither_entered_nor_changed(ask: Ask, repository: Path, tmp_path: Path) -> None:
    evil = program(tmp_path)
    git(tmp_path, "init", "-q", "-b", "main", str(tmp_path / "inner"))
    git(tmp_path / "inner", "commit", "-q", "--allow-empty", "-m", "inner")
    git(repository, "submodule", "--quiet", "add", str(tmp_path / "inner"), "libs/inner")
    git(repository, "commit", "-qm", "submodule")
    inner = repository / "libs" / "inner"
    for name in ("core.fsmonitor", "diff.external", "filter.evil.clean"):
        git(inner, "config", name, str(evil))
    (inner / "b.txt").write_text("b\n")
    (inner / ".gitattributes").write_text("* filter=evil\n")
    before = contents(repository / ".git" / "modules")
    answers = use_all(ask)
    assert_nothing_ran(tmp_path, answers)
    assert {"a.txt", "new.txt"} <= {*answers[5]["files"]}
    assert not [name for name in answers[5]["files"] if name.startswith("libs")]
    assert contents(repository / ".git" / "modules") == before
    head = git(inner, "-c", "core.fsmonitor=false", "rev-parse", "HEAD").strip()
    assert git(repository, "ls-tree", "HEAD", "libs/inner").split()[2] == head


@pytest.mark.parametrize(
    "name", ["--output=PWNED", "-O/etc/passwd", ":(glob)**", "../other/secret.txt", "a\nb", "@{-1}"]
)
def test_a_path_or_a_commit_is_never_an_option_of_git(name: str, ask: Ask, repository: Path, tmp_path: Path) -> None:
    answers = [
        call(ask, "git_diff", path=name),
        call(ask, "git_diff", commit=name),
        call(ask, "git_log", path=name),
        call(ask, "git_commit", message=name, paths=[name]),
    ]
    assert not [*tmp_path.rglob("PWNED"), *tmp_path.rglob("*=PWNED")]
    assert "three" not in str(answers)
    assert git(repository, "log", "--format=%s") == "two\none\n"


def test_a_repository_of_another_user_is_not_changed(ask: Ask, repository: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(repository / ".git", 12345, 12345)
    assert "cannot be changed from here" in call(ask, "git_commit", message="x")["message"]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes; reading changes no index."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
