"""Attacks of an MCP server while it runs: sockets of the machine, certificates, and files that an editor replaced."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from secrets import token_hex

import pytest
from tests.security.test_git_servers import SHELL
from tests.stories.test_imported_servers import certificate

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
pytestmark = pytest.mark.usefixtures("sandbox", "processes")
CONNECT = "python3 -c 'import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1].replace(\"@\", chr(0)))' "
OWN = (
    'python3 -c \'import socket; a = socket.socket(socket.AF_UNIX); a.bind("/tmp/own"); a.listen(); '
    'socket.socket(socket.AF_UNIX).connect("/tmp/own"); print("connected")\''
)


@pytest.fixture
def shell(ask: Ask, tmp_path: Path) -> Callable[..., Callable[[str], str]]:
    """Add a server with some needs, and return what runs a line of shell in it."""
    script = tmp_path / "server" / "shell.py"
    script.parent.mkdir()
    script.write_text(SHELL)

    def add(**needs: Json) -> Callable[[str], str]:
        added = ask("mcp", action="add", server="shell", command=sys.executable, args=[str(script)], **needs)
        assert added.content["status"] == "added", added.content
        ask("approvals", action="rules_add", item="mcp/shell/*")
        return do

    def do(line: str) -> str:
        done = ask("execute", item_id="mcp/shell/do", parameters={"line": line})
        return as_text(done.content["suggestion"] if done.is_error else done.content["result"])

    return add


def test_a_server_that_makes_unix_sockets_reaches_none_of_the_machine(
    ask: Ask, shell: Callable[..., Callable[[str], str]], tmp_path: Path
) -> None:
    granted, outside = tmp_path / "granted", tmp_path / "outside"
    for folder in (granted, outside):
        folder.mkdir()
    do = shell(write=[str(granted)])
    assert "Address family not supported" in do(OWN)

    allowed = ask("mcp", action="allow", server="shell", unix_sockets=True).content
    assert "it may change" in as_text(allowed["message"])
    assert "make sockets of the kind unix" in as_text(allowed["message"])
    listed = as_object(as_list(ask("mcp", action="list").content["servers"])[0])
    assert listed["may_reach"] == "no network; makes Unix sockets"
    assert "connected" in do(OWN)
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        abstract.bind(f"\0kiwi-{tmp_path.name}-{os.getpid()}")
        named.bind(str(outside / "agent.sock"))
        for listener in (abstract, named):
            listener.listen()
        assert "Connection refused" in do(f"{CONNECT} @kiwi-{tmp_path.name}-{os.getpid()}")
        assert "No such file" in do(f"{CONNECT} {outside}/agent.sock")
        assert "No such file" in do(f"{CONNECT} /run/dbus/system_bus_socket")
        # A socket in a folder that it is given could be reached, so it does not start with such a folder.
        named.close()
        with socket.socket(socket.AF_UNIX) as inner:
            (granted / "deep").mkdir()
            inner.bind(str(granted / "deep" / "agent.sock"))
            inner.listen()
            ask("mcp", action="restart", server="shell")
            refused = ask("execute", item_id="mcp/shell/do", parameters={"line": "true"})
            assert "agent.sock is a socket of another program" in as_text(refused.content["message"])


def test_only_the_owners_file_adds_certificates(
    ask: Ask, shell: Callable[..., Callable[[str], str]], home: Path, tmp_path: Path
) -> None:
    own = home / ".ai" / "certificates.pem"
    own.parent.mkdir(exist_ok=True)
    own.write_bytes(certificate(tmp_path).read_bytes())
    block = own.read_text().split("-----")[2].strip()
    do = shell(hosts=["api.example.test"])
    response = do("tail -n 30 $NODE_EXTRA_CA_CERTS; grep PRIVATE $SSL_CERT_FILE; echo x >> $SSL_CERT_FILE")
    assert block in response
    assert "PRIVATE" not in response
    assert "Read-only file system" in response

    own.chmod(0o666)
    ask("mcp", action="restart", server="shell")
    refused = ask("execute", item_id="mcp/shell/do", parameters={"line": "true"}).content
    assert "others can change it" in as_text(refused["message"])
    own.chmod(0o600)
    own.write_text("tea")
    refused = ask("execute", item_id="mcp/shell/do", parameters={"line": "true"}).content
    assert "no valid certificate" in as_text(refused["message"])

    for name in ("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        added = ask("mcp", action="add", server=f"with_{name.lower()}", command="true", env={name: "/tmp/x.pem"})
        assert "~/.ai/certificates.pem" in f"{added.content}", added.content
        manifest = {"tool_id": "own", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0"}
        made = ask(
            "execute", action="create", item_id="own",
            parameters={**manifest, "description": "x", "config": {"entrypoint": "a.sh", "env": {name: "/tmp/x.pem"}},
                        "files": {"a.sh": "true"}},
        )  # fmt: skip
        assert made.is_error
        assert name in f"{made.content}"


def test_a_protected_file_that_an_editor_replaced_stays_protected(
    shell: Callable[..., Callable[[str], str]], kernel: Kernel, owner: Caller, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    (work / ".ai").mkdir(parents=True)
    for name in ("AGENTS.md", ".mcp.json", ".ai/policy.yaml"):
        (work / name).write_text("mine")
    shell(write=[str(work)])
    names = "AGENTS.md .mcp.json .ai/policy.yaml .envrc"
    attack = f"cd {work}; for name in {names}; do echo evil > $name; done; cat AGENTS.md"

    async def story() -> None:
        words: JsonObject = {"item_id": "mcp/shell/do", "parameters": {"line": attack}}
        try:
            first = await kernel.call("execute", words, owner)
            edit()
            second = await kernel.call("execute", words, owner)
        finally:
            await kernel.aclose()
        assert as_text(first.content["result"]).startswith("0 mine")
        assert as_text(second.content["result"]).startswith("0 edited")

    def edit() -> None:
        for name in ("AGENTS.md", ".mcp.json", ".envrc"):  # as editors save a file
            (work / "new").write_text("edited")
            (work / "new").replace(work / name)
        (work / ".ai").rename(work / token_hex(4))
        (work / ".ai").mkdir()
        (work / ".ai/policy.yaml").write_text("edited")

    asyncio.run(story())
    for name in names.split():
        assert (work / name).read_text() == "edited", name
