"""A service on loopback that records requests, and a project with tools that send to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.plugins.http_server import HttpReply, HttpRequest, http_server


@pytest.fixture
def sent() -> list[str]:
    """The bodies that arrived."""
    return []


@pytest.fixture
def orders() -> list[object]:
    """The answer of the service to readers."""
    return []


@pytest.fixture
def service(sent: list[str], orders: list[object], home: Path, loopback: None) -> Iterator[str]:
    """The address of the service, which the owner's policy allows."""

    def answer(request: HttpRequest) -> HttpReply:
        is_reading = request.method == "GET"
        sent.append(f"GET {request.path}" if is_reading else request.body.decode())
        body = json.dumps(orders if is_reading else "done").encode()
        return HttpReply(body, headers={"content-type": "application/json"})

    with http_server(answer) as host:
        (home / ".ai").mkdir(exist_ok=True)
        (home / ".ai" / "policy.yaml").write_text(f'hosts: {{allow: ["{host}"]}}\n')
        yield f"http://{host}"


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
