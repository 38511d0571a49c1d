"""Paths of the memory: none leads out of its folder, whatever is swapped meanwhile."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread

import pytest

from kiwi_mcp.domain.errors import Conflict, InvalidArguments, KiwiError, NotFound, PathInvalid, ReservedPath, TooLarge
from kiwi_mcp.memory.files import MAX_BYTES, Change, apply, list_files, planned, read_bytes, read_text, search_files


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "memory" / "notes").mkdir(parents=True)
    (tmp_path / "memory" / "notes" / "tea.md").write_text("Ann drinks tea.\n")
    (tmp_path / "outside.md").write_text("secret")
    return tmp_path / "memory"


@pytest.mark.req("N4")
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("../outside.md", PathInvalid),
        ("/etc/passwd", PathInvalid),
        ("notes/../../outside.md", PathInvalid),
        ("notes//tea.md", PathInvalid),
        ("notes\\tea.md", PathInvalid),
        ("notes/tea\n.md", PathInvalid),
        ("a" * 300, PathInvalid),
        ("", PathInvalid),
        (".git/config", ReservedPath),
        ("notes/.hidden", ReservedPath),
        ("preferences.yaml", ReservedPath),
        ("policy.yaml", ReservedPath),
        ("Preferences.YAML", ReservedPath),
    ],
)
def test_a_path_outside_or_of_the_owner_is_not_changed(root: Path, path: str, error: type[KiwiError]) -> None:
    with pytest.raises(error) as refused:
        planned(root, "write", {"path": path, "content": "x"})
    assert refused.value.suggestion


@pytest.mark.req("N4")
def test_links_are_neither_read_nor_written_nor_listed(root: Path) -> None:
    (root / "link.md").symlink_to(root.parent / "outside.md")
    (root / "away").symlink_to(root.parent)
    os.link(root.parent / "outside.md", root / "twice.md")

    for path in ("link.md", "away/outside.md", "twice.md"):
        with pytest.raises(PathInvalid):
            read_bytes(root, path)
        with pytest.raises(PathInvalid):
            planned(root, "write", {"path": path, "content": "x"})
    assert [entry["path"] for entry in list_files(root, "", is_recursive=True)["entries"]] == [  # type: ignore[union-attr,index,call-overload]
        *("notes", "notes/tea.md", "twice.md")
    ]
    assert search_files(root, "secret", "", in_names=False)["matches"] == []


@pytest.mark.req("N4")
def test_a_folder_that_is_swapped_for_a_link_meanwhile_leads_nowhere(root: Path) -> None:
    outside = root.parent / "target"
    outside.mkdir()
    away, done = root.parent / "away", Event()

    def swap() -> None:
        notes = root / "notes"
        while not done.is_set():  # a folder that is made again meanwhile is in the way of a step
            for step in (lambda: notes.rename(away), lambda: notes.symlink_to(outside), notes.unlink):
                with suppress(OSError):
                    step()
            with suppress(OSError):
                away.rename(notes)
            shutil.rmtree(away, ignore_errors=True)

    swapping = Thread(target=swap)
    swapping.start()
    try:
        for number in range(200):
            try:
                apply(root, Change(f"notes/{number}.md", None, b"x"))
            except (KiwiError, OSError):
                continue
    finally:
        done.set()
        swapping.join(120)
    assert [*outside.iterdir()] == []


def test_a_change_is_checked_against_the_version_that_was_read(root: Path) -> None:
    read = read_text(root, "notes/tea.md")
    assert read["content"] == "Ann drinks tea.\n"

    edit = {"path": "notes/tea.md", "find": "tea", "replace": "cocoa", "expected_version": read["version"]}
    apply(root, planned(root, "edit", edit))
    assert (root / "notes" / "tea.md").read_text() == "Ann drinks cocoa.\n"
    with pytest.raises(Conflict) as refused:
        planned(root, "write", {"path": "notes/tea.md", "content": "", "expected_version": read["version"]})
    assert refused.value.details["version"] == read_text(root, "notes/tea.md")["version"]
    with pytest.raises(Conflict):
        planned(root, "write", {"path": "notes/tea.md", "content": "", "expected_version": "new"})


@pytest.mark.parametrize("find", ["missing", "n", ""])
def test_an_edit_needs_exactly_one_match(root: Path, find: str) -> None:
    with pytest.raises(InvalidArguments):
        planned(root, "edit", {"path": "notes/tea.md", "find": find, "replace": "x"})


def test_what_is_not_there_or_too_large_is_refused(root: Path) -> None:
    for action in ("edit", "delete"):
        with pytest.raises(NotFound):
            planned(root, action, {"path": "notes/none.md", "find": "a", "replace": "b"})
    with pytest.raises(TooLarge):
        planned(root, "write", {"path": "a.md", "content": "x" * (MAX_BYTES + 1)})
    (root / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(PathInvalid):
        read_text(root, "bytes")


def test_a_search_finds_lines_and_names_within_bounds(root: Path) -> None:
    (root / "long.md").write_text("needle " * 200 + "\n" + "a needle\n" * 60)

    found = search_files(root, "NEEDLE", "", in_names=False)
    assert len(found["matches"]) == 50  # type: ignore[arg-type]
    assert found["omitted_matches"] == 11
    assert max(len(match["text"]) for match in found["matches"]) == 500  # type: ignore[union-attr,index,call-overload,arg-type]
    assert search_files(root, "tea", "notes", in_names=True)["matches"] == [{"path": "notes/tea.md"}]


def test_a_long_file_is_shown_without_a_comparison_that_takes_too_long(root: Path) -> None:
    (root / "long.md").write_text("".join(f"a{number % 7}\n" for number in range(200_000)))

    change = planned(root, "write", {"path": "long.md", "content": "".join(f"a{n % 5}\n" for n in range(200_000))})

    assert change.diff().startswith(
        "--- before, from line 3: 199,998 lines\n+++ after, from line 3: 199,998 lines\n+a2\n"
    )
    assert planned(root, "write", {"path": "agents.MD", "content": "x"}).asks_always


def test_a_change_far_down_in_a_long_file_is_shown(root: Path) -> None:
    lines = [f"line {number}\n" for number in range(5_000)]
    (root / "long.py").write_text("".join(lines))
    diff = planned(root, "edit", {"path": "long.py", "find": "line 4500\n", "replace": "evil()\n"}).diff()
    assert diff.splitlines()[:2] == ["--- before, from line 4,498", "+++ after, from line 4,498"]
    assert diff.splitlines()[3:] == [
        *(" line 4497", " line 4498", " line 4499", "-line 4500", "+evil()"),
        *(" line 4501", " line 4502", " line 4503"),
    ]


@pytest.mark.parametrize("end", ["\u2028", "\r", "\x0b", "\x0c", "\x1c", "\x85"])
def test_what_no_compiler_takes_for_the_end_of_a_line_is_part_of_the_difference(root: Path, end: str) -> None:
    (root / "a.py").write_text("# note\ncheck()\n")
    change = planned(root, "edit", {"path": "a.py", "find": "# note\n", "replace": f"# note{end}"})
    assert change.diff().split("\n")[3:] == ["-# note", "-check()", f"+# note{end}check()"]


def test_a_deleted_file_leaves_no_empty_folder(root: Path) -> None:
    apply(root, planned(root, "delete", {"path": "notes/tea.md"}))
    assert [*root.iterdir()] == []
