"""One suite for every mechanism: the client gets the same answers and refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from mcp import Client
from mcp_types import CallToolResult
from tests.kernel.threads.conftest import ALL_TOOLS, write_provider
from tests.kernel.threads.conftest import DIRECTIVE as DIRECTIVE_OF_A_THREAD
from tests.plugins.scripted_model import ScriptedModel, say, use
from tests.stories.conftest import House, Placed

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object

Mechanism = Literal["mcp over stdio", "mcp over http", "command line", "in process"]
MECHANISMS: tuple[Mechanism, ...] = ("mcp over stdio", "mcp over http", "command line", "in process")

PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"who": {"type": "string", "description": "Whom"}},
    "required": ["who"],
    "additionalProperties": False,
}
RESULT: JsonObject = {"type": "object", "properties": {"greeting": {"type": "string"}}, "required": ["greeting"]}
READS_ONLY: JsonObject = {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True}
GREET: JsonObject = {
    "name": "greet",
    "title": "Greet",
    "description": "Greet a person",
    "inputSchema": PARAMETERS,
    "outputSchema": RESULT,
    "annotations": READS_ONLY,
}
FAIL: JsonObject = {"name": "fail", "description": "Lose the voice", "inputSchema": {"type": "object"}}
STUDY = {"name": "study", "limits": "", "outputs": "", "model": ""}
DIRECTIVE = """# Greet
```xml
<directive name="greet" version="1.0.0">
  <metadata><description>Greet a person</description><category>talk</category><author>me</author></metadata>
  <inputs><input name="who" type="string" required="true">Whom</input></inputs>
  <process><step name="say"><action>Say hello to {who}</action></step></process>
</directive>
```
"""


def script(house: House, placed: Placed, tool_id: str, code: str, **words: Json) -> None:
    """Write a tool that notes its calls where the server notes its own."""
    manifest: JsonObject = {
        "tool_id": tool_id, "tool_type": "script", "executor": "python_runtime", "version": "1.0.0",
        "config": {"entrypoint": "main.py"}, "needs": {"write": [str(placed.folder)]}, **words,
    }  # fmt: skip
    notes = (
        f"import pathlib\n\n\ndef main(who='you'):\n    notes = pathlib.Path({str(placed.folder / 'calls')!r})\n"
        f"    with notes.open('a') as file:\n        file.write('{tool_id}\\n')\n"
    )
    house.write(f"tools/{tool_id}/tool.yaml", manifest)
    house.write(f"tools/{tool_id}/main.py", f"{notes}{code}")


def greeting_script(house: House, placed: Placed) -> None:
    words: JsonObject = {"name": "Greet", "description": "Greet a person", "effect": "pure"}
    code = "    return {'greeting': f'Hello {who}'}\n"
    script(house, placed, "greet", code, parameters=PARAMETERS, outputs=RESULT, **words)


@dataclass
class Conversation:
    """The answers that a client got about one tool, by one mechanism."""

    mechanism: Mechanism
    house: House
    placed: Placed
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: set[str] = field(default_factory=set)
    ran: dict[str, int] = field(default_factory=dict)
    """How often anything ran, by the end of each step."""

    @property
    def source(self) -> str:
        return "mcp/placed" if self.mechanism.startswith("mcp") else "project/local"

    async def install(self, stack: ExitStack) -> None:
        """Put the tool where its mechanism reaches it, and let it do what it does."""
        self.placed.offer(GREET, FAIL)
        await self.house.own("approvals", action="add_rule", item="*")
        match self.mechanism:
            case "mcp over stdio":
                await self.house.own("mcp", action="add", server="placed", **self.placed.command)
            case "mcp over http":
                port, _ = stack.enter_context(self.placed.listening())
                self.permit(f"127.0.0.1:{port}")
                await self.house.own("mcp", action="add", server="placed", url=f"http://127.0.0.1:{port}/mcp")
            case "command line":
                self.permit(files={"write": {"allow": [str(self.placed.folder)]}})
                greeting_script(self.house, self.placed)
                script(self.house, self.placed, "fail", "    raise ValueError('no voice today')\n")
            case "in process":
                self.house.write("directives/greet.md", DIRECTIVE)
                self.house.write("directives/fail.md", DIRECTIVE.replace("</inputs>", "").replace('"greet"', '"fail"'))

    def permit(self, *hosts: str, **rules: Json) -> None:
        """Write the owner's policy; what was granted stays granted."""
        path = self.house.user / "policy.yaml"
        known: JsonObject = json.loads(path.read_text()) if path.exists() else {}
        self.house.settle("policy.yaml", {**known, **({"hosts": {"allow": list(hosts)}} if hosts else {}), **rules})

    async def ask(self, client: Client, step: str, verb: str, **request: Json) -> None:
        result: CallToolResult = await client.call_tool(verb, dict(request))
        assert result.structured_content is not None, result
        self.answers[step] = dict(result.structured_content)
        self.errors |= {step} if result.is_error else set()
        self.ran[step] = len(self.placed.noted("calls"))

    async def hold(self, stack: ExitStack) -> None:
        """Install the tool and ask everything."""
        await self.install(stack)
        async with self.house.client() as client:
            await self.converse(client)

    async def converse(self, client: Client) -> None:
        greet, fail = f"{self.source}/greet", f"{self.source}/fail"
        await self.ask(client, "search", "search", query="greet a person")
        await self.ask(client, "load", "load", item_id=greet)
        await self.ask(client, "wrong", "execute", item_id=greet, parameters={"who": 3, "whom": "Ann"})
        await self.ask(client, "call", "execute", item_id=greet, parameters={"who": "Ann"})
        await self.ask(client, "unknown", "execute", item_id=f"{self.source}/greets", parameters={"who": "Ann"})
        await self.ask(client, "fail", "execute", item_id=fail)
        await self.ask(client, "call after a failure", "execute", item_id=greet, parameters={"who": "Bob"})
        self.permit(items={"allow": ["*"], "deny": [f"{self.source}/greet@*"]})
        await self.ask(client, "denied", "execute", item_id=greet, parameters={"who": "Ann"})
        await self.ask(client, "search when denied", "search", query="greet a person")
        await self.ask(client, "runs", "runs")


