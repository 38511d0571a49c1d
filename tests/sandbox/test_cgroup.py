"""Cgroups: where they can be created, with cgroup v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiwi_mcp.domain.isolation import ResourceLimits
from kiwi_mcp.sandbox.limits import find_groups, sweep

LIMITS = ResourceLimits(memory_bytes=1_000_000, cpus=0.5, pids=7)


def folder_with(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_a_machine_without_cgroups_has_none(tmp_path: Path) -> None:
    assert find_groups(tmp_path, tmp_path / "absent") is None


def test_cgroup_v2_uses_the_controllers_of_the_parent_group(tmp_path: Path) -> None:
    root = folder_with(tmp_path / "root", cgroup__subtree_control="cpu memory pids", cgroup__procs="")
    folder_with(root / "app", cgroup__subtree_control="", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/app\n")
    groups = find_groups(root, own)
    assert groups is not None
    with groups.limited(LIMITS) as group:
        (folder,) = group.folders
        group.add(42)
        response = {path.name: path.read_text() for path in folder.iterdir()}
        for path in folder.iterdir():  # the files of a real group go with it
            path.unlink()
    assert folder.parent == root
    assert not folder.exists()
    assert response == {
        "memory.max": "1000000",
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "pids.max": "7",
        "cgroup.procs": "42",
    }


def test_a_group_without_delegated_controllers_is_not_used(tmp_path: Path) -> None:
    folder_with(tmp_path / "root", cgroup__subtree_control="memory pids", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert find_groups(tmp_path / "root", own) is None


def test_cgroup_v1_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    for controller in ("memory", "cpu", "pids"):
        folder_with(tmp_path / controller / "mine", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("4:memory:/mine\n1:cpu:/mine\n8:pids:/mine\n")
    groups = find_groups(tmp_path, own)
    assert groups is not None
    with groups.limited(LIMITS) as group:
        response = {path.name: path.read_text() for folder in group.folders for path in folder.iterdir()}
        for folder in group.folders:
            for path in folder.iterdir():
                path.unlink()
    assert response == {
        "memory.limit_in_bytes": "1000000",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
        "pids.max": "7",
    }


def test_cgroups_of_an_ended_kiwi_are_removed(tmp_path: Path) -> None:
    root = folder_with(tmp_path / "root", cgroup__subtree_control="cpu memory pids", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    groups = find_groups(root, own)
    assert groups is not None
    for name in ("kiwi-999999999-left", "kiwi-1-living", "other"):
        (root / name).mkdir()
    sweep(groups.folders.values())
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"kiwi-1-living", "other"}


def test_a_cgroup_that_another_kiwi_removes_during_the_sweep_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [tmp_path / f"kiwi-999999999-{number}" for number in range(3)]
    for folder in left:
        (folder / "inner").mkdir(parents=True)
    listed = os.scandir

    def rival(folder: str | Path) -> object:
        if Path(folder) == left[1]:
            (left[1] / "inner").rmdir()
            left[1].rmdir()
        return listed(folder)

    monkeypatch.setattr(os, "scandir", rival)
    sweep([tmp_path])

    assert [folder for folder in left if folder.exists()] == []


def test_a_sweep_of_a_missing_folder_does_nothing(tmp_path: Path) -> None:
    sweep([tmp_path / "absent"])
