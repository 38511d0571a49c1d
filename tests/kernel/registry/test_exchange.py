"""Exchange with other registries: push, pull, and items that stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from inline_snapshot import snapshot
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

pytestmark = pytest.mark.usefixtures("sandbox")


@pytest.fixture
def ann(a_machine: MakeMachine, sandbox: None) -> Machine:
    machine = a_machine("ann", namespaces=["acme", "public"])
    machine.publish("greet")
    machine.publish("wave", namespace="public")
    machine.publish("hide", visibility="private")
    return machine


@pytest.fixture
def bob(a_machine: MakeMachine) -> Machine:
    return a_machine("bob", namespaces=["acme", "public"])


@pytest.fixture
def remote(tmp_path: Path) -> str:
    """A folder with nothing in it."""
    return f"{tmp_path}/share"


def own(answer: JsonObject) -> list[str]:
    return [str(name) for name in as_list(answer["new"]) if not str(name).startswith("kiwi/")]


@pytest.mark.req("K-RG-03", "N4")
def test_a_pushed_item_is_pulled_once(ann: Machine, bob: Machine, remote: str) -> None:
    assert own(ann.exchange("push", remote, dry_run=True)) == ["acme/greet@1.0.0", "public/wave@1.0.0"]
    assert not bob.ask("registry", action="pull", remote=remote).content.get("new")

    pushed = ann.exchange("push", remote)
    assert (pushed["status"], own(pushed)) == ("pushed", ["acme/greet@1.0.0", "public/wave@1.0.0"])
    assert own(ann.exchange("push", remote)) == []

    planned = bob.exchange("pull", remote, dry_run=True)
    assert (planned["status"], own(planned)) == ("planned", ["acme/greet@1.0.0", "public/wave@1.0.0"])
    assert bob.refused("run", "greet") == "tool_not_found"
    assert own(bob.exchange("pull", remote)) == own(planned)
    assert as_object(bob.exchange("pull", remote)["counts"])["new"] == 0
    assert bob.do("run", "greet")["result"] == "hi"
    assert bob.refused("run", "hide") == "tool_not_found"
    assert bob.do("verify")["issues"] == []


@pytest.mark.req("K-RG-02")
def test_status_changes_travel(ann: Machine, bob: Machine, remote: str) -> None:
    ann.publish("greet", "1.1.0", says="bad")
    ann.exchange("push", remote)
    bob.exchange("pull", remote)
    assert bob.do("run", "greet")["result"] == "bad"
    ann.do("rollback", "greet", {"reason": "It leaks."})
    ann.do("deprecate", "wave", {"reason": "Old."})

    assert as_object(ann.exchange("push", remote)["counts"])["marked"] == 2
    assert as_object(bob.exchange("pull", remote)["counts"])["marked"] == 2

    assert bob.do("run", "greet")["result"] == "hi"
    assert bob.do("run", "wave")["warnings"] == ["registry/public/wave@1.0.0 is deprecated: Old."]
    assert as_object(bob.exchange("pull", remote)["counts"])["marked"] == 0


@pytest.mark.req("K-RG-02")
def test_the_same_version_with_other_content_refuses_the_whole_exchange(
    ann: Machine, bob: Machine, remote: str
) -> None:
    bob.publish("greet", says="other")
    bob.publish("new")
    ann.exchange("push", remote)

    for action in ("push", "pull"):
        refused = bob.ask("registry", action=action, remote=remote).content
        assert (refused["code"], refused["conflicts"]) == ("version_conflict", ["acme/greet@1.0.0"])
    assert own(ann.exchange("pull", remote)) == []
    assert bob.refused("run", "wave") == "tool_not_found"


def test_a_namespace_travels_alone_and_private_items_only_on_request(ann: Machine, bob: Machine, remote: str) -> None:
    assert own(ann.exchange("push", remote, only="public")) == ["public/wave@1.0.0"]
    assert own(ann.exchange("push", remote, with_private=True)) == ["acme/greet@1.0.0", "acme/hide@1.0.0"]
    assert own(bob.exchange("pull", remote, only="public")) == ["public/wave@1.0.0"]
    assert own(bob.exchange("pull", remote)) == ["acme/greet@1.0.0"]
    assert own(bob.exchange("pull", remote, with_private=True)) == ["acme/hide@1.0.0"]
    assert bob.do("run", "hide")["result"] == "hi"


def test_items_of_other_publishers_travel_under_their_full_name(
    ann: Machine, a_machine: MakeMachine, tmp_path: Path
) -> None:
    eve = a_machine("eve")
    ann.exchange("push", tmp_path / "share")
    eve.exchange("pull", tmp_path / "share")

    assert eve.refused("run", "greet") == "tool_not_found"
    assert eve.do("run", "registry/acme/greet")["result"] == "hi"
    assert eve.do("run", "acme/greet")["result"] == "hi"
    pulled = eve.do("pull", "acme/greet", {"from": str(tmp_path / "share")})
    assert (pulled["status"], pulled["new"]) == ("pulled", [])
    assert "kiwi run acme/greet@1.0.0" in str(pulled["next"])
    ann.publish("greet", "2.0.0", says="two")
    ann.exchange("push", tmp_path / "share")
    newer = eve.do("pull", "acme/greet@^2", {"from": str(tmp_path / "share")})
    assert (newer["status"], newer["new"]) == ("pulled", ["acme/greet@2.0.0"])


def test_a_remote_has_a_name_and_is_shown_without_secrets(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    response = ann.exchange("add", "share", url=str(tmp_path / "share"))
    assert response["status"] == "added"
    ann.exchange("add", "team", url="https://kiwi.example.com", token="${TEAM_TOKEN}")

    shown = ann.ask("registry", action="show").content
    assert {**shown, "registry": "", "remotes": list(as_object(shown["remotes"]))} == snapshot(
        {
            "action": "show",
            "registry": "",
            "actor": "ann",
            "namespaces": ["acme", "public"],
            "versions": 52,
            "remotes": ["share", "team"],
        }
    )
    assert own(ann.exchange("push", "share")) == ["acme/greet@1.0.0", "public/wave@1.0.0"]
    assert bob.do("pull", "greet", {"from": f"{tmp_path}/share"})["new"] == ["acme/greet@1.0.0"]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"action": "push"}, "invalid_request"),
        ({"action": "add", "remote": "team"}, "invalid_request"),
        ({"action": "add", "url": "/srv"}, "invalid_request"),
        ({"action": "add", "remote": "team", "url": "https://x", "token": "s3cret"}, "invalid_request"),
        ({"action": "add", "remote": "team", "url": "postgresql://ann:s3cret@db/kiwi"}, "invalid_request"),
        ({"action": "add", "remote": "Team", "url": "/srv"}, "invalid_request"),
        ({"action": "push", "remote": "nobody"}, "remote_not_found"),
        ({"action": "push", "remote": "ftp://example.com/s3cret"}, "remote_not_found"),
        ({"action": "pull", "remote": "https://ann:s3cret@example.com"}, "invalid_request"),
        ({"action": "pull", "remote": "postgresql://ann:s3cret@127.0.0.1:1/kiwi"}, "invalid_request"),
        ({"action": "add", "remote": "team", "url": "postgresql://db/kiwi"}, "invalid_request"),
        ({"action": "shove", "remote": "x"}, "invalid_request"),
    ],
)
def test_invalid_remotes_are_refused_without_showing_secrets(ann: Machine, request_: JsonObject, code: str) -> None:
    answer = ann.ask("registry", **request_)

    assert (answer.is_error, answer.content["code"]) == (True, code)
    assert answer.content["suggestion"]
    if code != "remote_not_found":
        assert "s3cret" not in str(answer.content)