@pytest.fixture(scope="module", params=MECHANISMS)
def conversation(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, sandbox: None
) -> Iterator[Conversation]:
    """One conversation about one tool: every client of every mechanism asks the same."""
    root = tmp_path_factory.mktemp("house")
    (root / "project" / ".ai").mkdir(parents=True)
    conversation = Conversation(request.param, House(root), Placed(root / "placed"))
    with ExitStack() as stack:
        asyncio.run(conversation.hold(stack))
        yield conversation


@pytest.mark.req("G1", "E6")
def test_the_tool_is_found_by_its_source_and_name(conversation: Conversation) -> None:
    (card,) = conversation.answers["search"]["results"]
    assert card["identity"] == f"{conversation.source}/greet@1.0.0"
    assert card.keys() == {"name", "description", "source", "path", "score", "tool_type", "identity", "why"}
    assert (card["name"], card["description"]) == ("greet", "Greet a person")


@pytest.mark.req("G1")
def test_the_definition_has_the_same_shape(conversation: Conversation) -> None:
    definition = conversation.answers["load"]
    assert definition.keys() - {"trust"} == {
        "name", "path", "content", "source", "metadata", "parameters", "identity", "digest", "integrity", "files",
        "chain",
    }  # fmt: skip
    assert definition["identity"] == f"{conversation.source}/greet@1.0.0"
    assert definition["parameters"] == PARAMETERS
    assert definition["metadata"]["description"] == "Greet a person"


@pytest.mark.req("G1")
def test_a_valid_call_is_answered_in_the_same_shape(conversation: Conversation) -> None:
    answer = conversation.answers["call"]
    # The isolation and the rule that allowed the call are reported if they apply.
    assert answer.keys() - {"isolation", "approval"} == {
        "tool_id", "action", "status", "result", "execution_time_ms", "output_path", "run_id", "identity", "integrity",
    }  # fmt: skip
    assert "Ann" in json.dumps(answer["result"])
    # What is read in the kernel's own process is a program that its reader runs.
    assert answer["status"] == ("ready" if conversation.mechanism == "in process" else "success")
    assert conversation.ran["call"] == (0 if conversation.mechanism == "in process" else 1)


@pytest.mark.req("G1")
def test_wrong_arguments_are_refused_before_anything_runs(conversation: Conversation) -> None:
    answer = conversation.answers["wrong"]
    assert "wrong" in conversation.errors
    assert answer["code"] == "invalid_input"
    assert {issue["place"] for issue in answer["issues"]} == {"who", "whom"}
    assert conversation.ran["wrong"] == 0


@pytest.mark.req("G1")
def test_an_unknown_name_is_not_found(conversation: Conversation) -> None:
    assert conversation.answers["unknown"]["code"] == "tool_not_found"
    assert conversation.ran["unknown"] == conversation.ran["call"]


