"""From an empty home to the first answer: install, run a tool, move ten servers to Kiwi, and call one as a client does.

Usage: journey.py
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).parents[1]
_UV = _ROOT / ".venv" / "bin" / "uv"
_PATIENCE = 1_200
_NPM = {
    "memory": ["@modelcontextprotocol/server-memory"],
    "filesystem": ["@modelcontextprotocol/server-filesystem", "{home}/notes"],
    "everything": ["@modelcontextprotocol/server-everything"],
    "thinking": ["@modelcontextprotocol/server-sequential-thinking"],
    "github": ["@modelcontextprotocol/server-github"],
    "browser": ["@playwright/mcp"],
}
_PYPI = {
    "time": ["mcp-server-time"],
    "git": ["mcp-server-git", "--repository", "{home}/notes"],
    "fetch": ["mcp-server-fetch"],
    "sqlite": ["--with", "mcp<2", "mcp-server-sqlite", "--db-path", "{home}/notes/notes.db"],
}
_MANIFEST = """tool_id: hello
tool_type: script
version: 1.0.0
executor: bash_runtime
description: Greet the world
config: {entrypoint: main.sh}
"""
_ABOUT = """\
`benchmarks/journey.py`: an empty home without caches, and a client file with ten servers of npm and PyPI. Every package
is downloaded, so the seconds depend on the network. Budget: 6 commands."""


class Step(NamedTuple):
    """One part of the journey: a command that is typed, or what the client does by itself."""

    name: str
    seconds: float
    result: str
    is_typed: bool = True


def measure() -> list[Step]:
    """Make the journey in a new home."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        return _journey(home, _environment(home))


def table(steps: Sequence[Step]) -> str:
    """Return the section of the page."""
    lines = ["## From an empty home to the first answer", "", _ABOUT, "", "| step | s | result |", "|---|---|---|"]
    lines += [
        f"| {f'`{one.name}`' if one.is_typed else one.name} | {one.seconds:.1f} | {one.result} |" for one in steps
    ]
    typed, seconds = sum(one.is_typed for one in steps), sum(one.seconds for one in steps)
    lines.append(f"| all: {typed} commands | {seconds:.1f} | |")
    return "\n".join(lines) + "\n"


def _environment(home: Path) -> Mapping[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "VIRTUAL_ENV", "UV_TOOL"))
    }
    programs = os.pathsep.join([str(home / ".local" / "bin"), str(_UV.parent), os.environ.get("PATH", os.defpath)])
    return {
        **kept,
        "HOME": str(home),
        "USER_SPACE": str(home / ".ai"),
        "PATH": programs,
        "UV_CACHE_DIR": f"{home}/.cache/uv",
    }


def _journey(home: Path, env: Mapping[str, str]) -> list[Step]:
    project = home / "project"
    tool = project / ".ai" / "tools" / "hello"
    tool.mkdir(parents=True)
    (tool / "tool.yaml").write_text(_MANIFEST)
    (tool / "main.sh").write_text("echo Hello\n")
    client = _write_client(home)

    def typed(*words: str) -> tuple[float, str]:
        started = time.perf_counter()
        done = subprocess.run(
            words, cwd=project, env=env, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(words)} failed:\n{done.stderr}")
        return time.perf_counter() - started, done.stdout

    steps = [Step("uv tool install .", typed("uv", "tool", "install", str(_ROOT))[0], "installed")]
    seconds, output = typed("kiwi", "run", "hello")
    steps.append(Step("kiwi run hello", seconds, output.strip()))
    seconds, output = typed("kiwi", "setup", "--yes", "--json")
    moved = json.loads(output)
    good = sum("fault" not in one for one in moved["servers"])
    replaced = sum(len(one["replaced"]) for one in moved["clients"])
    tokens = f"{moved['tokens_before']:,} → {moved['tokens_after']:,} tokens"
    steps.append(Step("kiwi setup --yes", seconds, f"{good} of 10 servers work, {replaced} replaced; {tokens}"))
    seconds, answer = _asked(json.loads(client.read_text())["mcpServers"]["kiwi"], project, env)
    steps.append(Step("the client starts Kiwi, the model calls `get_current_time`", seconds, answer, is_typed=False))
    return steps


def _write_client(home: Path) -> Path:
    (home / "notes").mkdir()
    subprocess.run(["git", "init", "-q", home / "notes"], check=True, timeout=60)
    servers: dict[str, dict[str, object]] = {}
    for program, packages in (("npx", _NPM), ("uvx", _PYPI)):
        for name, words in packages.items():
            args = [word.format(home=home) for word in words]
            servers[name] = {"command": program, "args": ["-y", *args] if program == "npx" else args}
    servers["github"]["env"] = {"GITHUB_PERSONAL_ACCESS_TOKEN": "ghp_" + "0aB1" * 9}
    path = home / ".cursor" / "mcp.json"
    path.parent.mkdir()
    path.write_text(json.dumps({"mcpServers": servers}, indent=2))
    return path


def _asked(entry: Mapping[str, Any], project: Path, env: Mapping[str, str]) -> tuple[float, str]:
    """Start Kiwi as the client's file says, and call a tool of a server through it."""
    hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "journey", "version": "1"}}
    call = {"name": "execute", "arguments": {"item_id": "get_current_time", "parameters": {"timezone": "UTC"}}}
    messages: list[dict[str, object]] = [
        {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": hello},
        {"jsonrpc": "2.0", "method": "notifications/initialized"},
        {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call},
    ]
    started = time.perf_counter()
    words = [entry["command"], *entry["args"]]
    with subprocess.Popen(
        words, cwd=project, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for message in messages:
            server.stdin.write(json.dumps(message) + "\n")
            server.stdin.flush()
        answer = next(found for line in server.stdout if (found := json.loads(line)).get("id") == 2)
        seconds = time.perf_counter() - started
        server.stdin.close()
    is_error = answer.get("result", {}).get("isError", "error" in answer)
    if is_error:
        raise SystemExit(f"The call failed: {json.dumps(answer)[:2_000]}")
    return seconds, "answered"


if __name__ == "__main__":
    print(table(measure()))
