"""OCI layouts: a folder has whole versions only, and the same content gives the same bytes."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ArtifactRefused, Conflict, NotFound, StoreUnavailable, TooLarge, VersionConflict
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.registry import (
    Op,
    Pin,
    PublishResult,
    RegistryEvent,
    ReleaseFile,
    StatusNote,
    VersionName,
    closure_of,
)
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store import folder as folders
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote import layout as index
from kiwi_mcp.store.remote.layout import Layout

Tree = Callable[[Path], Mapping[str, str]]

AT, LATER = "2026-01-28T12:00:00.000Z", "2026-01-29T12:00:00.000Z"
MANIFEST = b"version: 1.0.0\r\ndescription: caf\xc3\xa9\n"


def a_release(
    tool_id: str = "say",
    version: str = "1.0.0",
    *,
    namespace: str = "team",
    on: CheckedRelease | None = None,
    code: bytes = b"print('hi')\n",
) -> CheckedRelease:
    executor = Pin(on.name.tool_id, on.name, on.digest) if on else None
    file = ReleaseFile("main.py", code)
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=executor.ref if executor else None,
        manifest_body=MANIFEST,
        files=[ToolFile(file.path, file.sha256, len(file.data))],
    )
    files = (file, ReleaseFile("tool.yaml", MANIFEST))
    name = VersionName(namespace, tool_id, version)
    return CheckedRelease(name, f"tools/{tool_id}/tool.yaml", statement, {}, files, executor, created_at=AT)


def event(release: CheckedRelease, op: Op, reason: str = "", at: str = LATER) -> RegistryEvent:
    return RegistryEvent(7, op, release.name, release.digest, "", "ana", at, reason)


PRIMITIVE = a_release("spawn")
RUNTIME = a_release("my_runtime", on=PRIMITIVE)
TOOL = a_release(on=RUNTIME)
CHAIN = (TOOL, RUNTIME, PRIMITIVE)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "deep" / "layout")


def test_versions_are_returned_byte_for_byte(layout: Layout) -> None:
    layout.write(CHAIN)

    assert Layout(layout.folder).read([release.name for release in CHAIN]) == CHAIN
    assert layout.read([]) == ()


def test_writing_returns_new_versions_and_their_hashes(layout: Layout) -> None:
    below = closure_of(RUNTIME.digest, closure_of(PRIMITIVE.digest, None))
    layout.write(CHAIN[1:])

    assert layout.write(CHAIN)[:2] == (
        PublishResult(TOOL.name, TOOL.digest, closure_of(TOOL.digest, below), is_new=True),
        PublishResult(RUNTIME.name, RUNTIME.digest, below, is_new=False),
    )


def test_events_list_executors_first_and_read_no_contents(layout: Layout) -> None:
    layout.write([replace(TOOL, visibility="unlisted", published_by="ana"), *CHAIN[1:]])
    for blob in (layout.folder / "blobs/sha256").iterdir():
        blob.unlink()

    events = Layout(layout.folder).events()

    assert [event.name for event in events] == [PRIMITIVE.name, RUNTIME.name, TOOL.name]
    assert {event.op for event in events} == {"publish"}
    assert (events[2].digest, events[2].actor, events[2].at) == (TOOL.digest, "ana", AT)
    assert (events[2].seq, events[2].visibility, events[1].visibility) == (0, "unlisted", "public")


@given(st.permutations([*CHAIN, a_release("other"), a_release(version="1.10.0", on=RUNTIME)]))
@settings(max_examples=8, deadline=None)
def test_the_same_versions_give_the_same_bytes_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, releases: list[CheckedRelease]
) -> None:
    one, two = (Layout(tmp_path_factory.mktemp("layout")) for _ in range(2))
    one.write(releases)
    for release in sorted(releases, key=lambda release: CHAIN[::-1].index(release) if release in CHAIN else 9):
        two.write([release])

    copies = Layout(tmp_path_factory.mktemp("copy"))
    copies.write(one.read([event.name for event in one.events()]))

    assert _bytes(one) == _bytes(two) == _bytes(copies)


def _bytes(layout: Layout) -> Mapping[str, bytes]:
    files = (path for path in layout.folder.rglob("*") if path.is_file())
    return {path.relative_to(layout.folder).as_posix(): path.read_bytes() for path in files}


def test_writing_again_changes_nothing(layout: Layout) -> None:
    layout.write(CHAIN, [event(TOOL, "yank", "It deletes mail.")])
    before = {path: path.stat().st_mtime_ns for path in layout.folder.rglob("*")}

    again = Layout(layout.folder).write(CHAIN, [event(TOOL, "yank", "It deletes mail.")])

    assert not any(one.is_new for one in again)
    assert {path: path.stat().st_mtime_ns for path in layout.folder.rglob("*")} == before


def test_other_content_for_a_version_is_refused_with_every_conflict(layout: Layout, tree: Tree) -> None:
    layout.write([a_release("one"), a_release("two")])
    before = tree(layout.folder)
    changed = [a_release("one", code=b"1"), a_release("two", code=b"2"), a_release("three")]

    with pytest.raises(VersionConflict) as caught:
        layout.write(changed)

    assert caught.value.details["conflicts"] == ["team/one@1.0.0", "team/two@1.0.0"]
    assert tree(layout.folder) == before
    with pytest.raises(VersionConflict):
        layout.write([a_release("four"), a_release("four", code=b"4")])


def test_the_first_annotations_of_two_equal_versions_apply(layout: Layout) -> None:
    first, second = replace(TOOL, changelog="first"), replace(TOOL, changelog="second")

    layout.write([first, second, *CHAIN[1:]])

    assert layout.read([TOOL.name]) == (first,)


def test_a_yank_is_an_annotation_of_the_index_and_not_of_the_artifact(layout: Layout) -> None:
    layout.write(CHAIN)
    blobs = {path.name for path in (layout.folder / "blobs/sha256").iterdir()}

    layout.write((), [event(TOOL, "yank", "It deletes mail."), event(RUNTIME, "deprecate", "Use 2.")])

    assert {path.name for path in (layout.folder / "blobs/sha256").iterdir()} == blobs
    yanked, deprecated = Layout(layout.folder).read([TOOL.name, RUNTIME.name])
    assert yanked == replace(TOOL, yanked=StatusNote(LATER, "It deletes mail."))
    assert deprecated.deprecated == StatusNote(LATER, "Use 2.")
    response = [(event.op, event.name, event.at, event.reason) for event in layout.events()[3:]]
    assert response == [("deprecate", RUNTIME.name, LATER, "Use 2."), ("yank", TOOL.name, LATER, "It deletes mail.")]


def test_the_last_status_applies_and_is_reported(layout: Layout) -> None:
    layout.write(CHAIN, [event(TOOL, "yank"), event(TOOL, "deprecate"), event(TOOL, "unyank", at=LATER)])

    assert layout.read([TOOL.name])[0].yanked is None
    assert [event.op for event in layout.events()[3:]] == ["deprecate", "unyank"]


def test_a_visibility_applies_to_every_version_of_an_item(layout: Layout) -> None:
    newer = a_release(version="2.0.0", on=RUNTIME)
    layout.write([*CHAIN, newer])

    layout.write((), [replace(event(TOOL, "visibility", "private"), name=replace(TOOL.name, version=""))])

    assert [one.visibility for one in layout.read([TOOL.name, newer.name, RUNTIME.name])] == [
        "private",
        "private",
        "public",
    ]
    assert [(event.op, event.reason) for event in layout.events()[4:]] == [("visibility", "private")]


@pytest.mark.parametrize(
    "mark", [event(a_release("absent"), "yank"), event(a_release("absent"), "visibility", "private")]
)
def test_a_missing_version_gets_no_status(mark: RegistryEvent, layout: Layout) -> None:
    with pytest.raises(NotFound):
        layout.write(CHAIN, [mark])
    assert not layout.folder.exists()


@pytest.mark.parametrize("mark", [event(TOOL, "visibility", "everybody"), event(TOOL, "yank", at="soon")])
def test_an_unreadable_status_is_not_written(mark: RegistryEvent, layout: Layout) -> None:
    with pytest.raises(ArtifactRefused):
        layout.write(CHAIN, [mark])
    assert not layout.folder.exists()


def test_a_version_without_its_executor_is_not_written(layout: Layout) -> None:
    with pytest.raises(ArtifactRefused, match="which is not there"):
        layout.write([TOOL, PRIMITIVE])
    assert not layout.folder.exists()


def test_a_missing_or_empty_folder_has_no_versions(layout: Layout) -> None:
    assert (layout.is_there, layout.events(), layout.read([])) == (False, (), ())
    with pytest.raises(NotFound, match="does not hold team/say@"):
        layout.read([TOOL.name])

    layout.folder.mkdir(parents=True)
    assert (layout.is_there, layout.events()) == (False, ())

    layout.write(())
    assert (layout.is_there, layout.events()) == (True, ())


def test_a_layout_of_an_unknown_version_is_not_changed(layout: Layout, tree: Tree) -> None:
    layout.write(CHAIN)
    (layout.folder / "oci-layout").write_text('{"imageLayoutVersion": "2.0.0"}')
    before = tree(layout.folder)

    with pytest.raises(ArtifactRefused, match=r"1\.0\.0"):
        Layout(layout.folder).write([a_release("other")])
    assert tree(layout.folder) == before


def test_unrelated_files_are_not_changed(layout: Layout) -> None:
    layout.write(CHAIN)
    (layout.folder / "blobs/sha256/readme").write_text("mine")

    layout.write([a_release("other")])

    assert (layout.folder / "blobs/sha256/readme").read_text() == "mine"


def test_an_interrupted_write_is_resumed(layout: Layout) -> None:
    layout.write(CHAIN)
    whole = _bytes(layout)
    (layout.folder / "index.json").unlink()
    damaged = next((layout.folder / "blobs/sha256").iterdir())
    damaged.write_bytes(b"half")
    (layout.folder / "blobs/sha256/.kiwi-new").write_bytes(b"half")

    assert Layout(layout.folder).events() == ()
    Layout(layout.folder).write(CHAIN)

    assert _bytes(layout) == whole


def test_a_full_disk_is_reported(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.write(CHAIN)
    before = _bytes(layout)

    def full(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        layout.write([a_release("other")])
    monkeypatch.undo()

    assert layout.events() == Layout(layout.folder).events()
    assert before.items() <= _bytes(layout).items()
    assert layout.write([a_release("other")])[0].is_new


def test_an_unreadable_index_is_not_written(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.write(CHAIN)
    before = _bytes(layout)
    monkeypatch.setattr(index, "MAX_INDEX", 2_500)

    with pytest.raises(TooLarge):
        layout.write([a_release("other")])
    assert _bytes(layout) == before


def test_a_second_writer_waits_and_then_reports_it(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.write(CHAIN)
    monkeypatch.setattr(folders, "_WAIT", 0.05)

    with folders.opened(layout.folder) as descriptor:
        folders.lock(descriptor, layout.folder)
        assert Layout(layout.folder).events()
        with pytest.raises(Conflict, match="Another process"):
            Layout(layout.folder).write([a_release("other")])


def test_concurrent_writers_lose_nothing(layout: Layout) -> None:
    shared, releases = a_release("shared"), [a_release(f"tool{number}") for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda one: Layout(layout.folder).write([one, shared]), releases))

    assert [one.name for one, _ in made if one.is_new] == [release.name for release in releases]
    assert sum(other.is_new for _, other in made) == 1
    assert len(layout.read([event.name for event in layout.events()])) == 25


WRITER = """
import sys
from pathlib import Path
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.registry import ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.remote.layout import Layout
from kiwi_mcp.store.registry.release_check import CheckedRelease

