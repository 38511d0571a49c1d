"""Artiannotations that lie, lead elsewhere, or are too much: refused as a whole, before a byte of them is kept."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ArtifactRefused, Conflict, KiwiError, StoreUnavailable
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.registry import Pin, Release, ReleaseFile, StatusNote, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.registry.release_check import MAX_BYTES, MAX_FILES, CheckedRelease, order, release_issues
from kiwi_mcp.store.remote.layout import (
    MAX_INDEX,
    Artifact,
    Layout,
    LayoutEntry,
    decode,
    encode,
    read_entries,
    read_release,
)

Document = dict[str, Any]  # JSON that a test takes apart at will
Tree = Callable[[Path], Mapping[str, str]]

MANIFEST = b"tool_id: say\nversion: 1.0.0\n"
SECRET = b"the owner's own"


def a_release(
    tool_id: str = "say",
    *,
    executor: Pin | None = None,
    files: tuple[ReleaseFile, ...] = (ReleaseFile("lib/a.py", b"a = 1\n"), ReleaseFile("main.py", b"print('hi')\n")),
) -> Release:
    statement = statement_of(
        tool_id=tool_id,
        version="1.0.0",
        executor=executor.ref if executor else None,
        manifest_body=MANIFEST,
        files=[ToolFile(file.path, file.sha256, len(file.data), file.is_executable) for file in files],
    )
    name = VersionName("team", tool_id, "1.0.0")
    whole = (*files, ReleaseFile("tool.yaml", MANIFEST))
    return Release(name, f"tools/{tool_id}/tool.yaml", statement, {}, whole, executor)


def document_of(artifact: Artifact) -> Document:
    found: Document = json.loads(artifact.manifest)
    return found


def written(document: Document) -> bytes:
    return json.dumps(document).encode()


def refusal(artifact: Artifact) -> tuple[ArtifactRefused, list[str]]:
    """The refusal of an artifact, and the blobs that were asked for before it."""
    asked: list[str] = []

    def read(digest: str, size: int) -> bytes:
        asked.append(digest)
        return artifact.blobs[digest]

    with pytest.raises(ArtifactRefused) as caught:
        decode(artifact.manifest, read)
    return caught.value, asked


def folder_with(folder: Path, artifact: Artifact, entry: LayoutEntry) -> Layout:
    """A layout as an attacker writes it: whatever is in the artifact, with an index that fits it."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    for data in (artifact.manifest, *artifact.blobs.values()):
        (blobs / sha256(data).hexdigest()).write_bytes(data)
    rows = [replace(entry, artifact=artifact.digest, size=len(artifact.manifest)).to_json()]
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return Layout(folder)


@pytest.mark.case("PATH-03")
@pytest.mark.parametrize(
    "path",
    [
        "../x", "a/../../x", "/etc/passwd", "C:/x", "c:x", "\\\\host\\share\\x", "a\\b", "~/.ssh/config", "~", ".",
        "..", "", "a//b", "a/", "a.", "a ", " a", "con", "lib/nul.txt", "a\0b", "a\nb", "a\x85b", "a\u202eb", "x" * 256,
        "é" * 200, "/".join("a" * 17), "a/./b", "a:b", "a?b", "a*b",
    ],
)  # fmt: skip
def test_a_path_that_leads_outside_is_refused_before_any_blob_is_read(path: str) -> None:
    artifact = encode(a_release(files=(ReleaseFile(path, b"evil"),)))

    error, asked = refusal(artifact)

    assert any(issue.place == "files" for issue in error.issues)
    assert asked == []


@pytest.mark.case("PATH-03")
@pytest.mark.parametrize(
    "paths",
    [
        ("a.py", "a.py"), ("a.py", "A.py"), ("lib/a.py", "LIB/A.PY"), ("é.py", "e\u0301.py"), ("straße", "STRASSE"),
        ("a", "a/b"), ("a", "a/b/c"), ("A", "a/b"), ("tool.yaml", "tool.yaml/x"), ("tool.yaml", "TOOL.yaml"),
    ],
)  # fmt: skip
def test_conflicting_paths_are_refused(paths: tuple[str, ...]) -> None:
    error, asked = refusal(encode(a_release(files=tuple(ReleaseFile(path, b"") for path in paths))))

    assert any("cannot both be there" in issue.reason for issue in error.issues)
    assert asked == []


