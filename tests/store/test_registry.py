"""The registry on every store: immutable versions, in order, visible only to permitted actors."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from typing import cast

import pytest
from msgspec.structs import replace
from tests.plugins.registries import latest_chain, set_visibility

from kiwi_mcp.domain.errors import (
    ArtifactRefused,
    ChainTooDeep,
    IntegrityMismatch,
    InvalidRequest,
    KiwiError,
    MissingLink,
    NamespaceDenied,
    NotFound,
    VersionConflict,
    VersionNotFound,
)
from kiwi_mcp.domain.registry import (
    START,
    Actor,
    Cursor,
    Pin,
    ReleaseFile,
    StatusNote,
    VersionName,
    Visibility,
    closure_of,
)
from kiwi_mcp.store.database import Database, IntegrityFault
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.registry.release_check import CheckedRelease

ANN = Actor("ann", ("team", "public"))
BOB = Actor("bob", ("other", "public"))
YAML = b"# a comment\r\ntool_id: x   # kept\nversion: 1.0.0\n"


def release(
    tool_id: str = "greet",
    version: str = "1.0.0",
    *,
    namespace: str = "team",
    on: CheckedRelease | None = None,
    files: dict[str, bytes] | None = None,
    place: str = "",
    tool_type: str = "",
    visibility: Visibility = "public",
    description: str = "Says hello",
    ref: str = "",
) -> CheckedRelease:
    """A release as the catalog makes one: its statement speaks of every byte."""
    ref = ref or (on.name.tool_id if on else "")
    place = place or f"tools/{tool_id}/tool.yaml"
    held = {place.rpartition("/")[2]: YAML, **({"main.py": b"print('hi')\n"} if files is None else files)}
    manifest_path = place.rpartition("/")[2]
    listed = [
        {"path": path, "sha256": sha256(data).hexdigest(), "executable": path.endswith(".sh")}
        for path, data in sorted(held.items())
        if path != manifest_path
    ]
    statement = {
        "kind": "kiwi.item/1",
        "tool_id": tool_id,
        "version": version,
        "executor": ref or None,
        "manifest": sha256(held[manifest_path].replace(b"\r\n", b"\n")).hexdigest(),
        "files": listed,
    }
    return CheckedRelease(
        name=VersionName(namespace, tool_id, version),
        place=place,
        statement=json.dumps(statement, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode(),
        manifest={
            "tool_id": tool_id,
            "tool_type": tool_type or ("script" if on else "primitive"),
            "version": version,
            "name": tool_id.title(),
            "description": description,
            "category": "demo",
            "tags": ["one", "zwei", "три"],
            **({"executor": ref} if on else {}),
        },
        files=tuple(ReleaseFile(path, data, path.endswith(".sh")) for path, data in sorted(held.items())),
        executor=Pin(ref, on.name, on.digest) if on else None,
        visibility=visibility,
    )


PRIMITIVE = release("spawn")
RUNTIME = release("python", on=PRIMITIVE, tool_type="runtime")
TOOL = release("greet", on=RUNTIME)


SPOILS: list[Callable[[CheckedRelease], CheckedRelease]] = [
    lambda one: replace(one, files=one.files[1:]),
    lambda one: replace(one, files=(*one.files, ReleaseFile("extra.py", b""))),
    lambda one: replace(one, files=(replace(one.files[0], data=b"other"), *one.files[1:])),
    lambda one: replace(one, files=(one.files[0], replace(one.files[1], data=b"other"))),
    lambda one: replace(one, files=(*one.files, one.files[0])),
    lambda one: replace(one, files=(*one.files, replace(one.files[0], path="MAIN.py"))),
    lambda one: replace(one, files=(*one.files, ReleaseFile("../up.py", b""))),
    lambda one: replace(one, files=(*one.files, ReleaseFile("a\\b.py", b""))),
    lambda one: replace(one, files=tuple(ReleaseFile(f"f{n}", b"") for n in range(2_001))),
    lambda one: replace(one, place="../../tool.yaml"),
    lambda one: replace(one, statement=one.statement + b" "),
    lambda one: replace(one, statement=b"{"),
    lambda one: replace(one, statement=b"\xff"),
    lambda one: replace(one, name=replace(one.name, version="1.0.1")),
    lambda one: replace(one, name=replace(one.name, version="1.0.0+build")),
    lambda one: replace(one, name=replace(one.name, version="latest")),
    lambda one: replace(one, name=replace(one.name, tool_id="Other")),
    lambda one: replace(one, executor=Pin("evil", PRIMITIVE.name, PRIMITIVE.digest)),
    lambda one: replace(one, executor=None),
    lambda one: replace(one, executor=Pin("spawn", PRIMITIVE.name, "sha256:../../x")),
    lambda one: replace(one, manifest={}),
    lambda one: replace(one, manifest={**one.manifest, "name": "\0"}),
    lambda one: replace(one, manifest={**one.manifest, "name": "\ud800"}),
    lambda one: replace(one, manifest={**one.manifest, "name": float("nan")}),
    lambda one: replace(one, changelog="\0"),
    lambda one: replace(one, created_at="yesterday"),
    lambda one: replace(one, created_at="2026-13-01T00:00:00.000Z"),
    lambda one: replace(one, yanked=StatusNote("now")),
    lambda one: replace(one, is_official=True),
    lambda one: replace(one, is_builtin=True),
    lambda one: replace(one, visibility=cast("Visibility", "secret")),
]


FORBIDDEN = [
    "update tool_versions set manifest_canon = 'x'",
    "update tool_versions set version = '2.0.0'",
    "update tool_versions set published_by = 'me'",
    "delete from tool_versions",
    "update tool_version_files set content_text = 'x'",
    "delete from tool_version_files",
    "delete from tools",
    "update tools set tool_id = 'mine'",
    "update registry_log set actor = 'me'",
    "delete from registry_log",
    "delete from blobs",
    "update blobs set size_bytes = 1",
    "update tool_versions set is_latest = true where is_latest = false",
    "insert into tool_version_files (id, tool_version_id, path, sha256, size_bytes, content_text, created_at) "
    "select '01890000-0000-7000-a000-000000000000', id, 'new.py', content_hash, 1, 'x', created_at "
    "from tool_versions limit 1",
]


@pytest.fixture
def ann(database: Database) -> Registry:
    return Registry(database, ANN)


@pytest.fixture
def bob(ann: Registry) -> Registry:
    return ann.as_seen_by(BOB)


def versions(registry: Registry, tool_id: str = "greet") -> list[str]:
    return [one.name.version for one in registry.named(tool_id)]


def latest(registry: Registry, tool_id: str = "greet") -> str:
    (one,) = [one.name.version for one in registry.named(tool_id) if one.is_latest]
    return one


@pytest.mark.req("K-RG-01", "K-RG-03")
def test_a_published_version_is_returned_byte_for_byte(ann: Registry) -> None:
    files = {
        "main.py": "print('ö')\n".encode(),
        "run.sh": b"#!/bin/sh\n",
        "empty": b"",
        "odd.txt": b"\r\n\t no newline at the end",
        "latin.txt": b"\xe9",
        "zero.bin": b"a\0b",
        "large.txt": b"x" * 70_000,
        "lib/deep/part.py": b"",
    }
    sent = replace(release(files=files), changelog="First.", created_at="2026-01-28T12:00:00.000Z", published_by="zoe")

    (published,) = ann.publish([sent])
    (listed,) = ann.named("greet")
    (back,) = ann.read([listed.id])

    assert published.is_new
    assert published.digest == listed.digest == back.digest == sent.digest
    assert back == sent
    assert {file.path: file.data for file in back.files}["tool.yaml"] == YAML
    assert (listed.title, listed.description, listed.category) == ("Greet", "Says hello", "demo")
    assert listed.tags == ("one", "zwei", "три")
    assert listed.manifest == sent.manifest
    assert [*ann.verify()] == []


def test_an_embedded_manifest_is_one_of_the_files(ann: Registry, database: Database) -> None:
    sent = replace(release(place="tools/greet.py", files={}), changelog="")
    ann.publish([sent, release("knows", files={})])

    (listed,) = ann.named("greet")
    assert ann.read([listed.id])[0].files == sent.files
    rows = database.read("select v.manifest_yaml, f.path from tool_versions v left join tool_version_files f "
                         "on f.tool_version_id = v.id order by v.place")  # fmt: skip
    assert sorted(rows, key=str) == [(YAML.decode(), None), (None, "greet.py")]


def test_a_signature_line_is_not_part_of_the_digest(ann: Registry) -> None:
    line = b"# kiwi-mcp:validated:2026-01-28T12:00:00Z:" + b"0" * 64 + b"\n"
    plain = release()
    signed = replace(
        plain, files=tuple(replace(file, data=line + file.data) if file.data == YAML else file for file in plain.files)
    )
    ann.publish([signed])

    assert ann.read([ann.named("greet")[0].id])[0].files == signed.files
    assert [*ann.verify()] == []


@pytest.mark.req("K-RG-02")
def test_a_published_version_never_changes(ann: Registry) -> None:
    ann.publish([PRIMITIVE, release("other")])
    before = ann.head()

    with pytest.raises(VersionConflict) as caught:
        ann.publish([release("more"), release("spawn", files={"b.py": b""}), release("other", files={})])

    assert caught.value.details["conflicts"] == ["team/other@1.0.0", "team/spawn@1.0.0"]
    assert ann.named("more") == ()
    assert ann.head() == before


@pytest.mark.req("K-RG-02")
def test_publishing_the_same_version_again_changes_nothing(ann: Registry) -> None:
    (first,) = ann.publish([PRIMITIVE])
    head = ann.head()
    again, twice = ann.publish([PRIMITIVE, replace(PRIMITIVE, changelog="other words")])

    assert (again.is_new, twice.is_new) == (False, False)
    assert (again.digest, again.closure) == (first.digest, first.closure)
    assert ann.head() == head


@pytest.mark.req("K-RG-02")
def test_versions_have_semantic_order_in_any_publishing_order(ann: Registry) -> None:
    for version in ("1.9.0", "1.10.0", "2.0.0-rc.1", "1.2.0", "2.0.0-rc.1.1", "0.0.1"):
        ann.publish([release(version=version)])

    assert versions(ann) == ["2.0.0-rc.1.1", "2.0.0-rc.1", "1.10.0", "1.9.0", "1.2.0", "0.0.1"]
    assert latest(ann) == "1.10.0"
    assert ann.find()[0].name.version == "1.10.0"
    assert [one.name.version for one in ann.find(is_all_versions=True)] == versions(ann)


@pytest.mark.req("K-RG-02")
def test_a_yank_moves_the_latest_version_and_can_be_reversed(ann: Registry) -> None:
    ann.publish([release(version=version, description=version) for version in ("1.0.0", "1.1.0", "2.0.0-rc.1")])
    named = [VersionName("team", "greet", version) for version in ("1.1.0", "1.0.0", "2.0.0-rc.1")]

    (yanked,) = ann.set_status(named[:1], "yank", "It eats files.", "2026-01-28T12:00:00.000Z")
    assert yanked.yanked == StatusNote("2026-01-28T12:00:00.000Z", "It eats files.")
    assert latest(ann) == "1.0.0"
    assert ann.find()[0].description == "1.0.0"
    ann.set_status(named[1:2], "yank")
    assert latest(ann) == "2.0.0-rc.1"
    ann.set_status(named[2:], "yank")
    assert latest(ann) == "2.0.0-rc.1"
    ann.set_status(named, "unyank")
    assert latest(ann) == "1.1.0"
    assert [one.description for one in ann.named("greet")] == ["2.0.0-rc.1", "1.1.0", "1.0.0"]
    assert [*ann.verify()] == []


def test_a_namespace_with_only_yanked_versions_is_not_listed(ann: Registry) -> None:
    ann.publish([PRIMITIVE, release("wave", namespace="public"), release("wave", "1.1.0", namespace="public")])
    assert ann.namespaces(10) == ("public", "team")
    ann.set_status([VersionName("public", "wave", "1.1.0"), PRIMITIVE.name], "yank")
    assert ann.namespaces(10) == ("public",)
    ann.set_status([PRIMITIVE.name], "unyank")
    assert ann.namespaces(10) == ("public", "team")


def test_a_status_is_set_once(ann: Registry) -> None:
    ann.publish([PRIMITIVE])
    (first,) = ann.set_status([PRIMITIVE.name], "deprecate", "Use another.")
    head = ann.head()
    (second,) = ann.set_status([PRIMITIVE.name], "deprecate", "Said again.")

    assert first.deprecated == second.deprecated
    assert first.deprecated is not None
    assert first.deprecated.reason == "Use another."
    assert ann.head() == head
    assert ann.set_status([PRIMITIVE.name], "undeprecate")[0].deprecated is None
    assert ann.head() == head + 1


def test_statuses_are_set_on_all_or_none(ann: Registry) -> None:
    ann.publish([PRIMITIVE])

    with pytest.raises(VersionNotFound):
        ann.set_status([PRIMITIVE.name, replace(PRIMITIVE.name, version="9.9.9")], "yank")
    assert ann.named("spawn")[0].yanked is None


def test_executors_are_published_before_the_items_that_use_them(ann: Registry) -> None:
    published = ann.publish([TOOL, PRIMITIVE, RUNTIME])

    assert [one.name.tool_id for one in published] == ["greet", "spawn", "python"]
    below = closure_of(RUNTIME.digest, closure_of(PRIMITIVE.digest, None))
    assert published[0].closure == closure_of(TOOL.digest, below)
    (listed,) = ann.named("greet")
    assert listed.executor == TOOL.executor
    assert [event.name.tool_id for event in ann.events()] == ["spawn", "python", "greet"]


def test_a_chain_is_resolved_from_the_top(ann: Registry) -> None:
    ann.publish([TOOL, PRIMITIVE, RUNTIME])
    (listed,) = ann.named("greet")

    chain = ann.resolve(listed.id)

    assert [link.name for link in chain] == [TOOL.name, RUNTIME.name, PRIMITIVE.name]
    assert chain == latest_chain(ann, "greet")
    assert (chain[0].digest, chain[0].closure, chain[0].place) == (listed.digest, listed.closure, listed.place)
    assert json.loads(chain[1].manifest_text) == RUNTIME.manifest


def test_a_pin_stays_when_a_newer_executor_is_published(ann: Registry) -> None:
    ann.publish([TOOL, PRIMITIVE, RUNTIME])
    ann.publish([release("python", "2.0.0", on=PRIMITIVE, tool_type="runtime")])

    assert [link.version for link in latest_chain(ann, "greet")] == ["1.0.0", "1.0.0", "1.0.0"]


@pytest.mark.parametrize(
    "missing", [TOOL, replace(TOOL, executor=Pin("python", RUNTIME.name, f"sha256:{'0' * 64}"))], ids=["name", "digest"]
)
def test_a_pin_to_a_missing_version_is_refused(ann: Registry, missing: CheckedRelease) -> None:
    ann.publish([PRIMITIVE, RUNTIME] if missing is not TOOL else [PRIMITIVE])

    with pytest.raises(MissingLink):
        ann.publish([missing])
    assert ann.named("greet") == ()


def test_a_cycle_is_refused(ann: Registry) -> None:
    one = release("one", on=release("two"))
    two = release("two", on=one)
    one = replace(one, executor=Pin("two", two.name, two.digest))

    with pytest.raises(ArtifactRefused, match="cycle"):
        ann.publish([one, two])
    assert ann.head() == 0


def test_a_chain_of_more_than_sixteen_links_is_refused(ann: Registry) -> None:
    chain = [release("link_0")]
    for number in range(1, 1_000):
        chain.append(release(f"link_{number}", on=chain[-1]))

    with pytest.raises(ArtifactRefused, match="the limit is 16"):
        ann.publish(chain)
    assert ann.head() == 0
    for link in chain[:16]:
        ann.publish([link])
    with pytest.raises(ChainTooDeep):
        ann.publish([chain[16]])
    assert len(latest_chain(ann, "link_15")) == len(ann.find()) == 16


@pytest.mark.case("PATH-08", "PATH-09")
def test_a_release_with_wrong_hashes_is_refused_in_full(ann: Registry) -> None:
    ann.publish([PRIMITIVE])
    head = ann.head()

    for number, spoil in enumerate(SPOILS):
        with pytest.raises(ArtifactRefused) as caught:
            ann.publish([release("fine"), spoil(release("bad", on=PRIMITIVE))])
        assert caught.value.issues, number
    assert ann.head() == head
    assert ann.named("fine") == ()


def test_a_type_determines_whether_there_is_an_executor_and_a_new_type_is_stored(
    ann: Registry, database: Database
) -> None:
    with pytest.raises(ArtifactRefused, match="an executor is required"):
        ann.publish([release(tool_type="script")])
    ann.publish([release(tool_type="daemon")])

    assert ann.find(tool_type="daemon")[0].tool_type == "daemon"
    assert len(database.read("select * from tool_types")) == 11


@pytest.mark.req("K-RG-04")
def test_only_members_publish_to_a_namespace_and_no_user_to_that_of_kiwi(ann: Registry) -> None:
    for namespace in ("other", "kiwi"):
        with pytest.raises(NamespaceDenied):
            ann.publish([release("fine"), release(namespace=namespace)])
    assert ann.named("fine") == ()
    ann.publish([replace(release(namespace="kiwi"), is_builtin=True, is_official=True)], is_seeding=True)
    assert ann.named("greet")[0].is_builtin
    with pytest.raises(NamespaceDenied):
        ann.as_seen_by(Actor("root", ("kiwi",))).publish([release("evil", namespace="kiwi")])


@pytest.mark.req("K-RG-04")
def test_a_private_item_does_not_exist_for_others(ann: Registry, bob: Registry) -> None:
    ann.publish([release("hidden", visibility="private")])
    (listed,) = ann.named("hidden")

    def answers(tool_id: str, id_: str) -> list[str]:
        found = []
        name = VersionName("team", tool_id, "1.0.0")
        pinned = release("mine", namespace="other", on=release(tool_id), ref=f"registry/team/{tool_id}")
        for question in (
            lambda: bob.named(tool_id),
            lambda: bob.named(tool_id, "team"),
            bob.find,
            lambda: bob.find(namespace="team", is_all_versions=True),
            lambda: bob.by_digest(listed.digest),
            lambda: bob.get(id_),
            lambda: bob.resolve(id_),
            lambda: bob.read([id_]),
            bob.events,
            lambda: bob.set_status([name], "yank"),
            lambda: set_visibility(bob, "team", tool_id, "public"),
            lambda: bob.count_download(id_),
            lambda: [*bob.verify([id_])],
            lambda: bob.publish([pinned]),
        ):
            try:
                found.append(str(question()))
            except KiwiError as error:
                found.append(f"{error.to_response()}")
        return [text.replace(tool_id, "NAME").replace(id_, "ID").replace(pinned.digest, "DIGEST") for text in found]

    there = answers("hidden", listed.id)
    assert there == answers("absent", "01890000-0000-7000-a000-000000000000")
    assert [name.tool_id for name in (one.name for one in ann.find())] == ["hidden"]
    assert len(ann.events()) == 1


@pytest.mark.req("K-RG-04")
def test_an_unlisted_item_is_found_by_name_only(ann: Registry, bob: Registry) -> None:
    ann.publish([release(visibility="unlisted")])

    assert (bob.find(), bob.events()) == ((), ())
    assert len(bob.named("greet", "team")) == len(ann.find()) == 1
    assert bob.named("greet") == ()  # a stranger's namespace never answers to a short name
    set_visibility(ann, "team", "greet", "public")
    assert len(bob.find()) == 1
    event = ann.events()[-1]
    assert (event.op, event.reason, event.visibility, event.name.version) == ("visibility", "public", "public", "")


@pytest.mark.req("K-RG-04")
def test_an_item_is_never_more_visible_than_its_executors(ann: Registry) -> None:
    private = release("python", on=PRIMITIVE, tool_type="runtime", visibility="private")
    ann.publish([PRIMITIVE, private])

    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([TOOL])
    with pytest.raises(InvalidRequest, match="is private"):
        ann.publish([release(namespace="public", on=private, ref="registry/team/python", visibility="private")])
    ann.publish([replace(TOOL, visibility="private")])
    with pytest.raises(InvalidRequest, match="is private"):
        set_visibility(ann, "team", "greet", "unlisted")
    set_visibility(ann, "team", "python", "public")
    set_visibility(ann, "team", "greet", "public")
    with pytest.raises(InvalidRequest, match="cannot become private"):
        set_visibility(ann, "team", "python", "private")
    assert [*ann.verify()] == []


def test_short_names_are_searched_in_the_namespaces_of_the_actor_in_order(ann: Registry) -> None:
    ann.publish([release(namespace="public"), release(version="0.1.0"), release(namespace="public", version="3.0.0")])

    found = [str(one.name) for one in ann.named("greet")]
    assert found == ["team/greet@0.1.0", "public/greet@3.0.0", "public/greet@1.0.0"]
    assert latest_chain(ann, "greet")[0].name == VersionName("team", "greet", "0.1.0")


def test_only_members_may_change_the_status_of_a_visible_item(ann: Registry, bob: Registry) -> None:
    ann.publish([PRIMITIVE])

    with pytest.raises(NamespaceDenied):
        bob.set_status([PRIMITIVE.name], "yank")
    with pytest.raises(NamespaceDenied):
        set_visibility(bob, "team", "spawn", "private")


def test_a_release_from_another_registry_keeps_its_status_and_log(ann: Registry) -> None:
    mark = StatusNote("2026-01-28T12:00:00.000Z", "Bad.")
    ann.publish([replace(release(), yanked=mark, deprecated=mark), release(version="0.1.0")])

    (newer, older) = ann.named("greet")
    assert (newer.yanked, newer.deprecated, older.is_latest) == (mark, mark, True)
    assert [(event.op, event.name.version, event.reason) for event in ann.events()] == [
        ("publish", "0.1.0", ""),
        ("publish", "1.0.0", ""),
        ("yank", "1.0.0", "Bad."),
        ("deprecate", "1.0.0", "Bad."),
    ]


def test_the_log_is_read_from_a_cursor(ann: Registry) -> None:
    ann.publish([release(f"t{number}") for number in range(5)])

    first = ann.events(limit=2)
    assert [event.seq for event in (*first, *ann.events(after=first[-1].seq))] == [1, 2, 3, 4, 5]
    assert ann.head() == 5
    assert ann.events(after=5) == ()


def test_the_head_includes_writes_of_others(ann: Registry, bob: Registry) -> None:
    assert ann.head() == bob.head() == 0
    bob.publish([release(namespace="other")])
    assert ann.head() == 1


def test_a_cursor_is_remembered_for_each_remote(ann: Registry) -> None:
    assert ann.cursor("https://one") == START
    ann.set_cursor("https://one", Cursor(7, "sha256:7"))
    ann.set_cursor("https://one", Cursor(9, "sha256:9"))
    assert (ann.cursor("https://one"), ann.cursor("https://two")) == (Cursor(9, "sha256:9"), START)


def test_downloads_are_counted(ann: Registry, database: Database) -> None:
    ann.publish([PRIMITIVE])
    for _ in range(3):
        ann.count_download(ann.named("spawn")[0].id)
    assert database.read("select download_count from tools") == [(3,)]


@pytest.mark.case("PATH-08")
def test_an_invalid_name_finds_nothing(ann: Registry) -> None:
    for digest in ("sha256:../../x", "sha256:" + "A" * 64, "", "\0", f"sha256:{'0' * 64}\n"):
        with pytest.raises(InvalidRequest):
            ann.by_digest(digest)
    for text in ("../../x", "", "\0", "'; drop table tools; --", "x" * 10_000, "\ud800"):
        with pytest.raises(NotFound):
            ann.get(text)
        with pytest.raises(NotFound):
            ann.resolve(text)
        assert ann.named(text) == ann.named("greet", text) == ()


def test_lists_are_limited_and_filtered(ann: Registry) -> None:
    other = release("p", namespace="public", on=release("t0"), ref="registry/team/t0")
    ann.publish([release(f"t{number}") for number in range(5)] + [other])

    assert [one.name.tool_id for one in ann.find(limit=2)] == ["p", "t0"]
    assert [one.name.tool_id for one in ann.find(namespace="team", limit=1)] == ["t0"]
    assert [one.name.tool_id for one in ann.find(tool_type="script")] == ["p"]
    assert len(ann.by_digest(release("t1").digest)) == 1


@pytest.mark.req("K-RG-02")
def test_the_store_itself_refuses_to_change_a_published_version(ann: Registry, database: Database) -> None:
    ann.publish([release(files={"b.bin": b"\0", "a.py": b""}), release(version="2.0.0")])

    for statement in FORBIDDEN:
        with pytest.raises(IntegrityFault), database.transaction() as transaction:
            transaction.write(statement)
    assert [*ann.verify()] == []


def test_a_version_changed_in_the_store_is_not_returned(ann: Registry, database: Database) -> None:
    ann.publish([release(files={"a.py": b"one"})])
    with database.transaction() as transaction:
        on = " on tool_version_files" if database.dialect == "postgres" else ""
        transaction.write(f"drop trigger files_never_change{on}")
        transaction.write("update tool_version_files set content_text = 'two'")

    with pytest.raises(IntegrityMismatch, match=r"a\.py"):
        ann.read([ann.named("greet")[0].id])
