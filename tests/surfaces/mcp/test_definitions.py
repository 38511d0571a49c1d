from __future__ import annotations

import json

from mcp_types import Tool
from msgspec import Struct

from kiwi_mcp.domain.json import compact
from kiwi_mcp.domain.token_cost import cost_of, cost_of_json
from kiwi_mcp.kernel.token_meter import own_cost
from kiwi_mcp.kernel.verb import Request, SearchRequest, input_schema
from kiwi_mcp.kernel.verbs import BY_NAME, VERBS, load_verb
from kiwi_mcp.surfaces.generate import prepared
from kiwi_mcp.surfaces.mcp.handlers import definitions
from kiwi_mcp.surfaces.mcp.handshake import load_prepared

MOST_TOKENS = 900


class SharedPart(Struct, frozen=True):
    """A part."""

    title: str
    inner: list[int] | None = None


class OddRequest(Request, frozen=True, kw_only=True):
    """A request with a shared part."""

    title: SharedPart
    either: int | str = 3


def wire_form(tool: Tool) -> str:
    return compact(tool.model_dump(mode="json", by_alias=True, exclude_none=True))


def test_a_client_gets_search_load_execute_and_help_and_nothing_else() -> None:
    assert [tool.name for tool in definitions()] == ["search", "load", "execute", "help"]


def test_all_definitions_together_cost_less_than_nine_hundred_tokens() -> None:
    assert cost_of("\n".join(map(wire_form, definitions()))).tokens < MOST_TOKENS


def test_a_report_of_a_definition_matches_what_a_client_is_sent() -> None:
    for tool in definitions():
        sent = tool.model_dump(mode="json", by_alias=True, exclude_none=True)
        assert own_cost(tool.name) == cost_of_json(
            {word: sent[word] for word in ("name", "description", "inputSchema")}
        )


def test_a_schema_contains_every_parameter_of_its_request_and_no_reference() -> None:
    for tool in definitions():
        request = BY_NAME[tool.name].envelope or load_verb(tool.name, "").request
        assert list(tool.input_schema["properties"]) == list(request.__struct_fields__)
        assert all(word not in wire_form(tool) for word in ("$ref", "$defs", "anyOf", "maxLength"))


def test_defaults_choices_and_descriptions_survive_the_shortening() -> None:
    shown = dict(input_schema(SearchRequest))["properties"]
    assert isinstance(shown, dict)
    assert shown["source"] == {
        "default": "local",
        "description": "local = project, user, mcp; all adds registry, builtin",
        "enum": ["local", "all", "project", "user", "builtin", "registry", "mcp"],
        "type": "string",
    }


def test_a_parameter_may_be_called_title_and_shared_parts_are_inlined() -> None:
    schema = json.loads(compact(input_schema(OddRequest)))
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


def test_hints_distinguish_reading_from_acting() -> None:
    hints = {tool.name: tool.annotations for tool in definitions()}
    for verb in VERBS:
        if verb.is_meta_tool and (hint := hints[verb.name]):
            assert bool(hint.read_only_hint) is verb.is_read_only
    execute = hints["execute"]
    assert execute is not None
    assert execute.destructive_hint
    assert execute.open_world_hint


async def test_prepared_answers_match_the_sdk() -> None:
    assert load_prepared() == await prepared(), "run: python -m kiwi_mcp.surfaces.generate"
