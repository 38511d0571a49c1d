"""What a version stands on: what a pin may say, what a closure covers, and what ships with Kiwi and never travels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.catalog.seeds import seed, seeds, unseeded
from kiwi_mcp.domain.errors import ArtifactRefused, InvalidRequest, NamespaceDenied, VersionConflict
from kiwi_mcp.domain.registry import Actor, Event, Pin, Release, ReleaseFile, VersionName, Visibility, closure_of
from kiwi_mcp.store import layout as layouts
from kiwi_mcp.store.layout import Layout
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry import Registry

ANN = Actor("ann", ("acme", "public"))
YAML = b"description: Says hello\n"
BASH = VersionName("kiwi", "bash_runtime", "1.0.0")
SOME, OTHER = (f"sha256:{digit * 64}" for digit in "12")


def release(
    name: str, pin: Pin | None = None, *, text: bytes = b"echo hi\n", visibility: Visibility = "public"
) -> Release:
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
    return Release(
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


FIRST, SECOND = release("acme/helper@1.0.0"), release("acme/helper@1.1.0", text=b"echo evil\n")


@pytest.mark.parametrize(
    "ref",
    ["helper", "helper@^1", "helper@1.0.0", f"helper@{FIRST.digest}", "registry/acme/helper", "project/local/helper"],
)
def test_a_pin_that_says_what_the_reference_says_is_kept(ann: Registry, ref: str) -> None:
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
def test_a_pin_that_says_more_than_the_reference_is_refused_everywhere(
    ann: Registry, tmp_path: Path, ref: str, pin: str
) -> None:
    below = release(pin)
    tool = release("acme/tool@1.0.0", Pin(ref, below.name, below.digest))

    with pytest.raises(ArtifactRefused, match="executor"):
        ann.publish([tool])
    with pytest.raises(ArtifactRefused, match="executor"):
        Layout(tmp_path / "shelf").write([below, tool])
    assert ann.find() == ()


def test_a_tool_stands_on_another_namespace_where_it_says_so(ann: Registry) -> None:
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


def test_a_version_stands_on_any_release_of_kiwi_and_is_the_same_everywhere(ann: Registry, tmp_path: Path) -> None:
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


def test_what_is_pinned_to_the_kiwi_that_is_here_resolves_down_to_the_primitive(ann: Registry) -> None:
    seed(ann, "1")
    (bash,) = [one for one in seeds() if one.name.tool_id == "bash_runtime"]
    ann.publish([release("acme/tool@1.0.0", on(bash))])

    links = ann.resolve(ann.named("tool")[0].id)
    assert [link.tool_id for link in links] == ["tool", "bash_runtime", "subprocess"]
    assert [*ann.verify()] == []


def test_nobody_publishes_or_marks_what_ships_with_kiwi(ann: Registry) -> None:
    seed(ann, "1")
    squatter = ann.as_seen_by(Actor("eve", ("kiwi", "acme")))
    with pytest.raises(NamespaceDenied):
        squatter.publish([release("kiwi/bash_runtime@1.0.1")])


@pytest.mark.parametrize("is_harmful", [True, False])
def test_a_name_that_somebody_took_stops_no_store_from_opening(ann: Registry, is_harmful: bool) -> None:
    (bash,) = [one for one in seeds() if one.name.tool_id == "bash_runtime"]
    if is_harmful:
        ann.publish([release(str(bash.name))], is_seeding=True)

    seed(ann, "1")

    assert [*unseeded(ann)] == ([bash.name] if is_harmful else [])
    names = {one.name for one in ann.find(namespace="kiwi", is_all_versions=True)}
    assert {one.name for one in seeds()} <= names
    assert [*ann.verify()] == []


def test_a_folder_with_a_swapped_executor_is_refused_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = release("evil/bash_runtime@1.0.0", Pin("subprocess", VersionName("kiwi", "subprocess", "1.0.0"), SOME))
    tool = release("acme/tool@1.0.0", Pin("bash_runtime", evil.name, evil.digest))
    with monkeypatch.context() as lenient:  # as whoever writes the folder with a program of their own
        lenient.setattr(layouts, "unsound", lambda _: iter(()))
        Layout(tmp_path / "shelf").write([evil, tool])

    with pytest.raises(ArtifactRefused, match="does not mean evil/bash_runtime"):
        Layout(tmp_path / "shelf").events()


def shown(name: str, visibility: Visibility) -> Event:
    namespace, _, tool_id = name.partition("/")
    return Event(0, "visibility", VersionName(namespace, tool_id, ""), "", "", "", "", visibility)


def test_a_version_and_who_sees_its_item_change_together_or_not_at_all(ann: Registry) -> None:
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


def test_one_word_that_is_refused_leaves_all_of_them_unsaid(ann: Registry) -> None:
    ann.publish([FIRST, release("acme/tool@1.0.0", on(FIRST))])
    yank = Event(0, "yank", FIRST.name, FIRST.digest, "", "", "2026-02-01T00:00:00.000Z", "old")

    with pytest.raises(InvalidRequest, match="cannot become private"):
        ann.publish([SECOND], [yank, shown("acme/helper", "private")])
    assert [(one.name, one.yanked) for one in ann.named("helper")] == [(FIRST.name, None)]


def test_strangers_are_not_told_how_many_private_versions_there_are(ann: Registry) -> None:
    bob = ann.as_seen_by(Actor("bob", ("bobs",)))
    ann.publish([release("acme/open@1.0.0"), release("acme/secret@1.0.0", visibility="private")])

    assert (ann.count(), bob.count()) == (2, 1)
