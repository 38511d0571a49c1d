"""The gist of an answer holds what a model needs, in words."""

from __future__ import annotations

import pytest
from inline_snapshot import snapshot

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.surfaces.mcp.gist import gist


def test_a_result_is_told_as_it_is_with_what_was_printed() -> None:
    content: JsonObject = {"action": "run", "result": "HELLO", "logs": {"stderr": "careful\n"}, "output_path": "x"}
    assert gist(content) == snapshot("HELLO\nstderr: careful")


def test_a_preview_says_how_to_read_on() -> None:
    content: JsonObject = {"result": "abc", "result_handle": "t/output_1", "result_characters": 90_000}
    assert "t/output_1" in gist(content)
    assert "90000" in gist(content)


def test_a_refusal_says_what_happened_each_issue_and_what_to_do() -> None:
    content: JsonObject = {
        "error": "Invalid metadata",
        "message": "'x' has 1 issue.",
        "suggestion": "Mend it.",
        "issues": [{"place": "version", "reason": "is required", "fix": "Add it."}],
    }
    assert gist(content) == snapshot("""\
Invalid metadata: 'x' has 1 issue.
- version: is required. Add it.
What to do: Mend it.\
""")


def test_a_search_is_told_as_lines() -> None:
    one: JsonObject = {"name": "shout", "source": "project", "tool_type": "script", "description": "Write capitals"}
    assert gist({"results": [one], "total": 1}) == snapshot("shout (project script): Write capitals\n1 found.")


def test_a_definition_is_told_with_its_parameters_and_text() -> None:
    content: JsonObject = {
        "metadata": {"description": "Shout"},
        "identity": "project/local/shout@1.0.0",
        "parameters": {"type": "object"},
        "content": "tool_id: shout",
    }
    assert gist(content) == snapshot("""\
project/local/shout@1.0.0: Shout
parameters: {"type":"object"}
tool_id: shout\
""")


@pytest.mark.parametrize(
    "content", [{}, {"anything": 1}, {"valid": None}, {"help": 3}, {"metadata": []}, {"error": {}}]
)
def test_an_answer_of_any_shape_has_a_gist(content: JsonObject) -> None:
    assert isinstance(gist(content), str)
