"""When a checkpoint is made: as the owner says, else as the item says, else when a call asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.checkpoints.guard import NOTHING, wish
from kiwi_mcp.manifest.parse import parse

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
Tool = Callable[..., None]


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
def test_the_owner_decides_then_the_item_then_the_call(owner: str, item: Json, is_asked: bool, is_made: bool) -> None:
    manifest = Manifest("change", "script", "1.0.0", mutates_state=True, extra={"checkpoint": item})
    assert wish(manifest, PROCESS, owner, is_asked=is_asked).is_made is is_made
    assert not wish(manifest, REQUEST, owner, is_asked=is_asked).is_made
    assert wish(replace(manifest, mutates_state=False), PROCESS, owner, is_asked=False) == NOTHING


@pytest.mark.parametrize(
    ("item", "paths"), [(None, ("notes", "out")), ({"paths": ["src"]}, ("src",)), ("auto", ("notes", "out"))]
)
def test_what_an_item_needs_to_write_is_what_it_changes_where_it_does_not_say(
    item: Json, paths: tuple[str, ...]
) -> None:
    needs = {"write": ["notes", "out/**", "~/elsewhere", "/srv/data"]}
    manifest = Manifest("change", "script", "1.0.0", extra={"checkpoint": item, "needs": needs})
    assert wish(manifest, PROCESS, "", is_asked=True).paths == paths


@pytest.mark.req("K-GI-01")
def test_what_the_owner_and_the_item_say_is_heard(git: Git, run: Run, tool: Tool, policy: Path) -> None:
    assert is_saved(run("echo 1 > kept.txt", checkpoint=False)) is False
    tool(checkpoint="auto")
    assert is_saved(run("echo 2 > kept.txt", checkpoint=False)) is True
    policy.write_text("checkpoint: explicit\n")
    assert is_saved(run("echo 3 > kept.txt", checkpoint=False)) is False


@pytest.mark.req("K-GI-01")
def test_a_run_that_changes_state_offers_a_checkpoint(git: Git, run: Run, tool: Tool) -> None:
    assert "checkpoint: true" in as_text(as_object(run("true", checkpoint=False)["checkpoint"])["hint"])
    tool(mutates_state=False, checkpoint="auto")
    assert "checkpoint" not in run("true", checkpoint=False)
    tool(checkpoint="disabled")
    assert "checkpoint" not in run("true", checkpoint=False)


@pytest.mark.req("K-GI-01")
def test_a_checkpoint_that_is_asked_for_and_disabled_refuses_the_run(
    project: Path, git: Git, run: Run, tool: Tool
) -> None:
    tool(checkpoint="disabled")
    answer = run("echo 1 > kept.txt")
    assert (answer["code"], (project / "kept.txt").read_text()) == ("unavailable", "kept\n")


@pytest.mark.req("K-GI-02")
def test_outside_a_repository_nothing_is_pretended(project: Path, run: Run, tool: Tool) -> None:
    answer = run("echo 1 > made.txt")
    assert "does not say which paths it changes" in as_text(answer["message"])
    assert not (project / "made.txt").exists()
    tool(checkpoint="auto")
    answer = run("echo 1 > made.txt", checkpoint=False)
    assert (answer["status"], answer["checkpoint"]) == ("success", {"saved": False})
    assert any("Nothing was saved" in as_text(warning) for warning in as_list(answer["warnings"]))


def test_a_project_that_an_outer_repository_ignores_is_outside_of_it(
    project: Path, git: Git, run: Run, tmp_path: Path
) -> None:
    git("init", "-q", cwd=tmp_path)
    (tmp_path / ".gitignore").write_text("*\n")
    (project / ".git").rename(tmp_path / "gone")
    assert "no git repository" in as_text(run("true")["message"])


def test_a_repository_that_git_refuses_is_no_net(project: Path, git: Git, run: Run) -> None:
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
    assert "no git repository" in as_text(run("true")["message"])


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
def test_a_misspelt_word_is_an_issue_of_the_manifest(written: Json, place: str) -> None:
    manifest = parse({"tool_id": "change", "tool_type": "script", "version": "1.0.0", "checkpoint": written}, stem="x")
    assert [issue.place for issue in manifest.issues] == [place]


def test_a_misspelt_word_of_the_owner_refuses_everything(git: Git, run: Run, policy: Path) -> None:
    policy.write_text("checkpoint: allways\n")
    assert run("true", checkpoint=False)["code"] == "invalid_manifest"
