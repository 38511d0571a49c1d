"""A project with symlinks: outputs are written and pruned only in its own folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import as_list
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.outputs import Retention, keep

NOW = datetime(2026, 1, 28, 12, tzinfo=UTC)
PLACES = ("outputs", "outputs/tools", "outputs/tools/say")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder elsewhere, full of files that look like old outputs, under every name that a run would look for."""
    folder = tmp_path / "outside"
    for place in (folder, folder / "say", folder / "tools" / "say"):
        place.mkdir(parents=True, exist_ok=True)
        for number in range(60):
            (place / f"output_20200101_0000{number:02}.json").write_text("{}")
    return folder


def link(project: Path, place: str, target: Path) -> None:
    path = project / ".ai" / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target, target_is_directory=True)


def names(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("place", PLACES)
def test_a_symlinked_folder_is_neither_written_nor_pruned(place: str, project: Path, outside: Path) -> None:
    link(project, place, outside)
    before = names(outside)

    with pytest.raises(OSError, match="symbolic link"):
        keep(project / ".ai", "say", {"result": 1}, now=NOW, retention=Retention(1))

    assert names(outside) == before


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("place", PLACES)
async def test_a_run_without_a_stored_output_still_gives_its_result(place: str, project: Path, outside: Path) -> None:
    link(project, place, outside)
    before = names(outside)
    tool = project / ".ai" / "tools" / "say"
    tool.mkdir(parents=True)
    (tool / "tool.yaml").write_text(
        "tool_id: say\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\nconfig: {entrypoint: main.sh}\n"
    )
    (tool / "main.sh").write_text("echo hello\n")

    response = (await Kernel(project).call("execute", {"item_id": "say"})).content

    assert (response["status"], response["result"], response["output_path"]) == ("success", "hello", None)
    assert ["could not be kept" in str(warning) for warning in as_list(response["warnings"])] == [True]
    assert names(outside) == before


@pytest.mark.case("PATH-07")
def test_an_output_name_that_is_a_symlink_is_not_followed(project: Path, tmp_path: Path) -> None:
    folder = project / ".ai" / "outputs" / "tools" / "say"
    folder.mkdir(parents=True)
    victim = tmp_path / "victim"
    (folder / NOW.strftime("output_%Y%m%d_%H%M%S.json")).symlink_to(victim)

    kept = keep(project / ".ai", "say", {"result": 1}, now=NOW, retention=Retention())

    assert kept.handle == "say/output_20260128_120000_2"
    assert not victim.exists()
