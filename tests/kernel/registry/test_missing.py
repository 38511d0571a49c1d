"""Refusals about published versions are correct and suggest a next step."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

pytestmark = pytest.mark.usefixtures("sandbox")


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme", "public"])


def message_of(machine: Machine, action: str, item: str | None = None, words: JsonObject | None = None) -> str:
    """What a refusal says: its message and its suggestion."""
    answer = machine.try_to(action, item, words)
    assert answer.is_error, answer.content
    return f"{answer.content['message']} {answer.content['suggestion']}"


@pytest.mark.parametrize("action", ["versions", "diff", "yank", "deprecate", "rollback"])
def test_an_item_that_exists_only_in_a_folder_is_reported_as_unpublished(ann: Machine, action: str) -> None:
    ann.script("greet")
    said = message_of(ann, action, "greet@1.0.0" if action == "yank" else "greet")
    assert "'greet' is not published yet" in said
    assert "`kiwi publish greet`" in said


def test_a_misspelt_name_is_answered_with_the_right_one(ann: Machine, tmp_path: Path) -> None:
    ann.publish("greet")
    share = str(tmp_path / "share")
    ann.exchange("push", share)

    assert "Did you mean `greet`?" in message_of(ann, "versions", "gret")
    assert "Did you mean `greet`?" in message_of(ann, "diff", "gret")
    assert "Did you mean `greet`?" in message_of(ann, "pull", "gret")
    assert "Did you mean `greet`?" in message_of(ann, "pull", "gret", {"from": share})
    assert "Did you mean `acme/greet`?" in message_of(ann, "versions", "public/greet")
    ann.script("greet")
    assert "Did you mean `project`?" in message_of(ann, "diff", "greet", {"from": "projct"})


def test_a_name_with_only_yanked_versions_is_explained(ann: Machine) -> None:
    ann.publish("greet")
    ann.do("yank", "greet@1.0.0")
    said = message_of(ann, "pull", "greet")
    assert "yanked: acme/greet@1.0.0" in said
    assert "`kiwi pull acme/greet@1.0.0`" in said
    assert ann.do("pull", "acme/greet@1.0.0")["status"] == "pulled"


def test_a_range_cannot_be_yanked(ann: Machine) -> None:
    for version in ("1.0.0", "1.1.0"):
        ann.publish("greet", version)
    said = message_of(ann, "yank", "greet@^1")
    assert "`acme/greet@1.1.0`, `acme/greet@1.0.0`" in said
    assert all("yanked" not in as_object(one) for one in as_list(ann.do("versions", "greet")["versions"]))


def test_a_published_item_answers_to_its_namespace_and_name_everywhere(ann: Machine) -> None:
    ann.publish("greet", says="published")
    ann.script("greet", says="here")
    assert ann.do("run", "greet")["result"] == "here"
    assert ann.do("run", "acme/greet")["result"] == "published"
    assert ann.do("run", "acme/greet@^1")["result"] == "published"
    assert ann.ask("load", item_id="acme/greet").content["identity"] == "registry/acme/greet@1.0.0"
    for action in ("versions", "verify", "pull", "why", "diff", "deprecate"):
        assert not ann.try_to(action, "acme/greet").is_error
    assert ann.refused("run", "public/greet") == "tool_not_found"
    assert ann.refused("run", "project/greet") == "invalid_request"


def test_an_item_that_was_not_pushed_is_reported_as_local_only(ann: Machine, tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    (share / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
    (share / "blobs").write_text("in the way")
    ann.script("greet")

    said = message_of(ann, "publish", "greet", {"to": str(share)})
    assert f"acme/greet@1.0.0 is published here, and was not sent to {share}" in said
    assert f"`kiwi publish greet --namespace acme --to {share}`" in said
    (share / "blobs").unlink()
    again = ann.do("publish", "greet", {"to": str(share)})
    assert (again["status"], again["pushed"]) == ("unchanged", ["acme/greet@1.0.0"])


def test_a_missing_remote_stops_a_publish_before_anything_is_stored(ann: Machine) -> None:
    ann.script("greet")
    assert "`./shelf`" in message_of(ann, "publish", "greet", {"to": "shelf"})
    assert ann.refused("versions", "greet") == "not_found"


def test_a_conflict_during_a_pull_describes_the_local_version(
    ann: Machine, a_machine: MakeMachine, tmp_path: Path
) -> None:
    eve = a_machine("eve", namespaces=["acme"])
    eve.publish("greet", says="eve")
    eve.exchange("push", tmp_path / "share")
    ann.publish("greet", says="ann")

    said = message_of(ann, "pull", "greet", {"from": str(tmp_path / "share")})
    assert "You have another acme/greet@1.0.0 (published by ann on " in said


def test_a_missing_folder_cannot_be_pulled_from(ann: Machine, tmp_path: Path) -> None:
    ann.publish("greet")
    nowhere = tmp_path / "nowhere"
    assert f"no registry in {nowhere}" in message_of(ann, "pull", "greet", {"from": str(nowhere)})
    refused = ann.ask("registry", action="pull", remote=str(nowhere))
    assert (refused.is_error, refused.content["code"]) == (True, "not_found")
    assert not nowhere.exists()


def test_lists_show_own_items_first_with_a_total(ann: Machine) -> None:
    ann.publish("zebra")
    listed = ann.do("list")
    names = [str(as_object(one)["name"]) for one in as_list(listed["items"])]
    assert (names[0], listed["total"]) == ("zebra", len(names))
    bounded = ann.do("list", words={"limit": 1})
    assert [as_object(one)["name"] for one in as_list(bounded["items"])] == ["zebra"]
    assert "total" not in bounded
