"""A managed machine: unlisted items are neither pulled nor loaded, and the minimum level applies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer
from kiwi_mcp.policy import policy_files
from kiwi_mcp.policy.policy_files import deployments, minimum

Ask = Callable[..., Answer]
TOOL = "# tool_id: {0}\n# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Say\necho {0}\n"


@pytest.fixture
def managed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make this a managed machine, by the words of its file."""

    def write(text: str) -> Path:
        path = tmp_path / "deployment.yaml"
        path.write_text(text)
        monkeypatch.setenv("KIWI_DEPLOYMENT", str(path))
        return path

    return write


@pytest.fixture(autouse=True)
def tools(project: Path) -> Path:
    folder = project / ".ai" / "tools"
    folder.mkdir()
    for name in ("good", "stray"):
        (folder / f"{name}.sh").write_text(f"#!/bin/bash\n{TOOL.format(name)}")
    return folder


def checks(ask: Ask) -> list[JsonObject]:
    return [one for one in map(as_object, as_list(ask("doctor").content["checks"])) if one["check"] == "deployment"]


def new(ask: Ask, name: str) -> JsonObject:
    manifest = {"tool_type": "api", "executor": "http_client", "version": "1.0.0", "description": "Say"}
    config = {"method": "GET", "url": "https://api.test/"}
    parameters = {"manifest": {"tool_id": name, **manifest, "config": config}}
    return ask("execute", action="create", item_id=name, parameters=parameters).content


def test_a_list_of_names_without_versions_covers_all_versions(ask: Ask, managed: Callable[[str], Path]) -> None:
    managed("deployment: managed\nitems: {allow: ['project/local/good', 'project/local/other', 'builtin/*']}\n")

    assert ask("execute", item_id="good", dry_run=True).content["status"] == "planned"
    assert ask("execute", item_id="stray", dry_run=True).content["code"] == "not_permitted"
    assert new(ask, "other")["status"] == "created"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B3", "SR4")
def test_an_unlisted_item_is_neither_pulled_nor_loaded_and_the_reason_is_reported(
    ask: Ask, managed: Callable[[str], Path], tools: Path
) -> None:
    managed("deployment: managed\nitems: {allow: ['project/local/good*']}\n")

    for response in (
        new(ask, "other"),
        ask("execute", action="pull", item_id="acme/other@1.0.0").content,
        ask("load", item_id="stray", destination="user").content,
        ask("mcp", action="add", server="other", command="true").content,
        ask("execute", item_id="stray").content,
        ask("load", item_id="stray").content,
    ):
        assert response["code"] == "not_permitted"
        assert "deployment" in as_text(response["message"])
    assert not (tools / "other.yaml").exists()
    assert new(ask, "good_one")["status"] == "created"
    cards = map(as_object, as_list(ask("search", query="say").content["results"]))
    assert {as_text(card["name"]) for card in cards} == {"good", "good_one"}
    assert ask("execute", item_id="good", dry_run=True).content["status"] == "planned"
    assert [as_text(one["detail"]) for one in checks(ask)][1:] == [
        "project/local/stray@1.0.0 is not loaded: it is not on the list"
    ]


@pytest.mark.req("B3")
def test_a_planted_executor_is_not_used(ask: Ask, managed: Callable[[str], Path], tools: Path) -> None:
    (tools / "my_runtime.yaml").write_text(
        "tool_id: my_runtime\ntool_type: runtime\nexecutor: subprocess\nversion: 1.0.0\ndescription: Run\n"
        "config: {command: bash, args: ['{tool.files}/{tool.entrypoint}']}\n"
    )
    (tools / "good.sh").write_text(f"#!/bin/bash\n{TOOL.format('good').replace('bash_runtime', 'my_runtime')}")
    managed("deployment: managed\nitems: {allow: ['project/local/good@*']}\n")

    response = ask("execute", item_id="good").content
    assert (response["code"], "my_runtime" in as_text(response["message"])) == ("not_permitted", True)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("H6")
def test_no_process_runs_below_the_minimum_level_of_the_machine_and_none_is_relaxed_below_it(
    ask: Ask, managed: Callable[[str], Path]
) -> None:
    ask("execute", action="sign", item_id="good")
    managed("deployment: managed\nfloor: restricted\n")

    plan = as_object(ask("execute", item_id="good", dry_run=True).content["plan"])
    assert as_object(plan["jail"])["level"] == "restricted"
    assert as_object(ask("execute", action="why", item_id="good").content["isolation"])["decided_by"] == "deployment"
    response = ask("relax", action="apply", item_id="good", to="standard").content
    assert (response["code"], "restricted" in as_text(response["message"])) == ("not_permitted", True)


def test_deployment_files_only_add_restrictions(
    managed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system" / "deployment.yaml"
    monkeypatch.setattr(policy_files, "SYSTEM_FOLDER", str(system.parent))
    assert deployments() == ()
    system.parent.mkdir()
    assert deployments() == ()
    system.write_text("deployment: managed\nfloor: restricted\nitems: {allow: ['user/*']}\n")
    managed("deployment: local\nfloor: trusted\nitems: {allow: ['*']}\n")
    assert (minimum(), len(deployments())) == ("restricted", 1)
    managed("deployment: managed\nfloor: standard\nitems: {allow: ['*']}\n")
    assert (minimum(), len(deployments())) == ("restricted", 2)


def test_a_broken_machine_file_is_for_the_administrator_to_fix(
    managed: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = tmp_path / "system" / "deployment.yaml"
    monkeypatch.setattr(policy_files, "SYSTEM_FOLDER", str(system.parent))
    system.mkdir(parents=True)
    with pytest.raises(InvalidManifest) as fault:
        deployments()
    assert [issue.fix for issue in fault.value.issues] == ["Ask the administrator of this machine to fix it."]
    system.rmdir()
    managed("deployment: local\n").unlink()
    with pytest.raises(InvalidManifest) as fault:
        deployments()
    assert [issue.fix for issue in fault.value.issues] == ["Fix it, or unset KIWI_DEPLOYMENT."]


@pytest.mark.parametrize(
    "text",
    ["", "deployment: manged\n", "deployment: managed\nfloor: podman\n", "deployment: managed\nitem: {}\n", "- a\n"],
)
def test_an_invalid_deployment_file_refuses_everything(ask: Ask, managed: Callable[[str], Path], text: str) -> None:
    managed(text)

    with pytest.raises(InvalidManifest):
        deployments()
    assert ask("execute", item_id="good").content["code"] == "invalid_manifest"


@pytest.mark.usefixtures("sandbox")
def test_a_named_but_missing_file_refuses_everything(ask: Ask, managed: Callable[[str], Path]) -> None:
    managed("deployment: local\n").unlink()

    assert ask("execute", item_id="good").content["code"] == "invalid_manifest"
    assert [one["status"] for one in checks(ask)] == ["problem"]


@pytest.mark.usefixtures("sandbox")
def test_an_unmanaged_machine_has_every_item(ask: Ask) -> None:
    assert (minimum(), deployments(), checks(ask)) == (None, (), [])
