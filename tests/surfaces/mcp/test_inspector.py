"""The official Inspector, from npm, lists Kiwi's tools and calls them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kiwi_mcp

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.req("K-ME-01")]

INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
TOOL_ERROR = 5
TOOL = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "version": "1.0.0",
    "description": "Say a word",
    "config": {"entrypoint": "main.sh"},
    "parameters": [{"name": "word", "type": "string", "required": True}],
    "files": {"main.sh": 'echo "$KIWI_PARAM_word"\n'},
}


@pytest.fixture(scope="module")
def npm_cache() -> str:
    """The package cache of whoever runs the tests; tests have a home of their own, which is empty."""
    asked = subprocess.run(["npm", "config", "get", "cache"], capture_output=True, text=True, timeout=60, check=True)
    return asked.stdout.strip()


def inspect(project: Path, cache: str, method: str, *words: str) -> dict[str, Any]:
    """Ask one thing of a server that the Inspector starts, and return the result it prints."""
    server = [sys.executable, "-m", "kiwi_mcp", "serve", "--project", str(project)]
    source = str(Path(kiwi_mcp.__file__).parents[1])
    done = subprocess.run(
        ["npx", "-y", INSPECTOR, "--cli", *server, "--method", method, *words],
        cwd=project,
        env={**os.environ, "npm_config_cache": cache, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    # The Inspector's own exit code tells an error of the tool from one of the protocol.
    assert done.returncode == (TOOL_ERROR if result.get("isError") else 0), done.stderr
    return result


def call(project: Path, cache: str, tool: str, *arguments: str) -> dict[str, Any]:
    words = [word for argument in arguments for word in ("--tool-arg", argument)]
    return inspect(project, cache, "tools/call", "--tool-name", tool, *words)


def test_the_inspector_lists_the_tools_with_their_schemas(project: Path, npm_cache: str) -> None:
    tools = inspect(project, npm_cache, "tools/list")["tools"]

    assert [tool["name"] for tool in tools] == ["search", "load", "execute", "help"]
    assert all(tool["description"] and tool["inputSchema"]["type"] == "object" for tool in tools)


def test_the_inspector_creates_a_tool_finds_it_and_runs_it(project: Path, npm_cache: str) -> None:
    made = call(project, npm_cache, "execute", "action=create", "item_id=say", f"parameters={json.dumps(TOOL)}")
    found = call(project, npm_cache, "search", "query=say a word")
    ran = call(project, npm_cache, "execute", "action=run", "item_id=say", 'parameters={"word": "žluť"}')

    assert made["structuredContent"]["status"] == "created"
    assert [result["name"] for result in found["structuredContent"]["results"]] == ["say"]
    assert ran["structuredContent"]["result"] == "žluť"
    assert ran["isError"] is False


@pytest.mark.req("K-ME-03")
def test_the_inspector_is_told_of_an_error_as_an_error(project: Path, npm_cache: str) -> None:
    refused = call(project, npm_cache, "execute", "item_id=lost")

    assert refused["isError"] is True
    assert refused["structuredContent"]["code"] == "tool_not_found"
