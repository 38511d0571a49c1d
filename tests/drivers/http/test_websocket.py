"""An API tool with a `ws` URL uses WebSocket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from websockets.sync.server import ServerConnection, serve

from kiwi_mcp.kernel import Answer


def count_up(connection: ServerConnection) -> None:
    asked = json.loads(connection.recv(timeout=10))
    for number in range(asked["from"], asked["from"] + 5):
        connection.send(json.dumps({"number": number}))


@pytest.fixture
def port(home: Path) -> Iterator[int]:
    with serve(count_up, "127.0.0.1", 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        port = server.socket.getsockname()[1]
        (home / ".ai").mkdir()
        (home / ".ai" / "policy.yaml").write_text(f'hosts: {{allow: ["127.0.0.1:{port}"]}}\n')
        try:
            yield port
        finally:
            server.shutdown()
            thread.join(120)


@pytest.mark.usefixtures("loopback")
@pytest.mark.req("K-PR-02")
def test_a_websocket_tool_sends_its_body_and_collects_the_requested_number_of_messages(
    port: int, ask: Callable[..., Answer]
) -> None:
    words = {
        "tool_type": "api",
        "executor": "http_client",
        "manifest": {
            "version": "1.0.0",
            "description": "Count up",
            "config": {"url": f"ws://127.0.0.1:{port}/count", "body_template": {"from": "{start}"}, "max_events": 3},
            "parameters": [{"name": "start", "type": "integer", "required": True}],
        },
    }
    assert ask("execute", action="create", item_id="count_up", parameters=words).content["status"] == "created"

    ran = ask("execute", item_id="count_up", parameters={"start": 7})

    assert ran.content["result"] == [{"number": 7}, {"number": 8}, {"number": 9}]
