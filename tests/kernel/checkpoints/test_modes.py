"""Checkpoint modes: set by the owner, else by the item, else by the call."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.checkpoints import file_changes
from kiwi_mcp.kernel.checkpoints.checkpoint import NOTHING, wish
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.program import return_faults

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
Tool = Callable[..., None]
Undo = Callable[..., Answer]


@pytest.fixture
def policy(home: Path) -> Path:
    (home / ".ai").mkdir(exist_ok=True)
    return home / ".ai" / "policy.yaml"


def is_saved(answer: JsonObject) -> Json:
    return as_object(answer.get("checkpoint")).get("saved", False)


PROCESS = Plan("project/local/change@1.0.0", "", "process", (), ProcessSpec(("true",), "/"), {})
REQUEST = replace(PROCESS, spec=HttpSpec("POST", "https://example.org"))


@pytest.mark.req("K-GI-01")
@pytest.mark.parametrize(
    ("owner", "item", "is_asked", "is_made"),
    [
        ("", None, False, False),
        ("", None, True, True),
        ("", "explicit", False, False),
        ("", "auto", False, True),
        ("", {"mode": "auto", "paths": ["src"]}, False, True),
        ("", {"paths": ["src"]}, False, False),
        ("", "disabled", False, False),
        ("", "disabled", True, False),
        ("", "misspelt", False, True),
        ("auto", None, False, True),
        ("auto", "disabled", False, True),
        ("explicit", "auto", False, False),
        ("explicit", "auto", True, True),
        ("disabled", "auto", False, False),
    ],
)
def test_the_owner_decides_before_the_item_and_the_call(owner: str, item: Json, is_asked: bool, is_made: bool) -> None:
    manifest = Manifest("change", "script", "1.0.0", mutates_state=True, extra={"checkpoint": item})
    assert wish(manifest, PROCESS, "call", owner, is_asked=is_asked).is_made is is_made
    assert not wish(manifest, REQUEST, "none", owner, is_asked=is_asked).is_made
    assert wish(replace(manifest, mutates_state=False), PROCESS, "call", owner, is_asked=False) == NOTHING


@pytest.mark.req("K-GI-01")
def test_settings_of_the_owner_and_the_item_are_respected(git: Git, run: Run, tool: Tool, policy: Path) -> None:
    assert is_saved(run("echo 1 > kept.txt", checkpoint=False)) is False
    tool(checkpoint="auto")
    assert is_saved(run("echo 2 > kept.txt", checkpoint=False)) is True
    policy.write_text("checkpoint: explicit\n")
    assert is_saved(run("echo 3 > kept.txt", checkpoint=False)) is False


@pytest.mark.req("K-GI-01")
def test_a_changing_run_offers_a_checkpoint(git: Git, run: Run, tool: Tool) -> None:
    offered = run("true", checkpoint=False)
    assert "checkpoint: true" in as_text(as_object(offered["checkpoint"])["hint"])
    assert offered["checkpoint_recommended"] is True
    assert '"item_id":"git_checkpoint","parameters":{"operation":"change"}' in as_text(offered["checkpoint_hint"])
    assert "checkpoint_recommended" not in run("true")
    tool(mutates_state=False, checkpoint="auto")
    assert "checkpoint" not in run("true", checkpoint=False)
    tool(checkpoint="disabled")
    assert "checkpoint" not in run("true", checkpoint=False)


@pytest.mark.req("K-GI-01")
def test_a_requested_but_disabled_checkpoint_refuses_the_run(project: Path, git: Git, run: Run, tool: Tool) -> None:
    tool(checkpoint="disabled")
    answer = run("echo 1 > kept.txt")
    assert (answer["code"], (project / "kept.txt").read_text()) == ("unavailable", "kept\n")


@pytest.mark.req("K-GI-02")
def test_no_checkpoint_is_reported_where_nothing_can_be_saved(
    project: Path, run: Run, tool: Tool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_changes, "MOST_FILES", 2)
    for name in ("one", "two", "three"):
        (project / name).touch()
    answer = run("echo 1 > made.txt")
    assert "the limit is 2" in as_text(answer["message"])
    assert not (project / "made.txt").exists()
    tool(checkpoint="auto")
    answer = run("echo 1 > made.txt", checkpoint=False)
    assert (answer["status"], answer["checkpoint"]) == ("success", {"saved": False})
    assert any("Nothing was saved" in as_text(warning) for warning in as_list(answer["warnings"]))


def test_a_project_that_an_outer_repository_ignores_is_outside_it(
    project: Path, git: Git, run: Run, undo: Undo, tmp_path: Path
) -> None:
    git("init", "-q", cwd=tmp_path)
    (tmp_path / ".gitignore").write_text("*\n")
    (project / ".git").rename(tmp_path / "gone")
    ran = run("echo 1 > kept.txt")
    assert git("for-each-ref", "refs/kiwi", cwd=tmp_path) == ""
    assert undo(ran).content["status"] == "undone"
    assert (project / "kept.txt").read_text() == "kept\n"


def test_a_repository_that_git_refuses_is_not_used(project: Path, git: Git, run: Run) -> None:
    (project / ".git" / "config").write_text("[core\n")
    answer = run("echo 1 > kept.txt")
    assert "`git rev-parse`" in as_text(answer["message"])
    assert (project / "kept.txt").read_text() == "kept\n"


def test_without_git_a_checkpoint_is_refused_with_the_reason(
    project: Path, git: Git, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert "git is not installed" in as_text(run("true")["message"])


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("often", "checkpoint"),
        ({"mode": "sometimes"}, "checkpoint"),
        ({"mod": "auto"}, "checkpoint"),
        ({"paths": ["../out"]}, "checkpoint.paths"),
        ({"paths": "src"}, "checkpoint.paths"),
        ({"paths": [3]}, "checkpoint.paths"),
        (True, "checkpoint"),
    ],
)
def test_a_misspelt_mode_in_a_manifest_is_an_issue(written: Json, place: str) -> None:
    manifest = parse({"tool_id": "change", "tool_type": "script", "version": "1.0.0", "checkpoint": written}, stem="x")
    assert [issue.place for issue in manifest.issues] == [place]


def test_a_misspelt_mode_in_the_settings_refuses_everything(git: Git, run: Run, policy: Path) -> None:
    policy.write_text("checkpoint: allways\n")
    assert run("true", checkpoint=False)["code"] == "invalid_manifest"


@pytest.mark.req("K-GI-01")
def test_a_checkpoint_gives_what_the_directive_git_checkpoint_returns(
    project: Path, git: Git, run: Run, ask: Ask
) -> None:
    (project / "staged.txt").write_text("staged\n")
    git("add", "staged.txt")
    before = git("log", "--format=%H", "--branches"), git("ls-files", "--stage")

    saved = as_object(run("printf 'kept\\nmore\\n' > kept.txt; rm src/code.py; echo new > new.txt")["checkpoint"])

    assert (git("log", "--format=%H", "--branches"), git("ls-files", "--stage")) == before
    assert (saved["insertions"], saved["deletions"]) == (2, 1)
    assert git("cat-file", "-p", f"{saved['commit']}:after/kept.txt") == "kept\nmore\n"
    assert as_object(as_list(ask("undo").content["checkpoints"])[0])["commit"] == saved["commit"]
    asked = ask("execute", item_type="directive", item_id="git_checkpoint", parameters={"operation": "change"})
    outputs = as_object(as_object(asked.content["result"])["outputs"])
    returned: JsonObject = {
        "commit_sha": saved["commit"],
        "commit_message": "docs: say more",
        "files_changed": len(as_list(saved["changed"])),
        "insertions": saved["insertions"],
        "deletions": saved["deletions"],
    }
    assert not return_faults(outputs, returned)
