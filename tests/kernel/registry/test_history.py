"""The history of an item: references, statuses and rollback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry

VERSIONS = ("1.0.0", "1.2.0", "1.10.0", "2.0.0-rc.1")


@pytest.fixture
def ann(a_machine: MakeMachine, sandbox: None) -> Machine:
    """A machine with four versions of one tool, each of which says its own number."""
    machine = a_machine("ann", namespaces=["acme"])
    for version in VERSIONS:
        machine.publish("tick", version, version, changelog=f"This is {version}.")
    return machine


def listed(machine: Machine, item: str = "tick") -> list[JsonObject]:
    return [as_object(one) for one in as_list(machine.do("versions", item)["versions"])]


def said(machine: Machine, item: str = "tick") -> str:
    return str(machine.do("run", item)["result"])


def latest(machine: Machine) -> list[object]:
    return [one["version"] for one in listed(machine) if one["is_latest"]]


def log_of(machine: Machine) -> int:
    database = open_database(f"sqlite://{machine.user}/state/registry.db")
    head = Registry(database, Actor("ann")).head()
    database.close()
    return head


@pytest.mark.req("K-RG-02", "K-RG-03")
def test_versions_are_listed_newest_first_with_their_details(ann: Machine) -> None:
    found = listed(ann)

    assert [one["version"] for one in found] == ["2.0.0-rc.1", "1.10.0", "1.2.0", "1.0.0"]
    assert latest(ann) == ["1.10.0"]
    assert {**found[1], "digest": "", "closure": "", "published_at": ""} == snapshot(
        {
            "version": "1.10.0",
            "is_latest": True,
            "digest": "",
            "closure": "",
            "published_at": "",
            "published_by": "ann",
            "executor": "kiwi/bash_runtime@1.0.0",
            "changelog": "This is 1.10.0.",
        }
    )


@pytest.mark.req("K-CH-04")
def test_a_reference_means_the_highest_matching_version(ann: Machine) -> None:
    digest = str(listed(ann)[3]["digest"])
    meant = {
        "tick": "1.10.0",
        "tick@^1": "1.10.0",
        "tick@~1.2": "1.2.0",
        "tick@<1.5": "1.2.0",
        "tick@1.0.0": "1.0.0",
        "tick@2.0.0-rc.1": "2.0.0-rc.1",
        f"tick@{digest}": "1.0.0",
        "registry/acme/tick@1.2.0": "1.2.0",
        f"registry/acme/tick@{digest}": "1.0.0",
    }
    assert {item: said(ann, item) for item in meant} == meant
    assert {item: ann.do("pull", item)["identity"] for item in meant} == {
        item: f"registry/acme/tick@{version}" for item, version in meant.items()
    }
    for item in ("tick@^3", "tick@9.9.9", "tick@sha256:" + "0" * 64):
        assert ann.refused("run", item) == "version_not_found"


@pytest.mark.req("K-RG-02")
def test_a_yanked_version_needs_its_exact_version(ann: Machine) -> None:
    response = ann.do("yank", "tick@1.10.0", {"reason": "It leaks."})
    assert (response["status"], response["latest"]) == ("yanked", "1.2.0")

    assert said(ann) == said(ann, "tick@^1") == "1.2.0"
    ran = ann.do("run", "tick@1.10.0")
    assert ran["result"] == "1.10.0"
    assert ran["warnings"] == ["registry/acme/tick@1.10.0 is yanked: It leaks."]
    assert as_object(listed(ann)[1]["yanked"])["reason"] == "It leaks."
    assert ann.do("pull", "tick@1.10.0")["warnings"] == ran["warnings"]

    assert ann.do("yank", "tick@1.10.0", {"undo": True})["latest"] == "1.10.0"
    assert "warnings" not in ann.do("run", "tick@1.10.0")
    assert ann.refused("yank", "tick") == "invalid_request"
    assert ann.refused("yank", "tick@7.0.0") == "version_not_found"


@pytest.mark.req("K-RG-02")
def test_a_deprecated_version_still_runs_and_warns(ann: Machine) -> None:
    response = ann.do("deprecate", "tick@^1", {"reason": "Use tock."})
    assert response["versions"] == ["1.10.0", "1.2.0", "1.0.0"]

    ran = ann.do("run", "tick")
    assert (ran["result"], ran["warnings"]) == ("1.10.0", ["registry/acme/tick@1.10.0 is deprecated: Use tock."])
    assert ann.do("why", "tick")["notes"] == ran["warnings"]
    ann.do("deprecate", "tick", {"undo": True})
    assert "warnings" not in ann.do("run", "tick")


@pytest.mark.req("K-CH-04")
def test_a_yanked_or_deprecated_executor_warns_too(ann: Machine) -> None:
    runtime = (
        'tool_id: my_runtime\ntool_type: runtime\nversion: "1.0.0"\nexecutor: subprocess\ndescription: Runs Bash\n'
        'config: {command: bash, args: ["{tool.files}/{tool.entrypoint}"], result_from: stdout}\n'
    )
    ann.put("tools/my_runtime.yaml", runtime)
    ann.script("greet", on="my_runtime")
    ann.do("publish", "greet")
    for path in (ann.ai / "tools").rglob("*.*"):
        path.unlink()
    ann.do("deprecate", "my_runtime", {"reason": "Old."})
    ann.do("yank", "my_runtime@1.0.0", {"reason": "Bad."})

    ran = ann.do("run", "greet")
    assert ran["result"] == "hi"
    assert ran["warnings"] == [
        "registry/acme/my_runtime@1.0.0 is deprecated",
        "registry/acme/my_runtime@1.0.0 is yanked",
    ]


@pytest.mark.req("K-RG-02")
def test_a_rollback_returns_to_the_previous_release_and_can_be_undone(ann: Machine) -> None:
    response = ann.do("rollback", "tick", {"reason": "It leaks."})

    assert (response["latest"], response["yanked"]) == ("1.2.0", ["2.0.0-rc.1", "1.10.0"])
    assert said(ann) == "1.2.0"
    assert ann.do("rollback", "tick")["latest"] == "1.0.0"
    assert ann.refused("rollback", "tick") == "invalid_request"
    ann.do("yank", "tick@1.10.0", {"undo": True})
    assert said(ann) == "1.10.0"


@pytest.mark.req("K-RG-02")
def test_a_rollback_to_a_yanked_version_restores_it(ann: Machine) -> None:
    assert ann.do("rollback", "tick", {"to": "1.0.0"})["latest"] == "1.0.0"
    assert ann.do("yank", "tick@1.0.0")["latest"] is not None
    assert ann.refused("run", "tick") == "not_found"

    response = ann.do("rollback", "tick", {"to": "1.2.0"})

    assert (response["latest"], response["yanked"]) == ("1.2.0", [])
    assert said(ann) == "1.2.0"
    assert ann.refused("rollback", "tick", {"to": "1.2.0"}) == "invalid_request"
    assert ann.refused("rollback", "tick", {"to": "8.0.0"}) == "version_not_found"


def test_an_item_with_only_yanked_versions_is_not_offered(ann: Machine) -> None:
    ann.publish("tock")
    assert ann.names("says a word", "registry") == ["tick", "tock"]
    ann.do("yank", "tock@1.0.0")

    assert ann.names("says a word", "registry") == ["tick"]
    assert ann.do("pull", "tock@1.0.0")["status"] == "pulled"
    (row,) = [one for one in as_list(ann.do("list")["items"]) if as_object(one)["name"] == "tock"]
    assert "yanked" in as_object(row)


@pytest.mark.parametrize(
    ("action", "item", "words", "versions"),
    [
        ("yank", "tick@1.10.0", {}, ["1.10.0"]),
        ("yank", "acme/tick@1.2.0", {"reason": "x"}, ["1.2.0"]),
        ("deprecate", "tick", {}, ["2.0.0-rc.1", "1.10.0", "1.2.0", "1.0.0"]),
        ("rollback", "tick", {}, ["2.0.0-rc.1", "1.10.0"]),
        ("rollback", "tick", {"to": "1.0.0"}, ["2.0.0-rc.1", "1.10.0", "1.2.0"]),
    ],
)
def test_a_dry_run_shows_the_status_change_and_makes_none(
    ann: Machine, action: str, item: str, words: JsonObject, versions: list[str]
) -> None:
    head = log_of(ann)
    planned = ann.do(action, item, words, dry_run=True)
    assert planned["status"] == "planned"
    assert [as_object(one)["version"] for one in as_list(planned["versions"])] == versions
    assert log_of(ann) == head
    for wrong in ("nothing@1.0.0", "tick@9.0.0"):
        if action != "rollback":
            assert ann.refused(action, wrong, dry_run=True) in {"tool_not_found", "version_not_found"}


def test_invalid_arguments_are_refused_by_every_action(ann: Machine) -> None:
    for action in ("versions", "diff", "deprecate", "yank", "rollback", "verify", "list", "pull"):
        refused = ann.try_to(action, "tick@1.0.0", {"bogus": 1}).content
        assert (refused["code"], "bogus" in str(refused["message"])) == ("invalid_request", True)
    for action in ("versions", "diff", "deprecate", "yank", "rollback", "pull", "publish"):
        assert ann.refused(action) == "invalid_request"
        assert ann.refused(action, "../../etc/passwd") == "invalid_request"
        assert ann.refused(action, "no_such_tool@1.0.0") in {"tool_not_found", "not_found"}


@pytest.mark.req("K-RG-03")
def test_verify_covers_one_item_or_all(ann: Machine) -> None:
    one, exact, everything = ann.do("verify", "tick"), ann.do("verify", "tick@1.0.0"), ann.do("verify")
    assert (one["checked"], exact["checked"]) == (4, 1)
    assert int(str(everything["checked"])) > 30  # with the built-in items
    assert {str(response["status"]) for response in (one, exact, everything)} == {"verified"}


def test_lists_are_filtered_and_limited(ann: Machine) -> None:
    ann.publish("tock")

    def names(**words: object) -> list[object]:
        return [as_object(one)["name"] for one in as_list(ann.do("list", words=json.loads(json.dumps(words)))["items"])]

    assert names(namespace="acme") == ["tick", "tock"]
    assert ann.refused("list", words={"tool_type": "bash"}) == "not_found"
    assert ann.refused("list", words={"namespace": "nobodys"}) == "not_found"
    assert "Did you mean `script`" in str(ann.try_to("list", words={"tool_type": "scrpt"}).content["suggestion"])
    assert names(tool_type="script", namespace="acme") == ["tick", "tock"]
    assert names(limit=1) == ["tick"]
    assert "more than 1" in str(ann.do("list", words={"limit": 1})["suggestion"])


def test_pulling_counts_and_a_dry_run_does_not(ann: Machine, home: Path) -> None:
    def downloads() -> object:
        database = open_database(f"sqlite://{ann.user}/state/registry.db")
        ((count,),) = database.read("select download_count from tools where tool_id = 'tick'")
        database.close()
        return count

    ann.do("pull", "tick", dry_run=True)
    assert downloads() == 0
    ann.do("pull", "tick")
    assert downloads() == 1
    assert ann.refused("pull", "python_runtime") == "invalid_request"


@pytest.mark.usefixtures("sandbox")
def test_a_name_with_only_yanked_versions_is_reported(a_machine: MakeMachine) -> None:
    machine = a_machine("ann", namespaces=["acme"])
    machine.publish("tock", "1.0.0", "tock")
    machine.do("yank", "tock@1.0.0")

    answer = machine.try_to("run", "tock").content
    assert answer["code"] == "not_found"
    assert "is yanked: 1.0.0" in str(answer["message"])
    assert "tock@1.0.0" in str(answer["suggestion"])
    assert said(machine, "tock@1.0.0") == "tock"
