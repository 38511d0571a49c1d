"""How long Kiwi takes to start, against a bare server of the official SDK that does the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
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
    """Spawn to the first output of a command."""
    kiwi = str(Path(sys.executable).with_name("kiwi"))
    return interleaved(
        [
            Case("bare official SDK server, to tools/list", _listing([sys.executable, "-c", _BARE_SDK])),
            Case("kiwi version", _first_output([kiwi, "version"])),
            Case("kiwi search bash --source all", _first_output([kiwi, "search", "bash", "--source", "all"])),
            Case("kiwi --help", _first_output([kiwi, "--help"])),
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


def _first_output(argv: Sequence[str]) -> Callable[[], None]:
    def turn() -> None:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                argv,
                cwd=folder,
                capture_output=True,
                env=_environment(),
                check=True,
                timeout=60,
                stdin=subprocess.DEVNULL,
            )
            if not done.stdout:
                raise RuntimeError(argv)

    return turn