@pytest.mark.req("G1", "B6")
def test_a_denied_tool_is_refused_and_still_listed(conversation: Conversation) -> None:
    assert conversation.answers["denied"]["code"] == "not_permitted"
    assert conversation.ran["denied"] == conversation.ran["call after a failure"]
    (card,) = conversation.answers["search when denied"]["results"]
    assert card["permitted"] is False
    assert "permitted" not in conversation.answers["search"]["results"][0]


@pytest.mark.req("G1", "I5")
def test_a_failure_is_a_result_that_is_not_retried_and_the_next_call_works(conversation: Conversation) -> None:
    failure = conversation.answers["fail"]
    assert "fail" in conversation.errors
    assert failure.keys() >= {"error", "code", "item_type", "message", "suggestion"}
    if conversation.mechanism != "in process":
        assert (failure["status"], failure["code"]) == ("error", "execution_failed")
        assert "no voice today" in failure["message"]
        assert conversation.ran["fail"] - conversation.ran["unknown"] == 1
    assert "call after a failure" not in conversation.errors
    assert "Bob" in json.dumps(conversation.answers["call after a failure"]["result"])


@pytest.mark.req("G1")
def test_every_run_is_recorded_with_any_result(conversation: Conversation) -> None:
    statuses = [run["status"] for run in reversed(conversation.answers["runs"]["runs"])]
    done = conversation.answers["call"]["status"]
    failed = "refused" if conversation.mechanism == "in process" else "error"
    assert statuses == ["refused", done, "refused", failed, done, "refused"]
    recorded = [
        run for run in conversation.answers["runs"]["runs"] if run["id"] == conversation.answers["call"]["run_id"]
    ]
    assert [run["identity"] for run in recorded] == [f"{conversation.source}/greet@1.0.0"]


async def seen(client: Client) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], set[str]]:
    """What a client sees of the tool: its definition, its answer, what it refuses, and what is recorded of it."""
    listed = {tool.name: tool for tool in (await client.list_tools(cache_mode="refresh")).tools}
    answer = await client.call_tool("greet", {"who": "Ann"})
    refused = await client.call_tool("greet", {"whom": "Ann"})
    (run, *_) = [run for run in await runs(client) if run["status"] == "success"]
    shape = {"content": [block.type for block in answer.content], "structured": answer.structured_content}
    return listed["greet"].model_dump(), shape, refused.structured_content, {*run}


async def runs(client: Client) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = (await client.call_tool("runs", {})).structured_content["runs"]
    return listed


@pytest.mark.req("G2")
async def test_a_moved_tool_is_the_same_to_its_client_its_owner_and_its_records(house: House, placed: Placed) -> None:
    placed.offer(GREET)
    await house.own("approvals", action="add_rule", item="*")
    house.settle("preferences.yaml", {"always_send": {"greet": {"as": "greet"}}})
    open_, closed = {"allow": ["*"]}, {"allow": ["*"], "deny": ["*/greet@*"]}
    notes: JsonObject = {"write": {"allow": [str(placed.folder)]}}

    async def at_a_place(client: Client, host: str) -> tuple[object, ...]:
        house.settle("policy.yaml", {"items": open_, "hosts": {"allow": [host]}, "files": notes})
        found = await seen(client)
        house.settle("policy.yaml", {"items": closed, "hosts": {"allow": [host]}, "files": notes})
        assert "greet" not in [tool.name for tool in (await client.list_tools(cache_mode="refresh")).tools]
        denied = await client.call_tool("execute", {"item_id": "greet", "parameters": {"who": "Ann"}})
        assert denied.structured_content["code"] == "not_permitted"
        house.settle("policy.yaml", {"items": open_, "hosts": {"allow": [host]}, "files": notes})
        return found

    async def move(**words: Json) -> None:
        await house.own("mcp", **words)

    async with house.client() as client:
        await move(action="add", server="placed", **placed.command)
        here = await at_a_place(client, "127.0.0.1:1")
        with placed.listening() as (port, _):
            await move(action="remove", server="placed")
            house.settle("policy.yaml", {"items": open_, "hosts": {"allow": [f"127.0.0.1:{port}"]}})
            await move(action="add", server="placed", url=f"http://127.0.0.1:{port}/mcp")
            there = await at_a_place(client, f"127.0.0.1:{port}")
        await move(action="remove", server="placed")
        greeting_script(house, placed)
        for_each_call = await at_a_place(client, "127.0.0.1:1")
        assert here == there == for_each_call
        assert {run["identity"] for run in await runs(client) if run["status"] == "success"} == {
            "mcp/placed/greet@1.0.0", "project/local/greet@1.0.0",
        }  # fmt: skip
    assert placed.noted("calls") == ["greet"] * 3


