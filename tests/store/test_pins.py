"""Executors of a version: valid pins, closure hashes, and built-in items."""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from msgspec.structs import replace

from kiwi_mcp.catalog.release import seed, seeds, unseeded
from kiwi_mcp.domain.errors import ArtifactRefused, InvalidRequest, MissingLink, NamespaceDenied, VersionConflict
from kiwi_mcp.domain.registry import (
    Actor,
    Pin,
    RegistryEvent,
    Release,
    ReleaseFile,
    VersionName,
    Visibility,
    closure_of,
)
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry import release_check
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout

ANN = Actor("ann", ("acme", "public"))
YAML = b"description: Says hello\n"
BASH = VersionName("kiwi", "bash_runtime", "1.0.0")
SOME, OTHER = (f"sha256:{digit * 64}" for digit in "12")


def release(
    name: str, pin: Pin | None = None, *, text: bytes = b"echo hi\n", visibility: Visibility = "public"
) -> CheckedRelease:
    """A version as the catalog makes one: its statement speaks of every byte, and of the executor's reference."""
    namespace, _, rest = name.partition("/")
    tool_id, _, version = rest.partition("@")
    files = (ReleaseFile("main.sh", text), ReleaseFile("tool.yaml", YAML))
    said = {
        "kind": "kiwi.item/1",
        "tool_id": tool_id,
        "version": version,
        "executor": pin.ref if pin else None,
        "manifest": sha256(YAML).hexdigest(),
        "files": [{"path": "main.sh", "sha256": files[0].sha256, "executable": False}],
    }
    return CheckedRelease(
        VersionName(namespace, tool_id, version),
        f"tools/{tool_id}/tool.yaml",
        json.dumps(said, sort_keys=True, separators=(",", ":")).encode(),
        {"tool_id": tool_id, "tool_type": "script" if pin else "primitive", "version": version},
        files,
        executor=pin,
        visibility=visibility,
    )


def on(below: Release, ref: str = "") -> Pin:
    return Pin(ref or below.name.tool_id, below.name, below.digest)


@pytest.fixture
def ann(tmp_path: Path) -> Iterator[Registry]:
    database = open_database(f"sqlite://{tmp_path}/ann.db")
    yield Registry(database, ANN)
    database.close()


(BASH_RELEASE,) = [one for one in seeds() if one.name.tool_id == "bash_runtime"]
FIRST, SECOND = release("acme/helper@1.0.0"), release("acme/helper@1.1.0", text=b"echo evil\n")


@pytest.mark.parametrize(
    "ref",
    ["helper", "helper@^1", "helper@1.0.0", f"helper@{FIRST.digest}", "registry/acme/helper", "project/local/helper"],
)
def test_a_pin_within_its_reference_is_accepted(ann: Registry, ref: str) -> None:
    tool = release("acme/tool@1.0.0", on(FIRST, ref))
    ann.publish([FIRST, tool])

    assert ann.named("tool")[0].executor == tool.executor
    assert [*ann.verify()] == []


@pytest.mark.parametrize(
    ("ref", "pin"),
    [
        ("helper", "evil/helper@1.0.0"),
        ("helper", "acme/other@1.0.0"),
        ("helper@^2", "acme/helper@1.0.0"),
        ("helper@1.0.1", "acme/helper@1.0.0"),
        (f"helper@{OTHER}", "acme/helper@1.0.0"),
        ("helper@nonsense", "acme/helper@1.0.0"),
        ("registry/public/helper", "acme/helper@1.0.0"),
        ("registry/acme/helper", "kiwi/helper@1.0.0"),
        ("builtin/kiwi/helper", "acme/helper@1.0.0"),
        ("project/local/helper", "evil/helper@1.0.0"),
    ],
)
def test_a_pin_beyond_its_reference_is_refused(ref: str, pin: str) -> None:
    below = release(pin)
    with pytest.raises(ArtifactRefused, match="executor"):
        release("acme/tool@1.0.0", Pin(ref, below.name, below.digest))


def test_a_tool_may_use_an_executor_of_another_namespace_by_name(ann: Registry) -> None:
    below = release("public/helper@1.0.0")
    with pytest.raises(ArtifactRefused, match="does not mean public/helper") as refused:
        ann.publish([below, release("acme/tool@1.0.0", on(below))])
    assert "`executor: registry/public/helper`" in refused.value.issues[0].fix

    ann.publish([below, release("acme/tool@1.0.0", on(below, "registry/public/helper"))])


