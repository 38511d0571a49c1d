"""A service that a tool posts to: what arrives there was sent."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest


@pytest.fixture
def sent(project: Path, home: Path) -> Iterator[list[str]]:
    """What arrives at a service on loopback that a tool of the project posts to."""
    arrived: list[str] = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            arrived.append(self.rfile.read(int(self.headers["content-length"] or 0)).decode())
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return  # whoever called was killed

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        (home / ".ai").mkdir(exist_ok=True)
        (home / ".ai" / "policy.yaml").write_text(f'hosts: {{allow: ["{address}"]}}\n')
        (project / ".ai" / "tools").mkdir()
        (project / ".ai" / "tools" / "post_note.yaml").write_text(
            "tool_id: post_note\ntool_type: api\nexecutor: http_client\nversion: 1.0.0\ndescription: Keep a note\n"
            f'config: {{method: POST, url: "http://{address}/", body_template: {{text: "{{text}}"}}}}\n'
            "parameters: [{name: text, type: string}]\n"
        )
        yield arrived
        server.shutdown()
