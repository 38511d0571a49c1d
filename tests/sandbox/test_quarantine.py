"""Quarantine: files under protected names are found and moved, even if a process hides them."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from errno import EXDEV
from pathlib import Path

import pytest
from tests.sandbox.conftest import Cell, Warden

from kiwi_mcp.domain.isolation import SandboxProfile
from kiwi_mcp.sandbox.levels import base_profile, folded
from kiwi_mcp.sandbox.process_setup import is_placeholder, open_grants, protected_grants
from kiwi_mcp.sandbox.quarantine import Findings, NameWatch


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    (folder / "sub").mkdir(parents=True)
    return folder


@pytest.fixture
def watch(work: Path, tmp_path: Path) -> NameWatch:
    watch = NameWatch((str(work),), tmp_path / "state" / "quarantine", ())
    watch.begin()
    return watch


def origins(found: Findings) -> list[str]:
    return sorted(one.origin for one in found.moved)


@pytest.mark.parametrize(
    "name",
    [
        ".git",
        ".GIT",
        ".Git ",
        ".git.",
        ".g\u200cit",
        "\uff0egit",
        "claude.md",
        "CLAUDE.MD",
        ".env.x",
        ".ENVRC",
        ".environment",
    ],
)
def test_a_name_is_protected_in_every_spelling(name: str) -> None:
    assert base_profile().is_protected(name), folded(name)


@pytest.mark.parametrize(
    "name", ["git", ".gitignore", ".github2", "AGENTS.txt", "env", "my.env", ".prettierrc", "package.json"]
)
def test_other_names_are_not_protected(name: str) -> None:
    assert not base_profile().is_protected(name)


@pytest.mark.case("TR-F05")
def test_a_moved_file_overwrites_nothing_and_its_origin_is_recorded(
    work: Path, watch: NameWatch, tmp_path: Path
) -> None:
    for text in ("first", "second"):
        (work / "sub" / ".envrc").write_text(text)
        watch.end()
    found = watch.take_news()
    assert origins(found) == [f"{work}/sub/.envrc"] * 2
    assert [Path(one.place).read_text() for one in found.moved] == ["first", "second"]
    written = [
        json.loads(path.read_text()) for path in sorted((tmp_path / "state" / "quarantine").glob("*/origins.json"))
    ]
    assert written == [{"1/.envrc": f"{work}/sub/.envrc"}] * 2
    assert watch.take_news() == Findings()


@pytest.mark.case("TR-F05")
def test_a_file_that_cannot_be_renamed_into_quarantine_is_copied_with_its_links(
    work: Path, watch: NameWatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = os.rename

    def rename_here(source: str, target: str | Path, *, src_dir_fd: int, dst_dir_fd: int | None = None) -> None:
        if dst_dir_fd is None:
            raise OSError(EXDEV, "the quarantine is on another file system")
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", rename_here)
    secret = tmp_path / "secret"
    secret.write_text("private")
    (work / "sub" / ".vscode").mkdir()
    (work / "sub" / ".vscode" / "tasks.json").write_text("x")
    (work / "sub" / ".vscode" / "link").symlink_to(secret)
    watch.end()
    (moved,) = watch.take_news().moved
    assert moved.place.startswith(str(tmp_path / "state"))
    assert Path(moved.place, "link").is_symlink()
    assert Path(moved.place, "tasks.json").read_text() == "x"
    assert [*(work / "sub").iterdir()] == []
    assert secret.read_text() == "private"


@pytest.mark.case("TR-F05")
def test_without_a_quarantine_folder_a_file_is_renamed_in_place(work: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("no folder can be made here")
    watch = NameWatch((str(work),), tmp_path / "state" / "quarantine", ())
    watch.begin()
    (work / "sub" / ".mcp.json").write_text("x")
    watch.end()
    (moved,) = watch.take_news().moved
    assert Path(moved.place).parent == work / "sub"
    assert Path(moved.place).name.startswith("mcp.json.quarantined-")
    assert [path.name for path in (work / "sub").iterdir()] == [Path(moved.place).name]


@pytest.mark.case("TR-F05")
def test_a_pipe_with_a_protected_name_blocks_nothing(work: Path, watch: NameWatch) -> None:
    os.mkfifo(work / "sub" / ".env")
    watch.end()
    assert origins(watch.take_news()) == [f"{work}/sub/.env"]


@pytest.mark.case("TR-F05")
def test_a_name_with_control_characters_is_escaped(work: Path, watch: NameWatch) -> None:
    folder = work / "sub" / "a\x1b[2J\n`rm -rf ~`"
    folder.mkdir()
    (folder / ".git").mkdir()
    watch.end()
    (warning,) = watch.take_news().warnings()
    assert warning.isprintable()
    assert "mv -nT" not in warning


@pytest.mark.case("TR-F05")
def test_a_file_that_appears_between_two_server_calls_is_reported_and_left(work: Path, watch: NameWatch) -> None:
    (work / "sub" / ".vscode").mkdir()  # while it starts
    watch.open_call()
    (work / "sub" / ".idea").mkdir()
    watch.close_call()
    assert origins(watch.take_news()) == [f"{work}/sub/.idea", f"{work}/sub/.vscode"]
    (work / "sub" / ".git").mkdir()
    while not watch.is_due():
        pass
    watch.open_call()
    (work / "sub" / ".envrc").touch()
    watch.close_call()
    found = watch.take_news()
    assert (origins(found), found.unclaimed) == ([f"{work}/sub/.envrc"], (f"{work}/sub/.git",))
    assert (work / "sub" / ".git").is_dir()
    (work / "sub" / ".hg").mkdir()
    assert watch.leave().unclaimed == (f"{work}/sub/.hg",)


@pytest.mark.case("TR-F05")
def test_a_server_that_ends_during_a_call_does_not_prevent_quarantine(work: Path, watch: NameWatch) -> None:
    watch.open_call()
    (work / "sub" / ".git").mkdir()
    assert watch.leave() == Findings()
    watch.close_call()
    assert origins(watch.take_news()) == [f"{work}/sub/.git"]


def test_placeholders_of_other_processes_are_not_moved(work: Path, watch: NameWatch) -> None:
    with ExitStack() as keep:
        grants = open_grants(SandboxProfile("sandboxed", writable=(str(work / "sub"),)), (), keep)
        [*protected_grants(grants, base_profile(), keep)]
        assert is_placeholder(str(work / "sub" / ".git"))
        watch.end()
        assert watch.take_news() == Findings()
        assert (work / "sub" / ".git").is_dir()


@pytest.mark.case("TR-F05")
def test_a_forged_placeholder_that_is_filled_later_is_moved(work: Path, watch: NameWatch, tmp_path: Path) -> None:
    forged = work / "sub" / ".vscode"
    forged.mkdir()
    os.utime(forged, (0, 0))
    watch.end()
    later = NameWatch((str(work),), tmp_path / "state" / "quarantine", ())
    later.begin()
    (forged / "tasks.json").write_text("evil")
    os.utime(forged, (0, 0))
    later.end()
    assert origins(later.take_news()) == [str(forged)]


@pytest.mark.case("TR-F05")
def test_an_ordinary_user_finds_folders_that_a_process_made_unreadable(keeper: Warden) -> None:
    work, place = keeper.folder("closed"), keeper.folder("quarantine")
    script = """
        cd "$1"; mkdir -p sub/.vscode shut/.vscode hidden/.vscode listed/.vscode
        chmod 0 sub/.vscode; chmod 500 sub; chmod 500 shut; chmod 0 hidden; chmod 400 listed
    """
    opening = 'cd "$1"; chmod 700 hidden listed'

    def attack() -> list[list[str]]:
        found = []
        for code in (script, opening):
            watch = NameWatch((str(work),), place, ())
            watch.begin()
            keeper_run(keeper, code, work)
            watch.end()
            found.append([one.place and Path(one.origin).parent.name for one in watch.take_news().moved])
        return found

    first, second = keeper.do(attack)
    everything = {"sub", "shut", "hidden", "listed"}
    assert {*first} | {*second} == everything
    assert {*first} >= ({"sub", "shut"} if keeper.user == "ordinary" else everything)
    assert not [*work.glob("*/.vscode")]


def keeper_run(keeper: Warden, code: str, work: Path) -> None:
    ended = asyncio.run(keeper.held("/bin/sh", "-c", code, "sh", str(work), cell=Cell(writable=(work,))))
    assert ended.exit_code == 0, ended.stderr


def test_an_empty_file_of_the_owner_is_not_a_placeholder(work: Path) -> None:
    (work / ".env").touch(0o644)
    os.utime(work / ".env", (0, 0))
    with ExitStack() as keep:
        [
            *protected_grants(
                open_grants(SandboxProfile("sandboxed", writable=(str(work),)), (), keep), base_profile(), keep
            )
        ]
    assert [path.name for path in work.iterdir() if path.is_file()] == [".env"]


@pytest.mark.case("TR-F05")
def test_a_link_at_the_top_of_a_project_is_restored_too(work: Path, tmp_path: Path) -> None:
    (work / "sub" / "CLAUDE.md").symlink_to("AGENTS.md")
    watch = NameWatch((str(work),), tmp_path / "state" / "quarantine", (), (str(work / "sub"),))
    watch.begin()
    (work / "sub" / "CLAUDE.md").unlink()
    (work / "sub" / "CLAUDE.md").write_text("evil")
    watch.end()
    assert origins(watch.take_news()) == [f"{work}/sub/CLAUDE.md"]
    assert (work / "sub" / "CLAUDE.md").readlink() == Path("AGENTS.md")


@pytest.mark.case("TR-F05")
def test_a_project_in_a_writable_folder_is_protected_like_the_top(tmp_path: Path) -> None:
    project = tmp_path / "code" / "project"
    project.mkdir(parents=True)
    (project / "CLAUDE.md").write_text("mine")
    with ExitStack() as keep:
        grants = open_grants(SandboxProfile("sandboxed", writable=(str(tmp_path / "code"),)), (), keep)
        shields = {one.path: one for one in protected_grants(grants, base_profile(), keep, (str(project),))}
    assert {f"{project}/.env", f"{project}/CLAUDE.md", f"{tmp_path}/code/.env"} <= {*shields}
    assert not any(one.is_writable for one in shields.values())
    assert [path.name for path in project.iterdir()] == ["CLAUDE.md"]
