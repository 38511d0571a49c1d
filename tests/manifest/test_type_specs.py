"""A type is data."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.data import FOLDER, parsed
from kiwi_mcp.domain.items import TypeTraits
from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.type_specs import BUILT_IN, faults_of, load_type_specs

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


def test_the_types_that_are_built_in() -> None:
    sheets = load_type_specs()
    assert sheets.issues == ()
    assert set(sheets.types()) == {
        "primitive", "runtime", "mcp_server", "mcp_tool", "script", "api", "directive", "thread", "knowledge",
        "composite", "native", "skill", "code", "container", "file_tool",
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(BUILT_IN.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_built_in_type_has_no_faults(path: Path) -> None:
    assert not faults_of(as_object(read_yaml(path.read_text(), what=path.name).value), path.name)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.yaml")), ids=lambda path: path.stem)
def test_data_that_most_commands_need_is_parsed_ahead(path: Path) -> None:
    text = path.read_text()
    is_needed = path.parent.name in {"types", "isolation"}
    assert parsed(text) == (read_yaml(text, what=path.name).value if is_needed else None), "run `make reference`"


def test_legacy_type_names_mean_a_type_and_an_executor() -> None:
    sheets = load_type_specs()
    assert sheets.canonical("python") == ("script", "python_runtime")
    assert sheets.canonical("script") == ("script", "")
    assert sheets.canonical("never heard of") == ("never heard of", "")


def test_a_new_type_spec_file_is_a_new_type(tmp_path: Path) -> None:
    sheets = load_type_specs(write(tmp_path / "types", "query.yaml", QUERY))
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


def test_a_changed_type_spec_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "types", "query.yaml", QUERY)
    assert load_type_specs(folder) is load_type_specs(folder)
    write(folder, "query.yaml", QUERY.replace("A question for a database", "Changed"))
    changed = load_type_specs(folder).get("query")
    assert changed is not None
    assert changed.description == "Changed"


@pytest.mark.case("CHAIN-08")
def test_primitives_cannot_be_defined_by_data(tmp_path: Path) -> None:
    rules = "driver: ''\nneeds_executor: none\nfiles: none\nconfig: {type: object, additionalProperties: false}\n"
    sheet = f"type: primitive\n{rules}"
    sheets = load_type_specs(write(tmp_path / "types", "primitive.yaml", sheet))
    assert "code" in sheets.issues[0].reason
    primitive = sheets.get("primitive")
    assert primitive is not None
    assert primitive.ids == ("subprocess", "http_client")


@pytest.mark.parametrize("type_", ["mcp_tool", "mcp_server", "script", "api", "directive"])
def test_a_folder_does_not_redefine_a_built_in_type(tmp_path: Path, type_: str) -> None:
    folder = write(tmp_path / "types", "other.yaml", QUERY.replace("type: query", f"type: {type_}"))
    sheets = load_type_specs(folder)

    assert sheets.get(type_) == load_type_specs().get(type_)
    (issue,) = sheets.issues
    assert issue.place == "other.yaml.type"
    assert f"`{type_}` is a built-in type" in issue.reason


@pytest.mark.parametrize("alias", ["python", "api", "mcp_tool"])
def test_a_new_type_does_not_take_the_name_of_a_built_in_one_as_an_alias(tmp_path: Path, alias: str) -> None:
    folder = write(tmp_path / "types", "query.yaml", QUERY.replace("{sql:", f"{{{alias}:"))
    sheets = load_type_specs(folder)

    assert sheets.get("query") is None
    assert sheets.canonical(alias) == load_type_specs().canonical(alias)
    assert [issue.place for issue in sheets.issues] == [f"query.yaml.aliases.{alias}"]


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
def test_an_unsafe_type_spec_is_ignored(tmp_path: Path, change: tuple[str, str], place: str) -> None:
    sheets = load_type_specs(write(tmp_path / "types", "query.yaml", QUERY.replace(*change)))
    assert sheets.get("query") is None
    assert place in {issue.place for issue in sheets.issues}
    assert sheets.get("script") is not None


def test_a_type_spec_that_is_not_yaml_is_ignored(tmp_path: Path) -> None:
    folder = write(tmp_path / "types", "bad.yaml", "a: [")
    (folder / "binary.yaml").write_bytes(b"\xff\xfe")
    assert len(load_type_specs(folder).issues) == 2


def test_a_missing_folder_adds_nothing(tmp_path: Path) -> None:
    assert load_type_specs(tmp_path / "nowhere").types() == load_type_specs().types()


TOOL_OF_A_SERVER = """\
type: {type}
driver: mcp
needs_executor: required
executor_types: [{executor}]
files: none
{more}
config: {{type: object, additionalProperties: false, properties: {{mcp_tool_name: {{type: string}}}}}}
"""
SERVER = """\
type: my_server
driver: ""
needs_executor: required
executor_types: [primitive]
files: none
{more}
config: {{type: object, additionalProperties: false, properties: {{command: {{type: string}}}}}}
"""


def test_the_built_in_types_say_how_long_a_process_lives_and_who_describes_an_item() -> None:
    sheets = load_type_specs()
    assert sheets.traits("script") == TypeTraits("process", "call")
    assert sheets.traits("mcp_tool") == TypeTraits("mcp", "server", "server")
    assert sheets.traits("mcp_server") == TypeTraits("", "server", "server")
    assert sheets.traits("directive") == TypeTraits("read", result_kind="instructions")
    assert sheets.traits("no such type") == TypeTraits()
    assert [type_ for type_ in sheets.types() if sheets.is_server(type_)] == ["mcp_server"]


@pytest.mark.parametrize("trait", ["lifetime: call", "lifetime: none", "defined_by: owner"])
def test_a_project_cannot_say_that_its_owner_wrote_the_tools_of_a_server(tmp_path: Path, trait: str) -> None:
    spec = TOOL_OF_A_SERVER.format(type="my_tool", executor="mcp_server", more=trait)
    sheets = load_type_specs(write(tmp_path / "types", "mine.yaml", spec))
    assert sheets.get("my_tool") is None
    assert [issue.place for issue in sheets.issues] == ["mine.yaml.lifetime"]


def test_a_new_type_that_does_not_say_has_the_traits_of_its_driver(tmp_path: Path) -> None:
    spec = TOOL_OF_A_SERVER.format(type="my_tool", executor="mcp_server", more="")
    sheets = load_type_specs(write(tmp_path / "types", "mine.yaml", spec))
    assert sheets.traits("my_tool") == sheets.traits("mcp_tool")


def test_the_process_of_a_script_cannot_be_called_that_of_a_server(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "types", "query.yaml", QUERY.replace("driver: process", "driver: process\nlifetime: server")
    )
    assert load_type_specs(folder).get("query") is None


@pytest.mark.parametrize("executor", ["runtime", "my_server"])
def test_the_items_of_a_server_run_on_servers_alone(tmp_path: Path, executor: str) -> None:
    """Otherwise a runtime of a cloned project would have the provenance of an accepted server."""
    folder = write(tmp_path / "types", "a.yaml", TOOL_OF_A_SERVER.format(type="my_tool", executor=executor, more=""))
    write(folder, "b.yaml", SERVER.format(more=""))
    sheets = load_type_specs(folder)
    assert sheets.get("my_tool") is None
    assert "a.yaml.executor_types" in {issue.place for issue in sheets.issues}


def test_nothing_but_the_items_of_a_server_runs_on_a_server(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "types", "query.yaml", QUERY.replace("executor_types: [runtime]", "executor_types: [mcp_server]")
    )
    sheets = load_type_specs(folder)
    assert sheets.get("query") is None
    assert [issue.place for issue in sheets.issues] == ["query.yaml.executor_types"]


def test_a_server_of_a_new_type_is_a_server(tmp_path: Path) -> None:
    folder = write(tmp_path / "types", "a.yaml", TOOL_OF_A_SERVER.format(type="my_tool", executor="my_server", more=""))
    write(folder, "b.yaml", SERVER.format(more="lifetime: server\ndefined_by: server"))
    sheets = load_type_specs(folder)
    assert sheets.issues == ()
    assert sheets.is_server("my_server")


def test_a_project_does_not_redefine_a_type_of_the_user(tmp_path: Path) -> None:
    user = write(tmp_path / "user", "query.yaml", QUERY)
    project = write(tmp_path / "project", "query.yaml", QUERY.replace("files: optional", "files: none"))
    sheets = load_type_specs(project, user=user)
    assert sheets.by_type["query"].files == "optional"
    assert [issue.place for issue in sheets.issues] == ["query.yaml.type"]
