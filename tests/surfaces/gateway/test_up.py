"""`kiwi up` as a process: where it listens, when it refuses to start, and how it ends."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.policy.tokens import TokenStore

pytestmark = pytest.mark.usefixtures("processes")

PROGRAM = """
import sys
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.surfaces.cli import actions, gateway
from kiwi_mcp.surfaces.cli.help import find
from kiwi_mcp.surfaces.cli.inputs import read
from kiwi_mcp.surfaces.cli.inputs import parse
try:
    row, rest = find(["up", *sys.argv[1:]])
    module, _, name = row["run"].partition(".")
    sys.exit(getattr({"actions": actions, "gateway": gateway}[module], name)(row, read(row, parse(row, rest))))
except KiwiError as error:
    print(error.message, error.suggestion, file=sys.stderr)
    sys.exit(error.exit_code)
"""


@contextmanager
def kiwi_up(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr
    return process.stderr.readline()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
def test_the_server_reports_its_address_answers_and_stops_on_request(home: Path, ending: signal.Signals) -> None:
    TokenStore(home / ".ai").add("eve", ["acme"], can_write=True)
    with kiwi_up("--port", "0", "--json") as process:
        line = first_line(process)
        assert process.stdout
        response = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
        assert response["url"] in line
        assert response["url"] == f"http://127.0.0.1:{response['port']}"
        connection = http.client.HTTPConnection("127.0.0.1", response["port"], timeout=120)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read()) == {"status": "ok"}
        connection.close()

        process.send_signal(ending)
        assert process.wait(120) == 0
        said = process.stderr.read() if process.stderr else ""
        assert "Traceback" not in said
        assert said.endswith("Nothing is served any more.\n")


@pytest.mark.case("GW-08")
@pytest.mark.parametrize("words", [[], ["--host", "0.0.0.0"], ["--host", "0.0.0.0", "--read-only"]])
def test_without_tokens_the_server_does_not_start_on_a_public_address(words: list[str]) -> None:
    with kiwi_up("--port", "0", *words) as process:
        assert process.wait(120) == 4
        assert "kiwi up token add" in first_line(process)


def test_without_tokens_the_local_machine_may_read() -> None:
    with kiwi_up("--port", "0", "--read-only") as process:
        assert "(read-only)" in first_line(process)


def test_a_port_in_use_is_reported(home: Path) -> None:
    TokenStore(home / ".ai").add("eve", ["acme"], can_write=True)
    with kiwi_up("--port", "0") as first:
        port = first_line(first).rsplit(":", 1)[1].strip()
        with kiwi_up("--port", port) as second:
            assert second.wait(120) == 7
            assert "--port 0" in first_line(second)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("is_modern", [True, False])
def test_a_stopped_server_leaves_no_process_of_a_call(home: Path, project: Path, is_modern: bool) -> None:
    token = TokenStore(home / ".ai").add("eve", [], can_write=False, can_use_tools=True)
    folder = project / ".ai" / "tools" / "sleeper"
    folder.mkdir(parents=True)
    mark = f"60.{os.getpid()}{int(is_modern)}"  # its sandbox gives it another pid, so it is found by this argument
    (folder / "main.sh").write_text(f"sleep {mark} & wait")
    (folder / "tool.yaml").write_text(
        "tool_id: sleeper\ntool_type: script\nversion: 1.0.0\ndescription: Sleeps\nexecutor: bash_runtime\n"
        "config:\n  entrypoint: main.sh\n"
    )
    sign(project, "sleeper")
    with kiwi_up("--port", "0", "--json", "--project", str(project)) as process:
        response = answer_of(process)
        assert response["mcp"] == f"{response['url']}/mcp"
        connection = http.client.HTTPConnection("127.0.0.1", response["port"], timeout=120)
        session = {} if is_modern else opened(connection, token)
        begin_call(connection, token, session, is_modern=is_modern)
        end = time.monotonic() + 120
        while not sleepers(mark):
            assert time.monotonic() < end
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        assert sleepers(mark) == []
        connection.close()
        assert "Traceback" not in (process.stderr.read() if process.stderr else "")


def answer_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    response: dict[str, Any] = json.loads("".join(iter(process.stdout.readline, "}\n")) + "}")
    return response


def opened(connection: http.client.HTTPConnection, token: str) -> dict[str, str]:
    params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"}}
    send(connection, token, {"id": 0, "method": "initialize", "params": params}, {})
    answer = connection.getresponse()
    answer.read()
    return {"Mcp-Session-Id": answer.headers["mcp-session-id"], "MCP-Protocol-Version": "2025-11-25"}


def begin_call(connection: http.client.HTTPConnection, token: str, session: dict[str, str], *, is_modern: bool) -> None:
    params: dict[str, Any] = {"name": "execute", "arguments": {"item_id": "sleeper"}}
    headers = {"MCP-Protocol-Version": "2026-07-28", "Mcp-Method": "tools/call", "Mcp-Name": "execute"}
    if is_modern:
        words = {"protocolVersion": "2026-07-28", "clientCapabilities": {}}
        params["_meta"] = {f"io.modelcontextprotocol/{name}": value for name, value in words.items()}
    message = {"id": 1, "method": "tools/call", "params": params}
    send(connection, token, message, headers if is_modern else session)


def send(connection: http.client.HTTPConnection, token: str, message: dict[str, Any], headers: dict[str, str]) -> None:
    words = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    accept = {"Accept": "application/json, text/event-stream"}
    body = json.dumps({"jsonrpc": "2.0", **message})
    connection.request("POST", "/mcp", body, {**words, **accept, **headers})


def sleepers(mark: str) -> list[str]:
    """The processes on the machine that sleep for this time."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def sign(project: Path, name: str) -> None:
    """Sign a tool as the owner, so that it runs at the level of the owner."""

    async def story() -> None:
        kernel = Kernel(project)
        signed = await kernel.call("execute", {"action": "sign", "item_id": name})
        await kernel.aclose()
        assert not signed.is_error, signed.content

    asyncio.run(story())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--project", "/no/such/folder"], "is not a folder"),
        (["--issuer", "https://id.test"], "--audience URL"),
        (["--issuer", "http://id.test", "--audience", "https://k.test/mcp"], "https://name/path"),
    ],
)
def test_an_invalid_configuration_is_reported_before_anything_listens(
    home: Path, words: list[str], expected: str
) -> None:
    TokenStore(home / ".ai").add("eve", [], can_write=False)
    with kiwi_up("--port", "0", *words) as process:
        assert process.wait(120) == 4
        assert expected in first_line(process)


