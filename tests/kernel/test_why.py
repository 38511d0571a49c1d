"""Why: it says yes only to calls that would run, and no with the reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]

OTHER_DAY = (datetime.now().astimezone() + timedelta(days=3)).strftime("%a").lower()
HEAD: JsonObject = {"version": "1.0.0", "description": "x"}


@pytest.fixture
def tools(project: Path) -> Path:
    folder = project / ".ai" / "tools"
    folder.mkdir()
    return folder


def put(tools: Path, name: str, kind: str, executor: str, config: JsonObject, code: str = "") -> Path:
    folder = tools / name
    folder.mkdir()
    manifest = {"tool_id": name, "tool_type": kind, "executor": executor, "config": config, **HEAD}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, "parameters": [{"name": "word", "required": True}]}))
    if code:
        (folder / "main.sh").write_text(code)
    return folder


def why(ask: Ask, name: str, **parameters: str) -> JsonObject:
    return ask("execute", action="why", item_id=name, parameters=parameters).content


def codes(answer: JsonObject) -> list[object]:
    return [as_object(reason)["code"] for reason in as_list(answer["reasons"])]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SIG-01")
def test_a_tampered_tool_would_not_run_whether_or_not_parameters_are_given(tools: Path, ask: Ask) -> None:
    folder = put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    ask("execute", action="sign", item_id="say")
    assert why(ask, "say")["would_run"] is True

    (folder / "main.sh").write_text("echo evil\n")

    for response in (why(ask, "say"), why(ask, "say", word="x")):
        assert (response["would_run"], codes(response)) == (False, ["content_hash_mismatch"])


@pytest.mark.case("NET-12")
@pytest.mark.parametrize("host", ["127.0.0.1:9", "[::1]:9"])
def test_an_address_that_is_not_granted_would_not_be_called(host: str, tools: Path, home: Path, ask: Ask) -> None:
    put(tools, "local", "api", "http_client", {"method": "GET", "url": f"http://{host}/?q={{word}}"})

    response = why(ask, "local", word="x")

    assert (response["would_run"], codes(response)) == (False, ["address_denied"])
    assert host in str(as_object(as_list(response["reasons"])[0])["suggestion"])
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"hosts": {"allow": [host]}}))
    assert why(ask, "local", word="x")["would_run"] is True


@pytest.mark.req("K-CH-01", "K-CH-02")
def test_a_chain_that_does_not_resolve_is_shown_with_the_reason(tools: Path, ask: Ask) -> None:
    put(tools, "say", "script", "lost_runtime", {"entrypoint": "main.sh"}, "echo hello\n")

    response = why(ask, "say")

    assert (response["would_run"], codes(response)) == (False, ["executor_not_found"])
    assert "say → lost_runtime (missing)" in str(as_object(as_list(response["reasons"])[0])["message"])
    assert as_list(response["chain"])[0] == "say"


def test_an_invalid_item_would_not_run(tools: Path, ask: Ask) -> None:
    put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh", "timeout": -1}, "echo hello\n")

    response = why(ask, "say")

    assert (response["would_run"], codes(response)) == (False, ["invalid_manifest"])


def test_a_denied_item_would_not_run(tools: Path, home: Path, ask: Ask) -> None:
    put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps({"items": {"allow": ["*"], "deny": ["*/bash_runtime@*"]}}))

    response = why(ask, "say", word="x")

    assert (response["would_run"], codes(response)) == (False, ["not_permitted"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    ("policy", "needs", "expected"),
    [
        ({"items": {"allow": ["*"], "deny": ["*/say@*"]}}, {}, "denied"),
        ({"files": {"write": {"allow": ["other"]}}}, {"write": ["notes"]}, "write"),
        ({"files": {"read": {"deny": ["notes"]}}}, {"read": ["notes"]}, "read"),
        ({}, {"hosts": ["127.0.0.1:9"]}, "not on the public network"),
        ({}, {"write": ["lost"]}, "is not there"),
        ({"conditions": [{"items": "*/say@*", "days": [OTHER_DAY]}]}, {}, "not on this day"),
    ],
)
def test_checks_without_parameters_are_made_without_them(
    policy: JsonObject, needs: JsonObject, expected: str, tools: Path, project: Path, home: Path, ask: Ask
) -> None:
    (project / "notes").mkdir()
    folder = put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    manifest = json.loads((folder / "tool.yaml").read_text())
    (folder / "tool.yaml").write_text(json.dumps({**manifest, "needs": needs}))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(json.dumps(policy))
    ask("execute", action="sign", item_id="say")

    answer = why(ask, "say")

    assert answer["would_run"] is False
    assert expected in str(answer["reasons"])
    assert "invalid_arguments" not in codes(answer)


def test_each_refusal_is_a_reason(tools: Path, project: Path, home: Path, ask: Ask) -> None:
    (project / "notes").mkdir()
    folder = put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    manifest = json.loads((folder / "tool.yaml").read_text())
    needs = {"read": ["notes"], "hosts": ["bad.example"]}
    (folder / "tool.yaml").write_text(json.dumps({**manifest, "needs": needs}))
    (home / ".ai").mkdir(exist_ok=True)
    rules = {"files": {"read": {"deny": ["notes"]}}, "hosts": {"deny": ["bad.example"]}}
    (home / ".ai" / "policy.yaml").write_text(json.dumps(rules))

    answer = why(ask, "say")

    refused = [row for row in map(as_object, as_list(answer["rights"])) if not row["allowed"]]
    assert len(refused) == 2
    assert codes(answer) == ["not_permitted", "not_permitted"]


@pytest.mark.usefixtures("sandbox")
def test_the_rules_of_the_owner_are_shown_without_parameters(tools: Path, project: Path, ask: Ask) -> None:
    (project / "notes").mkdir()
    folder = put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    manifest = json.loads((folder / "tool.yaml").read_text())
    (folder / "tool.yaml").write_text(json.dumps({**manifest, "needs": {"write": ["notes"]}}))
    ask("execute", action="sign", item_id="say")

    answer = why(ask, "say")

    assert answer["would_run"] is True
    assert str(project / "notes") in str(as_object(answer["approval"])["reasons"])


def test_an_address_without_parameters_is_checked(tools: Path, ask: Ask) -> None:
    put(tools, "local", "api", "http_client", {"method": "GET", "url": "http://127.0.0.1:9/?q={word}"})

    answer = why(ask, "local")

    assert (answer["would_run"], codes(answer)) == (False, ["address_denied"])


def test_the_scope_of_program_rules_is_explained(tools: Path, home: Path, ask: Ask) -> None:
    put(tools, "say", "script", "bash_runtime", {"entrypoint": "main.sh"}, "echo hello\n")
    assert why(ask, "say")["notes"] == []
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text("commands: {deny: [curl]}\n")

    assert "what a program starts by itself" in str(why(ask, "say")["notes"])