def test_the_same_bytes_on_another_executor_are_a_conflict_in_a_store_and_in_a_folder(
    ann: Registry, tmp_path: Path
) -> None:
    honest, swapped = release("acme/tool@1.0.0", on(FIRST)), release("acme/tool@1.0.0", on(SECOND))
    assert honest.digest == swapped.digest
    shelf = Layout(tmp_path / "shelf")
    ann.publish([FIRST, honest])
    shelf.write([FIRST, honest])
    closure = ann.named("tool")[0].closure

    for write in (ann.publish, shelf.write):
        with pytest.raises(VersionConflict, match=r"acme/tool@1\.0\.0"):
            write([SECOND, swapped])
    with pytest.raises(VersionConflict):
        ann.publish([release("acme/more@1.0.0", on(one)) for one in (FIRST, SECOND)])
    assert (ann.named("tool")[0].closure, len(ann.named("helper"))) == (closure, 1)
    assert [event.closure for event in shelf.events()] == [one.closure for one in ann.events()]


def test_a_version_on_a_built_in_executor_is_the_same_for_every_release_of_kiwi(ann: Registry, tmp_path: Path) -> None:
    old = release("acme/tool@1.0.0", Pin("bash_runtime", BASH, SOME))
    new = release("acme/tool@1.0.0", Pin("bash_runtime", replace(BASH, version="1.0.1"), OTHER))
    shelf = Layout(tmp_path / "shelf")

    (published,) = ann.publish([old])
    assert published.closure == closure_of(old.digest, "kiwi/bash_runtime")
    assert shelf.write([new])[0].closure == published.closure
    assert not ann.publish([new])[0].is_new
    assert not shelf.write([old])[0].is_new
    listed = ann.named("tool")[0]
    assert listed.executor == old.executor
    assert [link.name for link in ann.resolve(listed.id)] == [old.name]
    assert ann.read([listed.id])[0].executor == old.executor
    assert [*ann.verify()] == []


def test_a_pin_to_the_current_kiwi_resolves_to_the_primitive(ann: Registry) -> None:
    seed(ann, "1")
    (bash,) = [one for one in seeds() if one.name.tool_id == "bash_runtime"]
    ann.publish([release("acme/tool@1.0.0", on(bash))])

    links = ann.resolve(ann.named("tool")[0].id)
    assert [link.tool_id for link in links] == ["tool", "bash_runtime", "subprocess"]
    assert [*ann.verify()] == []


def test_built_in_items_cannot_be_published_or_marked(ann: Registry) -> None:
    seed(ann, "1")
    squatter = ann.as_seen_by(Actor("eve", ("kiwi", "acme")))
    with pytest.raises(NamespaceDenied):
        squatter.publish([release("kiwi/bash_runtime@1.0.1")])


@pytest.mark.parametrize("is_harmful", [True, False])
def test_a_taken_name_does_not_prevent_opening_a_store(ann: Registry, is_harmful: bool) -> None:
    (bash,) = [one for one in seeds() if one.name.tool_id == "bash_runtime"]
    if is_harmful:
        ann.publish([release(str(bash.name))], is_seeding=True)

    seed(ann, "1")

    assert [*unseeded(ann)] == ([bash.name] if is_harmful else [])
    names = {one.name for one in ann.find(namespace="kiwi", is_all_versions=True)}
    assert {one.name for one in seeds()} <= names
    assert [*ann.verify()] == []


def test_a_folder_with_a_swapped_executor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = release("evil/bash_runtime@1.0.0", Pin("subprocess", VersionName("kiwi", "subprocess", "1.0.0"), SOME))
    honest = release("acme/tool@1.0.0", Pin("bash_runtime", BASH, SOME))
    with monkeypatch.context() as lenient:  # as a program that writes the folder without any check
        lenient.setattr(release_check, "release_issues", lambda _: iter(()))
        tool = replace(honest, executor=Pin("bash_runtime", evil.name, evil.digest))
        Layout(tmp_path / "shelf").write([evil, tool])

    with pytest.raises(ArtifactRefused, match="does not mean evil/bash_runtime"):
        Layout(tmp_path / "shelf").events()


def shown(name: str, visibility: Visibility) -> RegistryEvent:
    namespace, _, tool_id = name.partition("/")
    return RegistryEvent(0, "visibility", VersionName(namespace, tool_id, ""), "", "", "", "", visibility)


def test_a_version_and_its_visibility_change_together_or_not_at_all(ann: Registry) -> None:
    secret = release("acme/secret@1.0.0", visibility="private")
    ann.publish([secret, release("acme/tool@1.0.0")])
    newer = release("acme/tool@1.1.0", on(secret))

    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([newer])
    ann.publish([newer], [shown("acme/tool", "private")])
    assert {one.visibility for one in ann.named("tool")} == {"private"}
    assert [event.op for event in ann.history("tool")] == ["publish", "visibility", "publish"]

    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([release("acme/tool@1.2.0")], [shown("acme/tool", "public")])
    assert [one.name.version for one in ann.named("tool")] == ["1.1.0", "1.0.0"]


