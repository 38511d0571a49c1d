"""Two tenants of one registry: private items of one do not exist for the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.domain.json import JsonObject, as_list, as_object

SECRET, NEVER = "qqq_vvvv", "zzz_jjjj"
NO_DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def ann(a_machine: MakeMachine, store_url: str, sandbox: None) -> Machine:
    """A member of `acme`, who has published something for its members alone."""
    machine = a_machine("ann", url=store_url, namespaces=["acme"])
    machine.publish(SECRET, visibility="private", changelog="For us alone.")
    machine.publish(SECRET, "1.1.0", "more")
    return machine


@pytest.fixture
def bob(ann: Machine, a_machine: MakeMachine, store_url: str) -> Machine:
    """A member of `globex`, who uses the same store."""
    machine = a_machine("bob", url=store_url, namespaces=["globex"])
    machine.publish("opener", says="bob")
    return machine


def requests_for(name: str, digest: str, folder: Path) -> Iterator[tuple[str, JsonObject]]:
    """Every way to ask for an item."""
    words = (name, f"{name}@1.0.0", f"{name}@^1", f"{name}@{digest}")
    for item in (*words, *(f"registry/acme/{word}" for word in words)):
        yield "load", {"item_id": item}
        yield "load", {"item_id": item, "source": "registry"}
        yield "load", {"item_id": item, "destination": "project"}
        for action in ("run", "why", "versions", "diff", "verify", "deprecate", "rollback", "publish"):
            yield "execute", {"action": action, "item_id": item}
        for action in ("yank", "deprecate", "rollback", "run"):
            yield "execute", {"action": action, "item_id": item, "dry_run": True}
        yield "execute", {"action": "diff", "item_id": item, "parameters": {"from": "1.0.0", "to": "1.1.0"}}
    for item in (*words, *(f"acme/{word}" for word in words), digest):
        yield "execute", {"action": "pull", "item_id": item}
        yield "execute", {"action": "pull", "item_id": item, "dry_run": True}
        yield "execute", {"action": "pull", "item_id": item, "parameters": {"from": str(folder)}}
    yield "execute", {"action": "yank", "item_id": f"registry/acme/{name}@1.0.0"}
    for source in ("all", "registry"):
        yield "search", {"query": name, "source": source}
        yield "search", {"query": name.replace("_", " "), "source": source, "sort_by": "name"}
    for namespace in ("acme", "globex"):
        yield "execute", {"action": "list", "parameters": {"namespace": namespace}}
        yield (
            "execute",
            {"action": "publish", "item_id": "mine", "parameters": {"namespace": namespace}, "dry_run": True},
        )


def answers(machine: Machine, name: str, digest: str, folder: Path) -> list[str]:
    """What a machine answers to every request, with the name and the digest taken out."""
    answers = machine.ask_all(requests_for(name, digest, folder))
    response = [json.dumps(answer.content, sort_keys=True) for answer in answers]
    return [
        text.replace(name, "NAME").replace(digest, "DIGEST").replace(name.replace("_", " "), "WORDS")
        for text in response
    ]


@pytest.mark.req("K-RG-04")
def test_a_private_item_does_not_exist_for_others(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    digest = str(as_object(as_list(ann.do("versions", SECRET)["versions"])[0])["digest"])
    bob.script("mine")
    ann.exchange("push", tmp_path / "share")

    shown, compared = (
        answers(bob, name, hash_, tmp_path / "share") for name, hash_ in ((SECRET, digest), (NEVER, NO_DIGEST))
    )

    assert shown == compared
    assert ann.do("run", SECRET)["result"] == "more"
    assert answers(ann, SECRET, digest, tmp_path / "share") != shown


@pytest.mark.req("K-RG-04")
def test_no_list_suggestion_link_or_copy_reveals_a_private_item(ann: Machine, bob: Machine, tmp_path: Path) -> None:
    listed = bob.do("list")
    assert SECRET not in json.dumps(listed)
    asked: list[tuple[str, JsonObject]] = [
        ("search", {"query": "opener", "source": "all"}),
        ("execute", {"item_id": SECRET[:-1]}),
        ("execute", {"action": "versions", "item_id": SECRET[:-1]}),
        ("load", {"item_id": f"registry/acme/{SECRET[:-1]}"}),
    ]
    assert SECRET not in json.dumps([answer.content for answer in bob.ask_all(asked)])
    acme, nobodys = (bob.try_to("list", words={"namespace": name}).content for name in ("acme", "zyzzyva"))
    assert json.dumps(acme).replace("acme", "zyzzyva") == json.dumps(nobodys)

    bob.script("mine", on=f"registry/acme/{SECRET}@1.0.0")
    bob.script("yours", on=f"registry/acme/{NEVER}@1.0.0")
    mine, yours = bob.try_to("run", "mine").content, bob.try_to("run", "yours").content
    assert json.dumps(mine).replace("mine", "yours").replace(SECRET, NEVER) == json.dumps(yours)

    bob.exchange("push", tmp_path / "share", with_private=True)
    response = b"".join(path.read_bytes() for path in (tmp_path / "share").rglob("*") if path.is_file())
    assert b"opener" in response
    assert SECRET.encode() not in response


@pytest.mark.req("K-RG-04")
def test_a_private_item_travels_only_on_request_and_only_to_members(
    ann: Machine, a_machine: MakeMachine, tmp_path: Path
) -> None:
    ann.exchange("push", tmp_path / "public")
    ann.exchange("push", tmp_path / "all", with_private=True)
    cleo, dan = a_machine("cleo", namespaces=["acme"]), a_machine("dan")

    assert cleo.refused("pull", SECRET, {"from": str(tmp_path / "public")}) == "not_found"
    assert cleo.do("pull", SECRET, {"from": str(tmp_path / "all")})["status"] == "pulled"
    assert cleo.do("run", SECRET)["result"] == "more"
    assert dan.refused("pull", f"acme/{SECRET}", {"from": str(tmp_path / "all")}) == "namespace_denied"
    assert dan.refused("run", f"registry/acme/{SECRET}") == "tool_not_found"


@pytest.mark.req("K-RG-04")
def test_an_unlisted_item_is_reached_by_its_full_name_and_not_found_by_search(ann: Machine, bob: Machine) -> None:
    ann.publish("backstage", says="psst", visibility="unlisted")

    assert bob.names("backstage", "registry") == []
    assert "backstage" not in json.dumps(bob.do("list"))
    assert bob.refused("run", "backstage") == "tool_not_found"
    assert bob.do("run", "registry/acme/backstage")["result"] == "psst"
    assert bob.do("pull", "acme/backstage")["identity"] == "registry/acme/backstage@1.0.0"
    assert bob.do("versions", "registry/acme/backstage")["visibility"] == "unlisted"
    assert ann.names("backstage", "registry") == ["backstage"]


@pytest.mark.req("K-RG-04")
def test_a_namespace_accepts_versions_and_statuses_only_from_its_members(ann: Machine, bob: Machine) -> None:
    ann.publish("open", visibility="public")
    bob.script("mine")

    assert bob.refused("publish", "mine", {"namespace": "acme"}) == "namespace_denied"
    assert bob.refused("publish", "mine", {"namespace": "kiwi"}) == "namespace_denied"
    assert bob.refused("yank", "registry/acme/open@1.0.0") == "namespace_denied"
    assert bob.refused("deprecate", "registry/acme/open") == "namespace_denied"
    assert bob.do("run", "registry/acme/open")["result"] == "hi"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-04")
def test_a_short_name_never_means_an_item_of_another_user(a_machine: MakeMachine, sqlite_url: str) -> None:
    ann, eve = (
        a_machine("ann", url=sqlite_url, namespaces=["acme", "public"]),
        a_machine("eve", url=sqlite_url, namespaces=["evil"]),
    )
    eve.publish("deploy", "99.0.0", says="evil")
    assert ann.refused("run", "deploy") == "tool_not_found"
    assert ann.do("run", "registry/evil/deploy")["result"] == "evil"

    ann.publish("deploy", says="public", namespace="public")
    assert ann.do("run", "deploy")["result"] == "public"
    ann.publish("deploy", "0.1.0", says="acme", namespace="acme")
    assert ann.do("run", "deploy")["result"] == "acme"
    assert ann.do("pull", "deploy")["identity"] == "registry/acme/deploy@0.1.0"

    ann.script("local", on="deploy_runtime")
    eve.put("tools/deploy_runtime.yaml", RUNTIME)
    eve.do("publish", "deploy_runtime")
    assert ann.refused("run", "local") == "executor_not_found"


RUNTIME = """tool_id: deploy_runtime
tool_type: runtime
version: "1.0.0"
executor: subprocess
description: Runs Bash
config: {command: bash, args: ["{tool.files}/{tool.entrypoint}"], result_from: stdout}
"""
