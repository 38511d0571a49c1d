"""Temporary names: nothing is created where others can write, and no existing file is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.catalog.release import check_release
from kiwi_mcp.domain.registry import ReleaseFile, VersionName
from kiwi_mcp.manifest.signatures import statement_of
from kiwi_mcp.primitives.secrets.key_storage import file_key
from kiwi_mcp.store.folder import NEW
from kiwi_mcp.store.registry.release_check import CheckedRelease
from kiwi_mcp.store.remote.layout import Layout

STORY = """
import asyncio, json, os, sys, tempfile
from pathlib import Path

tempfile.gettempdir()  # which tries the folder out
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
            ("registry", {"action": "push", "remote": remote}),
            ("registry", {"action": "pull", "remote": remote}),
            ("secrets", {"action": "set", "name": "KEY", "value": "s3cret-value-7f3a"}),
        ]:
            await kernel.call(verb, request)
    finally:
        await kernel.aclose()

tempfile.TemporaryDirectory(prefix="seen-").cleanup()  # it shows that the hook sees what is made
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


def a_page() -> CheckedRelease:
    data = PAGE.encode()
    statement = statement_of(tool_id="page", version="1.0.0", executor=None, manifest_body=data, files=[])
    files = (ReleaseFile("page.md", data),)
    name = VersionName("public", "page", "1.0.0")
    return check_release(CheckedRelease(name, "knowledge/page.md", statement, {}, files))


@pytest.mark.usefixtures("processes")
@pytest.mark.case("RACE-05")
def test_nothing_is_created_in_the_shared_temporary_folder(project: Path, shared: Path, tmp_path: Path) -> None:
    (project / ".ai" / "knowledge").mkdir()
    (project / ".ai" / "knowledge" / "page.md").write_text(PAGE)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True, timeout=120)

    done = subprocess.run(
        [sys.executable, "-c", STORY, str(project), str(tmp_path / "remote")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"TMPDIR": str(shared), "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    (control,) = json.loads(done.stdout)
    assert Path(control[1]).name.startswith("seen-")
    assert [*shared.iterdir()] == []


@pytest.mark.case("RACE-05")
def test_a_symlink_with_the_name_of_a_draft_is_not_followed(tmp_path: Path) -> None:
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
def test_a_key_is_never_created_through_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    target = tmp_path / "elsewhere"
    (tmp_path / "state" / "key").symlink_to(target)

    with pytest.raises(Exception, match="key"):
        file_key(tmp_path / "state" / "key")()

    assert not target.exists()
