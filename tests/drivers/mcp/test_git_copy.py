"""A sandboxed server commits to a repository; nothing else that it writes into `.git` reaches the owner's git."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from msgspec.structs import replace
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.git_copy import GitCopy

SHELL = """
import json, subprocess, sys
for line in sys.stdin:
    message = json.loads(line)
    if "id" not in message:
        continue
    params = message.get("params", {})
    match message["method"]:
        case "initialize":
            result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                      "serverInfo": {"name": "shell", "version": "1"}}
        case "tools/list":
            result = {"tools": [{"name": "sh", "inputSchema": {"type": "object"}}]}
        case _:
            script = params.get("arguments", {}).get("script", "true")
            done = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
            text = done.stdout + done.stderr
            result = {"content": [{"type": "text", "text": text}], "isError": done.returncode != 0}
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
CONFIG = """
[user]
    name = Ann
    email = ann@example.test
[init]
    defaultBranch = main
"""
pytestmark = pytest.mark.usefixtures("sandbox", "processes")
Shell = Callable[[str], Awaitable[Outcome]]


@pytest.fixture
def repo(bench: Bench, home: Path) -> Path:
    """A repository of the owner's with one commit."""
    repo = bench.space.project / "repo"
    repo.mkdir()
    (home / ".gitconfig").write_text(CONFIG)
    git(repo, "init", "-q")
    (repo / "tea.txt").write_text("tea\n")
    git(repo, "add", "tea.txt")
    git(repo, "commit", "-qm", "first")
    return repo


def serve(bench: Bench, repos: Sequence[Path], story: Callable[[Shell], Coroutine[object, object, None]]) -> None:
    """Run a story with one sandboxed process of a server that runs shell scripts and may change repositories."""
    folder = bench.space.project / "servers"
    folder.mkdir()
    (folder / "shell.py").write_text(SHELL)
    profile = SandboxProfile("sandboxed", readable=(str(folder),), writable=tuple(map(str, repos)))
    held = replace(bench, profile=profile)
    tool = held.server(
        server_id="shell",
        command=sys.executable,
        args=[str(folder / "shell.py")],
        env={},
        timeout=60,
        startup_timeout=60,
    )
    chain = held.chain(tool, "sh")
    held.run(story(lambda script: held.call(chain, {"script": f"cd {repos[0]} && {script}"})))


def git(repo: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(repo), *words], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout


def settings(repo: Path) -> dict[str, str]:
    """Everything in a git folder but commits, branches, the index and what the owner's git notes about them."""
    moved = {"objects", "refs", "logs", "index", "HEAD", "COMMIT_EDITMSG"}
    return {
        str(path.relative_to(repo / ".git")): sha256(path.read_bytes()).hexdigest() if path.is_file() else "other"
        for path in (repo / ".git").rglob("*")
        if path.relative_to(repo / ".git").parts[0] not in moved
    }


def test_a_server_adds_commits_branches_and_sees_what_the_owner_commits(bench: Bench, repo: Path) -> None:
    before = settings(repo)

    async def story(shell: Shell) -> None:
        done = await shell("echo more >> tea.txt && echo new > 'a file' && git add -A")
        assert done.is_success, done.message
        assert git(repo, "status", "--short") == 'A  "a file"\nM  tea.txt\n'
        done = await shell("git commit -qm second && git checkout -qb topic && git tag v1 && git branch old main~1")
        assert (done.is_success, done.warnings) == (True, ()), done
        assert git(repo, "log", "--format=%s %an", "topic").splitlines() == ["second Ann", "first Ann"]
        assert git(repo, "branch", "--show-current") == "topic\n"
        assert (git(repo, "status", "--short"), git(repo, "tag")) == ("", "v1\n")
        git(repo, "commit", "-qm", "third", "--allow-empty")
        done = await shell("git log --format=%s -1 && git branch -D old && git checkout -q main && git gc -q")
        assert str(done.result).startswith("third"), done
        assert git(repo, "branch") == "* main\n  topic\n"
        await shell("echo x > x && git add x && git commit -qm fourth && git checkout -q --detach")
        assert git(repo, "log", "--format=%s", "-1") == "fourth\n"
        (repo / ".git/index.lock").touch()  # the owner's git is at work
        done = await shell("git commit -q --allow-empty -m refused")
        assert "was not taken over" in "".join(done.warnings), done
        (repo / ".git/index.lock").unlink()
        done = await shell("git log --format=%s -1 && git checkout -q main")
        assert (str(done.result), done.warnings) == ("fourth\n", ())

    serve(bench, [repo], story)
    assert git(repo, "branch", "--show-current") == "main\n"
    assert git(repo, "fsck", "--strict", "--no-dangling") == ""
    assert settings(repo) == before


