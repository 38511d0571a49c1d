"""Tasks across processes: acknowledged tasks are known to the next process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp_types.version import LATEST_MODERN_VERSION

import kiwi_mcp
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.tasks import LOST

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "kiwi_mcp"]
META: Json = {
    "io.modelcontextprotocol/protocolVersion": LATEST_MODERN_VERSION,
    "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
}
PATIENCE = 120.0


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}


@dataclass
class Raw:
    """A server and the lines exchanged with it."""

    process: subprocess.Popen[bytes]
    number: int = 0

    def send(self, method: str, **params: Json) -> None:
        assert self.process.stdin
        self.number += 1
        request = {"jsonrpc": "2.0", "id": self.number, "method": method, "params": {**params, "_meta": META}}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, method: str, **params: Json) -> dict[str, Any]:
        self.send(method, **params)
        assert self.process.stdout
        reply: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert reply["id"] == self.number
        return reply

    def execute(self, **words: Json) -> dict[str, Any]:
        result: dict[str, Any] = self.ask("tools/call", name="execute", arguments=words)["result"]
        return result

    def task(self, task_id: str) -> dict[str, Any]:
        response: dict[str, Any] = self.ask("tasks/get", taskId=task_id)["result"]
        return response

    def leave(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait(PATIENCE)


@contextmanager
def served(project: Path) -> Iterator[Raw]:
    words = [*COMMAND, "serve", "--project", str(project)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
        try:
            yield Raw(process)
        finally:
            process.kill()


def eventually(look: Callable[[], Any]) -> Any:
    """Return what is found at last; the other side has no way to tell us."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.05)
    raise AssertionError("it never came")


@pytest.fixture
def waiter(ask: Callable[..., Answer], home: Path, tmp_path: Path, sandbox: None) -> Path:
    """A tool that waits for a file, at most half a minute; and that file."""
    go_on = tmp_path / "go_on"
    script = f"for _ in $(seq 600); do [ -e {go_on} ] && break; sleep 0.05; done; echo waited"
    parameters: Json = {
        "tool_id": "waiter",
        "tool_type": "script",
        "executor": "bash_runtime",
        "manifest": {"version": "1.0.0", "description": "Waits", "config": {"entrypoint": "main.sh"}},
        "files": {"main.sh": script},
    }
    made = ask("execute", action="create", parameters=parameters)
    assert not made.is_error, made
    assert not ask("relax", action="apply", item_id="waiter", to="trusted").is_error
    (home / ".ai" / "preferences.yaml").write_text("task_after: 0.2\n", encoding="utf-8")
    return go_on


def test_a_task_of_a_killed_process_is_stored_as_failed(project: Path, waiter: Path) -> None:
    with served(project) as raw:
        created = raw.execute(item_id="waiter")
        raw.process.send_signal(signal.SIGKILL)
        assert created["resultType"] == "task", created
        raw.process.wait(PATIENCE)
    waiter.touch()
    with served(project) as raw:
        response = eventually(lambda: (now := raw.task(created["taskId"]))["status"] == "failed" and now)
        assert response["error"] == LOST
        assert response["createdAt"] == created["createdAt"]
        raw.leave()


def test_a_result_is_readable_by_the_next_process(project: Path, waiter: Path) -> None:
    with served(project) as raw:
        created = raw.execute(item_id="waiter")
        waiter.touch()
        done = eventually(lambda: (now := raw.task(created["taskId"]))["status"] == "completed" and now)
        raw.leave()
    with served(project) as raw:
        again = raw.task(created["taskId"])
        assert again["result"] == done["result"]
        assert again["result"]["structuredContent"]["result"].strip() == "waited"
        raw.leave()


def test_the_owner_stops_a_task_from_another_process(project: Path, waiter: Path) -> None:
    with served(project) as raw:
        created = raw.execute(item_id="waiter")
        words = [*COMMAND, "tasks", created["taskId"][:8], "--cancel", "--json"]
        response = subprocess.run(
            words, env=environment(), cwd=project, capture_output=True, check=True, timeout=PATIENCE
        )
        assert json.loads(response.stdout)["task_id"] == created["taskId"]
        eventually(lambda: raw.task(created["taskId"])["status"] == "cancelled")
        raw.leave()
