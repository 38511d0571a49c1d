"""A tool that changes files as requested, and a repository with uncommitted work."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Git = Callable[..., str]
Run = Callable[..., JsonObject]
State = Callable[[], object]


@pytest.fixture
def tool(project: Path, ask: Ask) -> Callable[..., None]:
    """Write the tool `change`, which changes state as its owner always lets it, with further words in its manifest."""
    folder = project / ".ai" / "tools" / "change"
    folder.mkdir(parents=True)
    (folder / "main.sh").write_text('cd "$KIWI_PROJECT" && eval "$KIWI_PARAM_do"\n')

    def write(**words: Json) -> None:
        manifest = {
            "tool_id": "change",
            "tool_type": "script",
            "executor": "bash_runtime",
            "version": "1.0.0",
            "description": "Do what is requested",
            "mutates_state": True,
            "needs": {"write": ["."]},
            "config": {"entrypoint": "main.sh"},
            "parameters": [{"name": "do", "type": "string", "required": True}],
        }
        (folder / "tool.yaml").write_text(json.dumps({**manifest, **words}))

    write()
    assert not ask("approvals", action="add_rule", item="change").is_error
    return write


@pytest.fixture
def run(ask: Ask, tool: Callable[..., None], sandbox: None) -> Run:
    """Run the tool with a checkpoint, and return the answer."""

    def execute(do: str, **words: Json) -> JsonObject:
        request = {"action": "run", "item_id": "change", "parameters": {"do": do}, "checkpoint": True, **words}
        return ask("execute", **request).content

    return execute


@pytest.fixture
def git(project: Path, home: Path, processes: None) -> Git:
    """Make the project a repository, and return how git is asked in it, as its user would."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"HOME": str(home), "GIT_CONFIG_NOSYSTEM": "1"}

    def ask_git(*words: str, cwd: Path = project) -> str:
        identity = ("-c", "user.name=Owner", "-c", "user.email=owner@localhost", "-c", "init.defaultBranch=main")
        done = subprocess.run(
            ["git", *identity, *words], cwd=cwd, env=env, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode(errors="replace")

    ask_git("init", "-q")
    (project / "kept.txt").write_text("kept\n")
    (project / "src").mkdir()
    (project / "src" / "code.py").write_text("print('one')\n")
    (project / ".gitignore").write_text("ignored/\n.ai/\n")
    ask_git("add", "-A")
    ask_git("commit", "-q", "-m", "Begin")
    return ask_git


@pytest.fixture
def state(project: Path, git: Git) -> State:
    """Return all that a user of the repository sees of it: the index byte by byte, refs, stash, reflog and status."""

    def look() -> object:
        index = (project / ".git" / "index").read_bytes()
        refs = git("for-each-ref", "refs/heads", "refs/tags", "refs/stash")
        return index, (project / ".git" / "HEAD").read_text(), refs, git("reflog"), git("status", "--porcelain")

    return look


@pytest.fixture
def undo(ask: Ask) -> Callable[..., Answer]:
    """Undo what an answer says can be undone."""

    def apply(answer: JsonObject, **words: Json) -> Answer:
        run_id = as_text(as_object(answer.get("checkpoint")).get("undo")) or as_text(answer.get("undo"))
        assert run_id, answer
        return ask("undo", action="apply", run_id=run_id, **words)

    return apply
