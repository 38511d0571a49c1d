"""Help is enough: its examples work as they stand, in the order of each page, in a project that holds nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import ElicitResult

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.help import page, topics
from kiwi_mcp.kernel.requests import Action, LoadRequest, Request, SearchRequest

PLACE = "/absolute/path/to/project"
RESULTS: Mapping[str, list[Json]] = {
    "create": [2, {"content": "Tables are plural, columns are not.", "links": []}],
    "directive": [
        {
            "name": "review_change",
            "description": "Review a change before it is merged",
            "version": "1.0.0",
            "inputs": [{"name": "branch", "type": "string", "required": True, "description": "The branch to review"}],
            "process": [
                {
                    "name": "read",
                    "description": "Read the difference",
                    "action": "Run git diff main...{branch} and read all of it.",
                },
                {
                    "name": "judge",
                    "description": "Say what to mend",
                    "action": "List faults, the worst first, each with its line.",
                },
            ],
            "provided_inputs": {"branch": "feature/x"},
            "integrity": "unsigned",
            "input_schema": {
                "type": "object",
                "properties": {"branch": {"type": "string", "description": "The branch to review"}},
                "required": ["branch"],
                "additionalProperties": False,
            },
            "permissions": {},
        }
    ],
    "execute": [{"text": "HELLO"}],
    "knowledge": [
        {
            "content": "Try again on 429 and 503 only, at most three times. See [[timeouts]].",
            "links": ["timeouts"],
        }
    ],
    "variables": ["nobody"],
    "registry": ["hello"],
    "runtimes": ["iwik"],
    "tool": ["Hello, Ada!"],
}
"""What the runs on each page give."""


def codes(base: type[KiwiError] = KiwiError) -> Iterator[str]:
    yield base.code
    for child in base.__subclasses__():
        yield from codes(child)


async def replay(topic: str, project: Path) -> list[Answer]:
    """Ask for a page and send its examples, one after the other, knowing nothing else."""
    kernel = Kernel()
    try:
        told = (await kernel.call("help", {"topic": topic})).content
        text = json.dumps(told["examples"]).replace(PLACE, str(project))
        return [await kernel.call(example["tool"], example["arguments"]) for example in json.loads(text)]
    finally:
        await kernel.aclose()


@pytest.mark.req("K-ME-05")
@pytest.mark.parametrize("topic", topics())
def test_every_example_of_a_page_succeeds_in_an_empty_project(topic: str, project: Path) -> None:
    answers = asyncio.run(replay(topic, project))
    assert [answer.content for answer in answers if answer.is_error] == []
    runs = [answer.content for answer in answers if answer.content.get("action") == "run"]
    assert [run["result"] for run in runs if run["status"] != "planned"] == RESULTS.get(topic, [])


@pytest.mark.req("K-ME-05")
def test_a_model_that_knows_nothing_creates_signs_and_runs_a_tool_from_help_alone(project: Path, kiwi: Path) -> None:
    """It sees four tools, asks for help, opens the topic that the overview names, and sends what it finds there."""

    async def agree(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    async def model() -> Mapping[str, JsonObject]:
        server = StdioServerParameters(command="kiwi", args=["serve"], env=dict(os.environ))
        # What a model wrote is shown to the owner before it first runs.
        asking = Client(server, read_timeout_seconds=20, elicitation_callback=agree)
        async with asyncio.timeout(40), asking as client:

            async def send(tool: str, arguments: JsonObject) -> JsonObject:
                result = await client.call_tool(tool, dict(arguments))
                assert not result.is_error, result.content
                return as_object(result.structured_content)

            assert "help" in {tool.name for tool in (await client.list_tools()).tools}
            overview = await send("help", {})
            assert "execute" in as_list(overview["topics"])
            told = await send("help", {"topic": "execute"})
            examples = json.loads(json.dumps(told["examples"]).replace(PLACE, str(project)))
            answers = [await send(example["tool"], example["arguments"]) for example in examples]
            return {as_text(answer["action"]): answer for answer in answers}

    done = asyncio.run(model())
    assert done["create"]["status"] == "created"
    assert done["sign"]["status"] == "signed"
    assert (done["run"]["status"], done["run"]["result"]) == ("success", {"text": "HELLO"})
    assert done["run"]["integrity"] == "signed"
    assert done["why"]["would_run"] is True


@pytest.mark.req("K-ME-05")
def test_help_says_what_this_installation_holds(project: Path) -> None:
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "greet.py").write_text(
        '__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n', encoding="utf-8"
    )
    told = asyncio.run(Kernel().call("help", {"project_path": str(project)})).content
    held = as_object(told["installation"])
    assert as_object(held["items_by_source"])["project"] == 1
    assert "python_runtime" in as_list(held["built_in"])


def test_the_pages_name_every_action_and_every_word_of_a_request() -> None:
    tables = page("execute") + page("registry")
    assert [action for action in get_args(Action) if f"| `{action}`" not in tables] == []
    requests: Mapping[str, type[Request]] = {"search": SearchRequest, "load": LoadRequest}
    for topic, request in requests.items():
        words = {*re.findall(r"[`\"](\w+)[`\"]", page(topic))}
        assert sorted({*request.model_fields} - words - {"length"}) == []


def test_every_code_on_the_page_of_errors_exists() -> None:
    rows = re.findall(r"^\|.*\|$", page("errors"), re.MULTILINE)[2:]
    named = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert len(named) >= len(rows)
    assert sorted(named - {*codes(), "execution_failed", "timeout"}) == []
