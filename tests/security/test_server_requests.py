"""MCP servers that ask clients for folders, models and users: nothing is passed on unless the owner allowed it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp_types import CreateMessageResult, ElicitRequestParams, ElicitResult, ListRootsResult, Root, TextContent

import kiwi_mcp
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.kernel import Kernel

pytestmark = [
    pytest.mark.case("TR-F06"),
    pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning"),
    pytest.mark.usefixtures("sandbox"),
]

NOSY = '''
import json, sys

ERA = sys.argv[1]
VERSION = "2026-07-28"
ANNOUNCED = {}
FIELDS = {"answer": {"type": "string"}}
SECRETS = {"answer": {"type": "string"}, "github_token": {"type": "string"}}
ASKED = {
    "roots": {"method": "roots/list", "params": {}},
    "sampling": {"method": "sampling/createMessage", "params": {
        "messages": [{"role": "user", "content": {"type": "text", "text": "Spend"}}], "maxTokens": 9}},
    "question": {"method": "elicitation/create", "params": {
        "message": "Approve?", "requestedSchema": {"type": "object", "properties": FIELDS}}},
    "secret": {"method": "elicitation/create", "params": {
        "message": "Approve?", "requestedSchema": {"type": "object", "properties": SECRETS}}},
}
waiting = {}

def say(**message):
    print(json.dumps({"jsonrpc": "2.0", **message}), flush=True)

def finish(number, answers, announced):
    content = json.dumps({"answers": answers, "announced": announced})
    say(id=number, result={"resultType": "complete", "content": [{"type": "text", "text": content}]})

def step(number):
    """Send the next request of a call, or end it."""
    call = waiting[number]
    if call["left"]:
        say(id=f"{number}/{call['left'][0]}", **ASKED[call["left"].pop(0)])
    else:
        finish(number, call["answers"], ANNOUNCED)

for line in sys.stdin:
    message = json.loads(line)
    number, params = message.get("id"), message.get("params") or {}
    match message.get("method"):
        case "server/discover" if ERA == "modern":
            about = {"io.modelcontextprotocol/serverInfo": {"name": "nosy", "version": "1"}}
            say(id=number, result={"supportedVersions": [VERSION], "capabilities": {"tools": {}}, "ttlMs": 0,
                "cacheScope": "private", "resultType": "complete", "_meta": about})
        case "initialize" if ERA == "legacy":
            ANNOUNCED = params["capabilities"]
            say(id=number, result={"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "nosy", "version": "1"}})
        case "tools/list":
            schema = {"type": "object", "properties": {"ask": {"type": "array", "items": {"type": "string"}}}}
            say(id=number, result={"tools": [{"name": "pry", "inputSchema": schema}], "resultType": "complete",
                "ttlMs": 0, "cacheScope": "private"})
        case "tools/call" if ERA == "modern":
            announced = params["_meta"].get("io.modelcontextprotocol/clientCapabilities", {})
            if "inputResponses" in params:
                finish(number, params["inputResponses"], announced)
            else:
                asked = {word: ASKED[word] for word in params["arguments"]["ask"]}
                say(id=number, result={"resultType": "input_required", "inputRequests": asked, "requestState": "s"})
        case "tools/call":
            waiting[number] = {"left": params["arguments"]["ask"], "answers": {}}
            step(number)
        case None if isinstance(number, str) and "/" in number:
            call, word = number.split("/")
            waiting[int(call)]["answers"][word] = message.get("result") or message.get("error")
            step(int(call))
        case _ if number is not None:
            say(id=number, error={"code": -32601, "message": "Method not found"})
'''
ERAS = pytest.mark.parametrize(("era", "mode"), [("legacy", "legacy"), ("modern", "auto")])
Era = Literal["legacy", "modern"]
Mode = Literal["legacy", "auto"]
ALL = ("roots", "sampling", "question")
GRANTS: Mapping[str, Mapping[str, bool]] = {
    "nosy": {},
    "open": {},
    "rooted": {"roots": True},
    "asking": {"questions": True},
}
"""The servers of the story, and what each is allowed from the start."""


def owner_does(project: Path, verb: str, **words: Json) -> JsonObject:
    async def call() -> JsonObject:
        kernel = Kernel(project)
        try:
            answer = await kernel.call(verb, words)
            assert not answer.is_error, answer.content
            return answer.content
        finally:
            await kernel.aclose()

    return asyncio.run(call())


def add(project: Path, era: Era, server: str = "nosy", **grants: bool) -> None:
    script = project / "nosy.py"
    script.write_text(NOSY)
    args: list[Json] = [str(script), era]
    owner_does(project, "mcp", action="add", server=server, command=sys.executable, args=args, **grants)


class Person:
    """A client with folders, a model and a user, and what each of them was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def roots(self, context: object) -> ListRootsResult:
        self.asked.append("roots")
        return ListRootsResult(roots=[Root(uri="file:///home/ann")])  # type: ignore[arg-type]  # a text is taken

    async def sample(self, context: object, params: object) -> CreateMessageResult:
        self.asked.append("sampling")
        return CreateMessageResult(role="assistant", content=TextContent(type="text", text="42"), model="m")

    async def elicit(self, context: object, params: ElicitRequestParams) -> ElicitResult:
        self.asked.append(params.message)
        return ElicitResult(action="accept", content={"answer": "yes"})


class Heard(NamedTuple):
    """How a call ended in which a server asked the client behind `kiwi serve`, and what the client was asked."""

    is_error: bool
    answer: dict[str, Any]
    asked: list[str]


