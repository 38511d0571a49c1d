"""Directives as text for a model."""

from __future__ import annotations

from inline_snapshot import snapshot

from kiwi_mcp.manifest.program import program_text


def test_a_program_states_goal_inputs_steps_and_end() -> None:
    text = program_text(
        {
            "name": "release",
            "description": "Release a version",
            "inputs": [{"name": "target", "description": "Where to"}, {"name": "count"}],
            "provided_inputs": {"target": "prod"},
            "context": {"files": ["a", "b"]},
            "process": [
                {
                    "name": "build",
                    "description": "Build it",
                    "action": "Run make\nand wait",
                    "verification": {"ok": True},
                },
                {"name": "ship"},
            ],
            "outputs": {"success": "It is out"},
            "success_criteria": ["It is up"],
        }
    )
    assert text == snapshot("""\
# release

Release a version

## Context

- files: ["a","b"]

## Inputs

- target: prod (Where to)
- count: (not given)

## Steps

1. build: Build it
   Run make
   and wait
   verification: {"ok":true}
2. ship

## Outputs

- success: It is out

## Done when

- It is up
""")


def test_absent_parts_of_a_program_take_no_text() -> None:
    assert program_text({"name": "bare", "outputs": "A text"}) == "# bare\n\n\n\n## Outputs\n\nA text\n"
