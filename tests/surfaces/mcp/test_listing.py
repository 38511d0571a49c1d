"""Offers as the lists of MCP, for clients of every revision."""

from __future__ import annotations

import pytest
from mcp_types import ToolAnnotations

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Hints, Offer, Offers
from kiwi_mcp.surfaces.mcp.handlers import prompts_of, resources_of, templates_of, tools_of


def names(offers: Offers, revision: str = "2026-07-28") -> list[str]:
    return [tool.name for tool in tools_of(offers, revision=revision)]


def test_meta_tools_come_first_and_only_if_offered() -> None:
    offers = Offers(("search", "execute"), (Offer("b", "user/local/b@1.0.0"), Offer("a", "user/local/a@1.0.0")))
    assert names(offers) == ["search", "execute", "b", "a"]


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-11-25", "2026-07-28"])
def test_one_unsupported_schema_omits_only_one_tool(revision: str) -> None:
    odd = Offer("odd", "user/local/odd@1.0.0", parameters={"$schema": 7})
    assert names(Offers(("search",), (odd, Offer("even", "user/local/even@1.0.0"))), revision) == ["search", "even"]


def test_a_result_schema_that_is_not_an_object_is_declared_to_supporting_clients() -> None:
    offers = Offers((), (Offer("rows", "user/local/rows@1.0.0", outputs={"type": "array"}),))
    declared = {
        revision: tools_of(offers, revision=revision)[0].output_schema
        for revision in ("2025-03-26", "2025-11-25", "2026-07-28")
    }
    assert declared == {"2025-03-26": None, "2025-11-25": None, "2026-07-28": {"type": "array"}}


def test_a_schema_is_sent_as_written() -> None:
    schema: JsonObject = {
        "type": "object",
        "title": "T",
        "$defs": {"a": {"$anchor": "x"}},
        "allOf": [{"anyOf": [{}]}],
        "if": {},
    }
    offer = Offer("all", "user/local/all@1.0.0", "All", "Takes all", schema, hints=Hints(is_idempotent=True))
    offers = Offers((), (offer,))
    (tool,) = tools_of(offers, revision="2026-07-28")
    assert (tool.title, tool.description, tool.input_schema) == ("All", "Takes all", schema)
    assert tool.annotations == ToolAnnotations(idempotent_hint=True)
    assert tool.output_schema is None


def test_arguments_of_a_prompt_say_which_are_required() -> None:
    schema: JsonObject = {"properties": {"a": {"description": "A thing"}, "b": {}}, "required": ["a"]}
    (prompt,) = prompts_of(Offers((), prompts=(Offer("p", "user/local/p@1.0.0", parameters=schema),)))
    assert [(one.name, one.description, one.required) for one in prompt.arguments or ()] == [
        ("a", "A thing", True),
        ("b", None, False),
    ]


def test_resources_have_a_name_beside_their_uri() -> None:
    text, any_text = Offer("a://b", "x", "B", mime_type="text/plain"), Offer("a://{c}", "y")
    offers = Offers((), resources=(text,), templates=(any_text,))
    (resource,), (template,) = resources_of(offers), templates_of(offers)
    assert (resource.uri, resource.name, resource.mime_type) == ("a://b", "B", "text/plain")
    assert (template.uri_template, template.name) == ("a://{c}", "a://{c}")
