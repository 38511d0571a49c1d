"""Root launchers: what is reused from one sandbox to the next, and what is not."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from threading import Event
from time import monotonic

import pytest

from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.sandbox.bubblewrap import UNPRIVILEGED_ID
from kiwi_mcp.sandbox.limits import find_groups
from kiwi_mcp.sandbox.process_setup import open_grants
from kiwi_mcp.sandbox.root_launcher import STAGED, RootLauncher, open_root_launcher

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root has cells")


@contextmanager
def cell_with(*readable: Path) -> Iterator[RootLauncher]:
    """A cell in which some paths lie."""
    with ExitStack() as keep:
        grants = open_grants(SandboxProfile("sandboxed", tuple(map(str, readable))), (), keep)
        yield keep.enter_context(open_root_launcher(grants, None, find_groups()))


def said(cell: RootLauncher, script: str) -> str:
    """The output of a shell that a launcher starts as an unprivileged user."""

    def spawn() -> Popen[bytes]:
        return Popen(("/bin/sh", "-c", script), cwd="/", env={}, stdin=DEVNULL, stdout=PIPE)

    with cell.start_as(UNPRIVILEGED_ID, ResourceLimits(), spawn) as process:
        assert process.stdout is not None
        return process.stdout.read().decode().strip()


@dataclass(frozen=True)
class Slow:
    """Imitates a process that starts slowly."""

    pid: int = 0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Wait for something that comes true by itself."""
    end = monotonic() + 120
    while not is_so() and monotonic() < end:
        Event().wait(0.001)


@pytest.mark.usefixtures("processes")
def test_the_started_process_is_an_unprivileged_user_and_cannot_return(tmp_path: Path) -> None:
    with cell_with(tmp_path) as cell:
        status = dict(
            line.split(":\t", 1) for line in said(cell, "cat /proc/self/status").splitlines() if ":\t" in line
        )
    assert status["Uid"].split() == [str(UNPRIVILEGED_ID)] * 4
    assert status["Gid"].split() == [str(UNPRIVILEGED_ID)] * 4
    assert not status["Groups"].split()
    assert {int(status[kind], 16) for kind in ("CapPrm", "CapEff", "CapAmb")} == {0}


@pytest.mark.usefixtures("processes")
def test_kiwi_keeps_its_user_and_its_view(tmp_path: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    with cell_with(tmp_path) as cell:
        said(cell, "true")
        users = {task.stat().st_uid for task in Path("/proc/self/task").iterdir()}
    assert users == {0}
    assert os.getresuid() == (0, 0, 0)
    assert Path("/proc/self/mountinfo").read_text() == before


@pytest.mark.usefixtures("processes")
def test_the_next_run_does_not_see_grants_of_the_last_one(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / folder.name).touch()
    with cell_with(first, second) as cell:
        assert said(cell, f"ls {STAGED}/0 {STAGED}/1").split()[1::2] == ["first", "second"]
        used = cell
    wait_until(lambda: used.is_clear)
    with cell_with(second) as cell:
        assert cell is used
        assert said(cell, f"ls {STAGED}/0; ls {STAGED}/1 2>/dev/null; find /tmp/root -xdev -name first") == "second"


def test_a_failed_run_leaves_no_launcher_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), cell_with(tmp_path) as cell:
        raise RuntimeError("the launcher failed")
    with cell_with(tmp_path) as other:
        assert other is not cell


def test_concurrent_runs_have_separate_launchers(tmp_path: Path) -> None:
    with cell_with(tmp_path) as one, cell_with(tmp_path) as other:
        assert one is not other


@pytest.mark.usefixtures("processes")
def test_the_started_process_is_in_the_cgroup_with_the_limits_of_the_run(tmp_path: Path) -> None:
    with cell_with(tmp_path) as cell:
        if cell.group is None:
            pytest.skip("groups of threads are a matter of the older interface")
        places = {folder.name for folder in cell.group.folders}
        inside = said(cell, "cat /proc/self/cgroup")
        cell.limit(ResourceLimits(pids=7, cpus=0.5), 0)
        quota = (cell.group.places["cpu"] / "cpu.cfs_quota_us").read_text().strip()
        count = (cell.group.places["pids"] / "pids.max").read_text().strip()
        group = cell.group
    assert sum(line.rpartition("/")[2] in places for line in inside.splitlines()) >= 3
    assert (quota, count) == ("50000", "8")  # the thread that starts them is one of the eight
    # A thread of Kiwi's own is in the cgroup, and must not be throttled by the usage of the last run.
    lifted = int((group.places["cpu"] / "cpu.cfs_quota_us").read_text())
    assert lifted > 1_000 * int((group.places["cpu"] / "cpu.cfs_period_us").read_text())


@pytest.mark.usefixtures("processes")
def test_the_started_process_has_an_empty_network(tmp_path: Path) -> None:
    with cell_with(tmp_path) as cell:
        network, links, routes = said(
            cell, "readlink /proc/self/ns/net; tail -n +3 /proc/net/dev | wc -l; tail -n +2 /proc/net/route | wc -l"
        ).splitlines()
    assert network != str(Path("/proc/self/ns/net").readlink())
    assert (links, routes) == ("1", "0")  # the one that every network has, which is down


def test_a_launcher_that_is_being_cleaned_is_not_waited_for(tmp_path: Path) -> None:
    begun, gate = Event(), Event()

    def slow() -> Slow:
        begun.set()
        gate.wait(120)
        return Slow()

    with ThreadPoolExecutor(1) as beside:
        with cell_with(tmp_path) as cell:
            beside.submit(cell.start, slow)
            assert begun.wait(120)
        try:
            with cell_with(tmp_path) as other:
                assert other is not cell
        finally:
            gate.set()


def test_the_cgroup_of_an_ended_launcher_is_removed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), cell_with(tmp_path) as cell:
        raise RuntimeError("the launcher failed")
    assert not any(folder.exists() for folder in (cell.group.folders if cell.group else ()))


@pytest.mark.usefixtures("processes")
def test_launchers_serve_event_loops_in_several_threads(tmp_path: Path) -> None:
    async def one() -> str:
        with cell_with(tmp_path) as cell:
            return await asyncio.to_thread(said, cell, "id -u")

    with ThreadPoolExecutor(4) as threads:
        assert {*threads.map(lambda _: asyncio.run(one()), range(8))} == {str(UNPRIVILEGED_ID)}
