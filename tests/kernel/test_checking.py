"""Checks of an item start no program that a call could not start."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
OTHER_DAY = DAYS[(datetime.now().astimezone().weekday() + 3) % 7]

SCRIPT: JsonObject = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "version": "1.0.0",
    "description": "Say hello",
    "config": {"entrypoint": "main.sh"},
    "files": {"main.sh": "echo hello\n"},
}
API: JsonObject = {
    "tool_type": "api",
    "executor": "http_client",
    "version": "1.0.0",
    "description": "Look something up",
    "config": {"method": "GET", "url": "https://words.example.com/"},
}


def act(ask: Ask, action: str, name: str = "say", words: JsonObject | None = None) -> JsonObject:
    return ask("execute", action=action, item_id=name, parameters=words or {}).content


def put(base: Path, name: str, words: JsonObject, **config: Json) -> Path:
    """Write a tool as its files, past the checks of create."""
    folder = base / "tools" / name
    folder.mkdir(parents=True)
    manifest = {word: value for word, value in words.items() if word != "files"}
    manifest |= {"tool_id": name, "config": {**as_object(words["config"]), **config}}
    (folder / "tool.yaml").write_text(json.dumps(manifest))
    for path, text in as_object(words.get("files")).items():
        (folder / path).write_text(str(text))
    return folder


def deny(home: Path, *rules: str) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"items": {"allow": ["*"], "deny": rules}}))


@pytest.fixture
def mark(project: Path) -> str:
    """The output of the `check` command of a project runtime, and a tool that uses the runtime."""
    config: JsonObject = {"command": "bash", "check": ["sh", "-c", "echo error: it was looked at >&2; exit 1"]}
    runtime = {**API, "tool_type": "runtime", "executor": "subprocess", "config": config}
    put(project / ".ai", "marking", runtime)
    put(project / ".ai", "say", {**SCRIPT, "executor": "marking"})
    return "error: it was looked at"


ACTIONS: Mapping[str, tuple[str, JsonObject]] = {
    "validate": ("say", {}),
    "sign": ("say", {}),
    "create": ("say_too", {**SCRIPT, "executor": "marking"}),
    "update": ("say", {"description": "Say hello again"}),
}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-VA-03")
@pytest.mark.parametrize("action", ACTIONS)
def test_the_check_command_of_a_permitted_item_is_started(action: str, mark: str, ask: Ask) -> None:
    name, words = ACTIONS[action]

    response = act(ask, action, name, words)

    assert [as_object(issue)["reason"] for issue in as_list(response["issues"])] == [mark]


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("rule", ["*/say*@*", "*/marking@*"], ids=["the item", "its runtime"])
def test_the_check_command_of_a_denied_item_is_not_started(
    rule: str, action: str, mark: str, home: Path, ask: Ask
) -> None:
    deny(home, rule)
    name, words = ACTIONS[action]

    response = act(ask, action, name, words)

    assert mark not in json.dumps(response)


POLICIES: Mapping[str, JsonObject] = {
    "the command": {"commands": {"deny": ["sh"]}},
    "the day": {"conditions": [{"items": "*/say*@*", "days": [OTHER_DAY]}]},
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("gate", POLICIES)
def test_the_check_command_passes_the_rules_of_a_call(gate: str, action: str, mark: str, home: Path, ask: Ask) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps(POLICIES[gate]))
    name, words = ACTIONS[action]

    response = act(ask, action, name, words)

    assert mark not in json.dumps(response)
    if action == "validate":
        assert "the syntax was not checked" in json.dumps(response["warnings"])


def test_a_check_with_a_missing_program_is_a_warning(mark: str, project: Path, ask: Ask) -> None:
    manifest = project / ".ai" / "tools" / "marking" / "tool.yaml"
    manifest.write_text(manifest.read_text().replace('"sh"', '"no_such_shell"'))

    (issue,) = as_list(act(ask, "validate")["warnings"])

    assert "no_such_shell" in str(as_object(issue)["reason"])


@pytest.mark.case("SIG-01")
@pytest.mark.parametrize("action", ACTIONS)
def test_an_executor_that_changed_after_signing_refuses_the_check(
    action: str, mark: str, project: Path, ask: Ask
) -> None:
    assert act(ask, "sign", "marking")["status"] == "signed"
    path = project / ".ai" / "tools" / "marking" / "tool.yaml"
    path.write_text(path.read_text().replace("Look something up", "Look elsewhere"))
    name, words = ACTIONS[action]

    refused = act(ask, action, name, words)

    assert [as_object(issue)["place"] for issue in as_list(refused["issues"])] == ["executor"]
    assert mark not in json.dumps(refused)


def test_a_user_item_is_not_checked_by_a_project_runtime(mark: str, project: Path, home: Path, ask: Ask) -> None:
    put(home / ".ai", "mine", {**SCRIPT, "executor": "marking"})

    response = act(ask, "validate", "mine")

    assert response["status"] == "invalid"
    assert mark not in json.dumps(response)


UNSOUND: Mapping[str, tuple[JsonObject, dict[str, Json]]] = {
    "a timeout beyond all measure": (SCRIPT, {"timeout": 99_999_999_999}),
    "a negative timeout": (SCRIPT, {"timeout": -1}),
    "retries without end": (API, {"retry": 100_000}),
    "a body without limit": (API, {"max_bytes": 10**15}),
}


@pytest.mark.req("K-VA-01")
@pytest.mark.parametrize("what", UNSOUND)
def test_an_invalid_value_refuses_the_run(what: str, project: Path, ask: Ask) -> None:
    words, config = UNSOUND[what]
    put(project / ".ai", "say", words, **config)

    refused = act(ask, "run")

    assert refused["code"] == "invalid_manifest"
    assert [as_object(issue)["place"] for issue in as_list(refused["issues"])] == [f"say.config.{next(iter(config))}"]
    assert not (project / ".ai" / "outputs").exists()


def test_an_invalid_runtime_refuses_the_tools_on_it(mark: str, project: Path, ask: Ask) -> None:
    path = project / ".ai" / "tools" / "marking" / "tool.yaml"
    path.write_text(json.dumps({**json.loads(path.read_text()), "config": {"command": "bash", "timeout": 10**9}}))

    refused = act(ask, "run")

    assert [as_object(issue)["place"] for issue in as_list(refused["issues"])] == ["marking.config.timeout"]


@pytest.mark.usefixtures("sandbox")
def test_an_unknown_key_in_a_legacy_config_still_runs(project: Path, ask: Ask) -> None:
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (tools / "say.py").write_text(
        '__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n__category__ = "old"\n'
        'CONFIG = {"retries": 3, "colour": "green"}\n\n\ndef main():\n    return CONFIG["colour"]\n'
    )

    assert act(ask, "run")["result"] == "green"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-01")
def test_a_change_after_signing_is_reported_before_the_errors_it_caused(project: Path, ask: Ask) -> None:
    path = put(project / ".ai", "say", SCRIPT, timeout=60) / "tool.yaml"
    assert act(ask, "sign")["status"] == "signed"
    path.write_text(path.read_text().replace("60", "-60"))

    assert act(ask, "run")["code"] == "content_hash_mismatch"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-04")
@pytest.mark.case("SIG-05")
def test_a_frozen_run_refuses_a_tool_that_was_never_signed(project: Path, ask: Ask) -> None:
    put(project / ".ai", "say", SCRIPT)

    refused = ask("execute", item_id="say", frozen=True).content

    assert (refused["code"], "never signed" in str(refused["message"])) == ("lock_mismatch", True)
    assert act(ask, "run")["result"] == "hello"
    act(ask, "sign")
    assert ask("execute", item_id="say", frozen=True).content["result"] == "hello"


@pytest.mark.usefixtures("sandbox")
def test_a_folder_of_python_without_declared_parameters_takes_those_of_main(project: Path, ask: Ask) -> None:
    code = "def main(word: str, count: int = 2):\n    return word * count\n"
    words = {**SCRIPT, "executor": "python_runtime", "config": {"entrypoint": "main.py"}, "files": {"main.py": code}}
    put(project / ".ai", "say", words)

    schema = as_object(ask("load", item_id="say").content["parameters"])

    assert schema["properties"] == {"word": {"type": "string"}, "count": {"type": "integer", "default": 2}}
    assert schema["required"] == ["word"]
    assert act(ask, "run", words={"word": "ab"})["result"] == "abab"
    assert act(ask, "run")["code"] == "invalid_input"


@pytest.mark.req("K-VA-02")
def test_a_syntax_error_in_an_embedded_tool_is_reported_with_its_line_by_run_too(project: Path, ask: Ask) -> None:
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (tools / "say.py").write_text('"""Say."""\n\n__version__ = "1.0.0"\n\n\ndef main(:\n    return 1\n')

    for action in ("run", "sign", "validate"):
        refused = act(ask, action)
        issues = [as_object(issue) for issue in as_list(refused["issues"])]
        assert (refused["code"], [issue.get("line") for issue in issues]) == ("invalid_manifest", [6])


@pytest.mark.req("K-VA-02")
@pytest.mark.parametrize(
    ("parameter", "place"),
    [
        ({"name": "count", "type": "integer", "default": "three"}, "parameters.count.default"),
        ({"name": "count", "type": "integer", "max": 3, "default": 4}, "parameters.count.default"),
        ({"name": "colour", "type": "string", "enum": ["red"], "default": "green"}, "parameters.colour.default"),
        ({"name": "two words", "type": "string"}, "parameters[0]"),
        ({"name": "a=b", "type": "string"}, "parameters[0]"),
    ],
)
def test_an_unusable_parameter_is_an_issue(parameter: JsonObject, place: str, ask: Ask) -> None:
    refused = act(ask, "create", words={**SCRIPT, "parameters": [parameter]})

    issues = [as_object(issue) for issue in as_list(refused["issues"])]
    assert (refused["code"], [issue["place"] for issue in issues]) == ("invalid_manifest", [place])
    assert all(issue["fix"] for issue in issues)
