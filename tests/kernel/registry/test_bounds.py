"""The bounds of what remotes tell: all of a long history, and no more of an endless one than can be held."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.registry import Actor, Event, VersionName
from kiwi_mcp.kernel.registry import over_http
from kiwi_mcp.kernel.registry.over_http import HttpRemote
from kiwi_mcp.kernel.registry.port import RegistryRemote
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry import Registry

DIGEST = f"sha256:{'a' * 64}"


class LongHistory(Registry):
    """A registry in which much happened to one item."""

    def history(self, tool_id: str, after: int = 0, limit: int = 100) -> tuple[Event, ...]:
        """Return one page of a thousand events."""
        name = VersionName("acme", tool_id, "1.0.0")
        seqs: Sequence[int] = range(after + 1, min(after + limit, 1_000) + 1)
        return tuple(Event(seq, "yank", name, DIGEST, DIGEST, "ann", "2026-01-01T00:00:00.000Z") for seq in seqs)


def test_the_whole_history_of_a_name_is_told(tmp_path: Path) -> None:
    database = open_database(f"sqlite://{tmp_path}/a.db")
    remote = RegistryRemote(LongHistory(database, Actor("ann", ("acme",))), "here")
    told = asyncio.run(remote.history("greeter"))
    assert [event.seq for event in told] == [*range(1, 1_001)]
    database.close()


class Endless(BaseHTTPRequestHandler):
    """A server whose log never ends."""

    def do_GET(self) -> None:
        """Answer with one more event."""
        after = int(parse_qs(urlsplit(self.path).query)["after"][0])
        event = {
            "seq": after + 1, "op": "publish", "namespace": "acme", "tool_id": "greeter", "version": "1.0.0",
            "digest": DIGEST, "closure": DIGEST, "actor": "eve", "at": "2026-01-01T00:00:00.000Z", "reason": "",
            "visibility": "public", "hash": DIGEST,
        }  # fmt: skip
        body = json.dumps({"events": [event], "more": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(("limit", "most"), [("_MAX_LOG", 5_000), ("_MAX_EVENTS", 10)])
def test_a_log_without_end_is_refused(url: str, monkeypatch: pytest.MonkeyPatch, limit: str, most: int) -> None:
    monkeypatch.setattr(over_http, limit, most)

    async def read() -> None:
        remote = HttpRemote(url)
        try:
            await remote.events()
        finally:
            await remote.aclose()

    with pytest.raises(ArtifactRefused, match="more than"):
        asyncio.run(asyncio.wait_for(read(), 20))
