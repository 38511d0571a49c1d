"""Control groups: where they can be made, on machines with either interface."""

from __future__ import annotations

from pathlib import Path

from kiwi_mcp.domain.isolation import Limits
from kiwi_mcp.sandbox.cgroup import find_groups, sweep

LIMITS = Limits(memory_bytes=1_000_000, cpus=0.5, pids=7)


def folder_with(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    return path


def test_a_machine_without_groups_has_none(tmp_path: Path) -> None:
    assert find_groups(tmp_path, tmp_path / "absent") is None


def test_the_newer_interface_hands_out_what_a_group_around_this_one_may(tmp_path: Path) -> None:
    root = folder_with(tmp_path / "root", cgroup__subtree_control="cpu memory pids", cgroup__procs="")
    folder_with(root / "app", cgroup__subtree_control="", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/app\n")
    groups = find_groups(root, own)
    assert groups is not None
    with groups.limited(LIMITS) as group:
        (folder,) = group.folders
        group.add(42)
        told = {path.name: path.read_text() for path in folder.iterdir()}
        for path in folder.iterdir():  # the files of a real group go with it
            path.unlink()
    assert folder.parent == root
    assert not folder.exists()
    assert told == {
        "memory.max": "1000000",
        "memory.swap.max": "0",
        "cpu.max": "50000 100000",
        "pids.max": "7",
        "cgroup.procs": "42",
    }


def test_a_group_whose_controllers_are_not_handed_out_is_none(tmp_path: Path) -> None:
    folder_with(tmp_path / "root", cgroup__subtree_control="memory pids", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert find_groups(tmp_path / "root", own) is None


def test_the_older_interface_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    for controller in ("memory", "cpu", "pids"):
        folder_with(tmp_path / controller / "mine", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("4:memory:/mine\n1:cpu:/mine\n8:pids:/mine\n")
    groups = find_groups(tmp_path, own)
    assert groups is not None
    with groups.limited(LIMITS) as group:
        told = {path.name: path.read_text() for folder in group.folders for path in folder.iterdir()}
        for folder in group.folders:
            for path in folder.iterdir():
                path.unlink()
    assert told == {
        "memory.limit_in_bytes": "1000000",
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "50000",
        "pids.max": "7",
    }


def test_groups_of_a_kiwi_that_is_gone_are_swept(tmp_path: Path) -> None:
    root = folder_with(tmp_path / "root", cgroup__subtree_control="cpu memory pids", cgroup__procs="")
    own = tmp_path / "own"
    own.write_text("0::/\n")
    groups = find_groups(root, own)
    assert groups is not None
    for name in ("kiwi-999999999-left", "kiwi-1-living", "other"):
        (root / name).mkdir()
    sweep(groups.folders.values())
    assert {path.name for path in root.iterdir() if path.is_dir()} == {"kiwi-1-living", "other"}