def test_an_identity_provider_is_enough_to_start(home: Path) -> None:
    words = ["--issuer", "https://id.test", "--audience", "https://kiwi.test/mcp"]
    with kiwi_up("--port", "0", "--json", *words) as process:
        assert answer_of(process)["mcp"] == "https://kiwi.test/mcp"


def test_the_server_serves_the_current_project_by_default(
    home: Path, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    TokenStore(home / ".ai").add("eve", [], can_write=False, can_use_tools=True)
    (project / ".ai/tools").mkdir()
    (project / ".ai/tools/hi.yaml").write_text(
        "tool_id: hi\ntool_type: api\nversion: 1.0.0\nexecutor: http_client\ndescription: Says hi\n"
        "config: {method: GET, url: 'https://example.com/'}\n"
    )
    (home / ".ai/preferences.yaml").write_text("always_send: [hi]\n")
    (project / "deep").mkdir()
    monkeypatch.chdir(project / "deep")
    with kiwi_up("--port", "0", "--json") as process:
        response = answer_of(process)
        assert (response["project"], response["always_sent"]) == (str(project), 1)
        assert process.stderr
        said = [process.stderr.readline() for _ in range(3)]
        assert said[2] == f"  tools of {project}; 1 always sent\n"
    with kiwi_up("--port", "0", "--json", "--no-project") as process:
        response = answer_of(process)
        assert (response["project"], response["always_sent"]) == (None, 0)
    monkeypatch.chdir(home)  # no project, though the user's own folder is there
    with kiwi_up("--port", "0", "--json") as process:
        assert answer_of(process)["project"] is None


def test_a_read_only_server_offers_no_tools(home: Path) -> None:
    with kiwi_up("--port", "0", "--json", "--read-only") as process:
        assert answer_of(process)["mcp"] is None


def test_tokens_are_created_listed_and_removed_by_commands(home: Path) -> None:
    def kiwi(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=120, check=False
        )
        return done.stdout if done.returncode == 0 else f"{done.returncode}: {done.stderr}"

    secret = kiwi("token", "add", "eve", "--namespaces", "acme, public", "--write").strip()
    assert TokenStore(home / ".ai").find(secret)
    listed = json.loads(kiwi("token", "list", "--json"))["tokens"]
    assert [(row["name"], row["right"], row["namespaces"]) for row in listed] == [("eve", "write", ["acme", "public"])]
    assert not listed[0]["tools"]
    assert secret not in kiwi("token", "list")
    tools = kiwi("token", "add", "ada", "--tools").strip()
    found = TokenStore(home / ".ai").find(tools)
    assert found is not None
    assert found.can_use_tools
    assert "ada  agent  read tools  -" in kiwi("token", "list")
    assert "eve" in kiwi("token", "remove", "eve")
    assert kiwi("token", "remove", "eve").startswith("3:")


def test_the_kernel_and_the_commands_load_no_server(home: Path) -> None:
    program = (
        "import sys, kiwi_mcp.kernel, kiwi_mcp.surfaces.cli.gateway, kiwi_mcp.kernel.remotes\n"
        "print([name for name in ('starlette', 'uvicorn', 'psycopg') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"
