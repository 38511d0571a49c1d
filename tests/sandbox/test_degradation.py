"""Degradation: a machine that cannot isolate refuses with a reason and never runs at a weaker level."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from platform import machine
from struct import pack

import pytest
from msgspec.structs import replace
from tests.sandbox.conftest import Cell, Warden, run_confined

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.isolation import Level, ProcessExit, SandboxProfile
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.sandbox.backend import Backend, BackendReport, Launch, SelfTest, choose, examine, forget
from kiwi_mcp.sandbox.bubblewrap import Bubblewrap, backends
from kiwi_mcp.sandbox.levels import demands
from kiwi_mcp.sandbox.seccomp import filter_program

SANDBOXES: tuple[Level, ...] = ("sandboxed", "restricted")


def backend_reports(state: Path, found: Sequence[Backend]) -> tuple[BackendReport, ...]:
    return asyncio.run(examine(found, state, run_confined))


@pytest.mark.usefixtures("processes")
@pytest.mark.case("DEG-01")
@pytest.mark.parametrize("level", SANDBOXES)
def test_without_a_sandbox_program_the_level_is_refused_with_the_missing_program(level: Level, tmp_path: Path) -> None:
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in backends()]
    with pytest.raises(Unavailable) as refused:
        choose(level, backend_reports(tmp_path, without))
    assert level in refused.value.message
    assert "install bubblewrap" in refused.value.suggestion
    missing = refused.value.details["missing"]
    assert isinstance(missing, list)
    assert {"fs_private", "syscall_filter"} <= {*missing} <= demands(level).requires


@pytest.mark.usefixtures("processes")
@pytest.mark.case("DEG-01")
def test_without_a_sandbox_program_standard_still_works(tmp_path: Path) -> None:
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in backends()]
    chosen = choose("standard", backend_reports(tmp_path, without))
    assert chosen.backend.name == "rlimits"
    with chosen.backend.wrap(
        ProcessSpec(("/bin/sh", "-c", "ulimit -n"), cwd="/"), SandboxProfile("standard")
    ) as confined:
        assert asyncio.run(run_confined(confined)).stdout == b"1024\n"


@pytest.mark.case("DEG-02")
def test_without_user_namespaces_nothing_runs_at_a_weaker_level(keeper: Warden) -> None:
    # Kiwi itself runs under its own seccomp filter here: no namespaces, not even for root.
    def refused() -> tuple[str, str]:
        child_filter(filter_program(machine(), families=(1, 2, 10, 16)))
        fresh = keeper.state / "blocked"
        try:
            choose("sandboxed", backend_reports(fresh, backends()))
        except KiwiError as fault:
            return fault.message, fault.suggestion
        return "", ""

    message, suggestion = in_a_copy(keeper, refused)
    assert "fs_private" in message
    assert "not run" in message
    # Root fails at its mount namespace, before it changes its user.
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
            except BaseException as fault:  # noqa: BLE001 - reported to the waiting process
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
from kiwi_mcp.sandbox.bubblewrap import backends
from kiwi_mcp.sandbox.backend import choose, examine
try:
    choose("sandboxed", asyncio.run(examine(backends(), Path(sys.argv[2]), run_confined)))
    print(json.dumps(["ran", ""]))
except KiwiError as fault:
    print(json.dumps([fault.message, fault.suggestion]))
"""


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DEG-03")
def test_with_a_masked_proc_nothing_runs_at_a_weaker_level(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("DEG-04")
def test_without_cgroups_a_watchdog_limits_restricted_processes_and_the_report_says_so(tmp_path: Path) -> None:
    without = [replace(one, groups=None) if isinstance(one, Bubblewrap) else one for one in backends()]
    chosen = choose("restricted", backend_reports(tmp_path, without))
    assert (chosen.backend.name, chosen.backend.limited_by) == ("bubblewrap", "watchdog")
    assert {"cpu_limit", "mem_limit"} <= chosen.properties


@pytest.mark.parametrize(("throttled", "is_shown"), [(0, False), (1, True)])
async def test_a_cpu_limit_counts_only_if_the_kernel_throttled_the_self_test(
    tmp_path: Path, throttled: int, is_shown: bool
) -> None:
    # On a busy machine the process itself sees little processor time; only the kernel knows whether it throttled it.
    bubblewrap = Scripted(says=b"cpu_limit mem_limit syscall_filter", throttled=throttled)
    (backend_report,) = await examine([bubblewrap], tmp_path, bubblewrap.run)
    assert ("cpu_limit" in backend_report.properties) is is_shown
    assert {"mem_limit", "syscall_filter"} <= backend_report.properties


class Scripted:
    """A backend with a self-test that prints its input and is throttled a given number of times."""

    name = "bubblewrap"
    limited_by = "cgroup"

    def __init__(self, says: bytes, throttled: int) -> None:
        self._says = says
        self._throttled = throttled
        self._count = 0

    def obstacles(self) -> tuple[str, ...]:
        return ()

    def fingerprint(self) -> str:
        return "1"

    def self_test(self, secret: str) -> SelfTest:
        return SelfTest(ProcessSpec(("/bin/true",), cwd="/"), SandboxProfile("restricted"))

    @contextmanager
    def wrap(self, spec: ProcessSpec, profile: SandboxProfile) -> Iterator[Launch]:
        yield Launch(spec, throttle_count=lambda: self._count)

    async def run(self, confined: Launch) -> ProcessExit:
        self._count += self._throttled
        return ProcessExit(0, self._says, b"")


@pytest.mark.case("DEG-05")
@pytest.mark.parametrize("launcher", ["/bin/false", "/bin/cat"])
def test_a_launcher_that_dies_is_not_reported_as_the_tool(launcher: str, keeper: Warden) -> None:
    marker = keeper.folder("marker")

    def tried() -> str:
        broken = next(replace(one, bwrap=launcher) for one in backends() if isinstance(one, Bubblewrap))
        spec = ProcessSpec(("/bin/sh", "-c", f": >{marker}/ran"), cwd="/", timeout=10.0)
        broken = replace(broken, owner_map=keeper.owner_map)
        with broken.wrap(spec, SandboxProfile("sandboxed", writable=(str(marker),))) as confined:
            ended = asyncio.run(run_confined(confined))
            try:
                confined.check(ended)
            except Unavailable as fault:
                return fault.message
        return "taken for the tool"

    assert "sandbox (bubblewrap) failed, not the tool" in keeper.do(tried)
    assert [*marker.iterdir()] == []


def test_stderr_of_a_tool_is_not_reported_as_a_launcher_failure(keeper: Warden) -> None:
    ended = keeper.run("/bin/sh", "-c", "echo 'bwrap: No permissions to create new namespace' >&2; exit 1")
    assert ended.exit_code == 1


class Counting:
    """A backend that counts its self-tests and returns a given result."""

    def __init__(self, inner: Backend, *, fingerprint: str = "1") -> None:
        self._inner = inner
        self._fingerprint = fingerprint
        self.name, self.limited_by = inner.name, inner.limited_by
        self.obstacles, self.self_test, self.wrap = inner.obstacles, inner.self_test, inner.wrap

    def fingerprint(self) -> str:
        return self._fingerprint


@pytest.mark.usefixtures("processes")
def test_a_self_test_runs_once_and_again_after_the_launcher_changed(tmp_path: Path) -> None:
    _, rlimits, _ = backends()
    runs = 0

    async def counted(confined: Launch) -> object:
        nonlocal runs
        runs += 1
        return await run_confined(confined)

    def examined(backend: Backend) -> frozenset[str]:
        (backend_report,) = asyncio.run(examine([backend], tmp_path, counted))  # type: ignore[arg-type] # as `run_confined`
        return backend_report.properties

    first = examined(Counting(rlimits))
    assert examined(Counting(rlimits)) == first
    assert runs == 1
    examined(Counting(rlimits, fingerprint="2"))
    assert runs == 2
    forget(tmp_path)
    examined(Counting(rlimits, fingerprint="2"))
    assert runs == 3


@pytest.mark.usefixtures("processes")
def test_a_damaged_or_forged_self_test_cache_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "isolation.json").write_text("{not json")
    without = [replace(one, bwrap=None) if isinstance(one, Bubblewrap) else one for one in backends()]
    honest = backend_reports(tmp_path, without)
    everything = sorted(demands("restricted").requires | demands("standard").prefers)
    known = json.loads((tmp_path / "isolation.json").read_text())
    (tmp_path / "isolation.json").write_text(json.dumps(dict.fromkeys(known, everything)))
    forged = backend_reports(tmp_path, without)
    assert [one.properties for one in forged] == [one.properties for one in honest]


def test_root_grants_its_own_folder_for_writing_only_with_an_owner_map(rooted: Warden) -> None:
    workspace = rooted.folder("of-root")
    cell = Cell(writable=(workspace,))
    assert rooted.run("/bin/sh", "-c", f"id -u >{workspace}/owner", cell=cell).exit_code == 0
    assert (workspace / "owner").stat().st_uid == 0
    with pytest.raises(Unavailable, match="belongs to root"):
        replace(rooted, owner_map=None).run("/bin/true", cell=cell)
