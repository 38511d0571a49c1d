"""Parameters have several declaration forms and one schema."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from kiwi_mcp.domain.errors import InvalidArguments, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.json_schema import schema_faults
from kiwi_mcp.manifest.parameters import accept, to_schema

PARAMETERS: Json = [
    {"name": "email", "type": "string", "required": True},
    {"name": "count", "type": "int", "default": 3, "min": 1, "max": 10},
    {"name": "depth", "type": "string", "enum": ["shallow", "deep"], "default": "shallow"},
    {"name": "flag", "type": "bool"},
    {"name": "extra", "type": "any"},
]


def schema(declared: Json) -> JsonObject:
    found, issues = to_schema(declared)
    assert not issues
    return found


def refused(declared: Json, given: JsonObject) -> tuple[Issue, ...]:
    with pytest.raises(InvalidArguments) as error:
        accept("tool", schema(declared), given)
    return error.value.issues


def test_the_list_form_becomes_a_closed_schema() -> None:
    assert schema(PARAMETERS) == snapshot(
        {
            "type": "object",
            "properties": {
                "email": {"type": "string"},
                "count": {"type": "integer", "default": 3, "minimum": 1, "maximum": 10},
                "depth": {"type": "string", "enum": ["shallow", "deep"], "default": "shallow"},
                "flag": {"type": "boolean"},
                "extra": {},
            },
            "required": ["email"],
            "additionalProperties": False,
        }
    )


def test_a_mapping_of_names_and_a_json_schema_mean_the_same() -> None:
    named = schema({"email": {"type": "str", "required": True}, "count": "integer"})
    written = schema({"properties": {"email": {"type": "string"}, "count": {"type": "integer"}}, "required": ["email"]})
    assert named == written


def test_an_open_schema_stays_open() -> None:
    assert schema({"type": "object", "additionalProperties": True})["additionalProperties"] is True
    assert schema({"allOf": [{"properties": {"a": {}}}]})["unevaluatedProperties"] is False
    assert accept("t", schema({"allOf": [{"properties": {"a": {}}}]}), {"a": 1}) == {"a": 1}


def test_list_types_and_nulls_have_several_spellings() -> None:
    found = schema(
        [
            {"name": "a", "type": "list[str]"},
            {"name": "b", "type": "string", "nullable": True},
            {"name": "c", "type": "int|null"},
        ]
    )
    assert found["properties"] == {
        "a": {"items": {"type": "string"}, "type": "array"},
        "b": {"type": ["string", "null"]},
        "c": {"type": ["integer", "null"]},
    }


def test_each_issue_of_a_declaration_is_reported() -> None:
    _, issues = to_schema(
        [{"type": "string"}, {"name": "a", "type": "strng"}, {"name": "a"}, {"name": "b", "required": "yes"}, 5]
    )
    assert [issue.place for issue in issues] == [
        "parameters[0]", "parameters[1].type", "parameters[2]", "parameters[3].required", "parameters[4]",
    ]  # fmt: skip
    assert "`string`" in issues[1].fix


@pytest.mark.req("K-RT-04")
def test_defaults_are_applied_also_within_objects() -> None:
    nested: Json = {
        "type": "object",
        "properties": {
            "page": {"type": "object", "properties": {"size": {"type": "integer", "default": 10}}},
            "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}},
        },
        "$defs": {"row": {"type": "object", "properties": {"ok": {"type": "boolean", "default": False}}}},
    }
    assert accept("t", schema(PARAMETERS), {"email": "a@b"}) == {"email": "a@b", "count": 3, "depth": "shallow"}
    assert accept("t", schema(nested), {"page": {}, "rows": [{}]}) == {"page": {"size": 10}, "rows": [{"ok": False}]}


def test_a_required_parameter_with_a_default_may_be_left_out() -> None:
    assert accept("t", schema([{"name": "base", "type": "string", "required": True, "default": "main"}]), {}) == {
        "base": "main"
    }


@pytest.mark.parametrize("value", [False, None, "", 0, "é 🥝", "--flag", "${HOME}", "{x}", [], {}, 1.5, "a\nb"])
def test_values_arrive_intact(value: Json) -> None:
    assert accept("t", schema([{"name": "PATH", "type": "any"}]), {"PATH": value}) == {"PATH": value}


@pytest.mark.case("INJ-07")
@pytest.mark.req("K-RT-04")
def test_every_issue_is_listed_at_once() -> None:
    issues = refused(PARAMETERS, {"count": "3", "depth": "deeep", "flag": 1, "emial": "x"})
    assert sorted(issue.place for issue in issues) == ["count", "depth", "email", "emial", "flag"]
    assert any("Did you mean `email`?" in issue.fix for issue in issues)


@pytest.mark.case("INJ-10")
@pytest.mark.parametrize("name", ["command", "args", "cwd", "env", "executor", "isolation", "timeout"])
def test_kernel_parameter_names_are_refused_unless_declared(name: str) -> None:
    assert refused(PARAMETERS, {"email": "a", name: "x"})[0].place == name


@pytest.mark.parametrize("value", ["a\0b", "\ud800", float("nan"), float("inf"), 2**53, 10**400, b"x"])
def test_values_that_json_cannot_carry_are_refused(value: Json) -> None:
    assert refused([{"name": "a", "type": "any"}], {"a": [value]})[0].place == "a[0]"


def test_deep_values_are_refused() -> None:
    value: Json = 1
    for _ in range(5_000):
        value = [value]
    assert "deep" in refused([{"name": "a", "type": "any"}], {"a": value})[0].reason


@pytest.mark.case("INJ-09")
def test_parameters_over_the_limit_are_refused_quickly() -> None:
    started = time.process_time()
    with pytest.raises(TooLarge):
        accept("t", schema([{"name": "a", "type": "string"}]), {"a": "x" * 50_000_000})
    assert time.process_time() - started < 3


@pytest.mark.case("INJ-08")
def test_a_hostile_pattern_costs_linear_time() -> None:
    hostile = schema([{"name": "a", "type": "string", "pattern": "^(a+)+$"}])
    started = time.process_time()
    with pytest.raises(InvalidArguments):
        accept("t", hostile, {"a": "a" * 100_000 + "!"})
    assert time.process_time() - started < 3


@pytest.mark.case("INJ-08")
@pytest.mark.parametrize(
    ("tricky", "reason"),
    [
        ({"$ref": "https://evil.test/schema.json"}, "reference"),
        ({"properties": {"a": {"$ref": "file:///etc/passwd"}}}, "reference"),
        ({"properties": {f"p{n}": {} for n in range(10_000)}}, "10,000 properties"),
        ({"properties": {"a": {"pattern": "("}}}, "pattern"),
        ({"properties": {"a": {"pattern": "(?=x)y"}}}, "pattern"),
        ({"properties": {"a": {"pattern": "x" * 2_000}}}, "pattern"),
        ({"properties": {"a": {"pattern": "(a{1000}){1000}"}}}, "pattern"),
        ({"properties": {"a": {"type": "strin"}}}, "JSON Schema"),
    ],
)
def test_unsafe_schemas_are_issues(tricky: JsonObject, reason: str) -> None:
    assert reason in schema_faults(tricky, "parameters")[0].reason


@pytest.mark.case("INJ-08")
def test_a_schema_that_refers_to_itself_is_bounded() -> None:
    recursive: JsonObject = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    endless: JsonObject = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert schema_faults(recursive, "parameters") == []
    assert accept("t", recursive, {"a": {"a": {}}}) == {"a": {"a": {}}}
    with pytest.raises(InvalidArguments):
        accept("t", recursive, {"a": {"b": 1}})
    schema_faults(endless, "parameters")
    assert accept("t", endless, {}) == {}


def test_data_keys_are_not_read_as_references() -> None:
    assert schema_faults({"properties": {"a": {"default": {"$ref": "https://x"}}}}, "parameters") == []


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
        max_size=5,
    )
)
@settings(max_examples=50, deadline=None)
def test_accepted_arguments_are_the_given_ones_and_defaults(given: JsonObject) -> None:
    open_schema = schema({"type": "object", "additionalProperties": True, "properties": {"zz_count": {"default": 3}}})
    try:
        accepted = accept("t", open_schema, given)
    except InvalidArguments:
        return
    assert accepted == {"zz_count": 3, **given}
