"""A service on loopback that records what tools send to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plugins.http_server import HttpReply, HttpRequest, http_server


@pytest.fixture
def sent(project: Path, home: Path, loopback: None) -> Iterator[list[str]]:
    """What arrives at a service on loopback that a tool of the project posts to."""
    arrived: list[str] = []

    def answer(request: HttpRequest) -> HttpReply:
        arrived.append(request.body.decode())
        return HttpReply()

    with http_server(answer) as address:
        (home / ".ai").mkdir(exist_ok=True)
        (home / ".ai" / "policy.yaml").write_text(f'hosts: {{allow: ["{address}"]}}\n')
        (project / ".ai" / "tools").mkdir()
        (project / ".ai" / "tools" / "post_note.yaml").write_text(
            "tool_id: post_note\ntool_type: api\nexecutor: http_client\nversion: 1.0.0\ndescription: Keep a note\n"
            f'config: {{method: POST, url: "http://{address}/", body_template: {{text: "{{text}}"}}}}\n'
            "parameters: [{name: text, type: string}]\n"
        )
        yield arrived
