from __future__ import annotations

import json
from contextlib import suppress
from time import process_time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.names import is_tool_id
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.openapi import OpenApiImport, tools_from_openapi
from kiwi_mcp.manifest.templates import placeholders, variables


def document(paths: Json, **words: Json) -> str:
    return json.dumps(
        {
            "openapi": "3.0.3",
            "info": {"title": "Small", "version": "1"},
            "servers": [{"url": "https://small.example"}],
            "paths": paths,
            **words,
        }
    )


def posting(schema: Json, **schemas: Json) -> JsonObject:
    """The only tool of a document with one operation that has this body."""
    operation: Json = {"operationId": "post", "requestBody": {"content": {"application/json": {"schema": schema}}}}
    text = document({"/x": {"post": operation}}, components={"schemas": schemas})
    (tool,) = tools_from_openapi(text, what="The document").manifests
    return tool


def value_schema(schema: Json, **schemas: Json) -> JsonObject:
    """What becomes of a schema that is a property of a body."""
    tool = posting({"type": "object", "properties": {"value": schema}}, **schemas)
    return as_object(as_object(as_object(tool["parameters"])["properties"])["value"])


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "enum": ["a"], "nullable": True}, {"type": ["string", "null"], "enum": ["a", None]}),
        ({"type": ["integer", "null"], "minimum": 1}, {"type": ["integer", "null"], "minimum": 1}),
        ({"type": "number", "maximum": 5, "exclusiveMaximum": True}, {"type": "number", "exclusiveMaximum": 5}),
        ({"type": "number", "exclusiveMinimum": 5}, {"type": "number", "exclusiveMinimum": 5}),
        ({"type": "file", "minLength": "3", "enum": {}, "required": True}, {}),
        ({"type": "string", "example": "x", "xml": {}, "externalDocs": {}, "title": "T"}, {"type": "string"}),
        ({"type": "integer", "maximum": 1e300}, {"type": "integer"}),
        ({"type": "string", "pattern": "^a+$"}, {"type": "string", "pattern": "^a+$"}),
        ({"type": "string", "pattern": "(?=x)"}, {"type": "string"}),
        ({"not": {"type": "string"}, "type": "string"}, {"type": "string"}),
        (True, {}),
        ("nonsense", {}),
        ({"type": "string", "default": "x"}, {"type": "string", "description": 'Default: "x".'}),
        (
            {"oneOf": [{"type": "integer"}, {"type": "number"}]},
            {"anyOf": [{"type": "integer"}, {"type": "number"}]},
        ),
        ({"oneOf": [{"type": "integer"}, {"$ref": "#/nowhere"}]}, {}),
    ],
)
def test_a_schema_is_read_as_json_schema_and_never_stricter(written: Json, read: JsonObject) -> None:
    assert value_schema(written) == read


def test_references_are_inlined() -> None:
    schemas: dict[str, Json] = {
        "Tag": {"type": "object", "required": ["name"], "properties": {"name": {"$ref": "#/components/schemas/Name"}}},
        "Name": {"type": "string", "maxLength": 9},
    }
    read = value_schema({"type": "array", "items": {"$ref": "#/components/schemas/Tag"}}, **schemas)
    assert read == {
        "type": "array",
        "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string", "maxLength": 9}}},
    }


def test_keys_beside_a_reference_count_too() -> None:
    base: Json = {"type": "object", "properties": {"a": {"type": "string"}}}
    read = value_schema(
        {"$ref": "#/components/schemas/Base", "description": "Mine.", "properties": {"b": {}}, "required": ["a", "b"]},
        Base=base,
    )
    assert read["description"] == "Mine."
    assert set(as_object(read["properties"])) == {"a", "b"}


@pytest.mark.case("INJ-08")
@pytest.mark.parametrize(
    "schemas",
    [
        {"A": {"type": "object", "properties": {"next": {"$ref": "#/components/schemas/A"}}}},
        {"A": {"$ref": "#/components/schemas/B"}, "B": {"$ref": "#/components/schemas/A"}},
        {"A": {"allOf": [{"$ref": "#/components/schemas/A"}, {"type": "object", "properties": {"x": {}}}]}},
        {"A": {"items": {"oneOf": [{"$ref": "#/components/schemas/A"}, {"$ref": "#/components"}]}}},
        {"A": {"$ref": "#/components/schemas/A"}},
        {"A": {"$ref": "#"}},
    ],
)
def test_a_recursive_schema_is_cut(schemas: dict[str, Json]) -> None:
    tool = posting({"type": "object", "properties": {"value": {"$ref": "#/components/schemas/A"}}}, **schemas)
    assert "$ref" not in compact(tool)


