"""Data is memory, operations are tools: with or without data of their own, and alone in reaching what is elsewhere."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
from tests.kernel.threads.conftest import ALL_TOOLS, DIRECTIVE, Agents, agents, write_provider
from tests.plugins.scripted_model import ScriptedModel, say, use
from tests.stories.conftest import MODEL, listening

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.settings import default_url
from kiwi_mcp.store.open import open_database

__all__ = ["agents"]
Content = dict[str, Any]


@pytest.fixture
async def kernel(project: Path, anyio_backend: str) -> Any:
    kernel = Kernel(project)
    yield kernel
    await kernel.aclose()


async def do(kernel: Kernel, verb: str, caller: Caller = MODEL, **words: Any) -> Content:
    return dict((await kernel.call(verb, words, caller)).content)


ENTRIES = {
    "cats": "A kitten sleeps most of the day.",
    "taxes": "The return is due in March.",
    "bread": "Knead the dough for ten minutes.",
}


@pytest.mark.req("A6")
@pytest.mark.usefixtures("encoder_model", "processes")
async def test_an_index_of_meanings_is_derived_and_can_be_deleted(
    project: Path, home: Path, tree: Callable[[Path], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KIWI_SEARCH")
    memory, derived = home / ".ai" / "memory", home / ".cache" / "kiwi"
    (memory / "knowledge").mkdir(parents=True)
    for name, text in ENTRIES.items():
        head = f"---\nid: {name}\ntitle: Notes on {name}\nversion: 1.0.0\n---\n"
        (memory / "knowledge" / f"{name}.md").write_text(head + text)
    before = tree(memory)

    async def found() -> list[tuple[str, float]]:
        kernel = Kernel(project)
        try:
            answer = await do(kernel, "search", item_type="knowledge", query="young pet that naps")
            return [(one["name"], one["meaning"]) for one in answer["results"]]
        finally:
            await kernel.aclose()

    first = await found()
    assert first[0][0] == "cats", "none of the words of the query is in the text"
    database = open_database(default_url(home / ".ai"))
    with database.transaction() as transaction:
        transaction.write("delete from sheets")  # the vectors
    database.close()
    assert [*derived.rglob("*.json")]
    rmtree(derived)
    assert await found() == first
    assert tree(memory) == before


@dataclass(frozen=True)
class Verb:
    """An item, arguments that it takes and does not take, what it returns, and whether the owner is asked."""

    item: str
    good: Content
    bad: Content
    returns: Any
    is_asked: bool
    query: str


VERBS = (
    Verb("memory_write", {"path": "tea.md", "content": "Green."}, {"path": "tea.md"}, None, True, "write memory"),
    Verb("memory_read", {"path": "coffee.md"}, {"path": 3}, None, False, "read memory"),
    Verb("calculator", {"left": 2, "right": 3}, {"left": "two", "right": 3}, 6, False, "multiply numbers"),
    Verb("send_message", {"text": "Hello"}, {"text": 5}, {"sent": True}, True, "send message"),
)


@pytest.mark.req("A7")
@pytest.mark.usefixtures("sandbox", "loopback")
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.item)
async def test_a_calculator_and_a_message_are_tools_as_those_of_the_memory_are(
    verb: Verb, kernel: Kernel, project: Path, home: Path
) -> None:
    sent: list[JsonObject] = []
    with listening(lambda _: (200, {"content-type": "application/json"}, b'{"sent": true}'), sent) as host:
        user = home / ".ai"
        (user / "memory").mkdir(parents=True)
        (user / "memory" / "coffee.md").write_text("Black.")
        (user / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [host]}}))
        write_verbs(user / "tools", host)
        for name in ("calculator", "send_message"):
            await do(kernel, "execute", Caller(), action="sign", item_id=name)

        found = await do(kernel, "search", query=verb.query, source="all")
        (card,) = [one for one in found["results"] if one["name"] == verb.item]
        loaded = await do(kernel, "load", item_id=card["identity"])
        assert {*verb.good} <= {*loaded["parameters"]["properties"]}
        for wrong in (verb.bad, {**verb.good, "colour": "red"}):
            refused = await do(kernel, "execute", item_id=verb.item, parameters=wrong)
            assert (refused["code"], bool(refused["issues"])) == ("invalid_input", True)
        planned = await do(kernel, "execute", item_id=verb.item, parameters=verb.good, dry_run=True)
        assert (planned["status"], planned["approval"]["needed"]) == ("planned", verb.is_asked)

        if verb.is_asked:
            waiting = await do(kernel, "execute", item_id=verb.item, parameters=verb.good)
            assert waiting["code"] == "approval_required"
            await do(kernel, "approvals", Caller(), action="approve", approval_id=waiting["approval_id"])
        assert not sent
        done = await do(kernel, "execute", item_id=verb.item, parameters=verb.good)
        assert done.get("status") == "success", done
        assert verb.returns is None or done["result"] == verb.returns
        assert {"result", "run_id", "identity", "integrity", "execution_time_ms"} <= done.keys()
        assert len(sent) == (verb.item == "send_message")
        again = await do(kernel, "execute", item_id=verb.item, parameters=verb.good)
        assert again.get("code") == ("approval_required" if verb.is_asked else None)

        receipts = (await do(kernel, "audit", Caller(), action="list", limit=100))["receipts"]
        runs = [one for one in receipts if verb.item in one.get("item", "") and one["action"] == "run"]
        assert "success" in {one["status"] for one in runs}
        (user / "policy.yaml").write_text(json.dumps({"items": {"deny": [f"*/{verb.item}*"]}}))
        denied = await do(kernel, "execute", item_id=verb.item, parameters=verb.good)
        assert denied["code"] == "not_permitted"
    assert verb.item == "memory_write" or not (user / "memory" / "tea.md").exists()


def write_verbs(folder: Path, host: str) -> None:
    """Write two tools without data: one that counts, one that sends."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "calculator.py").write_text(
        '"""Multiply two numbers"""\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n'
        '__version__ = "1.0.0"\n\n\ndef main(left: int, right: int):\n    return left * right\n'
    )
    (folder / "send_message.yaml").write_text(
        json.dumps(
            {
                "tool_id": "send_message", "tool_type": "api", "executor": "http_client", "version": "1.0.0",
                "description": "Send a message",
                "config": {"method": "POST", "url": f"http://{host}/send", "body_template": {"text": "{text}"}},
                "parameters": [{"name": "text", "type": "string", "required": True}],
            }
        )
    )  # fmt: skip