@pytest.mark.case("PATH-03")
@pytest.mark.parametrize("what", ["blob", "manifest", "index.json", "oci-layout", "blobs", "blobs/sha256"])
def test_a_symlink_in_a_folder_is_never_followed(what: str, tmp_path: Path) -> None:
    release = a_release()
    artifact = encode(release)
    layout = folder_with(tmp_path / "layout", artifact, LayoutEntry.of(release, artifact))
    assert layout.read([release.name]) == (CheckedRelease.of(release),)

    place = {"blob": f"blobs/sha256/{release.digest[7:]}", "manifest": f"blobs/sha256/{artifact.digest[7:]}"}
    linked = layout.folder / place.get(what, what)
    linked.rename(tmp_path / "elsewhere")
    linked.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ArtifactRefused):
        Layout(layout.folder).read([release.name])


@pytest.mark.case("PATH-03")
def test_a_pipe_folder_or_device_in_place_of_a_blob_is_refused_at_once(tmp_path: Path) -> None:
    release = a_release()
    artifact = encode(release)
    layout = folder_with(tmp_path / "layout", artifact, LayoutEntry.of(release, artifact))
    pipe, folder, device = (layout.folder / "blobs/sha256" / digest[7:] for digest in list(artifact.blobs)[:3])
    for path in (pipe, folder, device):
        path.unlink()
    os.mkfifo(pipe)
    folder.mkdir()
    device.symlink_to("/dev/zero")

    with pytest.raises(ArtifactRefused) as caught:
        layout.read([release.name])

    assert len(caught.value.issues) == 3


@pytest.mark.case("PATH-03")
@pytest.mark.parametrize("what", ["index.json", "blobs", "blobs/sha256", ".kiwi-new", "blobs/sha256/.kiwi-new"])
def test_writing_follows_no_symlink(what: str, tmp_path: Path, tree: Tree) -> None:
    first, second = a_release("first"), a_release("second")
    layout = Layout(tmp_path / "layout")
    layout.write([CheckedRelease.of(first)], ())
    outside = tmp_path / "outside"
    linked = layout.folder / what
    if linked.exists():
        linked.rename(outside)
    else:
        outside.write_bytes(SECRET)
    linked.symlink_to(outside)
    before = tree(outside) if outside.is_dir() else outside.read_bytes()

    try:
        Layout(layout.folder).write([CheckedRelease.of(second)], ())
    except KiwiError as error:
        assert isinstance(error, ArtifactRefused | StoreUnavailable)  # noqa: PT017 - some links are refused, some replaced

    assert (tree(outside) if outside.is_dir() else outside.read_bytes()) == before


@pytest.mark.case("PATH-08")
@pytest.mark.parametrize(
    "digest",
    [
        "sha256:../../x", f"sha256:{'../' * 21}x", f"sha256:{'A' * 64}", f"sha256:{'a' * 63}", f"sha256:{'a' * 65}",
        f"sha512:{'a' * 128}", f"md5:{'a' * 32}", "a" * 64, "", "sha256:", f"sha256:{'a' * 64}\n",
        f"sha256:{chr(0x661) * 64}",
    ],
)  # fmt: skip
def test_a_digest_that_is_a_path_is_refused(digest: str, tmp_path: Path) -> None:
    release = a_release()
    artifact = encode(release)
    for place in ("config", "layers"):
        document = document_of(artifact)
        descriptor = document["config"] if place == "config" else document["layers"][0]
        descriptor["digest"] = digest
        error, asked = refusal(replace(artifact, manifest=written(document)))
        assert error.issues[0].place.startswith(place)
        assert asked == []

    for entry in (
        replace(LayoutEntry.of(release, artifact), digest=digest),
        replace(LayoutEntry.of(a_release(executor=Pin("py", VersionName("kiwi", "py", "1.0.0"), digest)), artifact)),
    ):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        with pytest.raises(ArtifactRefused):
            folder_with(folder, artifact, entry).events()