def test_one_refused_change_rejects_all_of_them(ann: Registry) -> None:
    ann.publish([FIRST, release("acme/tool@1.0.0", on(FIRST))])
    yank = RegistryEvent(0, "yank", FIRST.name, FIRST.digest, "", "", "2026-02-01T00:00:00.000Z", "old")

    with pytest.raises(InvalidRequest, match="cannot become private"):
        ann.publish([SECOND], [yank, shown("acme/helper", "private")])
    assert [(one.name, one.yanked) for one in ann.named("helper")] == [(FIRST.name, None)]


def test_other_actors_do_not_learn_the_number_of_private_versions(ann: Registry) -> None:
    bob = ann.as_seen_by(Actor("bob", ("bobs",)))
    ann.publish([release("acme/open@1.0.0"), release("acme/secret@1.0.0", visibility="private")])

    assert (ann.count(), bob.count()) == (2, 1)


def test_the_closure_of_a_version_that_names_nothing_keeps_its_form() -> None:
    assert closure_of(SOME, OTHER) == "sha256:4b7de16713be46a2c4ef6a364470515305f6189e7688c1de495568a26713b19e"
    assert closure_of(SOME, None) == "sha256:f32e704a168c82b8b63e39788da6265f98821d67f0fd1be6e89702cdef947408"


def test_what_a_version_names_is_in_its_closure_in_a_store_and_in_a_folder(ann: Registry, tmp_path: Path) -> None:
    named = tuple(
        Pin(ref, one.name, one.digest) for ref, one in (("helper@^1", FIRST), ("kiwi/bash_runtime", BASH_RELEASE))
    )
    agent = replace(release("acme/agent@1.0.0"), references=named)
    shelf = Layout(tmp_path / "shelf")

    published = ann.publish([agent, FIRST])
    assert [one.closure for one in shelf.write([FIRST, agent])] == [one.closure for one in reversed(published)]
    wanted = [("helper@^1", closure_of(FIRST.digest, None)), ("kiwi/bash_runtime", "kiwi/bash_runtime")]
    assert published[0].closure == closure_of(agent.digest, None, wanted)
    assert [event.closure for event in shelf.events()] == [one.closure for one in ann.events()]
    (read,) = ann.read([ann.named("agent")[0].id])
    assert read.references == shelf.read([agent.name])[0].references == named
    assert [*ann.verify()] == []

    for write in (ann.publish, shelf.write):
        with pytest.raises(VersionConflict, match=r"acme/agent@1\.0\.0"):
            write([SECOND, replace(agent, references=(Pin("helper@^1", SECOND.name, SECOND.digest),))])


@pytest.mark.parametrize(
    "named",
    [
        (Pin("helper", VersionName("evil", "helper", "1.0.0"), SOME),),
        (Pin("helper@^2", FIRST.name, SOME),),
        (Pin("helper", FIRST.name, "sha256:1"),),
        (Pin("helper", FIRST.name, SOME), Pin("helper", FIRST.name, SOME)),
        (Pin("helper\n", FIRST.name, SOME),),
        (Pin("", VersionName("", "", ""), ""),),
    ],
)
def test_a_reference_to_something_else_than_it_says_is_refused(named: tuple[Pin, ...]) -> None:
    with pytest.raises(ArtifactRefused, match="references"):
        replace(release("acme/agent@1.0.0"), references=named)


def test_a_reference_to_what_is_not_there_or_private_is_refused(ann: Registry) -> None:
    secret = release("acme/secret@1.0.0", visibility="private")
    agent = replace(release("acme/agent@1.0.0"), references=(on(secret),))
    with pytest.raises(MissingLink):
        ann.publish([agent])
    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([agent, secret])


def test_an_item_and_what_it_names_stay_visible_to_the_same_users(ann: Registry) -> None:
    helper = release("acme/helper_a@1.0.0")
    agent = replace(release("acme/agent@1.0.0"), references=(on(helper),))
    ann.publish([helper, agent, release("acme/helperxa@1.0.0")])

    with pytest.raises(InvalidRequest, match="cannot become private"):
        ann.publish([], [shown("acme/helper_a", "private")])
    ann.publish([], [shown("acme/helperxa", "private")])
    ann.publish([], [shown("acme/agent", "private")])
    ann.publish([], [shown("acme/helper_a", "private")])
    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([], [shown("acme/agent", "public")])
