"""A type is data."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.sheets import load_sheets

QUERY = """
type: query
description: A question for a database
driver: process
needs_executor: required
executor_types: [runtime]
files: optional
aliases: {sql: sql_runtime}
config:
  type: object
  additionalProperties: false
  required: [statement]
  properties:
    statement: {type: string}
templates: [statement]
"""


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_ten_types_are_built_in() -> None:
    sheets = load_sheets()
    assert sheets.issues == ()
    assert set(sheets.types()) == {
        "primitive", "runtime", "mcp_server", "mcp_tool", "script", "api", "directive", "thread", "knowledge",
        "composite",
    }  # fmt: skip


def test_old_spellings_mean_a_type_and_an_executor() -> None:
    sheets = load_sheets()
    assert sheets.canonical("python") == ("script", "python_runtime")
    assert sheets.canonical("script") == ("script", "")
    assert sheets.canonical("never heard of") == ("never heard of", "")


def test_a_dropped_sheet_is_a_new_type(tmp_path: Path) -> None:
    sheets = load_sheets(write(tmp_path / "types", "query.yaml", QUERY))
    words: JsonObject = {
        "tool_id": "q",
        "version": "1.0.0",
        "description": "x",
        "parameters": [{"name": "n", "type": "int"}],
    }
    good = parse({**words, "tool_type": "sql", "config": {"statement": "select {n}"}}, stem="q", sheets=sheets)
    bad = parse({**words, "tool_type": "query", "config": {"statment": "select {m}"}}, stem="q", sheets=sheets)
    assert (good.tool_type, good.executor) == ("query", "sql_runtime")
    assert check(good, sheets=sheets) == ()
    assert {issue.place for issue in check(bad, sheets=sheets)} == {
        "executor", "config.statment", "config.statement", "parameters.n",
    }  # fmt: skip


def test_a_changed_sheet_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "types", "query.yaml", QUERY)
    assert load_sheets(folder) is load_sheets(folder)
    write(folder, "query.yaml", QUERY.replace("A question for a database", "Changed"))
    changed = load_sheets(folder).get("query")
    assert changed is not None
    assert changed.description == "Changed"


@pytest.mark.case("CHAIN-08")
def test_primitives_are_never_data(tmp_path: Path) -> None:
    rules = "driver: ''\nneeds_executor: none\nfiles: none\nconfig: {type: object, additionalProperties: false}\n"
    sheet = f"type: primitive\n{rules}"
    sheets = load_sheets(write(tmp_path / "types", "primitive.yaml", sheet))
    assert "code" in sheets.issues[0].reason
    primitive = sheets.get("primitive")
    assert primitive is not None
    assert primitive.ids == ("subprocess", "http_client")


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (("needs_executor: required", "needs_executor: none"), "query.yaml.driver"),
        (("executor_types: [runtime]", "executor_types: []"), "query.yaml.driver"),
        (("  additionalProperties: false\n", ""), "query.yaml.config"),
        (("driver: process", "driver: ../../evil"), "query.yaml.driver"),
        (("files: optional", "files: maybe"), "query.yaml.files"),
        (("type: query", "tipe: query"), "query.yaml.tipe"),
        (("{type: string}", "{$ref: 'https://evil.test/x'}"), "query.yaml.config.properties.statement.$ref"),
    ],
)
def test_a_sheet_that_would_open_a_hole_is_left_out(tmp_path: Path, change: tuple[str, str], place: str) -> None:
    sheets = load_sheets(write(tmp_path / "types", "query.yaml", QUERY.replace(*change)))
    assert sheets.get("query") is None
    assert place in {issue.place for issue in sheets.issues}
    assert sheets.get("script") is not None


def test_a_sheet_that_is_not_yaml_is_left_out(tmp_path: Path) -> None:
    folder = write(tmp_path / "types", "bad.yaml", "a: [")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    assert len(load_sheets(folder).issues) == 2


def test_a_missing_folder_adds_nothing(tmp_path: Path) -> None:
    assert load_sheets(tmp_path / "nowhere").types() == load_sheets().types()