@pytest.mark.case("PATH-09")
def test_an_undeclared_file_and_a_missing_declared_one_are_refused() -> None:
    release = a_release()
    extra = replace(release, files=(*release.files, ReleaseFile("evil.py", b"import os\n")))
    missing = replace(release, files=release.files[1:])
    changed = replace(release, files=(ReleaseFile("lib/a.py", b"a = 2\n"), *release.files[1:]))
    executable = replace(release, files=(replace(release.files[0], is_executable=True), *release.files[1:]))
    headless = replace(release, files=release.files[:-1])

    for spoilt in (extra, missing, changed, executable, headless):
        error, _ = refusal(encode(spoilt))
        assert {issue.place for issue in error.issues} <= {"files", "place"}


@pytest.mark.case("PATH-09")
def test_any_changed_byte_refuses_the_version(tmp_path: Path) -> None:
    release = a_release()
    layout = Layout(tmp_path / "layout")
    layout.write([CheckedRelease.of(release)], ())
    blobs = sorted((layout.folder / "blobs/sha256").iterdir())
    assert len(blobs) == 5

    for blob in blobs:
        good = blob.read_bytes()
        blob.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        with pytest.raises(ArtifactRefused):
            Layout(layout.folder).read([release.name])
        blob.write_bytes(good[:-1])
        with pytest.raises(ArtifactRefused):
            Layout(layout.folder).read([release.name])
        blob.write_bytes(good)

    assert Layout(layout.folder).read([release.name]) == (CheckedRelease.of(release),)


def test_an_index_that_contradicts_the_artifact_is_refused(tmp_path: Path) -> None:
    release = a_release()
    artifact = encode(release)
    entry = LayoutEntry.of(release, artifact)
    lies = [
        replace(entry, digest=f"sha256:{'a' * 64}"),
        replace(entry, annotations=replace(entry.annotations, name=VersionName("kiwi", "say", "1.0.0"))),
        replace(entry, annotations=replace(entry.annotations, name=VersionName("team", "say", "2.0.0"))),
        replace(entry, annotations=replace(entry.annotations, published_by="another publisher")),
    ]

    for number, lie in enumerate(lies):
        layout = folder_with(tmp_path / str(number), artifact, lie)
        with pytest.raises(ArtifactRefused):
            layout.read([lie.name])


def test_invalid_version_fields_are_refused() -> None:
    release = a_release()
    pin = Pin("python_runtime", VersionName("team", "evil", "1.0.0"), f"sha256:{'a' * 64}")
    spoilt = {
        "place": [replace(release, place=place) for place in ("tool.yaml", "etc/tool.yaml", "tools/../../tool.yaml")],
        "namespace": [replace(release, name=replace(release.name, namespace=word)) for word in ("", "..", "a/b", "A")],
        "tool_id": [replace(release, name=replace(release.name, tool_id=word)) for word in ("other", "..", "")],
        "version": [
            replace(release, name=replace(release.name, version=word))
            for word in (
                "1.0",
                "v1.0.0",
                "1.0.0+build",
                "1.0.1",
                f"1{chr(0x660)}.0.0",
                "9" * 5_000 + ".0.0",
                "None",
                "",
            )
        ],
        "executor": [a_release(executor=pin), replace(release, executor=replace(pin, ref="evil"))],
        "is_builtin": [replace(release, is_builtin=True)],
        "created_at": [replace(release, created_at=time) for time in ("now", "2026-02-30T00:00:00Z", "2026-01-28")],
        "changelog": [replace(release, changelog=text) for text in ("a\0b", "x" * 100_000)],
    }

    for place, cases in spoilt.items():
        for case in cases:
            error, _ = refusal(encode(case))
            assert any(issue.place.startswith(place) for issue in error.issues), place