STORY = """
import asyncio, json, sys
from pathlib import Path
reached = []

def hear(event, words):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        reached.append(str(words[1] if event == "socket.connect" else words))

sys.addaudithook(hear)
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.kernel import Kernel

async def main():
    kernel, steps = Kernel(Path(sys.argv[1])), json.loads(sys.argv[2])
    answers = []
    for verb, request in steps:
        answer = await kernel.call(verb, request, Caller(is_owner=True))
        answers.append([verb, reached[:], answer.content])
        reached.clear()
    await kernel.aclose()
    print(json.dumps(answers))

asyncio.run(main())
"""


@pytest.mark.req("A12")
@pytest.mark.usefixtures("sandbox", "loopback")
def test_nothing_but_a_tool_and_the_model_reaches_what_is_elsewhere(
    project: Path, home: Path, scripted_model: ScriptedModel
) -> None:
    user = home / ".ai"
    (user / "tools").mkdir(parents=True)
    (user / "directives").mkdir()
    (user / "memory" / "knowledge").mkdir(parents=True)
    (user / "memory" / "knowledge" / "tea.md").write_text("---\nid: tea\ntitle: Tea\nversion: 1.0.0\n---\nGreen.\n")
    write_provider(user, scripted_model, "openai_chat")
    text = DIRECTIVE.format(name="study", permissions=ALL_TOOLS, limits="", outputs="", model="")
    (user / "directives" / "study.md").write_text(text)
    with listening(lambda _: (200, {"content-type": "application/json"}, b'{"sent": true}'), []) as host:
        write_verbs(user / "tools", host)
        model = scripted_model.url("openai_chat").split("/")[2]
        (user / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [host, model]}}))
        scripted_model.will(
            use("execute", item_id="calculator", parameters={"left": 2, "right": 3}),
            use("execute", item_id="memory_read", parameters={"path": "knowledge/tea.md"}),
            say("Six."),
        )
        rule = {"action": "add_rule", "item": "*"}
        calculate = {"item_id": "calculator", "parameters": {"left": 2, "right": 3}}
        steps: list[tuple[str, Content]] = [
            *(("execute", {"action": "sign", "item_id": name}) for name in ("calculator", "send_message", "study")),
            ("approvals", rule),
            ("help", {}),
            ("search", {"query": "multiply"}),
            ("search", {"query": "green tea", "item_type": "knowledge"}),
            ("load", {"item_id": "calculator"}),
            ("execute", {"action": "why", "item_id": "send_message"}),
            ("execute", calculate),
            ("execute", {"item_id": "tea", "item_type": "knowledge"}),
            ("execute", {"item_id": "memory_write", "parameters": {"path": "a.md", "content": "a"}}),
            ("execute", {"item_id": "files_write", "parameters": {"path": "a.md", "content": "a"}}),
            ("execute", {"item_id": "git_init", "parameters": {}}),
            ("execute", {"item_id": "git_commit", "parameters": {"message": "a", "paths": ["a.md"]}}),
            ("memory", {"action": "list"}),
            ("audit", {"action": "list"}),
            ("doctor", {}),
            ("execute", {"item_id": "send_message", "parameters": {"text": "Hello"}}),
            ("thread", {"action": "start", "item_id": "study", "wait": True}),
        ]
        done = subprocess.run(
            [sys.executable, "-c", STORY, str(project), json.dumps(steps)],
            capture_output=True, text=True, timeout=240, check=True,
        )  # fmt: skip
    story = json.loads(done.stdout)
    *local, (_, sending, sent), (_, thinking, thought) = story
    assert [(verb, places) for verb, places, _ in local if places] == []
    assert [content for _, _, content in local if content.get("error")] == []
    assert (sent["result"], thought["result"]) == ({"sent": True}, "Six.")
    assert is_only(sending, host), sending
    assert is_only(thinking, model), thinking


