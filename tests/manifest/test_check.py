"""A manifest is checked before anything runs, and all issues are reported at once."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Manifest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.check import check
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.parse import parse
from kiwi_mcp.manifest.source_file import read_manifest
from kiwi_mcp.manifest.type_specs import load_type_specs

SHEETS = load_type_specs()
SEEDS = Path(__file__).parents[1] / "data" / "seeds"

GOOD: dict[str, JsonObject] = {
    "runtime": {"executor": "subprocess", "config": {"command": "ruby"}},
    "mcp_server": {"executor": "subprocess", "config": {"transport": "stdio", "command": "npx"}},
    "mcp_tool": {"executor": "a_server", "config": {"mcp_tool_name": "x"}},
    "script": {"executor": "a_runtime", "config": {"entrypoint": "main.py"}},
    "api": {"executor": "http_client", "config": {"method": "GET", "url": "https://a.example/"}},
    "directive": {"executor": "a_provider", "config": {}},
    "thread": {"executor": "a_provider", "config": {"directive": "d"}},
    "knowledge": {"config": {"entry_type": "pattern"}},
    "composite": {"config": {"steps": [{"tool": "a"}]}},
}
BELOW = {
    "subprocess": Manifest("subprocess", "primitive", "1.0.0"),
    "http_client": Manifest("http_client", "primitive", "1.0.0"),
    "a_runtime": Manifest("a_runtime", "runtime", "1.0.0"),
    "a_provider": Manifest("a_provider", "runtime", "1.0.0", config={"dialect": "openai_chat"}),
    "a_server": Manifest("a_server", "mcp_server", "1.0.0"),
    "a_script": Manifest("a_script", "script", "1.0.0"),
    "an_api": Manifest("an_api", "api", "1.0.0"),
}


def faults_of(words: JsonObject, *, with_files: bool = False, files: tuple[str, ...] = ()) -> list[Issue]:
    manifest = parse({"tool_id": "x", "version": "1.0.0", "description": "x", **words}, stem="x")
    below = BELOW.get(manifest.executor_id or "")
    return [
        *check(manifest, sheets=SHEETS, executor=below, with_files=with_files, file_names=files, is_folder=True),
    ]


def item(tool_type: str, **changes: Json) -> JsonObject:
    return {"tool_type": tool_type, **GOOD.get(tool_type, {}), **changes}


def configured(tool_type: str, **changes: Json) -> JsonObject:
    config = GOOD[tool_type]["config"]
    assert isinstance(config, dict)
    return item(tool_type, config={**config, **changes})


def read_seed(path: Path) -> tuple[Manifest, dict[str, int]]:
    if path.suffix == ".json":
        call = json.loads(path.read_text())["parameters"]
        words = {**call["manifest"], **{word: call[word] for word in ("tool_id", "tool_type", "executor")}}
        return parse(words, stem=path.stem), {}
    written = read_manifest(path, path.read_text())
    assert written is not None
    return parse(written.value, stem=path.stem, lines=written.lines), dict(written.lines)


@cache
def every_seed() -> dict[str, Manifest]:
    return {found.tool_id: found for found, _ in map(read_seed, sorted(SEEDS.iterdir()))}


@pytest.mark.req("K-TY-01")
@pytest.mark.parametrize("path", sorted(SEEDS.iterdir()), ids=lambda path: path.name)
def test_each_seed_example_is_accepted_unchanged(path: Path) -> None:
    manifest, lines = read_seed(path)
    below = every_seed().get(manifest.executor_id or "")
    issues = check(manifest, sheets=SHEETS, executor=below, with_files=False, lines=lines)
    errors = [(issue.place, issue.line) for issue in issues if issue.is_error]
    # The one template of a manifest lists all types in place of one.
    assert errors == []


@pytest.mark.req("K-VA-01")
@pytest.mark.parametrize("tool_type", GOOD)
def test_a_minimal_item_of_each_type_has_no_issues(tool_type: str) -> None:
    assert faults_of(item(tool_type)) == []


@pytest.mark.req("K-VA-01")
@pytest.mark.parametrize("tool_type", [name for name in GOOD if name not in {"knowledge", "composite"}])
def test_a_runnable_item_needs_an_executor(tool_type: str) -> None:
    (issue,) = faults_of(item(tool_type, executor=None))
    assert issue.place == "executor"
    assert "Add `executor:" in issue.fix


@pytest.mark.req("K-VA-01")
@pytest.mark.case("CHAIN-04")
@pytest.mark.parametrize(
    ("tool_type", "executor"),
    [
        ("api", "subprocess"),
        ("api", "a_runtime"),
        ("script", "a_server"),
        ("script", "subprocess"),
        ("script", "a_script"),
        ("mcp_tool", "a_runtime"),
        ("mcp_tool", "http_client"),
        ("mcp_server", "a_runtime"),
        ("runtime", "a_runtime"),
        ("directive", "http_client"),
        ("thread", "an_api"),
        ("knowledge", "a_runtime"),
        ("primitive", "subprocess"),
    ],
)
def test_an_executor_of_the_wrong_type_is_refused(tool_type: str, executor: str) -> None:
    assert "executor" in {issue.place for issue in faults_of(item(tool_type, executor=executor, tool_id="subprocess"))}


@pytest.mark.req("K-CH-03")
def test_executors_are_judged_by_type_and_never_by_name() -> None:
    script = parse(
        {"tool_id": "x", "version": "1.0.0", "description": "x", **item("script", executor="my_python")}, stem="x"
    )
    runtime = Manifest("my_python", "runtime", "1.0.0")
    pretender = Manifest("my_python", "api", "1.0.0")
    assert check(script, sheets=SHEETS, executor=runtime, with_files=False) == ()
    assert check(script, sheets=SHEETS, executor=pretender, with_files=False)[0].place == "executor"


@pytest.mark.case("CHAIN-08")
def test_a_manifest_that_claims_to_be_a_primitive_is_refused() -> None:
    (issue,) = faults_of({"tool_id": "my_metal", "tool_type": "primitive"})
    assert "code" in issue.reason


def test_a_missing_executor_and_an_invalid_pin_are_reported() -> None:
    words: JsonObject = {"tool_id": "x", "version": "1.0.0", "description": "x", **item("script", executor="gone@^x.y")}
    issues = check(parse(words, stem="x"), sheets=SHEETS, executor_missing=True, with_files=False)
    assert [issue.place for issue in issues] == ["executor", "executor"]
    assert faults_of(item("script", executor="a_runtime@^1.2")) == []


@pytest.mark.req("K-CH-05")
@pytest.mark.parametrize("word", ["command", "args", "check", "params_as", "compile_command"])
def test_a_tool_cannot_set_keys_of_its_executor(word: str) -> None:
    (issue,) = faults_of(configured("script", **{word: "x"}))
    assert issue.place == f"config.{word}"
    assert "runtime" in issue.reason


@pytest.mark.req("K-CH-05")
@pytest.mark.parametrize(
    ("tool_type", "word"), [("script", "cwd"), ("api", "verify"), ("api", "proxy"), ("mcp_tool", "command")]
)
def test_unknown_keys_are_refused(tool_type: str, word: str) -> None:
    assert [issue.place for issue in faults_of(configured(tool_type, **{word: False}))] == [f"config.{word}"]


@pytest.mark.req("K-VA-04")
@pytest.mark.parametrize(
    ("words", "place"),
    [
        (configured("api", method="FETCH"), "config.method"),
        (item("api", config={"url": "https://a.example/"}), "config.method"),
        (item("api", config={"method": "GET"}), "config"),
        (configured("api", url="ftp://a.example"), "config.url"),
        (configured("api", url="https://{host}/"), "config.url"),
        (configured("api", headers={"A": "b\r\nC: d"}), "config.headers.A"),
        (configured("api", headers={"A\n": "b"}), "config.headers"),
        (configured("api", response_transform="$" * 2_000), "config.response_transform"),
        (configured("api", timeout=0), "config.timeout"),
        (configured("api", timeout=100_000), "config.timeout"),
        (configured("api", retry=50), "config.retry"),
        (configured("api", auth={"type": "magic"}), "config.auth.type"),
        (configured("mcp_server", transport="pigeon"), "config.transport"),
        (item("mcp_server", config={"transport": "stdio"}), "config.command"),
        (item("mcp_server", config={"transport": "sse"}), "config.url"),
        (item("mcp_server", config={"command": "x"}), "config.transport"),
        (configured("mcp_server", transport="http", url="https://a.example/"), "config.transport"),
        (item("mcp_server", executor="http_client"), "config.transport"),
        (item("mcp_tool", config={}), "config.mcp_tool_name"),
        (configured("mcp_tool", mcp_tool_name="a\nb"), "config.mcp_tool_name"),
        (item("runtime", config={"install": "x"}), "config"),
        (item("script", config={}), "config.entrypoint"),
        (configured("script", entrypoint="../main.py"), "config.entrypoint"),
        (configured("script", env={"LD_PRELOAD": "x.so"}), "config.env"),
        (configured("script", requires=["--index-url x"]), "config.requires[0]"),
        (configured("script", requires=["x @ file:///x"]), "config.requires[0]"),
        (item("thread", config={}), "config.directive"),
        (item("composite", config={"steps": []}), "config.steps"),
    ],
)
def test_the_keys_of_each_type_are_checked(words: JsonObject, place: str) -> None:
    issues = [issue for issue in faults_of(words) if issue.is_error and "parameter" not in issue.reason]
    assert [issue.place for issue in issues] == [place]
    assert issues[0].fix


def test_an_invalid_isolation_level_is_refused_with_the_valid_ones() -> None:
    (issue,) = faults_of({"tool_type": "script", **GOOD["script"], "isolation": "podman"})
    assert (issue.place, issue.reason) == ("isolation", "'podman' is not a level of isolation")
    assert issue.fix == "Choose one of trusted, standard, sandboxed, restricted."


def test_packages_belong_to_the_runtime() -> None:
    words: JsonObject = {
        "tool_id": "x",
        "version": "1.0.0",
        "description": "x",
        **configured("script", requires=["@a/b@^1.0.0"]),
    }
    node = Manifest("n", "runtime", "1.0.0", config={"environment": "node"})
    python = Manifest("p", "runtime", "1.0.0", config={"environment": "python"})
    assert check(parse(words, stem="x"), sheets=SHEETS, executor=node, with_files=False) == ()
    assert check(parse(words, stem="x"), sheets=SHEETS, executor=python, with_files=False)


@pytest.mark.req("K-VA-04")
def test_templates_and_parameters_must_match() -> None:
    words = item(
        "api",
        config={"method": "POST", "url": "https://a.example/{lat}", "body_template": {"text": "{mesage} {{literal}}"}},
        parameters=[{"name": "lat", "type": "number"}, {"name": "message", "type": "string"}],
    )
    missing, unused = faults_of(words)
    assert (missing.place, missing.severity) == ("config.body_template", "error")
    assert "`message`" in missing.fix
    assert (unused.place, unused.severity) == ("parameters.message", "warning")


@pytest.mark.req("K-VA-02")
def test_seven_issues_each_have_place_reason_and_fix() -> None:
    text = """