@pytest.mark.case("INJ-08")
@pytest.mark.parametrize(
    "reference", ["https://evil.example/s.json#/A", "file:///etc/passwd", "other.yaml", "#anchor", 7]
)
def test_an_external_reference_is_never_followed_and_loosens_the_schema(reference: Json) -> None:
    read = value_schema({"$ref": reference})
    assert "any value is accepted" in as_text(read.pop("description") if isinstance(read, dict) else "")
    assert read == {}


@pytest.mark.case("INJ-08")
def test_references_that_multiply_are_bounded_in_time_and_size() -> None:
    # Each schema holds the next one ten times: written out, 10^30 nodes.
    schemas: dict[str, Json] = {
        f"S{level}": {
            "type": "object",
            "properties": {f"p{n}": {"$ref": f"#/components/schemas/S{level + 1}"} for n in range(10)},
        }
        for level in range(30)
    }
    started = process_time()
    tool = posting({"$ref": "#/components/schemas/S0"}, **schemas)
    assert process_time() - started < 4
    assert len(compact(tool)) < 60_000
    assert "p9" in as_object(as_object(tool["parameters"])["properties"])


@pytest.mark.case("INJ-08")
def test_a_long_chain_of_references_is_cut() -> None:
    schemas: dict[str, Json] = {f"S{n}": {"allOf": [{"$ref": f"#/components/schemas/S{n + 1}"}]} for n in range(5_000)}
    assert value_schema({"$ref": "#/components/schemas/S0"}, **schemas) is not None


@pytest.mark.case("INJ-08")
def test_ten_thousand_properties_become_one_loose_body() -> None:
    tool = posting({"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(10_000)}})
    properties = as_object(as_object(tool["parameters"])["properties"])
    assert properties == {"body": {"type": "object", "description": "The body."}}


@pytest.mark.case("INJ-08")
def test_a_hostile_pattern_is_safe_or_removed() -> None:
    read = value_schema({"type": "string", "pattern": "^(a+)+$"})
    started = process_time()
    faults(read, "a" * 5_000 + "!")
    assert process_time() - started < 3


def test_an_endless_path_is_skipped() -> None:
    made = tools_from_openapi(document({"/" + "x" * 1_000_000: {"get": {}}}), what="The document")
    assert made.manifests == ()
    assert len(compact(made.skipped[0].to_json())) < 1_000


def test_a_bound_of_nineteen_digits_is_omitted() -> None:
    text = (
        "openapi: 3.0.0\ninfo: {title: Small}\nservers: [{url: https://small.example}]\npaths: {/x: {get: {parameters: "
    )
    text += "[{name: n, in: query, schema: {type: integer, maximum: 9223372036854775807}}]}}}"
    (tool,) = tools_from_openapi(text, what="The document").manifests
    assert as_object(as_object(tool["parameters"])["properties"]) == {"n": {"type": "integer"}}


@pytest.mark.case("BOMB-02")
@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "a: " + "[" * 5_000, "- " * 5_000])
def test_a_deeply_nested_document_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest):
        tools_from_openapi(text, what="The document")


@pytest.mark.case("BOMB-03")
def test_a_document_over_the_limit_is_refused_at_once() -> None:
    text = "x" * 16_000_001
    started = process_time()
    with pytest.raises(InvalidManifest):
        tools_from_openapi(text, what="The document")
    assert process_time() - started < 4


@pytest.mark.case("PATH-01")
@pytest.mark.parametrize(
    "name", ["../x", "a/b", ".", "con", "x" * 300, "UPPER", "..\\..\\x", "\u202eevil", "日本", "-", "~/.ssh"]
)
def test_no_operation_id_makes_an_unsafe_name(name: str) -> None:
    made = tools_from_openapi(document({"/x": {"get": {"operationId": name}}}), what="The document", prefix="con")
    assert all(is_tool_id(as_text(tool["tool_id"])) for tool in made.manifests)
    assert len(made.manifests) == 1


