"""Temporary names: nobody can be there first, because no name is the same twice and nothing that is there is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.registry import Release, ReleaseFile, VersionName
from kiwi_mcp.manifest.digest import statement_of
from kiwi_mcp.primitives.key_file import file_key
from kiwi_mcp.store.folder import NEW
from kiwi_mcp.store.layout import Layout

STORY = """
import asyncio, json, os, sys
from pathlib import Path

made = []
def hook(event, words):
    if event == "open" and isinstance(words[2], int) and words[2] & os.O_CREAT:
        made.append(["file", os.fspath(words[0]) if not isinstance(words[0], int) else "", 0o600])
    elif event == "os.mkdir":
        made.append(["folder", os.fspath(words[0]), words[1]])
sys.addaudithook(hook)

from kiwi_mcp.kernel import Kernel

async def story(project, remote):
    kernel = Kernel(project)
    try:
        for verb, request in [
            ("execute", {"item_id": "page"}),
            ("execute", {"item_id": "page", "checkpoint": True}),
            ("execute", {"action": "publish", "item_id": "page"}),
            ("registry", {"action": "push", "remote": f"sqlite://{remote}"}),
            ("registry", {"action": "pull", "remote": f"sqlite://{remote}"}),
            ("secrets", {"action": "set", "name": "KEY", "value": "s3cret-value-7f3a"}),
        ]:
            await kernel.call(verb, request)
    finally:
        await kernel.aclose()

asyncio.run(story(Path(sys.argv[1]), sys.argv[2]))
shared = os.environ["TMPDIR"]
print(json.dumps([one for one in made if str(one[1]).startswith(shared)]))
"""
PAGE = "---\nid: page\ntitle: Page\nversion: 1.0.0\nentry_type: reference\n---\n\n# Page\n\nAll of it.\n"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder for temporary files that everybody may write to."""
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o777)
    folder.chmod(0o1777)
    return folder


def a_page() -> Release:
    data = PAGE.encode()
    statement = statement_of(tool_id="page", version="1.0.0", executor=None, manifest_body=data, files=[])
    files = (ReleaseFile("page.md", data),)
    name = VersionName("public", "page", "1.0.0")
    return check_release(Release(name, "knowledge/page.md", statement, {}, files))


@pytest.mark.case("RACE-05")
def test_no_name_in_the_shared_folder_is_used_twice_and_folders_there_are_ones_own(
    project: Path, shared: Path, tmp_path: Path
) -> None:
    (project / ".ai" / "knowledge").mkdir()
    (project / ".ai" / "knowledge" / "page.md").write_text(PAGE)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True, timeout=30)

    def names(number: int) -> list[tuple[str, str, int]]:
        done = subprocess.run(
            [sys.executable, "-c", STORY, str(project), str(tmp_path / f"remote-{number}.db")],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=os.environ | {"TMPDIR": str(shared), "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])},
        )
        assert done.returncode == 0, done.stderr
        return [(kind, name, mode) for kind, name, mode in json.loads(done.stdout)]

    first, second = names(1), names(2)
    assert first, "the story makes nothing temporary, and shows nothing"
    top = {Path(name).relative_to(shared).parts[0] for _, name, _ in first}
    assert top.isdisjoint({Path(name).relative_to(shared).parts[0] for _, name, _ in second})
    assert {mode for kind, name, mode in first if kind == "folder" and Path(name).parent == shared} == {0o700}
    assert [*shared.iterdir()] == []


@pytest.mark.case("RACE-05")
def test_a_link_under_the_name_of_a_draft_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    folder = tmp_path / "layout"
    layout = Layout(folder)
    layout.write([a_page()])
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        (place / NEW).symlink_to(victim)
    (folder / "index.json").unlink()

    layout = Layout(folder)
    layout.write([a_page()])

    assert victim.read_text() == "untouched"


@pytest.mark.case("RACE-05")
def test_a_key_is_never_made_at_the_end_of_a_link(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    target = tmp_path / "elsewhere"
    (tmp_path / "state" / "key").symlink_to(target)

    with pytest.raises(Exception, match="key"):
        file_key(tmp_path / "state" / "key")()

    assert not target.exists()
