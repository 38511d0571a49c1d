"""A package index on this machine, for drivers that fetch packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass
class PackageIndex:
    """A package index that notes what it is asked for: files by their path, each with the type of its content."""

    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer at its address."""
        index = self

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0].replace("%2f", "/")
                index.asked.append(path)
                kind, data = index.files.get(path, ("text/plain", b""))
                self.send_response(200 if path in index.files else 404)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data)

            do_HEAD = do_GET  # noqa: N815 - as the library calls it

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - as the library calls it
                return

        with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            self.address = f"http://127.0.0.1:{server.server_address[1]}"
            Thread(target=server.serve_forever, daemon=True).start()
            try:
                yield
            finally:
                server.shutdown()
