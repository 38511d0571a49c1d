"""Artifacts: a version as OCI documents and back, byte for byte, with all issues in one refusal."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.items import ToolFile
from kiwi_mcp.domain.json import JsonObject, canonical
from kiwi_mcp.domain.names import is_safe_path
from kiwi_mcp.domain.registry import Pin, Release, ReleaseFile, StatusNote, VersionName, Visibility
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.store.registry.release_check import MAX_LINKS, CheckedRelease, closures, order
from kiwi_mcp.store.remote.layout import Artifact, LayoutEntry, decode, encode

AT = "2026-01-28T12:00:00.000Z"
MANIFEST = b"tool_id: say\r\nversion: 1.0.0\n"
RUNTIME = VersionName("kiwi", "python_runtime", "1.2.0")
PIN = Pin("python_runtime@^1.2", RUNTIME, f"sha256:{'a' * 64}")


def a_release(
    tool_id: str = "say",
    version: str = "1.0.0",
    *,
    namespace: str = "team",
    executor: Pin | None = PIN,
    files: tuple[ReleaseFile, ...] = (ReleaseFile("main.py", b"print('hi')\n"),),
) -> CheckedRelease:
    statement = statement_of(
        tool_id=tool_id,
        version=version,
        executor=executor.ref if executor else None,
        manifest_body=MANIFEST,
        files=[ToolFile(file.path, file.sha256, len(file.data), file.is_executable) for file in files],
    )
    whole = sorted((*files, ReleaseFile("tool.yaml", MANIFEST)), key=lambda file: file.path)
    name = VersionName(namespace, tool_id, version)
    return CheckedRelease(name, f"tools/{tool_id}/tool.yaml", statement, {}, tuple(whole), executor, created_at=AT)


def decoded(artifact: Artifact, release: Release) -> Release:
    return decode(
        artifact.manifest, lambda digest, _: artifact.blobs[digest], status=LayoutEntry.of(release, artifact).status
    )


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
paths = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12).filter(is_safe_path)
contents = st.dictionaries(
    # Names that stay apart however a system folds them, and away from the manifest's own.
    st.builds("f{}/{}".format, st.integers(0, 9), paths.map(str.casefold).filter(is_safe_path)),
    st.tuples(st.binary(max_size=60), st.booleans()),
    max_size=4,
).filter(lambda files: len({path.split("/")[0] for path in files}) == len(files))


@st.composite
def releases(draw: st.DrawFn) -> Release:
    files = tuple(ReleaseFile(path, data, is_exec) for path, (data, is_exec) in draw(contents).items())
    executor = draw(st.sampled_from([None, PIN, Pin("python_runtime", RUNTIME, f"sha256:{'0' * 64}")]))
    marks = st.none() | st.builds(StatusNote, st.just(AT), texts)
    visibilities: st.SearchStrategy[Visibility] = st.sampled_from(["public", "unlisted", "private"])
    return replace(
        a_release(files=files, executor=executor),
        changelog=draw(texts),
        visibility=draw(visibilities),
        published_by=draw(texts),
        created_at=draw(st.sampled_from(["", AT])),
        yanked=draw(marks),
        deprecated=draw(marks),
        is_official=draw(st.booleans()),
    )


@given(release=releases())
@settings(max_examples=30, deadline=None)
def test_a_release_is_restored_from_its_artifact(release: Release) -> None:
    artifact = encode(release)

    assert decoded(artifact, release) == release
    assert encode(decoded(artifact, release)) == artifact


def test_the_order_of_files_does_not_change_an_artifact() -> None:
    release = a_release(files=(ReleaseFile("a.py", b"a"), ReleaseFile("z.py", b"z", is_executable=True)))

    assert encode(replace(release, files=release.files[::-1])) == encode(release)


def test_a_later_status_does_not_change_the_artifact() -> None:
    release = a_release()
    later = replace(release, yanked=StatusNote(AT, "It deletes mail."), deprecated=StatusNote(AT), visibility="private")

    assert encode(later) == encode(release)
    assert decoded(encode(release), later) == later


def test_the_config_is_the_statement_and_its_digest_that_of_the_item() -> None:
    release = a_release()
    document = json.loads(encode(release).manifest)

    assert document["config"]["digest"] == release.digest
    assert encode(release).blobs[release.digest] == release.statement
    assert encode(release).manifest == canonical(document)


DESCRIPTOR: JsonObject = {
    "type": "object",
    "required": ["mediaType", "digest", "size"],
    "properties": {
        "mediaType": {
            "type": "string",
            "pattern": "^[A-Za-z0-9][A-Za-z0-9.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9.+-]{0,126}$",
        },
        "digest": {"type": "string", "pattern": "^[a-z0-9]+:[a-f0-9]{64}$"},
        "size": {"type": "integer", "minimum": 0},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}
IMAGE_MANIFEST: JsonObject = {
    "type": "object",
    "required": ["schemaVersion", "config", "layers"],
    "properties": {
        "schemaVersion": {"const": 2},
        "mediaType": {"const": "application/vnd.oci.image.manifest.v1+json"},
        "artifactType": {"type": "string"},
        "config": DESCRIPTOR,
        "layers": {"type": "array", "minItems": 1, "items": DESCRIPTOR},
        "annotations": {"type": "object", "additionalProperties": {"type": "string"}},
    },
}


@given(release=releases())
@settings(max_examples=20, deadline=None)
def test_every_artifact_is_an_oci_image_manifest(release: Release) -> None:
    artifact = encode(release)
    document = json.loads(artifact.manifest)

    assert faults(IMAGE_MANIFEST, document) == []
    for descriptor in (document["config"], *document["layers"]):
        blob = artifact.blobs[descriptor["digest"]]
        assert (f"sha256:{sha256(blob).hexdigest()}", len(blob)) == (descriptor["digest"], descriptor["size"])


def test_unknown_annotations_are_ignored() -> None:
    release = a_release()
    artifact = encode(release)
    document = json.loads(artifact.manifest)
    document["annotations"]["com.example.more"] = "anything"

    assert decoded(replace(artifact, manifest=canonical(document)), release) == release


def chain_of(count: int) -> list[CheckedRelease]:
    made = [a_release("link0", executor=None)]
    for number in range(1, count):
        below = made[-1]
        made.append(a_release(f"link{number}", executor=Pin(below.name.tool_id, below.name, below.digest)))
    return made


@given(places=st.permutations(range(MAX_LINKS)))
@settings(max_examples=30, deadline=None)
def test_executors_come_before_the_items_that_use_them(places: list[int]) -> None:
    chain = chain_of(MAX_LINKS)

    assert list(order([chain[place] for place in places])) == chain
    assert len(set(closures(chain, what="The chain").values())) == MAX_LINKS


def test_a_version_with_an_executor_elsewhere_can_be_ordered() -> None:
    *_, top = chain_of(2)
    assert order([top]) == (top,)
    with pytest.raises(ArtifactRefused, match="which is not there"):
        closures([top], what="A folder")


def test_built_in_executors_count_by_name_only() -> None:
    pin = Pin(RUNTIME.tool_id, RUNTIME, f"sha256:{'1' * 64}")
    other = replace(pin, name=replace(RUNTIME, version="9.9.9"), digest=f"sha256:{'2' * 64}")

    found = [closures([a_release(executor=one)], what="A folder") for one in (pin, other)]
    assert found[0] == found[1]