@pytest.mark.case("BOMB-09")
@pytest.mark.parametrize("half", ["\ud800", "x\udfff"])
def test_a_lone_surrogate_is_refused_anywhere(half: str) -> None:
    pin = Pin("python_runtime", VersionName("kiwi", "python_runtime", "1.0.0"), f"sha256:{'a' * 64}")
    artifact = encode(replace(a_release(executor=pin), changelog="first", published_by="ana"))
    words = document_of(artifact)["annotations"]

    for word in words:
        spoilt = document_of(artifact)
        spoilt["annotations"][word] = half
        assert refusal(replace(artifact, manifest=written(spoilt)))
    spoilt = document_of(artifact)
    spoilt["layers"][0]["annotations"]["org.opencontainers.image.title"] = half
    assert refusal(replace(artifact, manifest=written(spoilt)))


def test_impossible_statuses_are_refused() -> None:
    artifact = encode(a_release())
    for marks in (
        {"yank": StatusNote("yesterday")},
        {"yank": StatusNote("")},
        {"visibility": StatusNote("", "everybody")},
    ):
        with pytest.raises(ArtifactRefused):
            decode(artifact.manifest, lambda digest, _: artifact.blobs[digest], status=marks)  # type: ignore[arg-type] # the keys are operations of the log


@pytest.mark.case("BOMB-08")
def test_more_files_or_bytes_than_the_limits_are_refused_unread() -> None:
    artifact = encode(a_release())
    many, large = document_of(artifact), document_of(artifact)
    many["layers"] = [deepcopy(many["layers"][0]) for _ in range(MAX_FILES + 1)]
    for number, layer in enumerate(many["layers"]):
        layer["annotations"]["org.opencontainers.image.title"] = f"{number}.py"
    large["layers"][0]["size"] = MAX_BYTES

    for spoilt in (many, large):
        error, asked = refusal(replace(artifact, manifest=written(spoilt)))
        assert "the limit is" in error.message
        assert asked == []


@pytest.mark.case("BOMB-08")
@pytest.mark.parametrize("size", [-1, 2**63, 1.5, True, "12", None])
def test_an_invalid_size_is_refused_unread(size: object) -> None:
    artifact = encode(a_release())
    spoilt = document_of(artifact)
    spoilt["config"]["size"] = spoilt["layers"][0]["size"] = size

    error, asked = refusal(replace(artifact, manifest=written(spoilt)))

    assert {"config", "layers[0]"} <= {issue.place for issue in error.issues}
    assert asked == []


@pytest.mark.case("BOMB-08")
def test_a_blob_larger_than_declared_is_not_read_to_its_end(tmp_path: Path) -> None:
    release = a_release()
    artifact = encode(release)
    layout = folder_with(tmp_path / "layout", artifact, LayoutEntry.of(release, artifact))
    with (layout.folder / "blobs/sha256" / release.digest[7:]).open("ab") as file:
        file.truncate(1 << 40)

    with pytest.raises(ArtifactRefused, match="larger than"):
        layout.read([release.name])


@pytest.mark.case("BOMB-02", "BOMB-03", "BOMB-05", "BOMB-09")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b" " * 5_000_000, "larger than"),
        (b"[" + b"0," * 1_900_000 + b"0]", "values"),
        (b'{"schemaVersion": 2, "schemaVersion": 2}', "twice"),
        (b'{"schemaVersion": NaN}', "NaN"),
        (b'{"schemaVersion": ' + b"9" * 5_000 + b"}", "digits"),
        (b'\xff\xfe{"a": 1}', "UTF-8"),
        (b'{"a": 1}'.decode().encode("utf-16"), "UTF-8"),
        (b"", "not JSON"),
        (b"[]", "mediaType"),
        (b'"\\ud800"', "mediaType"),
    ],
)
def test_a_manifest_bomb_is_refused_quickly(text: bytes, reason: str) -> None:
    start = time.process_time()
    error, asked = refusal(Artifact(text, {}))

    assert reason in error.message
    assert asked == []
    assert time.process_time() - start < 5


