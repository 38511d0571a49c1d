"""Releases: built from an item of any placement, and verified when they come from outside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.item_reader import load_bytes
from kiwi_mcp.catalog.registry_source import lay_out
from kiwi_mcp.catalog.release import check_release, release_of
from kiwi_mcp.domain.errors import ArtifactRefused
from kiwi_mcp.domain.registry import Pin, Release, ReleaseFile, VersionName
from kiwi_mcp.store.registry.release_check import CheckedRelease

Put = Callable[..., Path]

FOLDER = (
    'tool_id: greet\ntool_type: script\nversion: "1.0.0"\nexecutor: python_runtime\ndescription: Greets\n'
    "config: {entrypoint: main.py}\n"
)
EMBEDDED = (
    '"""\ntool_id: greet\ntool_type: script\nversion: "1.0.0"\nexecutor: python_runtime\ndescription: Greets\n'
    'config: {lib_imports: [loud]}\n"""\n\n\ndef main(word: str):\n    return word\n'
)
LEGACY = '"""Greets"""\n__version__ = "1.0.0"\n__tool_type__ = "python"\n__executor_id__ = "python_runtime"\n'
SINGLE = (
    'tool_id: greet\ntool_type: api\nversion: "1.0.0"\nexecutor: http_client\ndescription: Asks\n'
    "config: {method: GET, url_template: 'https://example.com/'}\n"
)
KNOWLEDGE = "---\nid: greet\ntitle: Greetings\nversion: 1.0.0\nentry_type: reference\n---\nHello.\n"
SHAPES = {
    "folder": {
        "tools/a/greet/tool.yaml": FOLDER,
        "tools/a/greet/main.py": "def main(word: str):\n    return 1\n",
        "tools/a/greet/deep/data.txt": "data",
    },
    "json": {
        "tools/greet/tool.json": '{"tool_id": "greet", "tool_type": "script", "version": "1.0.0", '
        '"executor": "python_runtime", "description": "x", "config": {"entrypoint": "main.py"}}',
        "tools/greet/main.py": "def main():\n    return 1\n",
    },
    "code": {"tools/b/greet.py": EMBEDDED, "tools/lib/loud.py": "def loud(word):\n    return word\n"},
    "legacy": {"scripts/c/greet.py": LEGACY},
    "single": {"tools/greet.yaml": SINGLE.replace("\n", "\r\n")},
    "knowledge": {"knowledge/d/greet.md": KNOWLEDGE},
}


@pytest.fixture
def make(put: Put, catalog: Catalog) -> Callable[[str], Release]:
    """Make a release of an item of a shape, as publishing does."""

    def release(shape: str) -> Release:
        for path, text in SHAPES[shape].items():
            put(path).write_bytes(text.encode())
        tool = catalog.find("greet")
        ref = tool.manifest.executor
        below = catalog.resolve("greet").links[1] if ref else None
        pin = Pin(ref, VersionName("kiwi", below.id, "1.0.0"), f"sha256:{below.digest}") if ref and below else None
        made = release_of(
            tool,
            {file.path: load_bytes(tool, file) for file in tool.files},
            namespace="acme",
            place=tool.origin.place,
            executor=pin,
        )
        assert made.digest == f"sha256:{tool.digest}"
        return made

    return release


@pytest.mark.req("K-RG-03")
@pytest.mark.parametrize("shape", SHAPES)
def test_an_item_of_any_placement_matches_its_release_and_is_restored_from_it(
    make: Callable[[str], Release], shape: str, tmp_path: Path
) -> None:
    release = make(shape)
    bare = replace(release, manifest={})

    assert check_release(bare) == CheckedRelease.of(release)
    lay_out(release, tmp_path / "out")
    found = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    laid = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in found}
    assert laid == {path: text.encode() for path, text in SHAPES[shape].items()}


@pytest.mark.case("PATH-09", "SIG-01")
@pytest.mark.parametrize("shape", ["folder", "code", "single"])
def test_a_release_that_contradicts_its_files_is_refused(make: Callable[[str], Release], shape: str) -> None:
    release = make(shape)
    first, *others = release.files
    pin = release.executor
    assert pin
    wrong = {
        "tool_id": replace(release, name=replace(release.name, tool_id="other")),
        "version": replace(release, name=replace(release.name, version="1.0.1")),
        "executor": replace(release, executor=replace(pin, ref="bash_runtime")),
        "executor (none)": replace(release, executor=None),
        "digest": replace(release, files=(replace(first, data=first.data + b"\n"), *others)),
        "digest (more)": replace(release, files=(*release.files, ReleaseFile("more.txt", b"x"))),
        "digest (statement)": replace(release, statement=release.statement + b" "),
        "place": replace(release, place="tools/elsewhere.yaml"),
        "place (none)": replace(
            release, files=tuple(one for one in release.files if one.path != release.manifest_path)
        ),
    }
    for word, changed in wrong.items():
        with pytest.raises(ArtifactRefused) as refused:
            check_release(changed)
        assert refused.value.issues[0].place in {word.partition(" ")[0], "", "config.entrypoint"}, word
        assert refused.value.issues[0].fix


@pytest.mark.case("SIG-06")
def test_swapped_added_and_newly_executable_files_are_detected(make: Callable[[str], Release]) -> None:
    release = make("folder")
    by_path = {file.path: file for file in release.files}
    main, data = by_path["main.py"], by_path["deep/data.txt"]
    others = tuple(file for file in release.files if file not in {main, data})
    for changed in (
        (replace(main, data=data.data), replace(data, data=main.data)),
        (main, data, ReleaseFile("more.py", b"")),
        (replace(main, is_executable=True), data),
        (main,),
    ):
        with pytest.raises(ArtifactRefused):
            check_release(replace(release, files=(*others, *changed)))


@pytest.mark.case("SIG-01")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_other_changed_byte_is_detected(make: Callable[[str], Release], data: st.DataObject) -> None:
    release = make("folder")
    place = data.draw(st.integers(0, len(release.files) - 1))
    file = release.files[place]
    at, byte = data.draw(st.integers(0, len(file.data) - 1)), data.draw(st.integers(0, 255))
    changed = file.data[:at] + bytes([byte]) + file.data[at + 1 :]
    if changed == file.data:
        return
    files = (*release.files[:place], replace(file, data=changed), *release.files[place + 1 :])
    with pytest.raises(ArtifactRefused):
        check_release(replace(release, files=files))


def test_a_signature_line_is_preserved_and_not_part_of_the_digest(make: Callable[[str], Release]) -> None:
    release = make("single")
    (file,) = release.files
    line = b"# kiwi-mcp:validated:2026-01-01T00:00:00Z:" + b"0" * 64 + b"\r\n"
    signed = replace(release, files=(replace(file, data=line + file.data),))

    assert check_release(signed).files[0].data.startswith(line)
    assert check_release(signed).digest == release.digest


def test_a_manifest_file_is_not_executable_and_a_program_is(
    make: Callable[[str], Release], put: Put, catalog: Catalog
) -> None:
    make("folder")
    put("tools/a/greet/tool.yaml", FOLDER).chmod(0o755)
    put("tools/a/greet/main.py", "def main():\n    return 1\n").chmod(0o755)
    tool = catalog.find("greet")
    data = {file.path: load_bytes(tool, file) for file in tool.files}
    made = release_of(tool, data, namespace="acme", place=tool.origin.place, executor=None)

    assert {file.path: file.is_executable for file in made.files} == {
        "deep/data.txt": False,
        "main.py": True,
        "tool.yaml": False,
    }
