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
    told: JsonObject = {"total": 7, "note": "Weak match.", "indexing": {"cards": 9}}
    found: JsonObject = {"results": [shout, post], **parts, **told}
    assert gist(found) == snapshot("""\
project/local/shout (script, 0.9 by write capitals; meaning 0.3, part 2): Write capitals
mcp/outbox/post (0.2; meaning 0.4, new, not accepted, not permitted: the item is denied): Post a letter
part 1: post a letter; part 2: shout it
7 found. Weak match.
still indexing, so some may be missing: {"cards":9}\
""")


def test_where_nothing_was_found_the_lines_say_what_is_close_and_how_to_ask() -> None:
    close: JsonObject = {"identity": "mcp/outbox/post@0.0.0", "description": "Post a letter"}
    found: JsonObject = {"results": [], "total": 0, "close": [close], "suggestion": "Ask for one need."}
    assert gist(found) == snapshot("""\
close: mcp/outbox/post: Post a letter
0 found. Ask for one need.\
""")


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
