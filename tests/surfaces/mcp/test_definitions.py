from __future__ import annotations

import asyncio
import json

from mcp_types import Tool

from kiwi_mcp.domain.json import compact
from kiwi_mcp.kernel.context.cost import cost_of, cost_of_json
from kiwi_mcp.kernel.context.sent import own_cost
from kiwi_mcp.kernel.requests import ProjectRequest, Request, SearchRequest
from kiwi_mcp.kernel.schemas import input_schema
from kiwi_mcp.kernel.verbs import BY_NAME, VERBS
from kiwi_mcp.surfaces.mcp.definitions import definitions
from kiwi_mcp.surfaces.mcp.greeting import load_prepared
from kiwi_mcp.surfaces.mcp.prepare import prepared

MOST_TOKENS = 900


def wire_form(tool: Tool) -> str:
    return compact(tool.model_dump(mode="json", by_alias=True, exclude_none=True))


def test_a_client_is_told_of_search_load_execute_and_help_and_of_nothing_else() -> None:
    assert [tool.name for tool in definitions()] == ["search", "load", "execute", "help"]


def test_all_definitions_together_cost_less_than_nine_hundred_tokens() -> None:
    assert cost_of("\n".join(map(wire_form, definitions()))).tokens < MOST_TOKENS


def test_what_a_report_says_of_a_definition_is_what_a_client_is_sent_of_it() -> None:
    for tool in definitions():
        sent = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert own_cost(tool.name) == cost_of_json(
            {word: sent[word] for word in ("name", "description", "inputSchema")}
        )


def test_a_schema_holds_every_parameter_of_its_request_and_no_reference() -> None:
    for tool in definitions():
        request = BY_NAME[tool.name].request
        assert list(tool.input_schema["properties"]) == list(request.model_fields)
        assert all(word not in wire_form(tool) for word in ("$ref", "$defs", "anyOf", "maxLength"))


def test_defaults_choices_and_descriptions_survive_the_shortening() -> None:
    shown = dict(input_schema(SearchRequest))["properties"]
    assert isinstance(shown, dict)
    whole = SearchRequest.model_json_schema()["properties"]["source"]
    assert {word: shown["source"][word] for word in ("default", "enum", "description")} == {
        word: whole[word] for word in ("default", "enum", "description")
    }


def test_a_parameter_may_be_called_title_and_a_shared_part_is_written_out() -> None:
    class Part(Request):
        """A part."""

        title: str
        inner: list[int] | None = None

    class Odd(ProjectRequest):
        """A request with a shared part."""

        title: Part
        either: int | str = 3

    schema = json.loads(compact(input_schema(Odd)))
    own = {name: schema["properties"][name] for name in ("title", "either")}
    assert own == {
        "title": {
            "description": "A part.",
            "properties": {"title": {"type": "string"}, "inner": {"items": {"type": "integer"}, "type": "array"}},
            "required": ["title"],
            "type": "object",
        },
        "either": {"anyOf": [{"type": "integer"}, {"type": "string"}], "default": 3},
    }
    assert schema["required"] == ["title"]


def test_hints_tell_reading_from_acting() -> None:
    hints = {tool.name: tool.annotations for tool in definitions()}
    for verb in VERBS:
        if verb.is_meta_tool and (hint := hints[verb.name]):
            assert bool(hint.read_only_hint) is verb.is_read_only
    execute = hints["execute"]
    assert execute is not None
    assert execute.destructive_hint
    assert execute.open_world_hint


def test_prepared_answers_are_those_the_sdk_gives_today() -> None:
    assert load_prepared() == asyncio.run(prepared()), "run: python -m kiwi_mcp.surfaces.mcp.prepare"
