"""A package index on this machine, for drivers that fetch packages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.plugins.http_server import HttpReply, HttpRequest, http_server


@dataclass
class PackageIndex:
    """A package index that notes what it is asked for: files by their path, each with the type of its content."""

    files: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    address: str = ""

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Answer at its address."""

        def answer(request: HttpRequest) -> HttpReply:
            path = request.path.partition("?")[0].replace("%2f", "/")
            self.asked.append(path)
            kind, data = self.files.get(path, ("text/plain", b""))
            headers = {"Content-Type": kind, "Cache-Control": "no-store"}
            return HttpReply(data, 200 if path in self.files else 404, headers)

        with http_server(answer) as host:
            self.address = f"http://{host}"
            yield
