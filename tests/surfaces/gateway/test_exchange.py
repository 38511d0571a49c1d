"""Push and pull over HTTP: cursors, namespaces and refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine
from tests.surfaces.gateway.conftest import Served

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

pytestmark = pytest.mark.usefixtures("sandbox")
HELPER = (
    'tool_id: helper\ntool_type: runtime\nversion: "1.0.0"\nexecutor: subprocess\ndescription: Runs it\n'
    'config: {command: bash, args: ["-c", "echo hi"]}\n'
)


Serve = Callable[[str], Served]


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme", "public"])


@pytest.fixture
def bob(a_machine: MakeMachine) -> Machine:
    return a_machine("bob", namespaces=["acme", "public"])


@pytest.fixture
def serve(serving: Serve, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    """Serve a store, and let the token of the remote `team` be that of a visitor."""

    def start(url: str, visitor: Machine, *namespaces: str) -> Served:
        served = serving(url)
        monkeypatch.setenv("TEAM_TOKEN", served.token("visitor", *namespaces))
        visitor.exchange("add", "team", url=served.url, token="${TEAM_TOKEN}")
        return served

    return start


Start = Callable[..., Served]


def store_of(machine: Machine) -> str:
    return f"sqlite://{machine.user}/state/registry.db"


def new(answer: JsonObject) -> list[str]:
    return [str(name) for name in as_list(answer["new"])]


def test_a_new_member_of_a_namespace_gets_versions_before_the_cursor(
    ann: Machine, bob: Machine, serve: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann.publish("greet", namespace="public")
    ann.publish("hidden", visibility="unlisted")
    bob.settle(namespaces=["public"])
    served = serve(store_of(ann), bob, "public")
    assert new(bob.exchange("pull", "team")) == ["public/greet@1.0.0"]

    monkeypatch.setenv("TEAM_TOKEN", served.token("member", "public", "acme"))
    remotes = {"team": {"url": served.url, "token": "${TEAM_TOKEN}"}}
    bob.settle(namespaces=["public", "acme"], remotes=remotes)
    assert new(bob.exchange("pull", "team")) == ["acme/hidden@1.0.0"]
    bob.settle(namespaces=["acme", "public"], remotes=remotes)
    assert bob.exchange("pull", "team")["message"] == "0 new, 0 unchanged, 0 marked"


def test_a_push_leaves_out_what_belongs_to_others_and_continues(
    ann: Machine, a_machine: MakeMachine, serve: Start, tmp_path: Path
) -> None:
    eve = a_machine("eve", namespaces=["eves"])
    ann.publish("theirs")
    ann.exchange("push", tmp_path / "share")
    eve.exchange("pull", tmp_path / "share")
    serve(f"sqlite://{tmp_path}/team.db", eve, "eves")
    answer = eve.ask("registry", action="push", remote="team")
    assert (answer.is_error, answer.content["refusal"]) == (True, "namespace_denied")

    eve.publish("mine")
    pushed = eve.exchange("push", "team")
    assert new(pushed) == ["eves/mine@1.0.0"]
    assert [str(line).partition(":")[0] for line in as_list(pushed["left_out"])] == ["acme/theirs@1.0.0"]
    again = eve.exchange("push", "team")
    assert (new(again), len(as_list(again["left_out"]))) == ([], 1)


def test_a_status_that_the_target_refuses_leaves_the_others(ann: Machine, bob: Machine, serve: Start) -> None:
    for name in ("greet", "wave"):
        ann.publish(name)
    ann.put("tools/helper/tool.yaml", HELPER)
    ann.do("publish", "helper")
    serve(store_of(ann), bob, "acme", "public")
    bob.exchange("pull", "team")
    bob.script("mine", on="registry/acme/helper")
    bob.do("publish", "mine")

    ann.do("yank", "greet@1.0.0")
    ann.do("publish", "helper", {"visibility": "private"})
    ann.do("yank", "wave@1.0.0")
    pulled = bob.exchange("pull", "team", with_private=True)

    assert as_object(pulled["counts"])["marked"] == 2
    (left,) = as_list(pulled["left_out"])
    assert "cannot become private" in str(left)
    assert [bob.refused("run", name) for name in ("greet", "wave")] == ["not_found"] * 2
