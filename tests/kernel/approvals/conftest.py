"""A service on loopback that takes down what it is sent, and a project with tools that send to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


@pytest.fixture
def sent() -> list[str]:
    """The bodies that arrived."""
    return []


@pytest.fixture
def orders() -> list[object]:
    """What the service answers to whoever reads from it."""
    return []


@pytest.fixture
def service(sent: list[str], orders: list[object], home: Path) -> Iterator[str]:
    """The address of the service, which the owner's policy allows."""

    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            sent.append(f"GET {self.path}")
            self._answer(orders)

        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["content-length"] or 0)).decode())
            self._answer()

        def _answer(self, said: object = "done") -> None:
            data = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (home / ".ai").mkdir(exist_ok=True)
        (home / ".ai" / "policy.yaml").write_text(f'hosts: {{allow: ["127.0.0.1:{server.server_port}"]}}\n')
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def add_tool(project: Path, service: str) -> Callable[..., Path]:
    """Put an api tool into the project, by hand."""

    def add(name: str = "post_note", method: str = "POST") -> Path:
        path = project / ".ai" / "tools" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        body = {"body_template": {"text": "{text}"}} if method == "POST" else {}
        config = {"method": method, "url": f"{service}/notes", **body}
        path.write_text(
            f"tool_id: {name}\ntool_type: api\nexecutor: http_client\nversion: 1.0.0\ndescription: Keep a note\n"
            f"config: {json.dumps(config)}\nparameters: [{{name: text, type: string}}]\n"
        )
        return path

    return add
