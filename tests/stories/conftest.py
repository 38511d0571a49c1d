"""Shared fixtures: services on loopback, an installation with its owner, and a movable server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from tests.plugins.http_server import HttpReply, HttpRequest, http_server

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import build_server
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher

PLACED = Path(__file__).parents[1] / "data" / "mcp" / "placed.py"
PATIENCE = 120.0
MODEL = Caller(client="a model")
Respond = Callable[[JsonObject], tuple[int, Mapping[str, str], bytes]]


def asked(project: Path, *requests: tuple[str, JsonObject]) -> list[JsonObject]:
    """Return the answers to some requests of the owner, made to one kernel."""

    async def story() -> list[JsonObject]:
        kernel = Kernel(project)
        try:
            return [(await kernel.call(verb, request, Caller())).content for verb, request in requests]
        finally:
            await kernel.aclose()

    return asyncio.run(story())


@pytest.fixture
def call(project: Path) -> Callable[..., dict[str, Any]]:
    """Call an item as a model does, which cannot be asked; `approved` has the owner approve it."""

    def call(item: str, *, approved: bool = False, **parameters: object) -> dict[str, Any]:
        async def story() -> dict[str, Any]:
            kernel = Kernel(project)
            try:
                request: Any = {"item_id": item, "parameters": parameters}
                answer = (await kernel.call("execute", request, MODEL)).content
                if approved:
                    number = as_text(answer["approval_id"])
                    said = await kernel.call("approvals", {"action": "approve", "approval_id": number}, Caller())
                    assert not said.is_error, said.content
                    answer = (await kernel.call("execute", request, MODEL)).content
                return dict(as_object(answer.get("result")) or answer)
            finally:
                await kernel.aclose()

        return asyncio.run(story())

    return call


@pytest.fixture
def serve(home: Path, loopback: None) -> Iterator[Callable[[Respond], tuple[str, list[JsonObject]]]]:
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
    def answer(received: HttpRequest) -> HttpReply:
        request: dict[str, Json] = {
            "method": received.method,
            "path": received.path,
            "headers": dict(received.headers),
            "body": received.body.decode(),
        }
        seen.append(request)
        status, headers, reply = respond(request)
        return HttpReply(reply, status, headers)

    with http_server(answer) as host:
        yield host


@dataclass(frozen=True)
class Placed:
    """An MCP server that runs from any folder: started by its client, or reached at an address."""

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
    """An installation: a project, its owner, and its clients."""

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
        """A kernel of this installation that records the calls of clients."""
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

    async def own(self, verb: str, **request: Json) -> JsonObject:
        """Call a verb as the owner."""
        kernel = self.kernel(is_owner=True)
        try:
            answer = await kernel.call(verb, request)
        finally:
            await kernel.aclose()
        assert not answer.is_error, answer.content
        return answer.content

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
        changes = ToolListWatcher(kernel, interval=0.1, soon=0.05)
        try:
            async with asyncio.timeout(PATIENCE), Client(build_server(kernel, calls=calls, changes=changes)) as client:
                yield client
        finally:
            await changes.aclose()
            await calls.aclose()
            await kernel.aclose()


@pytest.fixture
def house(project: Path, home: Path, copy_isolation_report: Callable[[Path], None]) -> House:
    """The project and the home of the test."""
    for cache in (project.parent / "cache", project.parent / "cache" / "kiwi"):
        cache.mkdir()
        copy_isolation_report(cache)
    return House(project.parent)


@pytest.fixture
def placed(tmp_path: Path, sandbox: None) -> Placed:
    """A server that offers nothing yet."""
    return Placed(tmp_path / "placed")