SMUGGLED = "${AWS_SECRET_ACCESS_KEY}"


@pytest.mark.parametrize(
    "paths",
    [
        {f"/{SMUGGLED}": {"get": {}}},
        {f"/x?{SMUGGLED}={SMUGGLED}": {"get": {}}},
        {"/x": {"get": {"parameters": [{"name": SMUGGLED, "in": "query", "schema": {}}]}}},
        {"/x": {"get": {"parameters": [{"name": SMUGGLED, "in": "header", "schema": {}}]}}},
        {
            "/{a}": {
                "get": {"parameters": [{"name": "a", "in": "path", "style": "matrix", "schema": {"default": SMUGGLED}}]}
            }
        },
        {"/x": {"get": {"responses": {"200": {"content": {SMUGGLED: {}}}}}}},
        {"/x": {"get": {"servers": [{"url": f"https://evil.example/{SMUGGLED}"}]}}},
        {"/x": {"get": {"servers": [{"url": "https://evil.example/{v}", "variables": {"v": {"default": SMUGGLED}}}]}}},
        {"/x": {"get": {"servers": [{"url": f"https://{SMUGGLED}.evil.example"}]}}},
        {"/x": {"post": {"requestBody": {"content": {f"text/{SMUGGLED}": {}}}}}},
        {
            "/x": {
                "post": {
                    "requestBody": {
                        "content": {
                            "application/json": {
                                "schema": {"type": "object", "properties": {SMUGGLED: {"const": SMUGGLED}}}
                            }
                        }
                    }
                }
            }
        },
    ],
)
def test_a_document_cannot_name_a_variable_of_the_owner(paths: Json) -> None:
    for tool in tools_from_openapi(document(paths), what="The document").manifests:
        assert variables(tool["config"]) == ()
        declared = as_object(as_object(tool["parameters"])["properties"])
        assert set(placeholders(tool["config"])) == set(declared)


SIGNS = st.characters(codec="utf-8", exclude_characters="\0")
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(SIGNS, max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(SIGNS, max_size=6), inner, max_size=3),
    max_leaves=8,
)
SCHEMA_WORDS = st.sampled_from(
    [
        *("type", "properties", "items", "required", "enum", "allOf", "anyOf", "oneOf", "$ref", "nullable", "pattern"),
        *("additionalProperties", "minimum", "exclusiveMinimum", "maxLength", "format", "default", "readOnly", "const"),
    ]
)
SCHEMAS = st.recursive(
    st.sampled_from([{"type": "string"}, {"$ref": "#/components/schemas/A"}, {"type": "object"}, {}]) | JSON_VALUES,
    lambda inner: (
        st.dictionaries(SCHEMA_WORDS, inner | st.lists(inner, max_size=2), max_size=4)
        | st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(st.text(SIGNS, max_size=4), inner)}
        )
    ),
    max_leaves=12,
)


@settings(max_examples=40, deadline=None)
@given(schema=SCHEMAS, other=SCHEMAS)
def test_any_schema_gives_a_tool_with_a_usable_schema(schema: Json, other: Json) -> None:
    tool = posting(schema, A=other)
    parameters = as_object(tool["parameters"])
    assert schema_faults(parameters, "parameters") == []
    assert set(placeholders(tool["config"])) == set(as_object(parameters["properties"]))
    assert set(as_list(parameters.get("required", []))) <= set(as_object(parameters["properties"]))


OPERATIONS = st.dictionaries(
    st.sampled_from(
        ["operationId", "parameters", "requestBody", "security", "servers", "tags", "responses", "summary"]
    ),
    JSON_VALUES,
)
PATHS = st.dictionaries(
    st.text(SIGNS, max_size=8),
    st.dictionaries(st.sampled_from(["get", "post", "parameters", "$ref"]), OPERATIONS | JSON_VALUES),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(paths=PATHS)
def test_any_document_gives_tools_or_an_error(paths: Json) -> None:
    made = OpenApiImport(())
    with suppress(KiwiError):
        made = tools_from_openapi(document(paths), what="The document")
    assert all(is_tool_id(as_text(tool["tool_id"])) for tool in made.manifests)
