"""Degradation: a machine that cannot isolate refuses, says what is missing and what to do, and never runs weaker."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from platform import machine
from struct import pack

import pytest
from tests.sandbox.conftest import Cell, Warden, run_confined

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.isolation import Jail, Level
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox import cgroup
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.levels import demands, offers
from kiwi_mcp.sandbox.port import Backend, Confined
from kiwi_mcp.sandbox.seccomp import filter_program
from kiwi_mcp.sandbox.standing import Standing, choose, examine, forget

SANDBOXES: tuple[Level, ...] = ("sandboxed", "restricted")


def usual() -> list[Backend]:
    """Return the backends of this machine without the last resort, which needs none of what is taken away here."""
    return [one for one in backends() if not offers()[one.name].is_last_resort]


def standings(state: Path, found: Sequence[Backend]) -> tuple[Standing, ...]:
    return asyncio.run(examine(found, state, run_confined))


@pytest.mark.case("DEG-01")
@pytest.mark.parametrize("level", SANDBOXES)
def test_without_a_sandbox_program_the_level_is_refused_with_what_is_missing(level: Level, tmp_path: Path) -> None:
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in usual()]
    with pytest.raises(Unavailable) as refused:
        choose(level, standings(tmp_path, without))
    assert level in refused.value.message
    assert "install bubblewrap" in refused.value.suggestion
    missing = refused.value.details["missing"]
    assert isinstance(missing, list)
    assert {"fs_private", "syscall_filter"} <= {*missing} <= demands(level).requires


@pytest.mark.case("DEG-01")
def test_without_a_sandbox_program_standard_still_works(tmp_path: Path) -> None:
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in usual()]
    chosen = choose("standard", standings(tmp_path, without))
    assert chosen.backend.name == "rlimits"
    with chosen.backend.wrap(ProcessSpec(("/bin/sh", "-c", "ulimit -n"), cwd="/"), Jail("standard")) as confined:
        assert asyncio.run(run_confined(confined)).stdout == b"1024\n"


@pytest.mark.case("DEG-02")
def test_where_user_namespaces_are_blocked_nothing_runs_weaker(keeper: Warden) -> None:
    # What Kiwi itself is held by here is the filter it holds others with: no namespaces, for root neither.
    def refused() -> tuple[str, str]:
        child_filter(filter_program(machine(), families=(1, 2, 10, 16)))
        fresh = keeper.state / "blocked"
        try:
            choose("sandboxed", standings(fresh, usual()))
        except KiwiError as fault:
            return fault.message, fault.suggestion
        return "", ""

    message, suggestion = in_a_copy(keeper, refused)
    assert "fs_private" in message
    assert "not run" in message
    # Root is stopped at its own table of mounts, before it becomes anybody else.
    assert "user namespaces" in suggestion if keeper.user == "ordinary" else "laid out" in suggestion


def child_filter(program: bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    instructions = ctypes.create_string_buffer(program, len(program))
    head = pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.create_string_buffer(head), 0, 0) == 0


def in_a_copy(keeper: Warden, work: object) -> tuple[str, str]:
    """Do something in a copy of this process, because what it does to itself cannot be undone."""
    assert callable(work)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        with os.fdopen(writing, "w") as pipe:
            try:
                pipe.write(json.dumps(keeper.do(work)))
            except BaseException as fault:  # noqa: BLE001 - told to the process that waits for it
                pipe.write(json.dumps([repr(fault), ""]))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        message, suggestion = json.load(pipe)
    os.waitpid(child, 0)
    return message, suggestion


NESTED = """
import asyncio, json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.sandbox.conftest import run_confined
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.sandbox.host import backends
from kiwi_mcp.sandbox.standing import choose, examine
try:
    choose("sandboxed", asyncio.run(examine(backends()[:3], Path(sys.argv[2]), run_confined)))
    print(json.dumps(["ran", ""]))
except KiwiError as fault:
    print(json.dumps([fault.message, fault.suggestion]))
