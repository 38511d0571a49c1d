"""What stories stand on beside the rest: services on loopback, a house with its owner, and a server to put anywhere."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from mcp import Client

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.changes import Changes
from kiwi_mcp.surfaces.mcp.server import build_server

PLACED = Path(__file__).parents[1] / "data" / "mcp" / "placed.py"
PATIENCE = 45.0
Respond = Callable[[JsonObject], tuple[int, Mapping[str, str], bytes]]


@pytest.fixture
def serve(home: Path) -> Iterator[Callable[[Respond], tuple[str, list[JsonObject]]]]:
    """Start a service on loopback, granted by the owner; give its address and the list of requests it gets."""
    with ExitStack() as stack:
        granted: list[str] = []

        def start(respond: Respond) -> tuple[str, list[JsonObject]]:
            seen: list[JsonObject] = []
            host = stack.enter_context(listening(respond, seen))
            granted.append(host)
            (home / ".ai").mkdir(exist_ok=True)
            (home / ".ai" / "policy.yaml").write_text(json.dumps({"hosts": {"allow": granted}}))
            return f"http://{host}", seen

        yield start


@contextmanager
def listening(respond: Respond, seen: list[JsonObject]) -> Iterator[str]:
    class Service(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            request: dict[str, Json] = {
                "method": self.command,
                "path": self.path,
                "headers": {name.lower(): value for name, value in self.headers.items()},
                "body": body.decode(),
            }
            seen.append(request)
            status, headers, reply = respond(request)
            self.send_response(status)
            for name, value in {"content-length": str(len(reply)), "connection": "close", **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply)

        do_GET = do_POST = answer  # noqa: N815 - the library finds methods by these names

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's own signature
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(5)


@dataclass(frozen=True)
class Placed:
    """An MCP server that can be put anywhere: started by whoever needs it, or reached at an address."""

    folder: Path

    def offer(self, *tools: JsonObject, **words: Json) -> None:
        """Offer this from now on."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / "offers.json").write_text(json.dumps({"tools": list(tools), **words}))

    @property
    def command(self) -> dict[str, Json]:
        """How it is started, in the words of a manifest."""
        return {"command": sys.executable, "args": ["-IS", str(PLACED), str(self.folder)]}

    @contextmanager
    def listening(self, port: int = 0) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
        """Have it listen for as long as the block lasts; give its port and its process."""
        words = [sys.executable, "-IS", str(PLACED), str(self.folder), str(port)]
        with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout
                yield int(process.stdout.readline()), process
            finally:
                process.kill()

    def noted(self, what: str) -> list[str]:
        """What it noted: its `starts`, or its `calls`."""
        path = self.folder / what
        return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class House:
    """A project and its owner, and clients that are told about it."""

    root: Path
    heard: list[str] = field(default_factory=list)
    """Every verb that clients brought to the kernel."""

    @property
    def project(self) -> Path:
        return self.root / "project"

    @property
    def user(self) -> Path:
        return self.root / "home" / ".ai"

    def kernel(self, *, is_owner: bool) -> Kernel:
        """A kernel of this house, whose clients are heard."""
        heard = self.heard

        class Heard(Kernel):
            async def call(self, verb: str, *words: Any, **named: Any) -> Any:
                heard.append(verb)
                return await super().call(verb, *words, **named)

        kind = Kernel if is_owner else Heard
        return kind(self.project, user=self.user, cache=self.root / "cache", is_owner=is_owner)

    def settle(self, file: str, words: Json) -> None:
        """Write a file of the owner's: `policy.yaml`, `preferences.yaml`."""
        self.user.mkdir(parents=True, exist_ok=True)
        (self.user / file).write_text(json.dumps(words))

    def write(self, path: str, text: str | JsonObject) -> Path:
        """Write a file of the project's `.ai`."""
        file = self.project / ".ai" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text if isinstance(text, str) else json.dumps(text))
        return file

    def own(self, verb: str, **request: Json) -> JsonObject:
        """Do something as the owner, beside whatever runs."""

        async def call() -> JsonObject:
            kernel = self.kernel(is_owner=True)
            try:
                answer = await kernel.call(verb, request)
            finally:
                await kernel.aclose()
            assert not answer.is_error, answer.content
            return answer.content

        return asyncio.run(call())

    async def command(self, *words: str) -> str:
        """What a command of the owner's prints, typed while clients are there."""
        surroundings = {**os.environ, "USER_SPACE": str(self.user), "XDG_CACHE_HOME": str(self.root / "cache")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kiwi_mcp", *words, cwd=self.project, env=surroundings,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        printed, _ = await process.communicate()
        assert process.returncode == 0, printed
        return printed.decode()

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """An official client of Kiwi, as a model has one."""
        kernel = self.kernel(is_owner=False)
        calls = Calls(kernel.tasks, task_after=kernel.task_after, principal=lambda _: "a model")
        changes = Changes(kernel, interval=0.1, soon=0.05)
        try:
            async with Client(build_server(kernel, calls=calls, changes=changes)) as client:
                yield client
        finally:
            await changes.aclose()
            await calls.aclose()
            await kernel.aclose()

    def told(self, story: Callable[[Client], Awaitable[None]]) -> None:
        """Let a client live through a story."""

        async def run() -> None:
            async with asyncio.timeout(PATIENCE), self.client() as client:
                await story(client)

        asyncio.run(run())


@pytest.fixture
def house(project: Path, home: Path, standing: Path) -> House:
    """The project and the home of the test; what its kernels and commands can hold processes by is known."""
    for cache in (project.parent / "cache", project.parent / "cache" / "kiwi"):
        cache.mkdir()
        shutil.copyfile(standing, cache / standing.name)
    return House(project.parent)


@pytest.fixture
def placed(tmp_path: Path) -> Placed:
    """A server that offers nothing yet."""
    return Placed(tmp_path / "placed")
