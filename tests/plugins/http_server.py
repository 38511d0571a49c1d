"""An HTTP server on loopback with scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


@dataclass(frozen=True)
class HttpRequest:
    """One request that the server received; the names of its headers are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class HttpReply:
    """One answer of the server. Its length is added to the headers."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@contextmanager
def http_server(respond: Callable[[HttpRequest], HttpReply]) -> Iterator[str]:
    """Answer requests on a free port of this machine for the length of a block; give the host and port."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            reply = respond(HttpRequest(self.command, self.path, headers, body))
            self.send_response(reply.status)
            for name, value in {"content-length": str(len(reply.body)), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(reply.body)

        do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = answer  # noqa: N815 - names of the library

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the signature of the library
            """Print nothing."""

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return  # the client was killed

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(120)
