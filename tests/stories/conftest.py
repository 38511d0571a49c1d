"""What stories stand on: a kernel that keeps running, folders that can be compared, and services on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel import Answer, Kernel

Respond = Callable[[JsonObject], tuple[int, Mapping[str, str], bytes]]


@pytest.fixture
def kernel(project: Path) -> Kernel:
    """One kernel for the whole story."""
    return Kernel(project)


@pytest.fixture
def ask(kernel: Kernel) -> Callable[..., Answer]:
    """Send one request, as a client would, and return its answer."""

    async def call(verb: str, request: JsonObject) -> Answer:
        try:
            return await kernel.call(verb, request)
        finally:
            await kernel.aclose()

    return lambda verb, **request: asyncio.run(call(verb, json.loads(json.dumps(request))))


@pytest.fixture
def tree() -> Callable[[Path], Mapping[str, str]]:
    """Every file below a folder, by path, with a hash of its bytes."""

    def hashes(folder: Path) -> Mapping[str, str]:
        files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        return {path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest() for path in files}

    return hashes


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
