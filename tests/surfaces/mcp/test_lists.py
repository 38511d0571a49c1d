"""The stored tool list of stage one: the last one is used if it is still valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiwi_mcp.surfaces.mcp.handshake import conditions, load_prepared, load_tools, path_of, recall, stamp
from kiwi_mcp.surfaces.mcp.stdio_server import keep

TOOLS = {"legacy": '{"tools":[]}', "modern": '{"tools":[1]}'}


@pytest.fixture
def preferences(home: Path) -> Path:
    file = home / ".ai" / "preferences.yaml"
    file.parent.mkdir()
    file.write_text("always_send: [a]")
    return file


def kept(project: str) -> None:
    keep(Path(path_of(project)), {**conditions(project, stamp()), "tools": TOOLS})


def test_without_preferences_the_prepared_list_is_used() -> None:
    prepared = load_prepared()
    assert load_tools(prepared, "") == prepared["tools"]
    assert load_tools(prepared, "/some/project") == prepared["tools"]


def test_with_preferences_the_last_list_is_used_and_none_if_there_is_none(preferences: Path) -> None:
    assert load_tools(load_prepared(), "/some/project") == {}
    kept("/some/project")
    assert load_tools(load_prepared(), "/some/project") == TOOLS
    assert load_tools(load_prepared(), "/some/project/") == TOOLS
    assert load_tools(load_prepared(), "/another/project") == {}
    assert load_tools(load_prepared(), "") == {}


def test_a_list_made_with_other_preferences_is_not_used(preferences: Path) -> None:
    kept("")
    preferences.write_text("always_send: [a, b]")
    assert recall("") == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tools": 7}', '{"tools": {"legacy": 7}}', "null", "\ud800"])
def test_an_invalid_file_counts_as_none(text: str, preferences: Path) -> None:
    kept("")
    Path(path_of("")).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert recall("") == {}


def test_the_list_file_is_private_and_supports_names_of_any_length(preferences: Path) -> None:
    long = "/" + "/".join(["ü%" * 20] * 40)
    kept(long)
    assert recall(long) == TOOLS
    assert Path(path_of(long)).stat().st_mode & 0o077 == 0


def test_few_lists_are_stored(preferences: Path) -> None:
    for number in range(70):
        kept(f"/project/{number}")
    assert len([*Path(path_of("")).parent.iterdir()]) == 64
    assert recall("/project/69") == TOOLS


def test_without_write_access_nothing_is_stored(preferences: Path) -> None:
    (preferences.parent / "state").write_text("in the way")
    kept("")
    assert recall("") == {}


def test_a_stored_list_is_complete(preferences: Path) -> None:
    kept("")
    assert json.loads(Path(path_of("")).read_text()).keys() == {"version", "project", "stamp", "tools"}


def test_a_list_made_with_preferences_of_a_memory_elsewhere_follows_them(preferences: Path, tmp_path: Path) -> None:
    config, moved = preferences.with_name("config.yaml"), tmp_path / "preferences.yaml"
    preferences.unlink()
    moved.write_text("always_send: [a]")
    config.write_text(f"memory_root: {tmp_path}\n")

    def kept_elsewhere() -> None:
        made_for = {**conditions("", stamp(str(moved))), "preferences": str(moved), "tools": TOOLS}
        keep(Path(path_of("")), made_for)

    kept_elsewhere()
    assert recall("") == TOOLS
    moved.write_text("always_send: [a, b]")
    assert recall("") == {}
    kept_elsewhere()
    config.write_text(f"memory_root: {tmp_path / 'other'}\n")
    assert recall("") == {}