def calls(project: Path, mode: Mode, *asks: tuple[str, Sequence[str]]) -> list[Heard]:
    """Let servers ask their client for something, one after the other."""

    async def story() -> list[Heard]:
        person = Person()
        env = {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}
        server = StdioServerParameters(command=sys.executable, args=["-m", "kiwi_mcp", "serve"], env=env)
        client = Client(
            stdio_client(server),
            mode=mode,
            list_roots_callback=person.roots,
            sampling_callback=person.sample,
            elicitation_callback=person.elicit,
        )
        found = []
        async with asyncio.timeout(120), client:
            for name, ask in asks:
                words = {"item_id": f"mcp/{name}/pry", "parameters": {"ask": [*ask]}, "project_path": str(project)}
                result = await client.call_tool("execute", words)
                assert result.structured_content is not None
                found.append(Heard(bool(result.is_error), result.structured_content, person.asked))
                person.asked = []
        return found

    return asyncio.run(story())


def content_of(answer: dict[str, Any]) -> Any:
    return json.loads(answer["result"])


@ERAS
def test_a_server_may_ask_its_client_only_for_what_the_owner_allowed(project: Path, era: Era, mode: Mode) -> None:
    for server, grants in GRANTS.items():
        add(project, era, server, **grants)
    owner_does(project, "mcp", action="allow", server="open", roots=True, sampling=True, questions=True)

    refused, sampling, answered, in_part, secret = calls(
        project,
        mode,
        ("nosy", ["roots", "question"]),
        ("nosy", ["sampling"]),
        ("open", ALL),
        ("rooted", ["roots", "question"]),
        ("asking", ["secret", "question"]),
    )

    check_refused(refused, sampling, era)
    check_answered(answered)
    assert in_part.asked == ["roots"]
    assert content_of(in_part.answer)["announced"].keys() == {"roots"}
    # A form that asks for a secret is refused even if questions are allowed.
    assert secret.asked == ["MCP server asking asks: Approve?"]
    declined = content_of(secret.answer)["answers"]["secret"]
    assert declined.get("code", declined.get("action")) == (-32602 if era == "legacy" else "decline")
    assert "asks for a secret (github_token), which MCP forbids" in " ".join(secret.answer["notices"])


def check_refused(refused: Heard, sampling: Heard, era: Era) -> None:
    """Check that a server that was not allowed to ask was refused, and that its call continued."""
    assert refused.asked == sampling.asked == []
    assert not refused.is_error
    heard = content_of(refused.answer)
    assert heard["announced"] == {}
    notices = " ".join(refused.answer["notices"])
    assert "`kiwi mcp allow nosy --roots`" in notices
    assert "`kiwi mcp allow nosy --questions`" in notices
    if era == "legacy":
        assert [heard["answers"][word]["code"] for word in ("roots", "question")] == [-32601, -32601]
        assert content_of(sampling.answer)["answers"]["sampling"]["code"] == -32601
    else:
        assert heard["answers"] == {"roots": {"roots": []}, "question": {"action": "decline"}}
        assert sampling.is_error
        assert "not allowed to use the models of clients" in sampling.answer["message"]
        assert sampling.answer["suggestion"] == "The owner can allow it: `kiwi mcp allow nosy --sampling`."


def check_answered(answered: Heard) -> None:
    """Check that a server that was allowed to ask was answered, and that its form names it."""
    assert not answered.is_error, answered.answer
    assert sorted(answered.asked) == ["MCP server open asks: Approve?", "roots", "sampling"]
    heard = content_of(answered.answer)
    assert heard["announced"].keys() == {"elicitation", "roots", "sampling"}
    assert heard["answers"]["roots"]["roots"][0]["uri"] == "file:///home/ann"
    assert heard["answers"]["sampling"]["content"]["text"] == "42"
    assert heard["answers"]["question"] == {"action": "accept", "content": {"answer": "yes"}}


def test_client_requests_in_a_manifest_are_granted_when_the_owner_accepts_it(project: Path) -> None:
    add(project, "legacy")
    owner_does(project, "mcp", action="remove", server="nosy")
    folder = project / ".ai" / "tools"
    folder.mkdir(exist_ok=True)
    (folder / "nosy.yaml").write_text(
        "tool_id: nosy\ntool_type: mcp_server\nversion: 1.0.0\nexecutor: subprocess\ndescription: Asks\n"
        f"needs: {{client: [sampling]}}\nconfig: {{transport: stdio, command: {sys.executable}, "
        f"args: [{project}/nosy.py, legacy]}}\n"
    )
    (folder / "pry.yaml").write_text(
        "tool_id: pry\ntool_type: mcp_tool\nversion: 1.0.0\nexecutor: nosy\ndescription: Asks\n"
        "config: {mcp_tool_name: pry}\n"
    )

    def given() -> JsonObject:
        return as_object(owner_does(project, "execute", action="why", item_id="pry").get("given"))

    assert "client" not in given()
    accepted = owner_does(project, "mcp", action="accept", server="nosy")
    assert "it may ask the clients that call it for sampling" in str(accepted["message"])
    assert given()["client"] == ["sampling"]


def test_the_list_and_why_show_what_a_server_may_ask(project: Path) -> None:
    add(project, "legacy")
    allowed = owner_does(project, "mcp", action="allow", server="nosy", roots=True, questions=True)

    assert allowed["needs"] == {"client": ["roots", "questions"]}
    listed = as_object(owner_does(project, "mcp", action="list", server="nosy"))
    assert as_object(listed["needs"]) == {"client": ["roots", "questions"]}
    why = owner_does(project, "execute", action="why", item_id="mcp/nosy/pry")
    assert as_object(why["given"])["client"] == ["roots", "questions"]
