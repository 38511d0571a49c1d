"""Grants: exactly the named path is granted, without symlinks."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import ExitStack
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest
from tests.sandbox.conftest import Cell, Warden

from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.kernel.paths import outputs_home, project_around
from kiwi_mcp.primitives.secrets.reveal import read_env_file
from kiwi_mcp.sandbox.levels import base_profile
from kiwi_mcp.sandbox.process_setup import OpenedGrant, Shields, open_grants, protected_grants


def opened(
    keep: ExitStack, *, readable: tuple[Path, ...] = (), writable: tuple[Path, ...] = ()
) -> tuple[OpenedGrant, ...]:
    profile = SandboxProfile("sandboxed", tuple(map(str, readable)), tuple(map(str, writable)))
    return open_grants(profile, (), keep)


@pytest.mark.parametrize("path", ["/", "/tmp", "/proc", "/proc/self", "/dev/shm", "relative", "/var/../etc", ""])
def test_paths_of_the_sandbox_itself_are_not_granted(path: str) -> None:
    with ExitStack() as keep, pytest.raises(Unavailable, match="cannot be given"):
        open_grants(SandboxProfile("sandboxed", readable=(path,)), (), keep)


def test_a_symlink_in_any_part_of_a_path_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real" / "out").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "etc").symlink_to("/etc")
    for path in (tmp_path / "link", tmp_path / "link" / "out", tmp_path / "real" / "etc"):
        with ExitStack() as keep, pytest.raises(Unavailable, match="a link on the way"):
            opened(keep, writable=(path,))


def test_only_folders_and_files_are_granted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "docker.sock"))
    for path in (tmp_path / "fifo", tmp_path / "docker.sock"):
        with ExitStack() as keep, pytest.raises(Unavailable, match="neither a folder nor a regular file"):
            opened(keep, readable=(path,))
    with ExitStack() as keep, pytest.raises(Unavailable, match="nothing of that name"):
        opened(keep, readable=(tmp_path / "absent",))


def test_a_path_inside_a_grant_of_the_same_kind_is_not_granted_twice(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    with ExitStack() as keep:
        given = opened(keep, readable=(tmp_path / "a" / "b", tmp_path / "a"), writable=(tmp_path / "a" / "b" / "c",))
        response = [(Path(grant.path).name, grant.is_writable) for grant in given]
    assert response == [("a", False), ("c", True)]


@pytest.mark.case("RACE-01")
def test_a_folder_replaced_by_a_link_never_shows_the_target(keeper: Warden) -> None:
    home = keeper.folder("race")
    (home / "out").mkdir()
    (home / "spare").symlink_to("/etc")
    if keeper.user == "ordinary":
        os.chown(home / "out", home.stat().st_uid, -1)
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            for first, second in (("out", "away"), ("spare", "out"), ("out", "spare"), ("away", "out")):
                os.rename(home / first, home / second)  # noqa: PTH104 - quicker, and this is a race

    racer = threading.Thread(target=exchange)
    racer.start()
    try:
        seen = [_listing(keeper, home / "out") for _ in range(12)]
    finally:
        stop.set()
        racer.join()
    assert {*seen} <= {"", "refused"}


def _listing(keeper: Warden, folder: Path) -> str:
    try:
        return keeper.run("/bin/ls", str(folder), cell=Cell(readable=(folder,))).stdout.decode()
    except KiwiError as fault:
        return "refused" if {"path", "launcher"} & {*fault.details} else str(fault)


def test_a_placeholder_is_removed_with_its_last_user(tmp_path: Path) -> None:
    profile, folder = base_profile(), tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as first:
        (grant,) = opened(first, writable=(folder,))
        kept = {Path(one.path).name for one in protected_grants([grant], profile, first)}
        assert kept == {*profile.protected} == {path.name for path in folder.iterdir()}
        with ExitStack() as second:
            [*protected_grants([grant], profile, second)]
        assert {path.name for path in folder.iterdir()} == kept
        assert {path.name for path in folder.iterdir() if path.is_dir()} == {".git"}
        assert not any(path.is_file() for path in folder.iterdir())
        assert project_around(folder) is None
        assert outputs_home(folder / ".ai", tmp_path) == tmp_path
        assert read_env_file(folder / ".env") == {}
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("is_folder", [True, False])
def test_placeholders_of_a_killed_kiwi_are_removed_by_the_next_run(tmp_path: Path, is_folder: bool) -> None:
    left = tmp_path / "workspace" / ".ai"
    left.parent.mkdir()
    left.mkdir() if is_folder else left.touch(0o444)
    os.utime(left, (0, 0))
    with ExitStack() as keep:
        [*protected_grants(opened(keep, writable=(left.parent,)), base_profile(), keep)]
    assert [*left.parent.iterdir()] == []


def test_a_placeholder_that_the_owner_filled_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as keep:
        [*protected_grants(opened(keep, writable=(folder,)), base_profile(), keep)]
        (folder / ".vscode").unlink()
        (folder / ".vscode").mkdir()
        (folder / "CLAUDE.md").unlink()
        (folder / "CLAUDE.md").write_text("mine")
    assert {path.name for path in folder.iterdir()} == {".vscode", "CLAUDE.md"}


def test_an_empty_folder_of_the_owner_stays(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / ".git").mkdir()
    (folder / ".envrc").write_text("mine")
    with ExitStack() as keep:
        (grant,) = opened(keep, writable=(folder,))
        names = {Path(one.path).name for one in protected_grants([grant], base_profile(), keep)}
    assert {".git", ".envrc"} <= names
    assert {path.name for path in folder.iterdir()} == {".git", ".envrc"}


def test_a_protected_name_that_is_a_link_makes_its_folder_read_only(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    (folder / "elsewhere").mkdir(parents=True)
    (folder / ".git").symlink_to("elsewhere")
    with ExitStack() as keep, pytest.raises(Unavailable, match="a link cannot be protected"):
        [*protected_grants(opened(keep, writable=(folder,)), base_profile(), keep)]


def test_a_path_locked_by_another_process_is_refused_without_waiting(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as first, ExitStack() as second:
        grants = opened(first, writable=(folder,))
        lock = os.open(folder, os.O_RDONLY)
        second.callback(os.close, lock)
        flock(lock, LOCK_EX)
        with pytest.raises(Unavailable, match="another process has locked it"):
            [*protected_grants(grants, base_profile(), second)]


def test_a_process_must_stop_when_a_protected_file_is_replaced_outside(tmp_path: Path) -> None:
    for name in ("AGENTS.md", ".env", "plain.txt"):
        (tmp_path / name).write_text("mine")
    with ExitStack() as keep:
        shields = Shields(protected_grants(opened(keep, writable=(tmp_path,)), base_profile(), keep))
        (tmp_path / "AGENTS.md").write_text("changed in place")
        (tmp_path / "new.txt").write_text("new")
        (tmp_path / "new.txt").replace(tmp_path / "plain.txt")
        assert (shields.replaced(), shields.is_whole()) == ("", True)
        (tmp_path / ".env.production").write_text("new")  # has no mount inside
        assert (shields.replaced(), shields.is_whole()) == ("", False)
        (tmp_path / "new.txt").write_text("new")
        (tmp_path / "new.txt").replace(tmp_path / "AGENTS.md")
        assert f"lost the protection of {tmp_path}/AGENTS.md" in shields.replaced()
        (tmp_path / ".env").unlink()
        (tmp_path / "AGENTS.md").unlink()
        assert shields.replaced()
