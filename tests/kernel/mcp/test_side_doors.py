"""What starts or reaches a server outside a call: refresh, login and completion pass the gates of a call."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Answers, Caller, Questions
from kiwi_mcp.domain.json import Json
from kiwi_mcp.kernel import Answer, Kernel

SCRIPT = Path(__file__).parents[2] / "data" / "mcp" / "scripted.py"
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
OTHER_DAY = DAYS[(datetime.now().astimezone().weekday() + 3) % 7]
POLICIES = {
    "the item": "items: {deny: ['project/local/one@*']}",
    "the command": f"commands: {{deny: ['{Path(sys.executable).name}']}}",
    "the day": f"conditions: [{{items: 'project/local/one@*', days: [{OTHER_DAY}]}}]",
}
Ask = Callable[..., Answer]


class Server:
    """A server that is a process, and the number of times it was started."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._offers = folder / "offers.json"
        self.offer("who")

    def offer(self, argument: str) -> None:
        prompts = [{"name": "greet", "arguments": [{"name": argument}]}]
        tools = [{"name": "note", "inputSchema": {"type": "object"}}]
        self._offers.write_text(json.dumps({"prompts": prompts, "tools": tools}))

    @property
    def words(self) -> dict[str, Json]:
        # The folder is named so that the server may write there: it notes each start.
        return {"command": sys.executable, "args": [str(SCRIPT), str(self._offers), str(self._offers.parent)]}

    @property
    def starts(self) -> int:
        notes = self._offers.with_suffix(".starts")
        return len(notes.read_text().splitlines()) if notes.exists() else 0


@pytest.fixture
def server(tmp_path: Path, ask: Ask) -> Server:
    """A server that the owner added and accepted; it was started once."""
    found = Server(tmp_path / "server")
    assert not ask("mcp", action="add", server="one", **found.words).is_error
    assert found.starts == 1
    return found


@pytest.fixture
def policy(home: Path) -> Path:
    return home / ".ai" / "policy.yaml"


def complete(kernel: Kernel, item: str = "mcp/one/greet") -> object:
    async def work() -> object:
        try:
            return await kernel.complete(item, "who", "A", {})
        finally:
            await kernel.aclose()

    return asyncio.run(work())


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("gate", POLICIES)
def test_refresh_does_not_start_a_server_that_the_rules_refuse(
    gate: str, ask: Ask, server: Server, policy: Path
) -> None:
    policy.write_text(POLICIES[gate])
    assert ask("mcp", action="refresh", server="one").content["code"] == "not_permitted"
    assert server.starts == 1
    policy.unlink()
    assert not ask("mcp", action="refresh", server="one").is_error
    assert server.starts == 2


@pytest.mark.usefixtures("sandbox")
def test_refresh_does_not_start_a_server_that_was_changed_after_signing(
    ask: Ask, server: Server, project: Path
) -> None:
    assert not ask("execute", action="sign", item_id="one").is_error
    manifest = next((project / ".ai").rglob("one.yaml"))
    manifest.write_text(manifest.read_text().replace("description:", "description: other,"))
    refused = ask("mcp", action="refresh", server="one", yes=True)
    assert refused.content["code"] == "content_hash_mismatch", refused.content
    assert server.starts == 1


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("gate", POLICIES)
def test_completion_does_not_start_a_server_that_the_rules_refuse(
    gate: str, kernel: Kernel, server: Server, policy: Path
) -> None:
    policy.write_text(POLICIES[gate].replace("project/local/one@", "*/one*"))
    assert complete(kernel) == ()
    assert server.starts == 1
    policy.unlink()
    assert complete(kernel) == ["Ann"]
    assert server.starts == 2


@pytest.mark.usefixtures("sandbox")
def test_completion_asks_nothing_about_an_item_that_is_not_as_it_was_accepted(
    kernel: Kernel, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.kernel.mcp_servers._RECENT", timedelta(0))
    server.offer("whom")
    assert complete(kernel) == ()


@pytest.mark.usefixtures("sandbox")
def test_completion_does_not_start_a_server_if_the_call_needs_approval(kernel: Kernel, server: Server) -> None:
    complete(kernel, "mcp/one/note")  # the server may change its folder
    assert server.starts == 1


@pytest.mark.parametrize("rule", ["items: {deny: ['project/local/away@*']}", "hosts: {deny: [example.com]}"])
def test_login_asks_nothing_of_a_server_that_the_rules_refuse(
    rule: str, kernel: Kernel, ask: Ask, policy: Path
) -> None:
    asked: list[Questions] = []

    async def note(questions: Questions) -> Answers:
        asked.append(questions)
        return {}

    async def log_in() -> Answer:
        try:
            return await kernel.call("mcp", {"action": "login", "server": "away"}, Caller(ask=note, is_owner=True))
        finally:
            await kernel.aclose()

    assert not ask("mcp", action="add", server="away", url="https://example.com/mcp", start=False).is_error
    policy.write_text(rule)
    assert asyncio.run(log_in()).content["code"] == "not_permitted"
    assert asked == []


@pytest.mark.usefixtures("sandbox")
def test_each_verb_that_changes_or_asks_a_server_leaves_a_receipt(ask: Ask, server: Server) -> None:
    ask("mcp", action="refresh", server="one")
    ask("mcp", action="accept", server="one")
    ask("mcp", action="logout", server="one")
    ask("mcp", action="remove", server="one")
    rows = ask("audit", action="list").content["receipts"]
    assert isinstance(rows, list)
    actions = [row["action"] for row in rows if isinstance(row, dict)]
    assert sorted(actions)[-5:] == ["mcp accept", "mcp add", "mcp logout", "mcp refresh", "mcp remove"]
    assert server.starts == 2
