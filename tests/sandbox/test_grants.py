"""Grants: what is given is what was named, with no link in between and nothing else beside it."""

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
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.kernel.places import project_around
from kiwi_mcp.sandbox.grants import Opened, open_grants
from kiwi_mcp.sandbox.profile import base_profile
from kiwi_mcp.sandbox.protected import shielded


def opened(keep: ExitStack, *, readable: tuple[Path, ...] = (), writable: tuple[Path, ...] = ()) -> tuple[Opened, ...]:
    jail = Jail("sandboxed", tuple(map(str, readable)), tuple(map(str, writable)))
    return open_grants(jail, (), keep)


@pytest.mark.parametrize("path", ["/", "/tmp", "/proc", "/proc/self", "/dev/shm", "relative", "/var/../etc", ""])
def test_places_of_the_sandbox_itself_are_not_granted(path: str) -> None:
    with ExitStack() as keep, pytest.raises(Unavailable, match="cannot be given"):
        open_grants(Jail("sandboxed", readable=(path,)), (), keep)


def test_a_link_anywhere_on_the_way_is_refused(tmp_path: Path) -> None:
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


def test_what_lies_in_a_grant_of_the_same_kind_is_not_given_twice(tmp_path: Path) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    with ExitStack() as keep:
        given = opened(keep, readable=(tmp_path / "a" / "b", tmp_path / "a"), writable=(tmp_path / "a" / "b" / "c",))
        told = [(Path(grant.path).name, grant.is_writable) for grant in given]
    assert told == [("a", False), ("c", True)]


@pytest.mark.case("RACE-01")
def test_a_folder_that_is_exchanged_for_a_link_never_shows_where_the_link_leads(keeper: Warden) -> None:
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


def test_a_place_that_is_kept_empty_is_gone_when_the_last_one_leaves(tmp_path: Path) -> None:
    profile, folder = base_profile(), tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as first:
        (grant,) = opened(first, writable=(folder,))
        kept = {Path(one.path).name for one in shielded([grant], profile, first)}
        assert kept == {*profile.kept_absent} == {path.name for path in folder.iterdir()}
        with ExitStack() as second:
            [*shielded([grant], profile, second)]
        assert {path.name for path in folder.iterdir()} == kept
        assert {path.name for path in folder.iterdir() if path.is_dir()} == {".git"}
        assert project_around(folder) is None
    assert [*folder.iterdir()] == []


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_a_kiwi_that_was_killed_left_behind_goes_with_the_next_run(tmp_path: Path, is_folder: bool) -> None:
    left = tmp_path / "workspace" / ".ai"
    left.parent.mkdir()
    left.mkdir() if is_folder else left.touch()
    os.utime(left, (0, 0))
    with ExitStack() as keep:
        [*shielded(opened(keep, writable=(left.parent,)), base_profile(), keep)]
    assert [*left.parent.iterdir()] == []


def test_a_place_that_the_owner_took_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as keep:
        [*shielded(opened(keep, writable=(folder,)), base_profile(), keep)]
        (folder / ".claude").unlink()
        (folder / ".claude").mkdir()
        (folder / ".cursor").chmod(0o644)
        (folder / ".cursor").write_text("mine")
    assert {path.name for path in folder.iterdir()} == {".claude", ".cursor"}


def test_an_empty_folder_of_the_owners_own_stays(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    (folder / ".git").mkdir()
    (folder / ".envrc").write_text("mine")
    with ExitStack() as keep:
        (grant,) = opened(keep, writable=(folder,))
        names = {Path(one.path).name for one in shielded([grant], base_profile(), keep)}
    assert {".git", ".envrc"} <= names
    assert {path.name for path in folder.iterdir()} == {".git", ".envrc"}


def test_a_protected_name_that_is_a_link_keeps_its_folder_from_being_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    (folder / "elsewhere").mkdir(parents=True)
    (folder / ".git").symlink_to("elsewhere")
    with ExitStack() as keep, pytest.raises(Unavailable, match="a link cannot be held"):
        [*shielded(opened(keep, writable=(folder,)), base_profile(), keep)]


def test_a_place_that_somebody_else_locked_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder = tmp_path / "workspace"
    folder.mkdir()
    with ExitStack() as first, ExitStack() as second:
        grants = opened(first, writable=(folder,))
        (folder / ".git").mkdir()
        os.utime(folder / ".git", (0, 0))
        lock = os.open(folder / ".git", os.O_RDONLY)
        second.callback(os.close, lock)
        flock(lock, LOCK_EX)
        with pytest.raises(Unavailable, match="another process holds its place"):
            [*shielded(grants, base_profile(), second)]
