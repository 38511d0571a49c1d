"""Files in `.ai/types/` that are no sheets: each is left out and named, and none of them holds anything up."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.manifest.document import MAX_BYTES
from kiwi_mcp.manifest.sheets import load_sheets

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


@pytest.fixture
def types(project: Path) -> Path:
    folder = project / ".ai" / "types"
    folder.mkdir()
    return folder


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ODD)
def test_an_odd_file_is_left_out_with_an_issue(what: str, types: Path) -> None:
    ODD[what](types / "odd.yaml")

    sheets = load_sheets(types)

    assert sheets.issues
    assert sheets.by_type == load_sheets().by_type


@pytest.mark.timeout(30)
def test_doctor_names_every_odd_file_and_the_project_goes_on(types: Path, project: Path) -> None:
    for number, make in enumerate(ODD.values()):
        make(types / f"odd_{number}.yaml")

    async def story() -> list[str]:
        kernel = Kernel(project)
        found = await kernel.call("search", {"query": "runtime", "source": "all"})
        assert found.content["total"]
        told = as_list((await kernel.call("doctor", {})).content["checks"])
        return [str(as_object(check)["check"]) for check in told if as_object(check)["status"] == "problem"]

    problems = asyncio.run(story())

    assert [number for number in range(len(ODD)) if not any(f"odd_{number}.yaml" in told for told in problems)] == []
