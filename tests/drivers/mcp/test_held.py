"""Servers in jail: what the process of one sees, changes and reaches, and what it is told to ask for."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.drivers.mcp.conftest import Bench

from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.outcome import Outcome

PROBE = '''
import json, os, socket, sys
import beside

def tried(work):
    try:
        return str(work())
    except Exception as fault:
        return f"{type(fault).__name__}: {fault}"

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "probe", "version": "1"}}
    if method == "tools/list":
        return {"tools": [{"name": "probe", "inputSchema": {"type": "object"}}]}
    arguments = params.get("arguments", {})
    match arguments.get("do"):
        case "read":
            said = tried(lambda: open(arguments["path"]).read())
        case "write":
            said = tried(lambda: open(arguments["path"], "w").write("x"))
        case "connect":
            said = tried(lambda: socket.create_connection(("127.0.0.1", arguments["port"]), 2))
        case "fail":
            return {"content": [{"type": "text", "text": arguments["text"]}], "isError": True}
        case _:
            said = beside.WORD + " " + str(os.getpid())
    return {"content": [{"type": "text", "text": said}]}

for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        result = {"result": answer(message["method"], message.get("params", {}))}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **result}), flush=True)
'''


@pytest.fixture
def held(bench: Bench) -> Bench:
    return replace(bench, jail=Jail("sandboxed"))


@pytest.fixture
def folder(bench: Bench) -> Path:
    """The folder of a server: its script, and a module beside it."""
    folder = bench.space.project / "servers"
    folder.mkdir()
    (folder / "probe.py").write_text(PROBE)
    (folder / "beside.py").write_text("WORD = 'here'")
    return folder


def server(bench: Bench, *arguments: str, **config: Json) -> Tool:
    return bench.server(server_id="probe", command=sys.executable, args=[*arguments], env={}, **config)


def said(outcome: Outcome) -> str:
    assert outcome.status == "success", outcome.message
    return str(outcome.result)


def do(bench: Bench, tool: Tool, **inputs: Json) -> Outcome:
    return bench.ask(tool, "probe", inputs)


def test_a_server_sees_what_lies_beside_its_script_and_not_the_rest_of_the_project(held: Bench, folder: Path) -> None:
    (held.space.project / "diary.txt").write_text("secret")
    probe = server(held, "servers/probe.py")
    assert said(do(held, probe)).startswith("here ")
    assert "No such file" in said(do(held, probe, do="read", path=str(held.space.project / "diary.txt")))
    assert "Read-only file system" in said(do(held, probe, do="write", path=str(folder / "new.txt")))
    assert not (folder / "new.txt").exists()
