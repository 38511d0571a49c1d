"""Faults of composites: all of them at once, each with its place and a way to fix it."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.composite import call_faults
from kiwi_mcp.manifest.type_specs import load_type_specs

PARAMETERS: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}, "count": {"type": "integer"}}}


def written(steps: list[Json], parameters: JsonObject = PARAMETERS, **config: Json) -> Manifest:
    """Return a composite."""
    return Manifest(
        "work", "composite", "1.0.0", description="Works", config={"steps": steps, **config}, parameters=parameters
    )


def issues(manifest: Manifest) -> list[Issue]:
    """Return the faults of a composite."""
    found = check(manifest, sheets=load_type_specs())
    assert all(issue.fix for issue in found)
    return list(found)


@pytest.mark.req("K-CO-01", "K-VA-01")
def test_all_faults_of_the_steps_are_listed_with_their_places() -> None:
    found = issues(
        written(
            [
                {"id": "a", "tool": "x", "needs": ["b"]},
                {"id": "b", "tool": "x", "needs": ["a"], "when": "((( =="},
                {"id": "n", "tool": "x", "needs": ["nowhere"], "parameters": {"p": "{town} {steps.z.result}"}},
                {"id": "c", "tool": "x", "parameters": {"p": ["{steps.d.result}", "{item}", "{steps.a.results}"]}},
                {"id": "d", "tool": "x", "on_error": "c", "ask": "Well?", "foreach": "{city}"},
                {"id": "e", "ask": "Sure?", "retry": {"attempts": 2}},
                {"id": "f", "tool": "x", "parameters": {"key": "${SECRET}", "first": "{steps.a.result.0}"}},
                {"id": "g", "tool": "x", "needs": ["g"], "when": "steps.a.result.count > steps.h.result"},
                {"id": "h", "tool": "x"},
                {"id": "h", "tool": "x"},
            ],
            output="{steps.nobody.result}",
        )
    )
    assert [(issue.place, issue.reason) for issue in found] == [
        ("config.steps[0].needs[0]", "the step `b` comes later"),
        ("config.steps[1].when", "is no expression: '==' stands where a value belongs"),
        ("config.steps[2].needs[0]", "no step has the id 'nowhere'"),
        ("config.steps[2].parameters", "`town` is not a parameter"),
        ("config.steps[2].parameters", "no step has the id 'z'"),
        ("config.steps[3].parameters", "the step `d` comes later"),
        ("config.steps[3].parameters", "`item` is known in a step with `foreach` only"),
        ("config.steps[3].parameters", "`steps.a.results` does not say what of the step is meant"),
        ("config.steps[4].ask", "cannot be asked for each element"),
        ("config.steps[4].on_error", "'c' is no later step"),
        ("config.steps[5].retry", "is for steps that call a tool"),
        ("config.steps[6].parameters", "`${SECRET}` is a variable"),
        ("config.steps[6].parameters", "`{steps.a.result.0}` is not understood"),
        ("config.steps[7].needs[0]", "is the step itself"),
        ("config.steps[7].when", "the step `h` comes later"),
        ("config.steps[9].id", "`h` is the id of another step too"),
        ("config.steps[0]", "waits for itself: a → b → a"),
        ("config.output", "no step has the id 'nobody'"),
    ]


@pytest.mark.parametrize(
    ("step", "place"),
    [
        ({"id": "0", "tool": "x"}, "config.steps[0].id"),
        ({"parameters": {}}, "config.steps[0]"),
        ({"tool": "x", "retry": {"attempts": 11}}, "config.steps[0].retry.attempts"),
        ({"tool": "x", "foreach": 5}, "config.steps[0].foreach"),
        ({"tool": "x", "timeout": -1}, "config.steps[0].timeout"),
        ({"ask": {"schema": {}}}, "config.steps[0].ask.message"),
        ({"ask": {"message": "?", "schema": {"type": "nonsense"}}}, "config.steps[0].ask.schema.type"),
        ({"tool": "x", "wait_for": "y"}, "config.steps[0].wait_for"),
    ],
)
def test_a_step_of_the_wrong_shape_is_refused(step: JsonObject, place: str) -> None:
    assert any(issue.place.startswith(place) for issue in issues(written([step]))), issues(written([step]))


def test_a_stand_in_that_waits_for_what_it_makes_possible_is_a_circle() -> None:
    found = issues(
        written(
            [
                {"id": "a", "tool": "x", "on_error": "c"},
                {"id": "b", "tool": "x", "needs": ["a"]},
                {"id": "c", "tool": "x", "needs": ["b"]},
            ]
        )
    )
    assert [issue.reason for issue in found] == ["waits for itself: b → c → b"]


def test_parameters_that_the_called_item_does_not_take_are_found_before_anything_runs() -> None:
    called = Manifest(
        "x",
        "script",
        "1.0.0",
        parameters={
            "type": "object",
            "properties": {"n": {"type": "integer"}, "text": {"type": "string"}, "o": {"default": 1}},
            "required": ["n", "text", "o"],
        },
    )
    steps: list[Json] = [
        {"tool": "x", "parameters": {"n": "{city}", "txt": "a"}},
        {"tool": "x", "parameters": {"n": "{count}", "text": 5}},
        {"tool": "x", "parameters": {"n": "{steps.step_1.result}", "text": "{count} times"}},
    ]
    assert [(issue.place, issue.reason) for issue in call_faults(written(steps), {"x": called})] == [
        ("config.steps[0].parameters", "`x` needs `text`"),
        ("config.steps[0].parameters.n", "is string, and `x` takes integer"),
        ("config.steps[0].parameters.txt", "is not a parameter of `x`"),
        ("config.steps[1].parameters.text", "5 is not text"),
    ]


def test_names_with_a_meaning_cannot_be_parameters() -> None:
    taken: JsonObject = {"type": "object", "properties": {"steps": {}}}
    assert [issue.place for issue in issues(written([{"tool": "x"}], taken))] == ["parameters.steps"]
