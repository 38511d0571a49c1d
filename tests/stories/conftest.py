"""What stories stand on beside the rest: services on loopback."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kiwi_mcp.domain.json import Json, JsonObject

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
