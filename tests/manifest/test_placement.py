"""A manifest may be in a folder, in the code, or the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.source_file import SourceManifest, read_manifest
from kiwi_mcp.manifest.type_specs import load_type_specs

WORDS = "tool_id: greet\ntool_type: script\nversion: 1.0.0\nexecutor: python_runtime\ndescription: Greets\n"
FOLDER = WORDS + "config: {entrypoint: greet.py}\nparameters: [{name: who, type: string, required: true}]\n"
CODE = f'"""\n{WORDS}"""\n\ndef main(who: str) -> str:\n    return who\n'


def written(path: str, text: str) -> SourceManifest:
    found = read_manifest(Path(path), text)
    assert found is not None
    return found


def test_a_tool_is_the_same_in_a_folder_and_in_its_code() -> None:
    folder = written(".ai/tools/greet/tool.yaml", FOLDER)
    code = written(".ai/tools/greet.py", CODE)
    assert (folder.placement, code.placement) == ("manifest", "embedded")
    first, second = parse(folder.value, stem="tool"), parse(code.value, stem="greet")
    assert (first.tool_id, first.tool_type, first.executor) == (second.tool_id, second.tool_type, second.executor)
    assert first.config == second.config
    assert first.parameters == second.parameters
    sheets = load_type_specs()
    assert check(first, sheets=sheets, file_names=["tool.yaml", "greet.py"], is_folder=True) == ()
    assert check(second, sheets=sheets, file_names=["greet.py"]) == ()


def test_json_and_toml_may_be_manifests_too() -> None:
    assert written("a.json", '{"tool_id": "a", "tool_type": "api"}').value["tool_id"] == "a"
    assert written("a.toml", 'tool_id = "a"\ntool_type = "api"\n').value["tool_id"] == "a"


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("package.json", '{"name": "x", "version": "1.0.0"}'),
        ("tsconfig.json", "{ // a comment\n}"),
        ("compose.yaml", "services: {}"),
        ("create.json", '{"action": "create", "parameters": {"tool_id": "x"}}'),
        ("README.md", "# Read me\n"),
        ("lib.py", "def helper(): ...\n"),
    ],
)
def test_other_files_are_not_items(path: str, text: str) -> None:
    assert read_manifest(Path(path), text) is None


def test_invalid_yaml_is_refused() -> None:
    with pytest.raises(InvalidManifest) as refused:
        read_manifest(Path("broken.yaml"), "garbage: [")
    assert "not YAML" in refused.value.message


@pytest.mark.parametrize(
    "text", ["", "a: 1\n---\nb: 2\n", "a: !odd 1\n", "a: 1\na: 2\n", "base: &b {}\nx: {<<: *b}\n", "[" * 300_000]
)
def test_yaml_that_is_not_a_manifest_is_ignored(text: str) -> None:
    assert read_manifest(Path("values.yaml"), text) is None


def test_a_tool_file_is_always_an_item() -> None:
    assert written("x/tool.yaml", "description: nothing else\n").value
    with pytest.raises(InvalidManifest):
        read_manifest(Path("x/tool.yaml"), "- a\n- b\n")


def test_markdown_is_a_directive_or_knowledge() -> None:
    directive = '<directive name="a" version="1.0.0"><metadata><description>x</description></metadata></directive>'
    knowledge = "---\nid: k\ntitle: K\nversion: 1.0.0\n---\nSee " + directive
    assert written(".ai/directives/a.md", directive).value["tool_type"] == "directive"
    assert written(".ai/knowledge/k.md", knowledge).value["tool_type"] == "knowledge"
    assert written("a.md", directive).value["tool_id"] == "a"


def test_a_legacy_script_is_its_own_entrypoint() -> None:
    found = read_manifest(Path(".ai/scripts/old.py"), "print(1)\n", is_legacy_script=True)
    assert found is not None
    manifest = parse(found.value, stem="old")
    assert manifest.config["entrypoint"] == "old.py"
    assert not [issue for issue in check(manifest, sheets=load_type_specs(), file_names=["old.py"]) if issue.is_error]