"""


@pytest.mark.case("DEG-03")
def test_where_proc_is_masked_nothing_runs_weaker(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    masked = ("--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc", "--ro-bind", "/dev/null", "/proc/version")
    ended = subprocess.run(
        ["/usr/bin/bwrap", *masked, sys.executable, "-c", NESTED, str(root), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert ended.stdout, ended.stderr.decode()
    message, suggestion = json.loads(ended.stdout)
    assert "fs_private" in message
    assert "/proc are masked" in suggestion


@pytest.mark.case("DEG-04")
def test_without_control_groups_restricted_is_refused_and_sandboxed_is_not(tmp_path: Path) -> None:
    without = [replace(one, groups=None) if isinstance(one, Bubblewrap) else one for one in usual()]
    found = standings(tmp_path, without)
    assert choose("sandboxed", found).backend.name == "bubblewrap"
    with pytest.raises(Unavailable, match="cpu_limit, mem_limit") as refused:
        choose("restricted", found)
    assert "control groups" in refused.value.suggestion


@pytest.mark.skipif(os.geteuid() != 0, reason="others may have no groups at all")
def test_a_busy_machine_is_not_taken_for_a_share_of_the_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "_quota", lambda _: str(10**9))
    bubblewrap = next(one for one in backends() if one.name == "bubblewrap")
    busy = [subprocess.Popen(["/bin/sh", "-c", "while :; do :; done"]) for _ in range(4)]
    try:
        (standing,) = standings(tmp_path, [bubblewrap])
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert "cpu_limit" not in standing.properties
    assert "syscall_filter" in standing.properties


@pytest.mark.case("DEG-05")
@pytest.mark.parametrize("launcher", ["/bin/false", "/bin/cat"])
def test_a_launcher_that_dies_is_not_taken_for_the_tool(launcher: str, keeper: Warden) -> None:
    marker = keeper.folder("marker")

    def tried() -> str:
        broken = next(replace(one, bwrap=launcher) for one in backends() if isinstance(one, Bubblewrap))
        spec = ProcessSpec(("/bin/sh", "-c", f": >{marker}/ran"), cwd="/", timeout=10.0)
        broken = replace(broken, owner_map=keeper.owner_map)
        with broken.wrap(spec, Jail("sandboxed", writable=(str(marker),))) as confined:
            ended = asyncio.run(run_confined(confined))
            try:
                confined.check(ended)
            except Unavailable as fault:
                return fault.message
        return "taken for the tool"

    assert "sandbox (bubblewrap) failed, not the tool" in keeper.do(tried)
    assert [*marker.iterdir()] == []


def test_what_a_tool_writes_to_stderr_is_not_taken_for_the_launchers_failure(keeper: Warden) -> None:
    ended = keeper.run("/bin/sh", "-c", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    assert ended.exit_code == 1


class Counting:
    """A backend that counts how often it is tested, and says what it is told to."""

    def __init__(self, inner: Backend, *, fingerprint: str = "1") -> None:
        self._inner = inner
        self._fingerprint = fingerprint
        self.name = inner.name
        self.obstacles, self.self_test, self.wrap = inner.obstacles, inner.self_test, inner.wrap

    def fingerprint(self) -> str:
        return self._fingerprint


def test_a_self_test_is_run_once_and_again_when_the_launcher_changed(tmp_path: Path) -> None:
    _, rlimits, _ = usual()
    runs = 0

    async def counted(confined: Confined) -> object:
        nonlocal runs
        runs += 1
        return await run_confined(confined)

    def examined(backend: Backend) -> frozenset[str]:
        (standing,) = asyncio.run(examine([backend], tmp_path, counted))  # type: ignore[arg-type] # as `run_confined`
        return standing.properties

    first = examined(Counting(rlimits))
    assert examined(Counting(rlimits)) == first
    assert runs == 1
    examined(Counting(rlimits, fingerprint="2"))
    assert runs == 2
    forget(tmp_path)
    examined(Counting(rlimits, fingerprint="2"))
    assert runs == 3


def test_a_damaged_or_forged_memory_of_self_tests_gives_nothing(tmp_path: Path) -> None:
    (tmp_path / "isolation.json").write_text("{not json")
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in usual()]
    honest = standings(tmp_path, without)
    everything = sorted(demands("restricted").requires | demands("standard").prefers)
    known = json.loads((tmp_path / "isolation.json").read_text())
    (tmp_path / "isolation.json").write_text(json.dumps(dict.fromkeys(known, everything)))
    forged = standings(tmp_path, without)
    assert [one.properties for one in forged] == [one.properties for one in honest]


def test_root_gives_root_s_own_folder_for_writing_only_with_a_map_of_owners(rooted: Warden) -> None:
    workspace = rooted.folder("of-root")
    cell = Cell(writable=(workspace,))
    assert rooted.run("/bin/sh", "-c", f"id -u >{workspace}/told", cell=cell).exit_code == 0
    assert (workspace / "told").stat().st_uid == 0
    with pytest.raises(Unavailable, match="belongs to root"):
        replace(rooted, owner_map=None).run("/bin/true", cell=cell)