@pytest.mark.case("BOMB-03")
@pytest.mark.parametrize("word", ["/" * 2_000_000, "a/" * 1_000_000, "1" * 2_000_000, "_" * 2_000_000])
def test_endless_values_are_refused_quickly_with_a_short_message(word: str) -> None:
    artifact = encode(a_release())
    start = time.process_time()

    for key in ("vnd.kiwi.namespace", "vnd.kiwi.tool_id", "org.opencontainers.image.version", "vnd.kiwi.place"):
        spoilt = document_of(artifact)
        spoilt["annotations"][key] = word
        error, _ = refusal(replace(artifact, manifest=written(spoilt)))
        assert len(json.dumps(error.to_response())) < 20_000
    spoilt = document_of(artifact)
    spoilt["layers"][0]["annotations"]["org.opencontainers.image.title"] = word
    error, _ = refusal(replace(artifact, manifest=written(spoilt)))

    assert len(json.dumps(error.to_response())) < 20_000
    assert time.process_time() - start < 5


@pytest.mark.case("BOMB-03")
def test_an_index_bomb_is_refused_quickly(tmp_path: Path) -> None:
    layout = Layout(tmp_path / "layout")
    layout.write([], ())
    index = layout.folder / "index.json"
    start = time.process_time()

    for text in (b"[" * 1_000_000, b'{"manifests": [' + b"{}," * 3_000_000 + b"{}]}", b"[]", b"\0", b""):
        index.write_bytes(text)
        with pytest.raises(ArtifactRefused):
            layout.events()
    with index.open("r+b") as file:
        file.truncate(MAX_INDEX + 1)
    with pytest.raises(ArtifactRefused, match="larger than"):
        layout.events()

    assert time.process_time() - start < 10


def linked(count: int) -> list[CheckedRelease]:
    made = [CheckedRelease.of(a_release("link0"))]
    for number in range(1, count):
        below = made[-1]
        link = a_release(f"link{number}", executor=Pin(below.name.tool_id, below.name, below.digest))
        made.append(CheckedRelease.of(link))
    return made


def test_a_chain_of_a_thousand_links_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    chain = linked(1_000)
    layout = Layout(tmp_path / "layout")

    for versions in (chain, chain[::-1]):
        with pytest.raises(ArtifactRefused, match="links; the limit is 16"):
            order(versions)
    with pytest.raises(ArtifactRefused):
        layout.write(chain, ())
    assert not layout.folder.exists()

    layout.write(chain[:16], ())
    before = (layout.folder / "index.json").read_bytes()
    with pytest.raises(ArtifactRefused, match="17 links"):
        layout.write(chain[16:17], ())
    assert (layout.folder / "index.json").read_bytes() == before


def test_a_cycle_of_executors_is_refused(tmp_path: Path) -> None:
    names = [VersionName("team", word, "1.0.0") for word in ("one", "two", "three")]
    digest = f"sha256:{'a' * 64}"
    cycle = [
        a_release(name.tool_id, executor=Pin(below.tool_id, below, digest))
        for name, below in zip(names, [*names[1:], names[0]], strict=True)
    ]
    alone = a_release("self", executor=Pin("self", VersionName("team", "self", "1.0.0"), digest))

    for versions in (cycle, [alone]):
        with pytest.raises(ArtifactRefused, match="form a cycle"):
            order(versions)
        with pytest.raises(ArtifactRefused):
            Layout(tmp_path / "layout").write([*map(CheckedRelease.of, versions)], ())
    assert not (tmp_path / "layout").exists()