def a_release(tool_id):
    file = ReleaseFile("main.py", tool_id.encode() * 5_000)
    statement = statement_of(
        tool_id=tool_id, version="1.0.0", executor=None, manifest_body=b"x",
        files=[ToolFile(file.path, file.sha256, len(file.data))],
    )
    name = VersionName("team", tool_id, "1.0.0")
    return CheckedRelease(name, f"tools/{tool_id}/tool.yaml", statement, {}, (file, ReleaseFile("tool.yaml", b"x")))

layout = Layout(Path(sys.argv[1]))
print("ready", flush=True)
for number in range(100_000):
    layout.write([a_release(f"{sys.argv[2]}-{number}-{part}") for part in range(3)])
    print(f"{sys.argv[2]}-{number}", flush=True)
"""


def _killed(folder: Path, words: Sequence[str], after: int) -> list[str]:
    """Start writers at once, kill each after a number of acknowledged writes, and return those."""
    command = [sys.executable, "-c", WRITER, str(folder)]
    writers = [subprocess.Popen([*command, word], stdout=subprocess.PIPE, text=True) for word in words]
    response: list[str] = []
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        response += [writer.stdout.readline().strip() for _ in range(after)]
    for writer in writers:
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.stdout is not None
        response += writer.stdout.read().splitlines()
        writer.stdout.close()
        writer.wait(120)
    return response


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("round_", range(3))
def test_a_killed_writer_loses_nothing_acknowledged_and_leaves_no_partial_version(round_: int, layout: Layout) -> None:
    response = _killed(layout.folder, [f"w{round_}a", f"w{round_}b"], random.Random(round_).randrange(1, 6))

    events = Layout(layout.folder).events()
    names = [event.name for event in events]

    assert {VersionName("team", f"{one}-{part}", "1.0.0") for one in response for part in range(3)} <= set(names)
    assert len(names) % 3 == 0
    assert len(Layout(layout.folder).read(names)) == len(names)
    assert layout.write([a_release("afterwards")])[0].is_new


DESCRIPTOR: JsonObject = {
    "type": "object",
    "required": ["mediaType", "digest", "size"],
    "properties": {
        "mediaType": {"const": "application/vnd.oci.image.manifest.v1+json"},
        "artifactType": {"type": "string"},
        "digest": {"type": "string", "pattern": "^sha256:[a-f0-9]{64}$"},
        "size": {"type": "integer", "minimum": 1},
        "annotations": {
            "type": "object",
            "required": ["org.opencontainers.image.ref.name"],
            "additionalProperties": {"type": "string"},
        },
    },
}
IMAGE_INDEX: JsonObject = {
    "type": "object",
    "required": ["schemaVersion", "manifests"],
    "properties": {
        "schemaVersion": {"const": 2},
        "mediaType": {"const": "application/vnd.oci.image.index.v1+json"},
        "manifests": {"type": "array", "items": DESCRIPTOR},
    },
}


def test_the_folder_is_an_oci_image_layout(layout: Layout) -> None:
    layout.write(CHAIN, [event(TOOL, "yank")])
    document = json.loads((layout.folder / "index.json").read_text())

    assert json.loads((layout.folder / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    assert faults(IMAGE_INDEX, document) == []
    assert {path.name for path in layout.folder.iterdir()} == {"oci-layout", "index.json", "blobs"}
    assert all((layout.folder / "blobs/sha256" / row["digest"][7:]).is_file() for row in document["manifests"])
    assert [row["annotations"]["org.opencontainers.image.ref.name"] for row in document["manifests"]] == [
        "team/my_runtime/1.0.0",
        "team/say/1.0.0",
        "team/spawn/1.0.0",
    ]


def test_an_index_rewritten_by_another_program_is_read(layout: Layout) -> None:
    layout.write(CHAIN)
    document = json.loads((layout.folder / "index.json").read_text())
    del document["mediaType"]
    rows = [
        {**row, "annotations": {**row["annotations"], "com.example.more": "x"}} for row in document["manifests"][::-1]
    ]
    (layout.folder / "index.json").write_text(json.dumps({**document, "manifests": rows}, indent=2))

    assert Layout(layout.folder).read([TOOL.name]) == (TOOL,)
