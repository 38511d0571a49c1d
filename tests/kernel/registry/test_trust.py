"""Attacks and mistakes by mirrors, members and later releases."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.plugins.machines import Machine, MakeMachine

from kiwi_mcp.catalog import release as seeds
from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.errors import ArtifactRefused, NotFound
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.registry import Actor, Pin, RegistryEvent, Release, VersionName
from kiwi_mcp.kernel import store as stores
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.remote.sync import LayoutRemote, LocalRegistry, VersionQuery, copy, pull

RUNTIME = (
    'tool_id: {name}\ntool_type: runtime\nversion: "1.0.0"\nexecutor: subprocess\ndescription: Runs it\n'
    'config: {{command: bash, args: ["-c", "echo {says}"]}}\n'
)
TOOL = VersionName("acme", "greet", "1.0.0")


@pytest.fixture
def ann(a_machine: MakeMachine) -> Machine:
    return a_machine("ann", namespaces=["acme", "public"])


@pytest.fixture
def bob(a_machine: MakeMachine, sandbox: None) -> Machine:
    return a_machine("bob", namespaces=["acme", "public"])


def runtime(machine: Machine, name: str, says: str) -> None:
    machine.put(f"tools/{name}/tool.yaml", RUNTIME.format(name=name, says=says))


def shelf_of(machine: Machine, folder: Path) -> Layout:
    machine.exchange("push", folder)
    return Layout(folder)


def mirror(honest: Layout, evil: Layout, runtime_id: str, folder: Path) -> Layout:
    """A folder with the genuine bytes of a tool, pinned to the runtime of another folder."""
    (tool,) = honest.read([TOOL])
    (below,) = evil.read([VersionName("acme", runtime_id, "1.0.0")])
    assert tool.executor is not None
    swapped = replace(tool, executor=Pin(tool.executor.ref, below.name, below.digest))
    assert swapped.digest == tool.digest
    made = Layout(folder)
    made.write([below, swapped])
    return made


def test_a_mirror_cannot_replace_a_built_in_runtime(
    ann: Machine, bob: Machine, a_machine: MakeMachine, tmp_path: Path
) -> None:
    eve = a_machine("eve", namespaces=["acme"])
    published = ann.publish("greet", says="genuine")
    runtime(eve, "bash_runtime", "PWNED")
    eve.do("publish", "bash_runtime", {"location": "project"})
    honest, evil = (shelf_of(one, tmp_path / one.name / "shelf") for one in (ann, eve))
    mirror(honest, evil, "bash_runtime", tmp_path / "mirror")

    by_closure = f"acme/greet@{published['closure']}"
    assert bob.refused("pull", by_closure, {"from": str(tmp_path / "mirror")}) == "not_found"
    pulled = bob.do("pull", f"acme/greet@{published['digest']}", {"from": str(tmp_path / "mirror")})
    assert pulled["closure"] != published["closure"]
    assert bob.do("run", "greet")["result"] == "genuine"
    conflict = bob.refused("pull", by_closure, {"from": str(honest.folder)})
    assert conflict == "version_conflict"


def test_a_closure_hash_covers_the_executors_and_a_digest_does_not(
    ann: Machine, bob: Machine, a_machine: MakeMachine, tmp_path: Path
) -> None:
    eve = a_machine("eve", namespaces=["acme"])
    for machine, says in ((ann, "genuine"), (eve, "PWNED")):
        runtime(machine, "helper", says)
        machine.script("greet", on="helper")
        machine.do("publish", "greet")
    honest, evil = (shelf_of(one, tmp_path / one.name / "shelf") for one in (ann, eve))
    mirror(honest, evil, "helper", tmp_path / "mirror")
    closure, other = (as_object(as_list(one.do("versions", "greet")["versions"])[0])["closure"] for one in (ann, eve))
    assert closure != other

    for item in (f"greet@{closure}", f"acme/greet@{closure}", str(closure)):
        assert bob.refused("pull", item, {"from": str(tmp_path / "mirror")}) == "not_found"
        planned = bob.do("pull", item, {"from": str(honest.folder)}, dry_run=True)
        assert planned["closure"] == closure
    assert bob.do("pull", f"greet@{closure}", {"from": str(honest.folder)})["closure"] == closure
    assert bob.do("run", "greet")["result"] == "genuine"
    assert bob.do("pull", f"greet@{closure}")["closure"] == closure
    answer = bob.ask("registry", action="pull", remote=str(tmp_path / "mirror"))
    assert answer.content["code"] == "version_conflict"


class Lying(LayoutRemote):
    """A mirror that says one thing of a version when it is asked first, and another one later."""

    def __init__(self, layout: Layout, said: Sequence[RegistryEvent]) -> None:
        super().__init__(layout, "lying")
        self.said = [said]

    async def history(self, tool_id: str) -> Sequence[RegistryEvent]:
        response = self.said.pop() if self.said else await super().events()
        return [event for event in response if event.name.tool_id == tool_id]


def test_a_source_with_a_wrong_closure_hash_is_refused(ann: Machine, a_machine: MakeMachine, tmp_path: Path) -> None:
    eve = a_machine("eve", namespaces=["acme"])
    for machine, says in ((ann, "genuine"), (eve, "PWNED")):
        runtime(machine, "helper", says)
        machine.script("greet", on="helper")
        machine.do("publish", "greet")
    honest, evil = (shelf_of(one, tmp_path / one.name / "shelf") for one in (ann, eve))
    fake = mirror(honest, evil, "helper", tmp_path / "mirror")
    (closure,) = [event.closure for event in honest.events() if event.name == TOOL]
    target = LayoutRemote(Layout(tmp_path / "target"), "target")
    wanted = VersionQuery.parse(f"acme/greet@{closure}")

    with pytest.raises(ArtifactRefused, match="not that of its closure"):
        asyncio.run(pull(Lying(fake, honest.events()), target, wanted, namespaces=(), check=check_release))
    with pytest.raises(NotFound):
        asyncio.run(pull(Lying(fake, fake.events()), target, wanted.exactly(TOOL), namespaces=(), check=check_release))
    assert not (tmp_path / "target").exists()


def seen(machine: Machine, actor: Actor) -> list[str]:
    database = open_database(f"sqlite://{machine.user}/state/registry.db")
    try:
        return [str(one.name) for one in Registry(database, actor).find(namespace="acme", is_all_versions=True)]
    finally:
        database.close()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RG-04")
def test_a_named_visibility_applies_to_the_whole_item_and_is_reported(ann: Machine) -> None:
    stranger = Actor("eve", ("public",))
    ann.publish("greet")
    planned = ann.script("greet", "1.1.0")
    dry = ann.do("publish", "greet", {"visibility": "private"}, dry_run=True)
    assert (dry["visibility"], seen(ann, stranger)) == ("private", ["acme/greet@1.0.0"])
    assert "would be private" in str(dry["message"])

    response = ann.do("publish", "greet", {"visibility": "private"})
    assert (response["status"], response["visibility"], seen(ann, stranger)) == ("published", "private", [])
    assert ann.do("versions", "greet")["visibility"] == "private"

    again = ann.do("publish", "greet", {"visibility": "public"})
    assert (again["status"], again["visibility"]) == ("unchanged", "public")
    assert "is public now, not private" in str(again["message"])
    assert seen(ann, stranger) == ["acme/greet@1.1.0", "acme/greet@1.0.0"]
    assert ann.do("publish", "greet")["visibility"] == "public"
    shutil.rmtree(planned)


def test_an_executor_of_other_items_does_not_become_private(ann: Machine) -> None:
    runtime(ann, "helper", "hi")
    ann.script("greet", on="helper")
    ann.do("publish", "greet")

    assert ann.refused("publish", "helper", {"visibility": "private"}) == "invalid_request"
    assert ann.do("versions", "helper")["visibility"] == "public"
    ann.do("publish", "greet", {"visibility": "private"})
    assert ann.do("publish", "helper", {"visibility": "private"})["status"] == "unchanged"
    assert ann.refused("publish", "greet", {"visibility": "unlisted"}) == "invalid_request"


@pytest.mark.usefixtures("sandbox")
def test_a_new_visibility_is_sent_to_the_remote(ann: Machine, tmp_path: Path) -> None:
    ann.script("greet")
    to: JsonObject = {"to": str(tmp_path / "share")}
    ann.do("publish", "greet", to)
    ann.do("publish", "greet", {**to, "visibility": "unlisted"})

    assert [event.visibility for event in Layout(tmp_path / "share").events()] == ["unlisted", "unlisted"]


def own(answer: JsonObject) -> list[str]:
    return [str(name) for name in as_list(answer["new"])]


def test_the_next_release_opens_a_store_with_conflicting_names(bob: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    bob.publish("mine")
    (bash,) = [one for one in seeds.seeds() if one.name.tool_id == "bash_runtime"]
    database = open_database(f"sqlite://{bob.user}/state/registry.db")
    newer = replace(bash, name=replace(bash.name, version="1.0.1"))
    squatter = _as_version(newer, b"evil")
    Registry(database, Actor("eve")).publish([squatter], is_seeding=True)
    database.close()
    shipped = [*seeds.seeds(), _as_version(newer, b"genuine")]
    monkeypatch.setattr(seeds, "seeds", lambda: iter(shipped))
    monkeypatch.setattr(stores, "__version__", "9.9.9")

    assert bob.do("run", "mine")["result"] == "hi"
    assert bob.do("list")["items"]
    assert bob.refused("run", "registry/kiwi/bash_runtime@1.0.1") == "tool_not_found"


def _as_version(release: Release, comment: bytes) -> CheckedRelease:
    """The same release with another manifest, and a statement that speaks of it."""
    (file,) = release.files
    changed = replace(file, data=file.data.replace(b"1.0.0", b"1.0.1") + b"# " + comment + b"\n")
    statement = release.statement.replace(b'"version":"1.0.0"', b'"version":"1.0.1"')
    old = statement.partition(b'"manifest":"')[2][:64]
    made = replace(release, files=(changed,), statement=statement.replace(old, changed.sha256.encode()))
    return CheckedRelease.of(made)


@pytest.mark.usefixtures("sandbox")
def test_a_tool_of_a_newer_kiwi_survives_an_older_server(tmp_path: Path, ann: Machine) -> None:
    ann.publish("greet")
    source = shelf_of(ann, tmp_path / "share")
    (tool,) = source.read([TOOL])
    pin = Pin("bash_runtime", VersionName("kiwi", "bash_runtime", "7.0.0"), f"sha256:{'7' * 64}")
    newer = Layout(tmp_path / "newer")
    newer.write([replace(tool, executor=pin)])
    database = open_database(f"sqlite://{tmp_path}/older.db")
    older = LocalRegistry(Registry(database, Actor("bob", ("acme",))), "older")

    assert asyncio.run(copy(LayoutRemote(newer, "newer"), older, check=check_release)).new == (TOOL,)
    assert asyncio.run(copy(older, LayoutRemote(source, "share"), check=check_release)).unchanged == 1
    assert asyncio.run(older.read([TOOL]))[0].executor == pin
    database.close()
