"""An MCP server that may change a repository can commit there, and can change nothing else in its git folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_text
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
pytestmark = [pytest.mark.case("TR-F05"), pytest.mark.usefixtures("sandbox", "processes")]

SHELL = """
import json, subprocess, sys

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "shell", "version": "1"}}
    if method == "tools/list":
        return {"tools": [{"name": "do", "inputSchema": {"type": "object"}}]}
    done = subprocess.run(["sh", "-c", params["arguments"]["line"]], capture_output=True, text=True)
    return {"content": [{"type": "text", "text": f"{done.returncode} {done.stdout}{done.stderr}"}]}

for line in sys.stdin:
    message = json.loads(line)
    if "id" in message and message["method"] in {"initialize", "tools/list", "tools/call"}:
        result = answer(message["method"], message.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
    elif "id" in message:
        refusal = {"code": -32601, "message": "Method not found"}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": refusal}), flush=True)
"""
IDENTITY = "-c user.name=Ann -c user.email=ann@example.test"
RUNS = "printf '#!/bin/sh\\ntouch PWNED\\n'"


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *IDENTITY.split(), "-c", "protocol.file.allow=always", *words],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a submodule and a further work tree."""
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    for folder in (inner, outer):
        git(tmp_path, "init", "-q", "-b", "main", str(folder))
        (folder / "a.txt").write_text("a")
        git(folder, "add", "a.txt")
        git(folder, "commit", "-qm", "first")
    git(outer, "submodule", "--quiet", "add", str(inner), "libs/inner")
    git(outer, "commit", "-qm", "submodule")
    git(outer, "worktree", "add", "-q", str(tmp_path / "second"), "-b", "second")
    return outer


def started(ask: Ask, tmp_path: Path, repository: Path) -> Callable[[str], str]:
    """Add a server, let it change the repository, and return what runs a line of shell in it."""
    script = tmp_path / "server" / "shell.py"
    script.parent.mkdir()
    script.write_text(SHELL)
    added = ask("mcp", action="add", server="shell", command=sys.executable, args=[str(script)])
    assert added.content["status"] == "added", added.content
    allowed = ask("mcp", action="allow", server="shell", write=[str(repository)])
    assert allowed.content["status"] == "allowed", allowed.content
    ask("approvals", action="rules_add", item="mcp/shell/*")

    def do(line: str) -> str:
        done = ask("execute", item_id="do", parameters={"line": f"cd {repository} && {line}"})
        assert not done.is_error, done.content
        return as_text(done.content["result"])

    return do


ATTACKS = {
    "a hook": f"mkdir -p .git/hooks && {RUNS} > .git/hooks/pre-commit && chmod +x .git/hooks/pre-commit",
    "a setting": "git config core.fsmonitor 'touch PWNED'",
    "a setting of the work tree": "echo '[core]' > .git/config.worktree",
    "an attribute": "echo '* filter=x' > .git/info/attributes",
    "another git folder": "mv .git .old && cp -r .old .git",
    "another hooks folder": "mv .git/hooks .git/old",
    "a hook of the submodule": f"{RUNS} > .git/modules/libs/inner/hooks/post-checkout",
    "a setting of the submodule": "git -C libs/inner config core.fsmonitor ./evil",
    "another submodule": "mv .git/modules/libs .git/modules/old",
    "another folder around the submodule": "mv .git/modules .git/old",
    "a commit in the submodule": f"git -C libs/inner {IDENTITY} commit -q --allow-empty -m inner",
    "another common folder": "mkdir -p .git/worktrees/second && echo /tmp > .git/worktrees/second/commondir",
    "a link": "ln -s ../a.txt .git/COMMIT_EDITMSG.new",
    "a rebase that runs code": "mkdir .git/rebase-merge && echo 'exec touch PWNED' > .git/rebase-merge/git-rebase-todo",
    "a common folder": "mkdir -p evil && cp .git/config evil/ && echo ../evil > .git/commondir",
}
REFUSED = {name for name in ATTACKS if "submodule" in name} | {"another git folder"}
"""What is read-only inside, too; the rest ends with the copy of the git folder."""


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return every path below a git folder but commits, branches and the index, files with their bytes."""
    moved = {"objects", "refs", "logs", "index", "HEAD"}
    return {
        path: path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] not in moved
    }


def test_a_server_commits_and_changes_nothing_else_in_a_git_folder(ask: Ask, tmp_path: Path, repository: Path) -> None:
    do = started(ask, tmp_path, repository)
    before = contents(repository / ".git")
    assert do("git log -1 --format=%s && echo b > b.txt && git status --short") == "0 submodule\n?? b.txt\n"
    assert do("git add b.txt && git commit -qm second && git branch topic") == "0 "
    assert git(repository, "log", "-1", "--format=%s", "topic") == "second\n"
    output = do("; ".join(f"({line}) 2>/dev/null && echo 'done: {name}.'" for name, line in ATTACKS.items()))
    assert {name for name in ATTACKS if f"done: {name}." not in output} == REFUSED
    assert contents(repository / ".git") == before
    assert git(repository, "status", "--short") == "?? evil/\n"
    git(repository, "commit", "-q", "--allow-empty", "-m", "third")
    assert not list(tmp_path.rglob("PWNED"))
