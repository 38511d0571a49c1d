"""The list that stage one gives out where the owner prefers tools of their own: the last one, if it still holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kiwi_mcp.surfaces.mcp.greeting import load_prepared, load_tools
from kiwi_mcp.surfaces.mcp.lists import conditions, path_of, recall, stamp
from kiwi_mcp.surfaces.mcp.serving import keep

TOOLS = {"legacy": '{"tools":[]}', "modern": '{"tools":[1]}'}


@pytest.fixture
def preferences(home: Path) -> Path:
    file = home / ".ai" / "preferences.yaml"
    file.parent.mkdir()
    file.write_text("always_send: [a]")
    return file


def kept(project: str) -> None:
    keep(Path(path_of(project)), {**conditions(project, stamp()), "tools": TOOLS})


def test_without_preferences_the_prepared_list_holds() -> None:
    prepared = load_prepared()
    assert load_tools(prepared, "") == prepared["tools"]
    assert load_tools(prepared, "/some/project") == prepared["tools"]


def test_with_preferences_the_last_list_is_given_and_nothing_where_there_is_none(preferences: Path) -> None:
    assert load_tools(load_prepared(), "/some/project") == {}
    kept("/some/project")
    assert load_tools(load_prepared(), "/some/project") == TOOLS
    assert load_tools(load_prepared(), "/some/project/") == TOOLS
    assert load_tools(load_prepared(), "/another/project") == {}
    assert load_tools(load_prepared(), "") == {}


def test_a_list_that_was_made_under_other_preferences_does_not_hold(preferences: Path) -> None:
    kept("")
    preferences.write_text("always_send: [a, b]")
    assert recall("") == {}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"tools": 7}', '{"tools": {"legacy": 7}}', "null", "\ud800"])
def test_a_file_that_is_not_understood_counts_as_none(text: str, preferences: Path) -> None:
    kept("")
    Path(path_of("")).write_text(text, encoding="utf-8", errors="surrogatepass")
    assert recall("") == {}


def test_the_file_is_for_its_owner_alone_and_names_of_any_length_have_one(preferences: Path) -> None:
    long = "/" + "/".join(["ü%" * 20] * 40)
    kept(long)
    assert recall(long) == TOOLS
    assert Path(path_of(long)).stat().st_mode & 0o077 == 0


def test_few_lists_are_kept(preferences: Path) -> None:
    for number in range(70):
        kept(f"/project/{number}")
    assert len([*Path(path_of("")).parent.iterdir()]) == 64
    assert recall("/project/69") == TOOLS


def test_where_nothing_can_be_written_nothing_is_kept(preferences: Path) -> None:
    (preferences.parent / "state").write_text("in the way")
    kept("")
    assert recall("") == {}


def test_what_is_kept_is_whole(preferences: Path) -> None:
    kept("")
    assert json.loads(Path(path_of("")).read_text()).keys() == {"version", "project", "stamp", "tools"}
