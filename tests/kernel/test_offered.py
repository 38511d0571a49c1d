"""An item as clients see it: callable names, and declared results."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.items import Chain, Location, Manifest, Source, Tool, TypeTraits
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.tool_names import callable_names, offer_of
from kiwi_mcp.policy.preferences import CALLABLE

IDS = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,127}", fullmatch=True)
SOURCES: st.SearchStrategy[Source] = st.sampled_from(["project", "user", "registry", "mcp", "builtin"])


def a_tool(tool_id: str = "thing", source: Source = "project", namespace: str = "local", **words: JsonObject) -> Tool:
    manifest = Manifest(tool_id, "script", "1.0.0", outputs=words.get("outputs", {}))
    return Tool(manifest, Location(source, Path("/x/tools/thing.py"), Path("/x/tools"), namespace, Path("/x")))


@settings(max_examples=60, deadline=None)
@given(tool_id=IDS, namespace=IDS, source=SOURCES)
def test_every_name_is_callable_by_clients(tool_id: str, namespace: str, source: Source) -> None:
    names = callable_names(a_tool(tool_id, source, namespace))
    assert all(CALLABLE.fullmatch(name) for name in names)


@settings(max_examples=40, deadline=None)
@given(ids=st.sets(IDS, min_size=2, max_size=2))
def test_two_items_of_one_source_never_get_the_same_name(ids: set[str]) -> None:
    one, other = (a_tool(tool_id) for tool_id in ids)
    assert callable_names(one)[0] != callable_names(other)[0]


@pytest.mark.parametrize(
    ("outputs", "declared"),
    [
        ({}, {}),
        ({"type": "object"}, {"type": "object"}),
        ({"type": "array"}, {"type": "array"}),
        ({"format": "json", "schema": {"type": "object"}}, {"type": "object"}),
        ({"format": "json"}, {}),
        ({"summary": "a text"}, {}),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/a.json"}}}, {}),
    ],
)
def test_a_result_schema_is_declared_if_the_author_wrote_one(outputs: JsonObject, declared: JsonObject) -> None:
    chain = Chain((a_tool(outputs=outputs),), (TypeTraits("process", "call"),))
    assert offer_of(chain, "thing").outputs == declared
