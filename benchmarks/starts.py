"""How long Kiwi takes to start, against a bare server of the official SDK that does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from measure import Case, Measured, interleaved

_RAW_LOOP = """
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("method") == "initialize":
        info = {"name": "raw", "version": "1"}
        result = {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}
    elif message.get("method") == "tools/list":
        result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
    else:
        continue
    print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
_BARE_SDK = """
import anyio, mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server

async def list_tools(ctx, params):
    return types.ListToolsResult(tools=[types.Tool(name="echo", input_schema={"type": "object"})])

async def main():
    server = Server("bare", on_list_tools=list_tools)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

anyio.run(main)
"""
_TOOL = """\
# tool_type: script
# executor: bash_runtime
# version: 1.0.0
# description: Say hello
echo hello
"""
HANDSHAKE: list[dict[str, object]] = [
    {
        "jsonrpc": "2.0", "id": 1, "method": "initialize",
        "params": {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "1"},
        },
    },
    {"jsonrpc": "2.0", "method": "notifications/initialized"},
    {"jsonrpc": "2.0", "id": 2, "method": "tools/list"},
]  # fmt: skip


def measure_servers(turns: int) -> list[Measured]:
    """Spawn to answered `tools/list`."""
    kiwi = str(Path(sys.executable).with_name("kiwi"))
    return interleaved(
        [
            Case("bare official SDK server", _listing([sys.executable, "-c", _BARE_SDK])),
            Case("kiwi serve", _listing([kiwi, "serve"])),
            Case("raw JSON loop (floor)", _listing([sys.executable, "-c", _RAW_LOOP])),
        ],
        turns=turns,
    )


def measure_commands(turns: int) -> list[Measured]:
    """Spawn to the end of a command, in a project with one signed bash tool."""
    kiwi = str(Path(sys.executable).with_name("kiwi"))
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        (project / ".ai" / "tools").mkdir(parents=True)
        (project / ".ai" / "tools" / "hello.sh").write_text(_TOOL, encoding="utf-8")
        command = partial(_command, project)
        command([kiwi, "sign", "hello"])()
        return interleaved(
            [
                Case("python -c pass", command([sys.executable, "-c", "pass"])),
                Case("kiwi version", command([kiwi, "version"])),
                Case("kiwi --help", command([kiwi, "--help"])),
                Case("kiwi run hello (a bash tool in its sandbox)", command([kiwi, "run", "hello"])),
                Case("kiwi search hello", command([kiwi, "search", "hello"])),
            ],
            turns=turns,
        )


def _environment() -> dict[str, str]:
    # Bytecode would be written by any ordinary start; a machine that forbids it slows every Python down alike.
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _listing(argv: Sequence[str]) -> Callable[[], None]:
    def turn() -> None:
        with subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            text=True,
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            for message in HANDSHAKE:
                process.stdin.write(json.dumps(message) + "\n")
                process.stdin.flush()
                if "id" in message and "result" not in json.loads(process.stdout.readline()):
                    raise RuntimeError(argv)
            process.kill()

    return turn


def _command(project: Path, argv: Sequence[str]) -> Callable[[], None]:
    home = str(project.parent)
    own = {"HOME": home, "XDG_CACHE_HOME": f"{home}/cache", "XDG_CONFIG_HOME": f"{home}/config"}

    def turn() -> None:
        subprocess.run(
            argv,
            cwd=project,
            capture_output=True,
            env={**_environment(), **own},
            check=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    return turn
