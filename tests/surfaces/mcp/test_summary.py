"""The text summary of an answer contains what a model needs."""

from __future__ import annotations

import pytest
from inline_snapshot import snapshot

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.surfaces.mcp.results import summarize


def test_a_result_is_shown_with_its_output() -> None:
    content: JsonObject = {"action": "run", "result": "HELLO", "logs": {"stderr": "careful\n"}, "output_path": "x"}
    assert summarize(content) == snapshot("HELLO\nstderr: careful")


def test_a_preview_names_the_command_to_read_on() -> None:
    content: JsonObject = {"result": "abc", "result_handle": "t/output_1", "result_characters": 90_000}
    assert "t/output_1" in summarize(content)
    assert "90000" in summarize(content)


def test_a_refusal_shows_the_message_each_issue_and_the_suggestion() -> None:
    content: JsonObject = {
        "error": "Invalid metadata",
        "message": "'x' has 1 issue.",
        "suggestion": "Fix it.",
        "issues": [{"place": "version", "reason": "is required", "fix": "Add it."}],
    }
    assert summarize(content) == snapshot("""\
Invalid metadata: 'x' has 1 issue.
- version: is required. Add it.
What to do: Fix it.\
""")


def test_a_search_is_shown_as_lines() -> None:
    shout: JsonObject = {
        "name": "shout",
        "identity": "project/local/shout@1.0.0",
        "source": "project",
        "tool_type": "script",
        "score": 0.9,
        "why": ["write", "capitals"],
        "meaning": 0.3,
        "part": 2,
        "description": "Write capitals",
    }
    post: JsonObject = {
        "identity": "mcp/outbox/post@0.0.0",
        "source": "mcp",
        "tool_type": "mcp_tool",
        "score": 0.2,
        "why": [],
        "meaning": 0.4,
        "state": "new",
        "permitted": False,
        "not_permitted": "the item is denied",
        "description": "Post a letter",
    }
    parts: JsonObject = {"parts": ["post a letter", "shout it"]}
    response: JsonObject = {"total": 7, "note": "Weak match.", "indexing": {"cards": 9}}
    found: JsonObject = {"results": [shout, post], **parts, **response}
    assert summarize(found) == snapshot("""\
project/local/shout (script, 0.9 by write capitals; meaning 0.3, part 2): Write capitals
mcp/outbox/post (0.2; meaning 0.4, new, not accepted, not permitted: the item is denied): Post a letter
part 1: post a letter; part 2: shout it
7 found. Weak match.
still indexing, so some may be missing: {"cards":9}\
""")


def test_a_search_without_hits_shows_similar_items_and_how_to_search() -> None:
    close: JsonObject = {"identity": "mcp/outbox/post@0.0.0", "description": "Post a letter"}
    found: JsonObject = {"results": [], "total": 0, "close": [close], "suggestion": "Ask for one need."}
    assert summarize(found) == snapshot("""\
close: mcp/outbox/post: Post a letter
0 found. Ask for one need.\
""")


def test_a_definition_is_shown_with_its_parameters_and_text() -> None:
    content: JsonObject = {
        "metadata": {"description": "Shout"},
        "identity": "project/local/shout@1.0.0",
        "parameters": {"type": "object"},
        "content": "tool_id: shout",
    }
    assert summarize(content) == snapshot("""\
project/local/shout@1.0.0: Shout
parameters: {"type":"object"}
tool_id: shout\
""")


@pytest.mark.parametrize(
    "content", [{}, {"anything": 1}, {"valid": None}, {"help": 3}, {"metadata": []}, {"error": {}}]
)
def test_any_answer_has_a_summary(content: JsonObject) -> None:
    assert isinstance(summarize(content), str)