def test_an_index_with_dangling_or_wrong_pins_is_refused(tmp_path: Path) -> None:
    below = a_release("below")
    nowhere = a_release(executor=Pin("below", below.name, below.digest))
    other = a_release(executor=Pin("below", below.name, f"sha256:{'a' * 64}"))

    for number, (versions, reason) in enumerate((([nowhere], "is not there"), ([below, other], "has another"))):
        rows = [LayoutEntry.of(release, encode(release)).to_json() for release in versions]
        layout = folder_with(tmp_path / str(number), encode(below), LayoutEntry.of(below, encode(below)))
        (layout.folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": rows}))
        with pytest.raises(ArtifactRefused, match=reason):
            layout.events()


def test_an_invalid_release_is_never_written_to_a_folder(tmp_path: Path, tree: Tree) -> None:
    layout = Layout(tmp_path / "layout")
    good, bad = a_release("good"), a_release("bad", files=(ReleaseFile("../x", b"evil"),))

    with pytest.raises(ArtifactRefused, match="safe on every system"):
        CheckedRelease.of(bad)
    with pytest.raises(ArtifactRefused, match="safe on every system"):
        replace(CheckedRelease.of(good), files=bad.files)
    for unchecked in (good, bad):
        with pytest.raises(TypeError, match="was not checked"):
            layout.write([unchecked], ())  # type: ignore[list-item]  # which no type checker lets pass
    assert not layout.folder.exists()

    layout.write([CheckedRelease.of(good)], ())
    before = tree(layout.folder)
    with pytest.raises(TypeError):
        layout.write([CheckedRelease.of(a_release("more")), bad], ())  # type: ignore[list-item]  # as above
    assert tree(layout.folder) == before


def test_a_folder_with_other_content_is_never_written(tmp_path: Path, tree: Tree) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    (folder / "index.json").write_text("{}")
    before = tree(folder)

    with pytest.raises(Conflict, match="it holds other things"):
        Layout(folder).write([CheckedRelease.of(a_release())], ())
    with pytest.raises(Conflict):
        Layout(folder / "index.json").write([CheckedRelease.of(a_release())], ())
    assert tree(folder) == before


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
GOOD = encode(a_release())
INDEX: Document = {
    "schemaVersion": 2,
    "manifests": [
        replace(LayoutEntry.of(a_release(), GOOD), status={"yank": StatusNote("2026-01-28T12:00:00Z", "bad")}).to_json()
    ],
}


def _places(value: Json) -> list[list[str | int]]:
    match value:
        case dict():
            return [[], *([key, *rest] for key, inner in value.items() for rest in _places(inner))]
        case list():
            return [[], *([index, *rest] for index, inner in enumerate(value) for rest in _places(inner))]
        case _:
            return [[]]


def _replaced(value: Any, place: list[str | int], new: Json) -> Any:
    if not place:
        return new
    copy = value.copy()
    copy[place[0]] = _replaced(copy[place[0]], place[1:], new)
    return copy


@given(data=st.data(), new=json_values)
@settings(max_examples=50, deadline=None)
def test_any_manifest_is_valid_or_refused(data: st.DataObject, new: Json) -> None:
    document = document_of(encode(a_release()))
    spoilt = _replaced(document, data.draw(st.sampled_from(_places(document))), new)

    try:
        release = decode(json.dumps(spoilt).encode(), lambda digest, _: GOOD.blobs[digest])
    except ArtifactRefused:
        return
    assert list(release_issues(release)) == []


@given(data=st.data(), new=json_values)
@settings(max_examples=40, deadline=None)
def test_any_index_gives_sound_versions_or_is_refused(data: st.DataObject, new: Json) -> None:
    spoilt = _replaced(INDEX, data.draw(st.sampled_from(_places(INDEX)[1:])), new)
    blobs = {**GOOD.blobs, GOOD.digest: GOOD.manifest}

    try:
        releases = [
            read_release(entry, lambda digest, _: blobs[digest]) for entry in read_entries(written(spoilt), "it")
        ]
    except ArtifactRefused:
        return
    assert [list(release_issues(release)) for release in releases] == [[] for _ in releases]
