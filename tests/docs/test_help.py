"""Help pages: their examples work unchanged, in the order of each page, in an empty project."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from mcp import Client, StdioServerParameters
from mcp_types import ElicitResult

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.tool_list import help_topics
from kiwi_mcp.kernel.verb import ACTIONS, SearchRequest
from kiwi_mcp.kernel.verbs.help import page
from kiwi_mcp.kernel.verbs.load import LoadRequest

PLACE = "/absolute/path/to/project"
RESULTS: Mapping[str, list[Json]] = {
    "skill": [{"skills": []}],
    "memory": [{"query": "tea", "matches": [], "omitted_matches": 0}],
    "files": [{"query": "tea", "matches": [], "omitted_matches": 0}],
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
                    "action": "Run git diff main...{input:branch} and read all of it.",
                },
                {
                    "name": "judge",
                    "description": "List what to fix",
                    "action": "List faults, the worst first, each with its line.",
                },
            ],
            "text": """\
# review_change

Review a change before it is merged

## Inputs

- branch: feature/x (The branch to review)

## Steps

1. read: Read the difference
   Run git diff main...feature/x and read all of it.
2. judge: List what to fix
   List faults, the worst first, each with its line.
""",
            "instructions": "Follow `text` step by step with your own tools, within `permissions` and `limits`, and "
            "answer with `outputs`.",
            "model": {"tier": "balanced"},
            "git_checkpoint": "explicit",
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
    "code": [
        {"value": 3},
        {"value": 8},
        {"value": 11, "printed": "articles: 3\n"},
        {"value": ["coal"]},
        {"value": ["jam"]},
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
        response = (await kernel.call("help", {"topic": topic})).content
        text = json.dumps(response["examples"]).replace(PLACE, str(project))
        return [await kernel.call(example["tool"], example["arguments"]) for example in json.loads(text)]
    finally:
        await kernel.aclose()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-05")
@pytest.mark.parametrize("topic", help_topics())
async def test_every_example_of_a_page_succeeds_in_an_empty_project(topic: str, project: Path) -> None:
    answers = await replay(topic, project)
    assert [answer.content for answer in answers if answer.is_error] == []
    runs = [answer.content for answer in answers if answer.content.get("action") == "run"]
    assert [run["result"] for run in runs if run["status"] != "planned"] == RESULTS.get(topic, [])


@pytest.mark.req("K-ME-05")
async def test_a_model_without_knowledge_creates_signs_and_runs_a_tool_from_help_alone(
    project: Path, kiwi: Path
) -> None:
    """It sees four tools, asks for help, opens the topic that the overview names, and sends what it finds there."""

    async def agree(context: object, params: object) -> ElicitResult:
        return ElicitResult(action="accept", content={"approve": True})

    server = StdioServerParameters(command="kiwi", args=["serve"], env=dict(os.environ))
    # What a model wrote is shown to the owner before it first runs.
    asking = Client(server, read_timeout_seconds=120, elicitation_callback=agree)
    async with asyncio.timeout(120), asking as client:

        async def send(tool: str, arguments: JsonObject) -> JsonObject:
            result = await client.call_tool(tool, dict(arguments))
            assert not result.is_error, result.content
            return as_object(result.structured_content)

        assert "help" in {tool.name for tool in (await client.list_tools()).tools}
        overview = await send("help", {})
        assert "execute" in as_list(overview["topics"])
        response = await send("help", {"topic": "execute"})
        examples = json.loads(json.dumps(response["examples"]).replace(PLACE, str(project)))
        answers = [await send(example["tool"], example["arguments"]) for example in examples]
        done = {as_text(answer["action"]): answer for answer in answers}
    assert done["create"]["status"] == "created"
    assert done["sign"]["status"] == "signed"
    assert (done["run"]["status"], done["run"]["result"]) == ("success", {"text": "HELLO"})
    assert done["run"]["integrity"] == "hashed"
    assert done["why"]["would_run"] is True


@pytest.mark.req("K-ME-05")
async def test_help_describes_this_installation(project: Path) -> None:
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "greet.py").write_text(
        '__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = "python_runtime"\n', encoding="utf-8"
    )
    response = (await Kernel().call("help", {"project_path": str(project)})).content
    held = as_object(response["installation"])
    assert as_object(held["items_by_source"])["project"] == 1
    assert "python_runtime" in as_list(held["built_in"])


def test_the_pages_name_every_action_and_every_request_key() -> None:
    tables = page("execute") + page("registry")
    assert [action for action in ACTIONS if f"| `{action}`" not in tables] == []
    keys = {"search": {*SearchRequest.__struct_fields__}, "load": {*LoadRequest.__struct_fields__}}
    for topic, names in keys.items():
        words = {*re.findall(r"[`\"](\w+)[`\"]", page(topic))}
        assert sorted(names - words - {"length"}) == []


def test_every_code_on_the_errors_page_exists() -> None:
    rows = re.findall(r"^\|.*\|$", page("errors"), re.MULTILINE)[2:]
    named = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert len(named) >= len(rows)
    assert sorted(named - {*codes(), "execution_failed", "timeout"}) == []
