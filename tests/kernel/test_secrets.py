"""The secrets verb: the owner sets, grants and revokes; other actors see only names."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from keyring import get_keyring, set_keyring
from tests.primitives.test_sealing import Ring

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


def doctor(ask: Ask) -> JsonObject:
    checks = map(as_object, as_list(ask("doctor").content["checks"]))
    return next(row for row in checks if row["check"] == "secrets")


def seal_by_passphrase(state: Path) -> None:
    """Leave the key of a store as earlier versions sealed it with a passphrase."""
    key, salt, nonce = (state / "secrets.key").read_bytes(), os.urandom(32), os.urandom(12)
    derived = Scrypt(salt=salt, length=32, n=2**12, r=8, p=1).derive(b"correct horse battery")
    wrapped = salt + nonce + AESGCM(derived).encrypt(nonce, key, b"secrets.wrapped")
    (state / "secrets.wrapped").write_bytes(wrapped)
    (state / "secrets.key").unlink()


def stranger(project: Path, **request: Json) -> Answer:
    async def call() -> Answer:
        kernel = Kernel(project, is_owner=False)
        try:
            return await kernel.call("secrets", request)
        finally:
            await kernel.aclose()

    return asyncio.run(call())


@pytest.mark.usefixtures("sandbox")
def test_a_secret_is_set_granted_rotated_revoked_and_removed(ask: Ask, project: Path) -> None:
    response = ask("secrets", action="set", name="CRM_KEY", value=VALUE).content
    assert (response["status"], response["message"], response["next"]) == (
        "set", "CRM_KEY is in the store, for processes", "kiwi secrets grant CRM_KEY TOOL",
    )  # fmt: skip
    response = ask("secrets", action="grant", name="CRM_KEY", tool="crm").content
    assert response["message"] == f"project/local/crm in {project} is given CRM_KEY from now on"
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)
    assert ask("secrets", action="rotate", name="CRM_KEY", value=VALUE + "!").content["status"] == "rotated"
    assert ask("execute", item_id="crm").content["result"] == len(VALUE) + 1
    row = listed(ask)["CRM_KEY"]
    assert row["grants"] == [{"item": "project/local/crm", "project": str(project)}]
    assert (row["hosts"], row["form"], row["age_days"], row["weak"]) == ([], "env", 0, False)
    response = ask("secrets", action="revoke", name="CRM_KEY", tool="crm").content
    assert response["message"] == "CRM_KEY was taken back from project/local/crm"
    assert ask("execute", item_id="crm").content["code"] == "secret_not_granted"
    assert ask("secrets", action="remove", name="CRM_KEY").content["status"] == "removed"
    assert listed(ask) == {}
    assert ask("execute", item_id="crm").content["code"] == "variable_missing"


def test_no_answer_and_no_file_contains_a_value(ask: Ask, home: Path, project: Path) -> None:
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
@pytest.mark.parametrize(
    ("action", "more"),
    [
        ("set", {"value": VALUE, "hosts": ["*"]}),
        ("grant", {"tool": "crm"}),
        ("revoke", {"tool": "crm"}),
        ("rotate", {"value": VALUE}),
        ("remove", {}),
    ],
)
def test_only_the_owner_changes_secrets_and_others_see_names(
    action: str, more: dict[str, Json], ask: Ask, project: Path
) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=["a.example"])
    before = listed(ask)

    assert stranger(project).content == {"action": "list", "secrets": [{"name": "CRM_KEY"}]}
    refused = stranger(project, action=action, name="CRM_KEY", **more)

    assert refused.content["code"] == "not_permitted"
    assert f"kiwi secrets {action} CRM_KEY" in str(refused.content["suggestion"])
    assert VALUE not in json.dumps(refused.content)
    assert listed(ask) == before


@pytest.mark.usefixtures("sandbox")
def test_hosts_and_form_change_while_the_value_stays(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=["Api.Example.com", "*.b.example:8443", "::1"])
    row = listed(ask)["CRM_KEY"]
    assert (row["hosts"], row["form"]) == (["api.example.com", "*.b.example:8443", "::1"], "header")
    response = ask("secrets", action="set", name="CRM_KEY", form="any").content
    assert response["message"] == (
        "CRM_KEY is for processes, and for requests to api.example.com, *.b.example:8443, ::1; its value stays"
    )
    response = ask("secrets", action="set", name="CRM_KEY", hosts=[], form="header").content
    assert response["warnings"] == ["no request may carry it yet: `--hosts` says where it may go"]
    ask("secrets", action="grant", name="CRM_KEY", tool="*")
    assert ask("execute", item_id="crm").content["code"] == "secret_not_granted"
    ask("secrets", action="set", name="CRM_KEY", form="env")
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)


@pytest.mark.parametrize("host", ["https://a.example", "a.example/x", "a b", "", "*.*", "a:b", "[::1", "a..b"])
def test_an_invalid_host_is_refused(host: str, ask: Ask) -> None:
    response = ask("secrets", action="set", name="CRM_KEY", value=VALUE, hosts=[host]).content
    assert response["code"] == "invalid_request"
    assert listed(ask) == {}


@pytest.mark.case("SEC-13")
@pytest.mark.parametrize("value", ["a", "true", "1234567", "localhost", "production", "       "])
def test_a_value_that_cannot_be_redacted_is_refused_without_force(value: str, ask: Ask) -> None:
    refused = ask("secrets", action="set", name="CRM_KEY", value=value).content
    assert refused["code"] == "invalid_request"
    assert "--weak" in str(refused["suggestion"])
    assert listed(ask) == {}
    response = ask("secrets", action="set", name="CRM_KEY", value=value, weak=True).content
    assert "cannot be" in str(refused["message"]) or "too common" in str(refused["message"])
    assert "too short or too common" in str(response["warnings"])
    assert listed(ask)["CRM_KEY"]["weak"] is True


@pytest.mark.parametrize("value", ["", "a\0b-and-some-more", "x" * 70_000])
def test_a_value_that_no_variable_can_contain_is_refused(value: str, ask: Ask) -> None:
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
def test_an_impossible_request_is_refused_with_a_reason(request_: JsonObject, code: str, ask: Ask) -> None:
    assert ask("secrets", **request_).content["code"] == code


@pytest.mark.usefixtures("sandbox")
def test_a_pattern_that_still_covers_a_revoked_item_is_reported(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    for tool in ("crm", "mail", "project/local/*"):
        ask("secrets", action="grant", name="CRM_KEY", tool=tool)
    response = ask("secrets", action="revoke", name="CRM_KEY", tool="project/local/crm@1.0.0").content
    assert response["warnings"] == ["`project/local/*` still gives it"]
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)
    assert ask("secrets", action="revoke", name="CRM_KEY", tool="elsewhere").content["code"] == "not_found"
    ask("secrets", action="revoke", name="CRM_KEY")
    assert listed(ask)["CRM_KEY"]["grants"] == []


def test_a_name_that_is_also_set_elsewhere_is_reported(ask: Ask, project: Path) -> None:
    (project / ".env").write_text("CRM_KEY=an-older-value\n")
    response = ask("secrets", action="set", name="CRM_KEY", value=VALUE).content
    [warning] = as_list(response["warnings"])
    assert str(project / ".env") in str(warning)


@pytest.mark.case("SEC-11")
def test_with_a_locked_store_no_item_with_a_variable_runs(ask: Ask, home: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    (home / ".ai" / "state" / "secrets.key").write_bytes(bytes(32))

    for response in (ask("execute", item_id="crm"), ask("secrets")):
        assert response.content["code"] == "store_damaged"
        assert "the key that it was sealed with" in str(response.content["suggestion"])


def test_why_reports_whether_a_variable_is_in_the_store_and_granted(ask: Ask) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    response = ask("execute", action="why", item_id="crm").content
    assert response["variables"] == {"CRM_KEY": "the store of secrets, not granted"}
    assert response["would_run"] is False
    assert [as_object(reason)["code"] for reason in as_list(response["reasons"])] == ["secret_not_granted"]
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    response = ask("execute", action="why", item_id="crm").content
    assert (response["variables"], response["would_run"]) == ({"CRM_KEY": "the store of secrets, granted"}, True)
    assert VALUE not in json.dumps(response)


@pytest.mark.usefixtures("loopback")
def test_settings_of_the_owner_need_no_grant_and_respect_hosts(ask: Ask, project: Path, home: Path) -> None:
    ask("secrets", action="set", name="TEAM_TOKEN", value=VALUE, hosts=["elsewhere.example"])
    ask("registry", action="add", remote="team", url="http://127.0.0.1:9", token="${TEAM_TOKEN}")

    refused = ask("registry", action="pull", remote="team").content

    assert (refused["code"], refused["host"]) == ("secret_not_granted", "127.0.0.1")
    ask("secrets", action="set", name="TEAM_TOKEN", hosts=["127.0.0.1:9"])
    assert ask("registry", action="pull", remote="team").content["code"] == "request_failed"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-03")
def test_a_tool_that_a_model_changed_loses_its_secrets_until_the_owner_grants_them_again(
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


@pytest.mark.usefixtures("sandbox")
def test_a_change_by_the_owner_keeps_the_grants(ask: Ask, project: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    (project / ".ai" / "tools" / "crm" / "main.sh").write_text('printf "%s" "${#CRM_KEY}"; echo\n')
    assert ask("execute", action="sign", item_id="crm").content["status"] == "signed"
    assert ask("execute", item_id="crm").content.get("code") != "secret_not_granted"


@pytest.mark.usefixtures("sandbox")
def test_the_owner_moves_the_key_and_sees_what_still_opens_the_store(ask: Ask, home: Path, project: Path) -> None:
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    assert ask("secrets", action="seal").content["code"] == "invalid_request"
    assert stranger(project, action="seal", key="file").content["code"] == "not_permitted"
    refused = ask("secrets", action="seal", key="passphrase").content
    assert (refused["code"], "'file', 'keyring'" in json.dumps(refused)) == ("invalid_request", True)
    before, ring = get_keyring(), Ring()
    set_keyring(ring)
    try:
        response = ask("secrets", action="seal", key="keyring").content
        assert response["message"] == "the store is opened by the keyring from now on"
        assert response["warnings"] == ["copies of the old key file still open the store: remove them"]
        assert ask("secrets").content["sealed_by"] == "keyring"
        assert not (home / ".ai" / "state" / "secrets.key").exists()
        assert str(doctor(ask)["detail"]).endswith("opened by the keyring")
        response = ask("secrets", action="seal", key="file").content
    finally:
        set_keyring(before)
    assert (response["sealed_by"], response["warnings"]) == ("key file", [])
    assert list(listed(ask)) == ["CRM_KEY"]


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("SEC-11")
def test_passphrase_secrets_are_refused_everywhere_until_converted(
    ask: Ask, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.primitives.secrets.key_storage._COST", 2**12)
    ask("secrets", action="set", name="CRM_KEY", value=VALUE)
    ask("secrets", action="grant", name="CRM_KEY", tool="crm")
    ask("key", action="new")
    state = home / ".ai" / "state"
    seal_by_passphrase(state)
    given = tmp_path / "passphrase"
    given.write_text("correct horse battery\n")
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(given))

    asked = (
        ask("secrets"),
        ask("secrets", action="set", name="MAIL_KEY", value=VALUE),
        ask("execute", item_id="crm"),
        ask("execute", action="sign", item_id="crm"),
        ask("key", action="rotate"),
    )
    for refused in asked:
        assert refused.content["code"] == "store_unavailable"
        assert "`kiwi secrets seal file` or `kiwi secrets seal keyring`" in str(refused.content["suggestion"])
    assert doctor(ask)["status"] == "problem"
    assert {path.name for path in state.glob("secrets.*")} == {"secrets.wrapped"}

    response = ask("secrets", action="seal", key="file").content
    assert (response["status"], response["sealed_by"]) == ("sealed", "key file")
    assert {path.name for path in state.glob("secrets.*")} == {"secrets.key"}
    assert ask("execute", item_id="crm").content["result"] == len(VALUE)
    assert ask("execute", action="sign", item_id="crm").content["status"] == "signed"


def test_a_wrong_passphrase_does_not_lose_the_private_keys(
    ask: Ask, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kiwi_mcp.primitives.secrets.key_storage._COST", 2**12)
    ask("key", action="new")
    state = home / ".ai" / "state"
    (state / "secrets.key").unlink()
    (state / "secrets.salt").write_bytes(bytes(32))  # no secret is stored: only the private key can tell
    (tmp_path / "wrong").write_text("incorrect horse\n")
    monkeypatch.setenv("KIWI_PASSPHRASE_FILE", str(tmp_path / "wrong"))
    refused = ask("secrets", action="seal", key="file").content
    assert (refused["code"], "Nothing was changed" in str(refused)) == ("store_damaged", True)
    assert {path.name for path in state.glob("secrets.*")} == {"secrets.salt"}
