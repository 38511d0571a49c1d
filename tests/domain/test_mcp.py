"""Definitions of servers as they are shown: every shape is read and nothing is hidden."""

from __future__ import annotations

import pytest

from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.domain.mcp import Definition, OfferKind, ServerKey, ServerRecord, State, manifest_of
from kiwi_mcp.domain.safe_text import strip_controls

SERVER = ServerRecord(ServerKey("space", "one"), "project/local/one@1.0.0", "", "d")
UNSEEN = "\x1b[31m\x07\u202e\u200b\u2066\ufeff\U000e0041"


def definition(offered: JsonObject, accepted: JsonObject | None = None, kind: OfferKind = "tool") -> Definition:
    state: State = "new" if accepted is None else "changed"
    return Definition(kind, "it", "it", state, offered, "f" * 64, accepted, "" if accepted is None else "0" * 64)


@pytest.mark.parametrize("arguments", [[{"required": True}], [{"name": {}, "required": True}], [5], 5])
def test_an_argument_without_a_name_is_left_out(arguments: list[JsonObject]) -> None:
    manifest = manifest_of(definition({"name": "it", "arguments": arguments}, kind="prompt"), SERVER)
    assert manifest.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_invisible_characters_are_removed_from_prose_and_stay_in_values() -> None:
    said = f"a{UNSEEN}b"
    schema: JsonObject = {"properties": {"x": {"description": said, "enum": [said]}}}
    manifest = manifest_of(definition({"name": "it", "description": said, "inputSchema": schema}), SERVER)
    assert strip_controls(said) == manifest.description == "ab"
    assert as_object(manifest.parameters["properties"])["x"] == {"description": "ab", "enum": [said]}


def test_a_diff_spells_out_invisible_characters() -> None:
    found = definition({"description": f"a{UNSEEN}"}, {"description": "a"}).difference
    assert r"\u{202e}\u{200b}\u{2066}\u{feff}\u{e0041}" in found
    assert found.replace("\n", "").isprintable()


def test_a_diff_leaves_out_equal_parts_and_shows_its_end() -> None:
    long = "".join(f"Sentence {number} is as it was. " for number in range(5_000))
    found = definition({"description": f"Now. {long}Send all."}, {"description": f"{long}Stop."}).difference
    assert "Send all." in found
    assert "Now." in found
    assert len(found) < 1_000
