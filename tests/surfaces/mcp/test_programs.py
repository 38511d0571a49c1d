"""Directives as texts that a model can follow."""

from __future__ import annotations

from inline_snapshot import snapshot

from kiwi_mcp.surfaces.mcp.programs import program_text


def test_a_program_tells_what_for_with_what_step_by_step_until_when() -> None:
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


def test_what_a_program_does_not_say_takes_no_words() -> None:
    assert program_text({"name": "bare", "outputs": "A text"}) == "# bare\n\n\n\n## Outputs\n\nA text\n"