tool_id: Bad Name
tool_type: api
version: "1.0"
executor: subprocess
description: Seven faults
config:
  method: FETCH
  url: ftp://example.com/
  timeout: -1
  verify: false
"""
    document = read_yaml(text, what="bad.yaml")
    assert isinstance(document.value, dict)
    manifest = parse(document.value, stem="bad", lines=document.lines)
    issues = check(manifest, sheets=SHEETS, lines=document.lines)
    assert len(issues) == 7
    assert all(issue.is_error and issue.place and issue.reason and issue.fix and issue.line for issue in issues)
    assert {issue.place: issue.reason for issue in issues} == {
        "tool_id": "'Bad Name' cannot name an item",
        "version": "'1.0' is not a semantic version",
        "executor": "an api depends on `http_client`, not on 'subprocess'",
        "config.method": "'FETCH' is not one of 'GET', 'POST', 'PUT', 'PATCH', 'DELETE', 'HEAD', 'OPTIONS'",
        "config.url": "'ftp://example.com/' is not an address Kiwi can use",
        "config.timeout": "-1 is not more than 0",
        "config.verify": "unknown key 'verify'",
    }


@pytest.mark.case("PATH-04")
@pytest.mark.parametrize(
    ("files", "place"),
    [(("tool.yaml", "other.py"), "config.entrypoint"), ((), "config.entrypoint"), (("main.py", "../x"), "../x")],
)
def test_an_entrypoint_must_be_among_the_files(files: tuple[str, ...], place: str) -> None:
    assert place in {issue.place for issue in faults_of(item("script"), with_files=True, files=files)}
    assert faults_of(item("script"), with_files=True, files=("tool.yaml", "main.py")) == []


def test_types_with_text_need_a_file_and_types_without_do_not() -> None:
    assert faults_of(item("knowledge"), with_files=True, files=("tool.yaml",))[0].is_error
    assert faults_of(item("knowledge"), with_files=True, files=("tool.yaml", "content.md")) == []
    assert faults_of(item("api"), with_files=True) == []
    assert not faults_of(item("api"), with_files=True, files=("tool.yaml", "x.py"))[0].is_error


@pytest.mark.parametrize(
    ("version", "ok"),
    [("1.0.0", True), ("1.0", False), ("0.0.0", False), ("", False), ("v1.0.0", False), ("1.0.0-rc.1", True)],
)
def test_versions_are_semantic(version: str, ok: bool) -> None:
    assert (faults_of(item("knowledge", version=version)) == []) is ok


@pytest.mark.case("UNI-02")
@pytest.mark.parametrize("character", ["\u200b", "\u202e", "\u2066", "\U000e0041", "\ufeff", "\u00ad"])
def test_invisible_characters_are_flagged(character: str) -> None:
    described = faults_of(item("knowledge", description=f"a{character}b"))
    declared = faults_of(item("script", parameters=[{"name": "a", "type": "string", "description": f"x{character}"}]))
    assert [(issue.place, issue.severity) for issue in described] == [("description", "warning")]
    assert [issue.place for issue in declared] == ["parameters.properties.a.description"]


RULES: JsonObject = {
    "child_schemas": [
        {
            "match": {"tool_type": "script"},
            "schema": {
                "type": "object",
                "properties": {
                    "manifest": {"properties": {"entrypoint": {"pattern": r"\.py$"}}, "required": ["entrypoint"]}
                },
                "required": ["manifest"],
            },
        }
    ],
    "child_constraints": {"x": {"min_version": "1.0.0", "max_version": "2.0.0"}},
}


def under(validation: JsonObject, **words: Json) -> list[str]:
    child = parse({"tool_id": "x", "version": "1.0.0", "description": "x", **item("script"), **words}, stem="x")
    parent = Manifest("py", "runtime", "1.0.0", validation=validation)
    return [issue.place for issue in check(child, sheets=SHEETS, executor=parent, with_files=False)]


@pytest.mark.req("K-CH-06")
def test_rules_of_a_parent_are_respected_if_declared_and_not_required() -> None:
    assert under({}) == []
    assert under(RULES) == []
    assert under(RULES, config={"entrypoint": "main.rb"}) == ["entrypoint"]
    assert under(RULES, version="2.1.0") == ["version"]
    assert under({"child_constraints": {"x": "^2.0"}}) == ["version"]
    assert under({"child_schemas": [{"match": {"tool_type": "api"}}]}) == ["executor"]
    assert under({"child_schemas": [{"match": {}, "schema": {"$ref": "https://evil.test"}}]}) == ["executor"]
