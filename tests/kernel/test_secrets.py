"""The secrets verb: the owner keeps, grants and takes back; whoever else asks hears names."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
VALUE = "s3cret-value-7f3a"


@pytest.fixture(autouse=True)
def tools(project: Path) -> None:
    for name in ("crm", "mail"):
        folder = project / ".ai" / "tools" / name
        folder.mkdir(parents=True)
        (folder / "tool.yaml").write_text(
            f"tool_id: {name}\ntool_type: script\nexecutor: bash_runtime\nversion: 1.0.0\ndescription: Say it\n"
            "config: {entrypoint: main.sh, variables: [CRM_KEY]}\nparameters: []\n"
        )
        (folder / "main.sh").write_text('printf "%s" "${#CRM_KEY}"\n')


def listed(ask: Ask) -> dict[str, JsonObject]:
    rows = map(as_object, as_list(ask("secrets").content["secrets"]))
    return {str(row["name"]): row for row in rows}


def stranger(project: Path, **request: Json) -> Answer:
    async def call() -> Answer:
        kernel = Kernel(project, is_owner=False)
        try:
            return await kernel.call("secrets", request)
        finally:
            await kernel.aclose()

    return asyncio.run(call())


def test_a_secret_is_set_granted_rotated_revoked_and_removed(ask: Ask, project: Path) -> None:
    told = ask("secrets", action="set", name="CRM_KEY", value=VALUE).content
    assert (told["status"], told["message"], told["next"]) == (
        "set", "CRM_KEY is in the store, for processes", "kiwi secrets grant CRM_KEY TOOL",
    )  # fmt: skip
    told = ask("secrets", action="grant", name="CRM_KEY", tool="crm").content
    assert told["message"] == f"project/local/crm in {project} is given CRM_KEY from now on"
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)
    assert ask("secrets", action="rotate", name="CRM_KEY", value=VALUE + "!").content["status"] == "rotated"
    assert ask("execute", item_id="crm").content["result"] == len(VALUE) + 1
    row = listed(ask)["CRM_KEY"]
    assert row["grants"] == [{"item": "project/local/crm", "project": str(project)}]
    assert (row["hosts"], row["form"], row["age_days"], row["weak"]) == ([], "env", 0, False)
    told = ask("secrets", action="revoke", name="CRM_KEY", tool="crm").content
    assert told["message"] == "CRM_KEY was taken back from project/local/crm"
    assert ask("execute", item_id="crm").content["code"] == "secret_not_granted"
    assert ask("secrets", action="remove", name="CRM_KEY").content["status"] == "removed"
    assert listed(ask) == {}
    assert ask("execute", item_id="crm").content["code"] == "variable_missing"


def test_no_answer_and_no_file_holds_a_value(ask: Ask, home: Path, project: Path) -> None:
    answers = [
        ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=["a.example"]),
        ask("secrets", action="rotate", name="CRM_KEY", value=VALUE),
        ask("secrets", action="set", name="CRM KEY", value=VALUE),
        ask("secrets", action="set", name="CRM_KEY", value=VALUE, form="cookie"),
        ask("secrets", action="set", name="CRM_KEY", value=[VALUE]),
        ask("secrets", action="rotate", name="NO_KEY", value=VALUE),
        ask("secrets"),
    ]
    assert VALUE not in json.dumps([answer.content for answer in answers])
    files = [path for path in (*project.rglob("*"), *home.rglob("*")) if path.is_file()]
    assert not [path for path in files if VALUE.encode() in path.read_bytes()]


@pytest.mark.case("SEC-03")
@pytest.mark.parametrize("action", ["set", "grant", "revoke", "rotate", "remove"])
def test_whoever_is_not_the_owner_sees_names_and_changes_nothing(action: str, ask: Ask, project: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=["a.example"])
    before = listed(ask)

    assert stranger(project).content == {"action": "list", "secrets": [{"name": "CRM_KEY"}]}
    refused = stranger(project, action=action, name="CRM_KEY", value=VALUE, tool="crm", hosts=["*"])

    assert refused.content["code"] == "not_permitted"
    assert f"kiwi secrets {action} CRM_KEY" in str(refused.content["suggestion"])
    assert VALUE not in json.dumps(refused.content)
    assert listed(ask) == before


def test_hosts_and_form_change_while_the_value_stays(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=["Api.Example.com", "*.b.example:8443", "::1"])
    row = listed(ask)["CRM_KEY"]
    assert (row["hosts"], row["form"]) == (["api.example.com", "*.b.example:8443", "::1"], "header")
    told = ask("secrets", action="set", name="CRM_KEY", form="any").content
    assert told["message"] == (
        "CRM_KEY is for processes, and for requests to api.example.com, *.b.example:8443, ::1; its value stays"
    )
    told = ask("secrets", action="set", name="CRM_KEY", hosts=[], form="header").content
    assert told["warnings"] == ["no request may carry it yet: `--hosts` says where it may go"]
    ask("secrets", action="grant", name="CRM_KEY", tool="*")
    assert ask("execute", item_id="crm").content["code"] == "secret_not_granted"
    ask("secrets", action="set", name="CRM_KEY", form="env")
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)


@pytest.mark.parametrize("host", ["https://a.example", "a.example/x", "a b", "", "*.*", "a:b", "[::1", "a..b"])
def test_what_is_no_host_is_refused(host: str, ask: Ask) -> None:
    told = ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=[host]).content
    assert told["code"] == "invalid_request"
    assert listed(ask) == {}


@pytest.mark.case("SEC-13")
@pytest.mark.parametrize("value", ["a", "true", "1234567", "localhost", "production", "       "])
def test_a_value_that_cannot_be_hidden_is_refused_unless_the_owner_means_it(value: str, ask: Ask) -> None:
    refused = ask("secrets", action="set", name="CRM_KEY", value=value).content
    assert refused["code"] == "invalid_request"
    assert "--weak" in str(refused["suggestion"])
    assert listed(ask) == {}
    told = ask("secrets", action="set", name="CRM_KEY", value=value, weak=True).content
    assert "cannot be" in str(refused["message"]) or "too common" in str(refused["message"])
    assert "too short or too common" in str(told["warnings"])
    assert listed(ask)["CRM_KEY"]["weak"] is True


@pytest.mark.parametrize("value", ["", "a\0b-and-some-more", "x" * 70_000])
def test_a_value_that_no_variable_can_hold_is_refused(value: str, ask: Ask) -> None:
    refused = ask("secrets", action="set", name="CRM_KEY", value=value, weak=True).content
    assert refused["code"] == "invalid_request"
    assert listed(ask) == {}


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"action": "set", "name": "CRM_KEY"}, "not_found"),
        ({"action": "set", "value": VALUE}, "invalid_request"),
        ({"action": "set", "name": "1KEY", "value": VALUE}, "invalid_request"),
        ({"action": "grant", "name": "CRM_KEY"}, "invalid_request"),
        ({"action": "grant", "name": "CRM_KEY", "tool": "nowhere"}, "tool_not_found"),
        ({"action": "grant", "name": "CRM_KEY", "tool": "crm"}, "not_found"),
        ({"action": "revoke", "name": "CRM_KEY", "tool": "crm"}, "not_found"),
    ],
)
def test_what_cannot_be_done_is_refused_with_its_reason(request_: JsonObject, code: str, ask: Ask) -> None:
    assert ask("secrets", **request_).content["code"] == code


def test_a_pattern_that_still_covers_what_was_revoked_is_told(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    for tool in ("crm", "mail", "project/local/*"):
        ask("secrets", action="grant", name="CRM_KEY", tool=tool)
    told = ask("secrets", action="revoke", name="CRM_KEY", tool="project/local/crm@1.0.0").content
    assert told["warnings"] == ["`project/local/*` still gives it"]
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)
    assert ask("secrets", action="revoke", name="CRM_KEY", tool="elsewhere").content["code"] == "not_found"
    ask("secrets", action="revoke", name="CRM_KEY")
    assert listed(ask)["CRM_KEY"]["grants"] == []


def test_a_name_that_is_set_elsewhere_as_well_is_told(ask: Ask, project: Path) -> None:
    (project / ".env").write_text("CRM_KEY=an-older-value\n")
    told = ask("secrets", action="set", name="CRM_KEY", value=VALUE).content
    [warning] = as_list(told["warnings"])
    assert str(project / ".env") in str(warning)


@pytest.mark.case("SEC-11")
def test_a_store_that_does_not_open_lets_nothing_run_that_names_a_variable(ask: Ask, home: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    (home / ".ai" / "state" / "secrets.key").write_bytes(bytes(32))

    for told in (ask("execute", item_id="crm"), ask("secrets")):
        assert told.content["code"] == "store_damaged"
        assert "passphrase" in str(told.content["suggestion"])


def test_why_says_that_a_variable_comes_from_the_store_and_whether_it_is_granted(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    told = ask("execute", action="why", item_id="crm").content
    assert told["variables"] == {"CRM_KEY": "the store of secrets, not granted"}
    assert told["would_run"] is False
    assert [as_object(reason)["code"] for reason in as_list(told["reasons"])] == ["secret_not_granted"]
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    told = ask("execute", action="why", item_id="crm").content
    assert (told["variables"], told["would_run"]) == ({"CRM_KEY": "the store of secrets, granted"}, True)
    assert VALUE not in json.dumps(told)


def test_the_owners_own_settings_need_no_grant_and_are_held_to_hosts_all_the_same(
    ask: Ask, project: Path, home: Path
) -> None:
    ask("secrets", action="set", name="TEAM_TOKEN", value=VALUE, hosts=["elsewhere.example"])
    ask("registry", action="add", remote="team", url="http://127.0.0.1:9", token="${TEAM_TOKEN}")

    refused = ask("registry", action="pull", remote="team").content

    assert (refused["code"], refused["host"]) == ("secret_not_granted", "127.0.0.1")
    ask("secrets", action="set", name="TEAM_TOKEN", hosts=["127.0.0.1:9"])
    assert ask("registry", action="pull", remote="team").content["code"] == "request_failed"


@pytest.mark.case("SEC-03")
def test_a_tool_that_a_model_changed_loses_its_secrets_until_the_owner_grants_them_anew(
    ask: Ask, project: Path
) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    main = project / ".ai" / "tools" / "crm" / "main.sh"
    main.write_text('printf "%s" "$CRM_KEY" | rev\n')

    refused = ask("execute", item_id="crm").content
    assert refused["code"] == "secret_not_granted"
    assert "it has changed since the owner granted it that secret" in str(refused["message"])
    variables = as_object(ask("execute", action="why", item_id="crm").content["variables"])
    assert variables["CRM_KEY"] == "the store of secrets, not granted"

    main.write_text('printf "%s" "${#CRM_KEY}"; echo\n')
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    assert ask("execute", item_id="crm").content.get("code") != "secret_not_granted"
    assert len(as_list(listed(ask)["CRM_KEY"]["grants"])) == 1


def test_a_change_of_the_owners_own_keeps_what_was_granted(ask: Ask, project: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    (project / ".ai" / "tools" / "crm" / "main.sh").write_text('printf "%s" "${#CRM_KEY}"; echo\n')
    assert ask("execute", action="sign", item_id="crm").content["status"] == "signed"
    assert ask("execute", item_id="crm").content.get("code") != "secret_not_granted"


def test_the_owner_moves_the_key_and_hears_what_still_opens_the_store(
    ask: Ask, home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    assert ask("secrets", action="seal").content["code"] == "invalid_request"
    assert stranger(project, action="seal", key="file").content["code"] == "not_permitted"
    passphrase = tmp_path / "passphrase"
    passphrase.write_text("correct horse battery\n")
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(passphrase))
    told = ask("secrets", action="seal", key="passphrase").content
    assert told["message"] == "the store is opened by the passphrase from now on"
    assert told["warnings"] == ["copies of the old key file still open the store: remove them"]
    assert ask("secrets").content["sealed_by"] == "passphrase"
    assert not (home / ".ai" / "state" / "secrets.key").exists()
    checks = {str(row["check"]): row for row in map(as_object, as_list(ask("doctor").content["checks"]))}
    assert str(checks["secrets"]["detail"]).endswith("opened by the passphrase")
    told = ask("secrets", action="seal", key="file").content
    assert (told["sealed_by"], told["warnings"]) == ("key file", [])
    assert list(listed(ask)) == ["CRM_KEY"]
