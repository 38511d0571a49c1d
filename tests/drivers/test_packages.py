"""Packages that are servers: detected in commands, fetched once, locked, and started without an index."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
import zipfile
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping
from hashlib import sha256, sha512
from pathlib import Path

import pytest
from tests.drivers.conftest import PackageIndex

from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.drivers.environments.packages import server_package
from kiwi_mcp.kernel import Kernel

SERVER = """
import json, sys

def main():
    for line in sys.stdin:
        message = json.loads(line)
        match message["method"]:
            case "initialize":
                result = {"protocolVersion": message["params"]["protocolVersion"], "capabilities": {"tools": {}},
                          "serverInfo": {"name": "teapot", "version": "1"}}
            case "tools/list":
                result = {"tools": [{"name": "pour", "inputSchema": {"type": "object"}}]}
            case "tools/call":
                result = {"content": [{"type": "text", "text": "tea VERSION"}]}
            case _:
                continue
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
"""
SCRIPT = """#!/usr/bin/env node
const lines = require("readline").createInterface({ input: process.stdin });
lines.on("line", (line) => {
  const message = JSON.parse(line);
  const results = {
    initialize: () => ({ protocolVersion: message.params.protocolVersion, capabilities: { tools: {} },
                         serverInfo: { name: "teapot", version: "1" } }),
    "tools/list": () => ({ tools: [{ name: "pour", inputSchema: { type: "object" } }] }),
    "tools/call": () => ({ content: [{ type: "text", text: "tea VERSION" }] }),
  };
  if (message.id !== undefined && results[message.method])
    console.log(JSON.stringify({ jsonrpc: "2.0", id: message.id, result: results[message.method]() }));
});
"""


@pytest.mark.parametrize(
    ("line", "wanted", "program", "rest"),
    [
        ("npx -y server", ("server@latest",), "", ()),
        ("npx --yes @scope/server@1.2.3 --port 1", ("@scope/server@1.2.3",), "", ("--port", "1")),
        ("npx -y -p @scope/server teapot x", ("@scope/server@latest",), "teapot", ("x",)),
        ("npm exec --yes --package=server -- teapot", ("server@latest",), "teapot", ()),
        ("uvx server", ("server",), "server", ()),
        ("uvx server@1.2 --flag", ("server==1.2",), "server", ("--flag",)),
        ("uvx server@latest", ("server",), "server", ()),
        ("uvx --python 3.12 --with extra --from server[cli]==1 teapot", ("server[cli]==1", "extra"), "teapot", ()),
        ("uv tool run server", ("server",), "server", ()),
        ("pipx run --spec server==2 teapot", ("server==2",), "teapot", ()),
    ],
)
def test_the_package_of_a_fetching_command_is_detected(
    line: str, wanted: tuple[str, ...], program: str, rest: tuple[str, ...]
) -> None:
    command, *args = line.split()
    found = server_package(command, args, Path("/cache"))
    assert found is not None
    assert (found[0].wanted, found[0].program, found[1]) == (wanted, program, rest)
    assert found[0].folder.startswith("/cache/envs/")


@pytest.mark.parametrize(
    "line",
    ["npx", "npx -y ./server", "npx --registry http://x server", "uvx --from git+https://x/y z", "uv run server.py",
     "npm run x", "uvx --index-url http://x server", "node server.js", "npx https://x/y.tgz", "uvx ../server"],
)  # fmt: skip
def test_other_fetching_commands_are_left_unchanged(line: str) -> None:
    command, *args = line.split()
    assert server_package(command, args, Path("/cache")) is None


class Index(PackageIndex):
    """An index that offers a teapot, which is a server."""

    def wheel(self, version: str) -> None:
        """Offer a version of the server for Python."""
        name, info = f"teapot-{version}-py3-none-any.whl", f"teapot-{version}.dist-info"
        files: Mapping[str, str] = {
            "teapot.py": SERVER.replace("VERSION", version),
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: teapot\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": "[console_scripts]\nteapot = teapot:main\n",
        }
        rows = [f"{path},sha256={_digest(text.encode())},{len(text)}" for path, text in files.items()]
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w") as archive:
            for path, text in {**files, f"{info}/RECORD": "\n".join([*rows, f"{info}/RECORD,,"]) + "\n"}.items():
                archive.writestr(path, text)
        self.files[f"/files/{name}"] = ("application/octet-stream", packed.getvalue())
        links = [
            f'<a href="/files/{path.rpartition("/")[2]}#sha256={sha256(data).hexdigest()}">x</a>'
            for path, (_, data) in self.files.items()
            if path.endswith(".whl")
        ]
        listed = [link.replace(">x<", f">{link.partition('/files/')[2].partition('#')[0]}<") for link in links]
        self.files["/simple/teapot/"] = ("text/html", f"<html><body>{' '.join(listed)}</body></html>".encode())

    def tarball(self, version: str) -> None:
        """Offer a version of the server for Node."""
        manifest = {"name": "teapot", "version": version, "bin": {"teapot": "index.js"}}
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            for path, text in {
                "package.json": json.dumps(manifest),
                "index.js": SCRIPT.replace("VERSION", version),
            }.items():
                entry = tarfile.TarInfo(f"package/{path}")
                entry.size, entry.mode = len(text), 0o755
                archive.addfile(entry, io.BytesIO(text.encode()))
        data = packed.getvalue()
        self.files[f"/teapot/-/teapot-{version}.tgz"] = ("application/octet-stream", data)
        held = json.loads(self.files.get("/teapot", ("", b'{"name":"teapot","versions":{}}'))[1])
        whole = b64encode(sha512(data).digest()).decode()
        dist = {"tarball": f"{self.address}/teapot/-/teapot-{version}.tgz", "integrity": f"sha512-{whole}"}
        held["versions"][version] = {**manifest, "dist": dist}
        held["dist-tags"] = {"latest": version}
        self.files["/teapot"] = ("application/json", json.dumps(held).encode())


def _digest(data: bytes) -> str:
    return urlsafe_b64encode(sha256(data).digest()).rstrip(b"=").decode()


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    index = Index()
    with index.serving():
        monkeypatch.setenv("UV_DEFAULT_INDEX", f"{index.address}/simple/")
        monkeypatch.setenv("npm_config_registry", f"{index.address}/")
        for name in ("UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "PIP_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        yield index


@pytest.mark.usefixtures("sandbox")
@pytest.mark.slow
@pytest.mark.case("MCP-14")
@pytest.mark.parametrize(("command", "args"), [("npx", ["-y", "teapot@latest"]), ("uvx", ["teapot"])])
def test_a_package_is_fetched_once_locked_and_started_without_an_index(
    index: Index, project: Path, command: str, args: list[str]
) -> None:
    offer = index.tarball if command == "npx" else index.wheel
    offer("1.0.0")

    async def add() -> None:
        kernel = Kernel(project)
        added = await kernel.call("mcp", {"action": "add", "server": "pot", "command": command, "args": [*args]})
        assert added.content.get("items"), str(added.content.get("warnings"))
        package = as_object(added.content["package"])
        assert (package["name"], package["version"]) == ("teapot", "1.0.0")
        assert as_text(package["integrity"]).startswith(("sha512-", "sha256:"))
        assert not [one for one in as_list(added.content.get("warnings")) if "that day" in str(one)]
        await kernel.aclose()

    async def pour() -> None:
        kernel = Kernel(project)
        answer = await kernel.call("execute", {"item_id": "pour"})
        assert answer.content["result"] == "tea 1.0.0", answer.content
        await kernel.aclose()

    asyncio.run(add())
    assert index.asked
    offer("2.0.0")
    index.asked.clear()
    asyncio.run(pour())
    assert index.asked == []
