"""The scope of a model grows and shrinks by data only, one stage after the other."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
Ask = Callable[..., Answer]
NOTE = '---\nid: note\ntitle: Note\nentry_type: learning\ncategory: x\nversion: "1.0.0"\n---\n\nRemember the milk.\n'
READER = (
    "# tool_id: reader\n# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Read files\n"
)


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B1")
def test_scope_grows_from_texts_to_files_to_servers_by_data_and_shrinks_again(
    ask: Ask, project: Path, home: Path, tmp_path: Path
) -> None:
    ai, policy = project / ".ai", home / ".ai" / "policy.yaml"
    policy.parent.mkdir(exist_ok=True)
    (ai / "knowledge").mkdir()
    (ai / "tools").mkdir()
    (project / "docs").mkdir()

    def seen(name: str) -> JsonObject | None:
        cards = map(as_object, as_list(ask("search", query=f"{name} remember read post", limit=50).content["results"]))
        return next((card for card in cards if as_text(card["name"]) == name), None)

    def planned(name: str) -> object:
        response = ask("execute", item_id=name, dry_run=True).content
        return response.get("status") or response["code"]

    note = ai / "knowledge" / "note.md"
    note.write_text(NOTE)
    assert planned("note") == "planned"

    reader = ai / "tools" / "reader.sh"
    reader.write_text(f"#!/bin/bash\n{READER}# needs: {{read: [docs]}}\nls docs\n")
    assert (planned("note"), planned("reader")) == ("planned", "planned")

    offers = tmp_path / "offers.json"
    offers.write_text(
        json.dumps({"tools": [{"name": "post", "description": "Post", "inputSchema": {"type": "object"}}]})
    )
    added = ask("mcp", action="add", server="outbox", command=sys.executable, args=[str(SCRIPT), str(offers)])
    assert not added.is_error
    assert [planned(name) for name in ("note", "reader", "mcp/outbox/post")] == ["planned"] * 3

    policy.write_text("items: {deny: ['mcp/outbox/*']}\n")
    assert planned("mcp/outbox/post") == "not_permitted"
    assert not ask("mcp", action="remove", server="outbox").is_error
    assert planned("mcp/outbox/post") == "tool_not_found"

    policy.write_text("files: {read: {deny: [docs]}}\n")
    assert (planned("reader"), planned("note")) == ("not_permitted", "planned")
    reader.unlink()
    assert (planned("reader"), seen("reader")) == ("tool_not_found", None)

    policy.unlink()
    note.unlink()
    assert (planned("note"), seen("note")) == ("tool_not_found", None)
