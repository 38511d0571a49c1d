"""Files that a sandboxed tool leaves for Kiwi: only regular files are read, up to a limit."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.sandboxed import Sandbox, backend_reports
from kiwi_mcp.kernel.checkpoints.checkpoint import CheckpointRequest, Guard, begin
from kiwi_mcp.primitives.process.run import ProcessResult
from kiwi_mcp.sandbox.backend import choose
from kiwi_mcp.sandbox.quarantine import NameWatch
from kiwi_mcp.store.runs import new_run

pytestmark = pytest.mark.usefixtures("sandbox")

TERABYTE = 10**12
PATH = "/usr/local/bin:/usr/bin:/bin"
WISH = CheckpointRequest(is_made=True, is_asked=True)
LEFT = """
import os, stat, sys
os.chdir(sys.argv[1])
os.mkfifo("fifo")
os.mknod("socket", stat.S_IFSOCK | 0o600)
os.mkdir("folder.json")
os.symlink("/etc/passwd", "link")
os.symlink("/dev/zero", "device")
os.truncate(os.open("sparse", os.O_CREAT | os.O_RDWR), int(sys.argv[2]))
open("plain", "w").write("plain")
deep = "."
for _ in range(200):
    deep += "/d"
    os.mkdir(deep)
"""
FLOOD = """
import os, sys
for number in range(int(sys.argv[2])):
    os.close(os.open(f"{sys.argv[1]}/{number}", os.O_CREAT | os.O_WRONLY))
"""


@pytest.fixture
def space(project: Path, home: Path) -> Space:
    (project / "out").mkdir()
    (project / "out" / "before").write_text("before")
    return Space(project, home / ".ai", home / ".cache" / "kiwi")


def collected(space: Space, code: str, *words: str, limits: ResourceLimits) -> tuple[ProcessResult, Guard, float]:
    """Run code that may write to `out`, and let Kiwi look at what it left."""

    async def story() -> tuple[ProcessResult, Guard, float]:
        out = str(space.project / "out")
        profile = SandboxProfile("sandboxed", writable=(out,), limits=limits)
        spec = ProcessSpec(("python3", "-I", "-S", "-c", code, out, *words), cwd="/", env={"PATH": PATH}, timeout=60)
        hold = Sandbox(
            profile, choose("sandboxed", await backend_reports(space)), space.cache, NameWatch((), space.cache, ())
        )
        guard = await begin(space, "filler", new_run(time.time_ns() // 1_000_000)[0], WISH)
        async with guard:
            result = await hold.run(spec, secrets={}, report=silent)
            ended = time.monotonic()
        return result, guard, time.monotonic() - ended

    return asyncio.run(story())


def kept(space: Space) -> list[bytes]:
    """Return every content in the private repository of the project."""
    (folder,) = (space.user / "state" / "checkpoints").iterdir()

    def git(*words: str) -> bytes:
        done = subprocess.run(["git", f"--git-dir={folder}", *words], capture_output=True, timeout=120, check=True)
        return done.stdout

    rows = git("cat-file", "--batch-all-objects", "--batch-check").decode().splitlines()
    return [git("cat-file", "blob", name) for name, kind, _ in map(str.split, rows) if kind == "blob"]


@pytest.mark.case("RACE-02")
def test_only_regular_files_of_a_tool_are_collected(space: Space) -> None:
    result, guard, seconds = collected(space, LEFT, str(TERABYTE), limits=ResourceLimits(file_bytes=2 * TERABYTE))

    assert result.exit_code == 0, result.stderr
    assert seconds < 60
    response = as_object(guard.summary)
    changed = {str(as_object(row)["path"]) for row in as_list(response["changed"])}
    assert changed == {"out/plain", "out/link", "out/device"}
    assert {"out/fifo", "out/socket", "out/sparse"}.isdisjoint(changed)
    # Of a link it is kept where it leads, and nothing of what is there.
    assert sorted(kept(space)) == [b"/dev/zero", b"/etc/passwd", b"before", b"plain"]


@pytest.mark.case("RACE-02")
def test_a_file_above_the_size_limit_is_not_created(space: Space) -> None:
    result, _, _ = collected(space, LEFT, str(TERABYTE), limits=ResourceLimits())
    assert result.exit_code != 0
    assert (space.project / "out" / "sparse").stat().st_size == 0


@pytest.mark.case("RES-14")
def test_a_hundred_thousand_files_are_not_collected_and_are_removed(space: Space) -> None:
    opened = len([*Path("/proc/self/fd").iterdir()])
    result, guard, seconds = collected(space, FLOOD, "100000", limits=ResourceLimits(workspace_files=200_000))

    assert result.exit_code == 0, result.stderr
    assert seconds < 90
    assert as_object(guard.summary)["unfinished"] is True
    assert "50,000 files" in " ".join(guard.warnings)
    assert kept(space) == [b"before"]
    assert len([*Path("/proc/self/fd").iterdir()]) < opened + 100


@pytest.mark.case("RES-14")
def test_by_default_a_tool_is_stopped_before_it_creates_that_many_files(space: Space) -> None:
    result, _, _ = collected(space, FLOOD, "400000", limits=ResourceLimits())
    assert "made more than 50,000 files" in result.stopped
