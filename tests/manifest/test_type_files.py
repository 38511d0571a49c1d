"""Files in `.ai/types/` that are not type specs: each is ignored and named, and none blocks anything."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.manifest.document import MAX_BYTES
from kiwi_mcp.manifest.type_specs import load_type_specs

ODD: Mapping[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a link to an endless device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("lost.yaml"),
    "a link to a file": lambda path: path.symlink_to("/etc/passwd"),
    "a folder": Path.mkdir,
    "an oversized file": lambda path: path.write_bytes(b"# " + b"x" * MAX_BYTES),
    "a broken file": lambda path: path.write_text("type: [script\n"),
    "bytes that are no text": lambda path: path.write_bytes(b"type: \xff\n"),
    "a list": lambda path: path.write_text("- type\n"),
    "a sheet of a primitive": lambda path: path.write_text(
        "type: primitive\ndriver: ''\nneeds_executor: none\nfiles: none\nconfig: {additionalProperties: false}\n"
    ),
}

NOTE = """type: note
driver: read
needs_executor: none
files: optional
folder: {folder}
format: {{suffix: .md, reader: front_matter}}
config: {{additionalProperties: false}}
"""


@pytest.fixture
def types(project: Path) -> Path:
    folder = project / ".ai" / "types"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("what", ODD)
def test_an_invalid_type_file_is_ignored_with_an_issue(what: str, types: Path) -> None:
    ODD[what](types / "odd.yaml")

    sheets = load_type_specs(types)

    assert sheets.issues
    assert sheets.by_type == load_type_specs().by_type


def test_a_type_file_that_is_written_twice_in_one_clock_tick_is_read_twice(types: Path) -> None:
    path = types / "note.yaml"
    for folder in ("notes", "memos"):
        path.write_text(NOTE.format(folder=folder))
        os.utime(path, ns=(0, 0))
        assert load_type_specs(types).by_type["note"].folder == folder


@pytest.mark.usefixtures("sandbox")
async def test_doctor_names_every_invalid_type_file_and_the_project_works(types: Path, project: Path) -> None:
    for number, make in enumerate(ODD.values()):
        make(types / f"odd_{number}.yaml")

    async def story() -> list[str]:
        kernel = Kernel(project)
        found = await kernel.call("search", {"query": "runtime", "source": "all"})
        assert found.content["total"]
        response = as_list((await kernel.call("doctor", {})).content["checks"])
        return [str(as_object(check)["check"]) for check in response if as_object(check)["status"] == "problem"]

    problems = await story()

    assert [
        number for number in range(len(ODD)) if not any(f"odd_{number}.yaml" in response for response in problems)
    ] == []
