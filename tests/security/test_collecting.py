"""What a confined tool leaves where Kiwi looks afterwards: regular files alone are read, and only up to a limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.isolation import Jail, Limits
from kiwi_mcp.domain.json import as_list, as_object
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.held import Hold, standings
from kiwi_mcp.kernel.checkpoints.checkpoint import begin
from kiwi_mcp.kernel.checkpoints.copies import FOLDER
from kiwi_mcp.kernel.checkpoints.guard import Guard, Wish
from kiwi_mcp.primitives.subprocess import ProcessResult
from kiwi_mcp.sandbox.standing import choose
from kiwi_mcp.store.runs import new_run

TERABYTE = 10**12
PATH = "/usr/local/bin:/usr/bin:/bin"
WISH = Wish(is_made=True, is_asked=True, paths=("out",))
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


def collected(space: Space, code: str, *words: str, limits: Limits) -> tuple[ProcessResult, Guard, float]:
    """Run code that may write to `out`, and let Kiwi look at what it left."""

    async def story() -> tuple[ProcessResult, Guard, float]:
        out = str(space.project / "out")
        jail = Jail("sandboxed", writable=(out,), limits=limits)
        spec = ProcessSpec(("python3", "-I", "-S", "-c", code, out, *words), cwd="/", env={"PATH": PATH}, timeout=60)
        hold = Hold(jail, choose("sandboxed", await standings(space)), space.cache)
        guard = await begin(space, "filler", new_run(time.time_ns() // 1_000_000)[0], WISH)
        async with guard:
            result = await hold.run(spec, secrets={}, report=silent)
            ended = time.monotonic()
        return result, guard, time.monotonic() - ended

    return asyncio.run(story())


def kept(project: Path) -> list[bytes]:
    return [path.read_bytes() for path in project.joinpath(*FOLDER, "contents").iterdir()]


@pytest.mark.case("RACE-02")
def test_of_what_a_tool_leaves_only_regular_files_are_read(space: Space) -> None:
    result, guard, seconds = collected(space, LEFT, str(TERABYTE), limits=Limits(file_bytes=2 * TERABYTE))

    assert result.exit_code == 0, result.stderr
    assert seconds < 10
    told = as_object(guard.told)
    changed = {str(as_object(row)["path"]) for row in as_list(told["changed"])}
    assert changed == {"out/plain", "out/link", "out/device"}
    assert {"out/fifo", "out/socket", "out/sparse"}.isdisjoint(changed)
    # Of a link it is kept where it leads, and nothing of what is there.
    assert sorted(kept(space.project)) == [b"/dev/zero", b"/etc/passwd", b"before", b"plain"]


@pytest.mark.case("RACE-02")
def test_a_file_larger_than_it_may_write_is_not_made_at_all(space: Space) -> None:
    result, _, _ = collected(space, LEFT, str(TERABYTE), limits=Limits())
    assert result.exit_code != 0
    assert (space.project / "out" / "sparse").stat().st_size == 0


@pytest.mark.case("RES-14")
def test_a_hundred_thousand_files_are_too_many_to_be_collected_and_nothing_of_them_stays(space: Space) -> None:
    result, guard, seconds = collected(space, FLOOD, "100000", limits=Limits(workspace_files=200_000))

    assert result.exit_code == 0, result.stderr
    assert seconds < 30
    assert as_object(guard.told)["unfinished"] is True
    assert "50,000 files" in " ".join(guard.warnings)
    assert kept(space.project) == [b"before"]
    assert len([*Path("/proc/self/fd").iterdir()]) < 200


@pytest.mark.case("RES-14")
def test_by_default_a_tool_is_stopped_before_it_has_made_as_many(space: Space) -> None:
    result, _, _ = collected(space, FLOOD, "400000", limits=Limits())
    assert "made more than 50,000 files" in result.stopped
