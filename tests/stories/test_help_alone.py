"""Help is sufficient: a reader without knowledge creates, signs and runs tools from its pages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.tool_list import help_topics
from kiwi_mcp.kernel.verbs import BY_NAME

Ask = Callable[..., Answer]

PLACE = "/absolute/path/to/project"


def requests(ask: Ask, topic: str, project: Path) -> list[tuple[str, JsonObject]]:
    """The examples of a page, about this project."""
    response = json.loads(json.dumps(ask("help", topic=topic).content["examples"]).replace(PLACE, str(project)))
    return [(str(example["tool"]), as_object(example["arguments"])) for example in response]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-05")
@pytest.mark.parametrize("topic", help_topics())
def test_every_example_of_a_page_works_unchanged(topic: str, project: Path, ask: Ask) -> None:
    for verb, arguments in requests(ask, topic, project):
        answer = ask(verb, **arguments)
        assert not answer.is_error, (verb, arguments, answer.content)


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-05")
def test_a_reader_of_help_creates_signs_and_runs_a_tool(project: Path, ask: Ask) -> None:
    answers = {
        str(arguments.get("action", "run")): ask(verb, **arguments).content
        for verb, arguments in requests(ask, "execute", project)
    }

    assert answers["create"]["status"] == "created"
    assert answers["sign"]["status"] == "signed"
    assert answers["run"]["result"] == {"text": "HELLO"}
    assert answers["why"]["would_run"] is True


def test_help_describes_this_installation(project: Path, ask: Ask) -> None:
    held = as_object(ask("help").content["installation"])

    assert "python_runtime" in as_list(held["built_in"])
    assert held["items_by_source"] == {"builtin": len(as_list(held["built_in"]))}


def test_every_meta_tool_has_a_page_and_an_unknown_page_is_not_found(ask: Ask) -> None:
    for verb in (verb.name for verb in BY_NAME.values() if verb.is_meta_tool and verb.name != "help"):
        assert ask("help", topic=verb).content["topic"] == verb
    lost = ask("help", topic="cooking")
    assert (lost.content["error"], lost.content["topics"]) == ("Topic not found", list(help_topics()))