def is_only(places: list[str], host: str) -> bool:
    """Whether something was reached, and each time by the name or the address of a host."""
    name, _, port = host.rpartition(":")
    return bool(places) and all(name in one and port in one for one in places)


@pytest.mark.req("SR5")
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("sandbox", "loopback")
async def test_a_hundred_crashes_of_tools_leave_the_loop_and_other_tools_standing(agents: Agents) -> None:
    crashes = {"segfault": "kill -SEGV $$", "killed": "kill -KILL $$", "aborted": "kill -ABRT $$", "failed": "exit 7"}
    for name, text in crashes.items():
        agents.bash_tool(name, text)
    agents.bash_tool("ended", "kill -TERM $$")
    agents.bash_tool("greet", "echo Hello")
    agents.directive("study")
    names = [*crashes, "ended"]
    await agents.sign(*names, "greet", "study")
    for number in range(20):
        turn = use("execute", item_id="greet", parameters={"number": number})
        for name in names:
            turn = turn & use("execute", item_id=name, parameters={"number": number})
        agents.model.will(turn)
    agents.model.will(say("All of them fell."))
    done = await agents.start("study", limits={"turns": 25})
    assert (done["status"], done["result"]) == ("completed", "All of them fell."), done["questions"]
    events = await agents.events(done["thread_id"])
    ended = [event["status"] for event in events if event["kind"] == "result"]
    assert (ended.count("error"), ended.count("ok")) == (100, 20), events[-20:]
    assert not [event for event in events if event["kind"] in {"recovered", "unknown"}]
