"""Metadata inside code is read and never executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.manifest.source_file import SourceManifest, comment_marks, read_embedded

DUNDERS = '''# kiwi-mcp:validated:2026-01-28T12:00:00Z:{hash}
"""Greets a person.

More about it.
"""
__version__ = "1.0.0"
__tool_type__ = "python"
__executor_id__ = "python_runtime"
__category__ = "utility"
CONFIG = {{"timeout": 5}}
DEPENDENCIES = ["httpx>=0.24"]
REQUIRES = ["fs.read"]

def main(name: str, count: int = 1, *, loud: bool = False) -> dict:
    return {{}}
'''


def read(suffix: str, text: str) -> SourceManifest:
    found = read_embedded(suffix, text, what=f"tool{suffix}")
    assert found is not None
    return found


def parameters(function: str) -> JsonObject:
    return as_object(read(".py", f'__version__ = "1.0.0"\n{function}\n').value["parameters"])


def test_dunders_are_metadata() -> None:
    found = read(".py", DUNDERS.format(hash="0" * 64))
    assert found.issues == ()
    assert found.value == {
        "description": "Greets a person.",
        "version": "1.0.0",
        "tool_type": "python",
        "executor": "python_runtime",
        "category": "utility",
        "config": {"timeout": 5},
        "dependencies": ["httpx>=0.24"],
        "requires": ["fs.read"],
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "count": {"type": "integer", "default": 1},
                "loud": {"type": "boolean", "default": False},
            },
            "additionalProperties": False,
            "required": ["name"],
        },
    }
    assert found.lines["version"] == 6


def test_a_docstring_may_be_the_manifest() -> None:
    words = "tool_id: my_script\ntool_type: script\nversion: 1.10.0\nexecutor: python_runtime\n"
    text = f'#!/usr/bin/env python3\n"""\n{words}"""\n'
    found = read(".py", text)
    assert found.value["tool_id"] == "my_script"
    assert found.value["version"] == "1.10.0"
    assert found.lines["tool_id"] == 3


def test_an_issue_in_a_docstring_has_the_line_of_the_file() -> None:
    with pytest.raises(InvalidManifest) as refused:
        read_embedded(".py", '# first\n"""\ntool_id: a\ntool_id: b\n"""\n', what="x.py")
    assert refused.value.issues[0].line == 4


@pytest.mark.case("BOMB-12")
def test_reading_a_hostile_file_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    touch = f"pathlib.Path({str(canary)!r}).touch()"
    text = f'import pathlib\n{touch}\n__version__ = {touch} or "1.0.0"\n__tool_type__ = "python"\n'
    found = read(".py", text)
    assert [(issue.place, issue.line, issue.is_error) for issue in found.issues] == [("version", 3, True)]
    assert "version" not in found.value
    assert not canary.exists()


def test_a_computed_constant_is_ignored() -> None:
    found = read(".py", '__version__ = "1.0.0"\nCONFIG = load()\n')
    assert [issue.is_error for issue in found.issues] == [False]


def test_a_repeated_assignment_is_reported_and_the_last_counts() -> None:
    found = read(".py", '__version__ = "1.0.0"\n__version__ = "2.0.0"\n')
    assert found.value["version"] == "2.0.0"
    assert "twice" in found.issues[0].reason


@pytest.mark.parametrize(
    "text", ["", "import os\n", "def main(): ...\n", "CONFIG = {}\n", "# __version__\n", '"""Just text."""\n']
)
def test_a_file_without_metadata_is_not_an_item(text: str) -> None:
    assert read_embedded(".py", text, what="x.py") is None


def test_an_old_script_without_metadata_is_an_item() -> None:
    found = read_embedded(".py", '"""Does it."""\ndef main(a): ...\n', what="x.py", is_legacy_script=True)
    assert found is not None
    assert found.value["executor"] == "python_runtime"
    assert found.value["tool_type"] == "script"
    assert found.value["version"] == "1.0.0"


@pytest.mark.parametrize(
    "text",
    [
        '__version__ = "1"\nprint "old"\n',
        '__version__ = "1"\ndef (:\n',
        '__version__ = "1"\n' + "(" * 500,
        "__version__ = \0",
    ],
)
def test_source_that_does_not_parse_is_refused(text: str) -> None:
    with pytest.raises(InvalidManifest, match=r"Python cannot read it|too large"):
        read(".py", text)


@pytest.mark.parametrize(
    "text",
    ["-" * 100_000 + "1", "+".join(["1"] * 50_000), "[" * 90 + "]" * 90, "9" * 10_000, "'\\ud800'", "{1: 2}", "1e999"],
)
def test_hostile_literals_are_issues_or_refused(text: str) -> None:
    try:
        issues = read(".py", f"__version__ = {text}\n").issues
    except InvalidManifest as refused:
        issues = refused.issues
    assert issues


def test_a_script_block_names_dependencies() -> None:
    block = '# /// script\n# requires-python = ">=3.11"\n# dependencies = [\n#   "rich>=13",\n# ]\n# ///\n'
    text = f'{block}__version__ = "1.0.0"\n'
    assert read(".py", text).value["dependencies"] == ["rich>=13"]


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        ("a: str", {"type": "string"}),
        ("a: 'float'", {"type": "number"}),
        ("a: list[str]", {"type": "array", "items": {"type": "string"}}),
        ("a: dict[str, int]", {"type": "object"}),
        ("a: Optional[int] = None", {"type": ["integer", "null"], "default": None}),
        ("a: int | None = 3", {"type": ["integer", "null"], "default": 3}),
        ("a: Literal['x', 'y'] = 'x'", {"enum": ["x", "y"], "default": "x"}),
        ("a: str | int", {"anyOf": [{"type": "string"}, {"type": "integer"}]}),
        ("a: str = None", {"type": ["string", "null"], "default": None}),
        ("a: Annotated[int, 'How many']", {"type": "integer", "description": "How many"}),
        ("a: int = -1", {"type": "integer", "default": -1}),
        ("a: Custom = make()", {}),
        ("a", {}),
    ],
)
def test_annotations_become_types(annotation: str, schema: JsonObject) -> None:
    assert as_object(parameters(f"def main({annotation}): ...")["properties"])["a"] == schema


@pytest.mark.parametrize(
    ("function", "is_open"),
    [
        ("def main(**kwargs): ...", True),
        ("async def run(a, **rest): ...", True),
        ("def execute(params, project_path): ...", True),
        ("def main(params): ...", True),
        ("import argparse\ndef main(): ...", True),
        ("print('plain script')", True),
        ("def main(): ...", False),
        ("def main(a): ...", False),
    ],
)
def test_only_functions_with_keyword_arguments_accept_unknown_parameters(function: str, is_open: bool) -> None:
    assert parameters(function)["additionalProperties"] is is_open


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".sh", f"#!/bin/bash\n# kiwi-mcp:validated:2026-01-28T12:00:00Z:{'0' * 64}\n"
                "# tool_id: x\n# tool_type: script\n# config:\n#   timeout: 5\necho\n"),
        (".js", "// tool_id: x\n// tool_type: script\n// config:\n//   timeout: 5\nconsole.log(1)\n"),
        (".ts", "/*\n * tool_id: x\n * tool_type: script\n * config:\n *   timeout: 5\n */\n"),
        (".go", "// Copyright\n\n/*\ntool_id: x\ntool_type: script\nconfig:\n  timeout: 5\n*/\npackage main\n"),
        (".lua", "--[[\ntool_id: x\ntool_type: script\nconfig:\n  timeout: 5\n]]\n"),
        (".sql", "-- tool_id: x\n-- tool_type: script\n-- config:\n--   timeout: 5\n"),
        (".rb", "=begin\ntool_id: x\ntool_type: script\nconfig:\n  timeout: 5\n=end\n"),
        (".lisp", "; tool_id: x\n; tool_type: script\n; config:\n;   timeout: 5\n"),
        (".unknown", "# tool_id: x\n# tool_type: script\n# config:\n#   timeout: 5\n"),
    ],
)  # fmt: skip
def test_a_leading_comment_of_any_language_may_be_the_manifest(suffix: str, text: str) -> None:
    found = read(suffix, text)
    assert found.value == {"tool_id": "x", "tool_type": "script", "config": {"timeout": 5}}
    assert "tool_id" in text.splitlines()[found.lines["tool_id"] - 1]


def test_a_comment_after_code_is_not_metadata() -> None:
    assert read_embedded(".sh", "echo\n# tool_id: x\n# tool_type: script\n", what="x.sh") is None
    assert read_embedded(".sh", "# just words\necho\n", what="x.sh") is None


def test_languages_are_data() -> None:
    assert comment_marks()[".rs"].line == "//"
    found = read_embedded(".never-heard-of", "# tool_id: x\n# tool_type: script\n", what="x.never-heard-of")
    assert found is not None
    assert found.value["tool_id"] == "x"