@pytest.mark.req("G2", "H7")
async def test_a_shipped_tool_moves_out_of_the_process_by_configuration_alone(
    house: House, placed: Placed, scripted_model: ScriptedModel
) -> None:
    note, path = "Green tea, 80 degrees.\n", "notes/tea.md"
    for root in (house.user / "memory", placed.folder):
        (root / path).parent.mkdir(parents=True)
        (root / path).write_text(note)
    await house.own("approvals", action="add_rule", item="*")

    (house.user / "tools").mkdir()
    write_provider(house.user, scripted_model, "openai_chat")
    house.write("directives/study.md", DIRECTIVE_OF_A_THREAD.format(permissions=ALL_TOOLS, **STUDY))
    await house.own("execute", action="sign", item_id="study")

    async def in_a_thread() -> tuple[object, ...]:
        """What a model is sent of the tool, and the events of a thread in which it calls it."""
        scripted_model.will(use("memory_read", path=path), say("Drink it."))
        done = await house.own("thread", action="start", item_id="study", inputs={"topic": "tea"}, wait=True)
        assert done["result"] == "Drink it."
        shown = await house.own("thread", action="show", thread_id=done["thread_id"])
        # `began` is no event of the conversation: it says, for recovery, that a call left the process.
        events = [event for event in map(as_object, as_list(shown["events"])) if event["kind"] != "began"]
        results = [sorted({*event} - {"run_id"}) for event in events if event["kind"] == "result"]
        sent = [tool["function"] for tool in scripted_model.requests[-1].json["tools"]]
        assert note.strip() in json.dumps(scripted_model.requests[-1].json["messages"])
        (one,) = [tool for tool in sent if tool["name"] == "memory_read"]
        return one, [event["kind"] for event in events], results

    async def definition(client: Client) -> dict[str, Any]:
        listed = {tool.name: tool for tool in (await client.list_tools(cache_mode="refresh")).tools}
        return listed["memory_read"].model_dump(by_alias=True, exclude_none=True)

    async def at_a_place(client: Client, item: str, *hosts: str) -> tuple[dict[str, Any], list[str], object]:
        """What the model, the owner's rule and the records see of the tool where it is now."""
        house.settle("preferences.yaml", {"always_send": {item: {"as": "memory_read"}}})
        rules: JsonObject = {"items": {"allow": ["*"]}, "hosts": {"allow": [scripted_model.host, *hosts]}}
        house.settle("policy.yaml", rules)
        shown, thread = await definition(client), await in_a_thread()
        answer = await client.call_tool("memory_read", {"path": path})
        assert not answer.is_error, answer
        assert note.strip() in json.dumps(
            answer.structured_content or answer.content[0].model_dump(), ensure_ascii=False
        )
        wrong = await client.call_tool("memory_read", {"file": path})
        house.settle("policy.yaml", {**rules, "items": {"allow": ["*"], "deny": ["*/memory_read@*"]}})
        denied = await client.call_tool("execute", {"item_id": item, "parameters": {"path": path}})
        refusals = [one.structured_content["code"] for one in (wrong, denied)]
        events = [(run["status"], sorted({*run} - {"arguments", "isolation"})) for run in (await runs(client))[:3]]
        return {name: shown[name] for name in ("name", "description", "inputSchema")}, refusals, (events, thread)

    async with house.client() as client:
        inside = await at_a_place(client, "builtin/kiwi/memory_read")
        placed.offer({**inside[0], "annotations": READS_ONLY})
        await house.own("mcp", action="add", server="placed", **placed.command)
        in_a_sandbox = await at_a_place(client, "mcp/placed/memory_read")
        assert placed.noted("calls") == ["memory_read"] * 2
        await house.own("mcp", action="remove", server="placed")
        with placed.listening() as (port, _):
            house.settle("policy.yaml", {"items": {"allow": ["*"]}, "hosts": {"allow": [f"127.0.0.1:{port}"]}})
            await house.own("mcp", action="add", server="placed", url=f"http://127.0.0.1:{port}/mcp")
            elsewhere = await at_a_place(client, "mcp/placed/memory_read", f"127.0.0.1:{port}")
        assert inside == in_a_sandbox == elsewhere

        assert inside[1] == ["invalid_input", "not_permitted"]
        assert placed.noted("calls") == ["memory_read"] * 4
