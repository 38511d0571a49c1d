"""Writable folders of a sandboxed process have a quota."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.isolation import ResourceLimits, SandboxProfile
from kiwi_mcp.domain.outcome import Outcome, silent
from kiwi_mcp.domain.plan import ProcessSpec
from kiwi_mcp.drivers.process import outcome_of
from kiwi_mcp.drivers.sandboxed import Sandbox, backend_reports
from kiwi_mcp.sandbox.backend import choose
from kiwi_mcp.sandbox.limits import quota
from kiwi_mcp.sandbox.quarantine import NameWatch

MEGABYTE = 1_048_576
PATH = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    folder = tmp_path / "workspace"
    folder.mkdir()
    return folder


def run(workspace: Path, script: str, *, limits: ResourceLimits, timeout: float = 60.0) -> Outcome:
    """Run a script that may write to a folder, as the driver runs tools."""

    async def held() -> Outcome:
        cache = Path(os.environ["XDG_CACHE_HOME"]) / "kiwi"
        backend_report = choose("sandboxed", await backend_reports(Space(workspace, workspace, cache)))
        profile = SandboxProfile("sandboxed", writable=(str(workspace),), limits=limits)
        spec = ProcessSpec(("/bin/sh", "-c", script), cwd=str(workspace), env={"PATH": PATH}, timeout=timeout)
        result = await Sandbox(profile, backend_report, cache, NameWatch((), cache, ())).run(
            spec, secrets={}, report=silent
        )
        return outcome_of("filler", "json_or_text", {}, spec, result)

    return asyncio.run(held())


def taken(folder: Path) -> int:
    return sum(path.stat(follow_symlinks=False).st_blocks * 512 for path in folder.rglob("*"))


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("RES-06")
def test_a_process_that_fills_its_folder_is_stopped_before_the_disk_is_full(workspace: Path) -> None:
    script = "i=0; while [ $i -lt 400 ]; do head -c 10485760 /dev/zero >f$i; i=$((i+1)); sleep 0.02; done"
    outcome = run(workspace, script, limits=ResourceLimits(workspace_bytes=100 * MEGABYTE))

    assert outcome.status == "error"
    assert "wrote more than 104,857,600 bytes" in outcome.message
    assert taken(workspace) < 1_000 * MEGABYTE


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("RES-06")
def test_a_quota_exceeded_before_the_first_check_is_reported(workspace: Path) -> None:
    outcome = run(
        workspace,
        "for i in 1 2 3 4 5 6; do fallocate -l 8388608 f$i; done",
        limits=ResourceLimits(workspace_bytes=32 * MEGABYTE),
    )
    assert "wrote more than 33,554,432 bytes" in outcome.message


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("RES-14")
def test_a_process_that_creates_endless_files_is_stopped(workspace: Path) -> None:
    script = "i=0; while [ $i -lt 100000 ]; do : >f$i; i=$((i+1)); done; echo done"
    outcome = run(workspace, script, limits=ResourceLimits(workspace_files=1_000))

    assert outcome.status == "error"
    assert "made more than 1,000 files" in outcome.message
    assert len([*workspace.iterdir()]) < 100_000


@pytest.mark.usefixtures("sandbox")
def test_a_process_within_its_quota_runs_to_its_end(workspace: Path) -> None:
    (workspace / "old").write_bytes(b"x" * 8 * MEGABYTE)
    outcome = run(
        workspace, "head -c 1048576 /dev/zero >new; echo 7", limits=ResourceLimits(workspace_bytes=4 * MEGABYTE)
    )
    assert (outcome.status, outcome.result) == ("success", 7)


def test_space_used_by_others_is_not_counted(workspace: Path, tmp_path: Path) -> None:
    (workspace / "old").write_bytes(b"x" * MEGABYTE)
    time.sleep(0.03)  # so that what is old has an older time
    exceeded = quota((str(workspace),), ResourceLimits(workspace_bytes=2 * MEGABYTE))
    assert exceeded is not None
    (tmp_path / "elsewhere").write_bytes(b"x" * 16 * MEGABYTE)
    assert exceeded() == ""
    (workspace / "new").write_bytes(b"x" * 16 * MEGABYTE)
    assert "wrote more than" in exceeded()


def test_space_freed_by_others_hides_nothing(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kiwi_mcp.sandbox.limits._PAUSE", 0.0)
    (tmp_path / "large").write_bytes(os.urandom(16 * MEGABYTE))
    watch = quota([str(workspace)], ResourceLimits(workspace_bytes=4 * MEGABYTE))
    assert watch is not None
    (tmp_path / "large").unlink()
    (workspace / "much").write_bytes(os.urandom(8 * MEGABYTE))
    assert "wrote more than" in watch()


def test_a_process_without_writable_folders_is_not_watched() -> None:
    assert quota((), ResourceLimits()) is None