TREE = "t=$(printf '%s %s %s\t%s\n' {kind} | git mktree); "
ATTACKS = {
    "what git runs": "git config core.fsmonitor '{run}'; git config core.hooksPath .git/h; git config include.path /x; "
    "git config extensions.worktreeConfig true; printf '[core]\n fsmonitor = {run}\n' > .git/config.worktree; "
    "echo '* filter=x' > .git/info/attributes; git config filter.x.clean '{run}'; mkdir -p .git/hooks; "
    "for h in post-index-change pre-commit post-checkout reference-transaction; do "
    "printf '#!/bin/sh\n{run}\n' > .git/hooks/$h; chmod +x .git/hooks/$h; done; "
    "mkdir .git/rebase-merge; echo 'exec {run}' > .git/rebase-merge/git-rebase-todo",
    "other settings": "mkdir -p .git/c .git/modules/x .git/worktrees/y; cp -r .git/refs .git/objects .git/c/; "
    "printf '[core]\n editor = {run}\n fsmonitor = {run}\n[diff]\n external = {run}\n' | "
    "tee .git/config .git/c/config .git/modules/x/config > .git/worktrees/y/config; echo c > .git/commondir",
    "other refs": "git update-ref refs/kiwi/evil HEAD; git update-ref refs/replace/$(git rev-parse HEAD) HEAD",
    "links": "rm -rf .git/logs .git/HEAD .git/index .git/packed-refs; mkdir .git/logs; "
    "for n in logs/HEAD HEAD index packed-refs; do ln -s {secret} .git/$n; done",
    "a link as a branch": "mkdir -p .git/refs/heads; ln -s {secret} .git/refs/heads/evil",
    "a linked folder": "rm -rf .git/refs; ln -s {home} .git/refs; echo x > .git/HEAD",
    "a pipe as a branch": "mkdir -p .git/refs/heads; mkfifo .git/refs/heads/evil",
    "pipes for folders": "rm -rf .git/refs .git/objects/pack; mkfifo .git/refs .git/objects/pack; echo x > .git/HEAD",
    "a head elsewhere": "echo 'ref: refs/heads/../../config' > .git/HEAD",
    "a bad name": "echo $(git rev-parse HEAD) refs/heads/../../hooks/pre-commit >> .git/packed-refs",
    "other objects": "echo {home}/other/.git/objects > .git/objects/info/alternates; "
    "mkdir -p .git/refs/heads; echo {other} > .git/refs/heads/evil",
    "hooks in a commit": "t=$(echo '{run}' | git hash-object -w --stdin); "
    + TREE.replace("{kind}", "100755 blob $t pre-commit")
    + TREE.replace("{kind}", "040000 tree $t hooks")
    + TREE.replace("{kind}", "040000 tree $t .git")
    + "git update-ref refs/heads/evil $(git commit-tree -m x $t)",
    "hooks in the index": "sed -i s,tea.txt,.git/co, .git/index",
    "no rights": "chmod 000 .git/refs .git/HEAD",
}
"""What a server does in the git folder of a repository, each in one of its own."""


@pytest.mark.timeout(240)
def test_nothing_that_a_server_writes_into_git_reaches_the_owner(
    bench: Bench, repo: Path, home: Path, tmp_path: Path
) -> None:
    other = home / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-qm", "secret", "--allow-empty")
    secret, marker = home / "secret.txt", tmp_path / "ran"
    secret.write_text("secret\n")
    repos = {name: bench.space.project / f"repo_{number}" for number, name in enumerate(ATTACKS)}
    for one in repos.values():
        shutil.copytree(repo, one)
    places = {
        "run": f"touch {marker}",
        "secret": str(secret),
        "home": str(home),
        "other": git(other, "rev-parse", "HEAD"),
    }
    scripts = []
    for name, text in ATTACKS.items():
        for place, value in places.items():
            text = text.replace(f"{{{place}}}", value.strip())  # noqa: PLW2901 - filled in
        scripts.append(f"(cd {repos[name]}; {text})")
    before = settings(repo)

    async def story(shell: Shell) -> None:
        first = await shell("; ".join(scripts))
        for one in repos.values():  # the owner's git replaces the settings while the server runs
            git(one, "config", "kiwi.test", "1")
            git(one, "config", "--remove-section", "kiwi")
        again = await shell("; ".join(scripts))
        # Some attacks change nothing that is taken over; the rest are refused with a reason.
        assert sum("was not taken over" in warning for warning in first.warnings) >= 8, first
        assert sum("was not taken over" in warning for warning in again.warnings) >= 8, again

    serve(bench, [*repos.values()], story)
    for name, one in repos.items():
        assert {**settings(one), "config": ""} == {**before, "config": ""}, name
        assert "touch" not in (one / ".git/config").read_text()
        assert git(one, "for-each-ref") == git(repo, "for-each-ref"), name
        git(one, "status")
        git(one, "add", "-A")
        git(one, "commit", "-qm", "by the owner", "--allow-empty")
        git(one, "checkout", "-q", "-b", "next")
        assert git(one, "fsck", "--strict", "--no-dangling") == "", name
        assert not marker.exists(), name
    assert secret.read_text() == "secret\n"


def test_commits_reach_a_repository_on_another_file_system(repo: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == repo.stat().st_dev:
        pytest.skip("/dev/shm is no file system of its own")

    def change(copy: GitCopy) -> None:
        (repo / "tea.txt").write_text("more tea\n")
        where = (f"--git-dir={copy.folder}", f"--work-tree={repo}")
        objects = {"GIT_ALTERNATE_OBJECT_DIRECTORIES": f"{repo}/.git/objects"}
        for words in (("add", "-A"), ("commit", "-qm", "second"), ("rm", "-rq", ".")):
            subprocess.run(["git", *where, *words], check=True, env={**os.environ, **objects}, timeout=30)

    async def commit(home: Path) -> list[str]:
        copy, warnings = await GitCopy.make(f"{repo}/.git", home), list[str]()
        assert copy is not None
        await copy.refresh()
        change(copy)
        await copy.take_over(warnings.append)
        return warnings

    with TemporaryDirectory(dir=memory) as home:
        assert asyncio.run(commit(Path(home, "0"))) == []
    assert git(repo, "log", "--format=%s").splitlines() == ["second", "first"]
    assert git(repo, "status", "--short") == "D  tea.txt\n"  # an index without files is taken over, too
