"""The prefer verb: what clients see, and how the owner changes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]


@pytest.fixture(autouse=True)
def items(project: Path) -> None:
    tools, knowledge = project / ".ai" / "tools", project / ".ai" / "knowledge"
    tools.mkdir()
    knowledge.mkdir()
    for name in ("weather", "forecast"):
        head = f'"""Tell the {name}"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n__executor_id__ = '
        (tools / f"{name}.py").write_text(f'{head}"python_runtime"\n\n\ndef main(city: str):\n    return city\n')
    (knowledge / "clouds.md").write_text(
        "---\nid: clouds\ntitle: Clouds\nversion: 1.0.0\ntype: reference\n---\n\nThey are white.\n"
    )


@pytest.fixture
def file(home: Path) -> Path:
    (home / ".ai" / "memory").mkdir(parents=True)
    return home / ".ai" / "memory" / "preferences.yaml"


def names(answer: JsonObject, word: str = "tools") -> list[str]:
    return [as_text(as_object(row)["name"]) for row in as_list(answer[word])]


def test_a_list_shows_each_entry_with_its_item_and_its_cost(ask: Ask, file: Path) -> None:
    file.write_text("always_send: [weather, nowhere]\n")
    response = ask("prefer").content
    assert response["meta_tools"] == ["search", "load", "execute", "help"]
    (row,) = map(as_object, as_list(response["tools"]))
    assert (row["name"], row["identity"]) == ("weather", "project/local/weather@1.0.0")
    assert row["description"] == "Tell the weather"
    assert response["tokens"] == row["tokens"]
    tokens = row["tokens"]
    assert isinstance(tokens, int)
    assert 10 < tokens < 100
    assert "kiwi://knowledge/clouds" in names(response, "resources")
    assert ["nowhere" in as_text(notice) for notice in as_list(response["notices"])] == [True]


def test_the_owner_adds_and_removes_entries_and_the_rest_of_the_file_stays(ask: Ask, file: Path) -> None:
    file.write_text("# mine\nalways_send:\n  forecast: true  # daily\ntask_after: 9\n")
    added = ask("prefer", action="add", name="weather", **{"as": "sky"}).content
    assert (added["status"], added["came"], added["went"]) == ("preferred", ["sky"], [])
    assert file.read_text() == (
        "# mine\nalways_send:\n  forecast: true  # daily\n  weather:\n    as: sky\ntask_after: 9\n"
    )
    assert file.stat().st_mode & 0o777 == 0o644
    assert ask("prefer", action="remove", name="sky").content["went"] == ["sky"]
    assert file.read_text() == "# mine\nalways_send:\n  forecast: true  # daily\ntask_after: 9\n"


def test_the_first_entry_creates_a_private_file(ask: Ask, file: Path) -> None:
    assert not ask("prefer", action="add", name="weather").is_error
    assert file.read_text() == "always_send:\n  weather: true\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_list_of_names_can_be_changed_too(ask: Ask, file: Path) -> None:
    file.write_text("always_send: [weather]\n")
    assert ask("prefer", action="add", name="forecast").content["came"] == ["forecast"]
    assert names(ask("prefer").content) == ["forecast", "weather"]


@pytest.mark.req("D8")
def test_a_default_or_pattern_entry_is_switched_off_individually(ask: Ask, file: Path) -> None:
    assert ask("prefer", action="remove", name="help").content["went"] == ["help"]
    assert file.read_text() == "always_send:\n  help: false\n"
    ask("prefer", action="add", name="*")
    assert ask("prefer", action="remove", name="weather").content["went"] == ["weather"]
    assert "project/local/weather: false" in file.read_text()
    gone = ask("prefer", action="remove", name="kiwi://knowledge/clouds", kind="resource").content["went"]
    assert gone == ["kiwi://knowledge/clouds"]
    assert ask("prefer", action="add", name="help").content["came"] == ["help"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"action": "add"}, "name: is required"),
        ({"action": "add", "name": " "}, "names nothing"),
        ({"action": "add", "name": "a", "as": "b c"}, "is not a name that clients can call"),
        ({"action": "add", "name": "a*", "as": "b"}, "gives one name to several items"),
        ({"action": "add", "name": "a", "as": "b", "kind": "resource"}, "is not true or false"),
        ({"action": "remove", "name": "nowhere"}, "is not among what is sent"),
        ({"action": "drop"}, "there is no 'drop'"),
        ({"action": "add", "nam": "a"}, "unknown argument `nam`"),
    ],
)
def test_an_invalid_entry_is_refused_and_nothing_is_written(
    ask: Ask, file: Path, words: dict[str, Json], expected: str
) -> None:
    answer = ask("prefer", **words)
    assert answer.is_error
    assert expected in as_text(answer.content["message"])
    assert not file.exists()


@pytest.mark.req("D3")
def test_search_cannot_be_removed(ask: Ask, file: Path) -> None:
    answer = ask("prefer", action="remove", name="search")
    assert answer.content["code"] == "invalid_request"
    assert not file.exists()


def test_an_invalid_file_is_not_written(ask: Ask, file: Path) -> None:
    file.write_text("alway_send: [weather]\n")
    answer = ask("prefer", action="add", name="forecast")
    assert answer.content["code"] == "invalid_manifest"
    assert file.read_text() == "alway_send: [weather]\n"


async def test_a_model_may_list_and_not_change(project: Path, file: Path) -> None:
    kernel = Kernel(project, is_owner=False)
    assert not (await kernel.call("prefer", {})).is_error
    for action in ("add", "remove"):
        answer = await kernel.call("prefer", {"action": action, "name": "weather"})
        assert answer.content["code"] == "not_permitted"
        assert f"kiwi prefer {action} weather" in as_text(answer.content["suggestion"])
    assert not file.exists()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("C6")
def test_doctor_and_help_report_preferred_but_missing_items(ask: Ask, file: Path) -> None:
    file.write_text("always_send: [weather, nowhere]\n")
    checks = [as_object(check) for check in as_list(ask("doctor").content["checks"])]
    response = {
        as_text(check["status"]): as_text(check["detail"]) for check in checks if check["check"] == "preferences"
    }
    assert "1 always-sent tool," in response["ok"]
    assert "`nowhere` is not sent" in response["warning"]
    (notice,) = as_list(as_object(ask("help").content["installation"])["notices"])
    assert "`nowhere` is not sent" in as_text(notice)
    file.write_text("alwayssend: []\n")
    problems = [as_object(check) for check in as_list(ask("doctor").content["checks"])]
    assert any(check["check"] == "preferences" and check["status"] == "problem" for check in problems)


def test_only_the_named_entry_is_removed(ask: Ask, file: Path) -> None:
    file.write_text("always_send:\n  weather: true\n  project/local/weather: {as: sky}\n  '*': true\n")
    response = ask("prefer", action="remove", name="weather").content
    assert file.read_text() == "always_send:\n  project/local/weather: {as: sky}\n  '*': true\n"
    assert "sends `sky` all the same" in as_text(response["message"])
    ask("prefer", action="remove", name="*")
    assert file.read_text() == "always_send:\n  project/local/weather: {as: sky}\n"


def test_a_switched_off_item_is_sent_again_after_that_entry_is_removed(ask: Ask, file: Path) -> None:
    file.write_text("always_send:\n  help: false\n")
    assert ask("prefer", action="remove", name="help").content["came"] == ["help"]


def test_a_name_that_is_taken_is_refused_and_nothing_is_written(ask: Ask, file: Path) -> None:
    file.write_text("always_send: [forecast]\n")
    for taken, holder in (("forecast", "project/local/forecast"), ("load", "Kiwi's own tool")):
        answer = ask("prefer", action="add", name="weather", **{"as": taken})
        assert f"`{taken}` is taken, by {holder}" in as_text(answer.content["message"])
    assert file.read_text() == "always_send: [forecast]\n"


def test_a_name_that_another_entry_decides_is_reported(ask: Ask, file: Path) -> None:
    file.write_text("always_send:\n  project/local/weather: {as: sky}\n")
    response = ask("prefer", action="add", name="weather", **{"as": "rain"}).content
    assert "sent as `sky` all the same" in as_text(response["message"])


def test_a_missing_item_is_noted(ask: Ask, file: Path) -> None:
    response = ask("prefer", action="add", name="nowhere").content
    assert response["message"] == "`nowhere` is noted; it is sent once there is such a tool that can be used"
    assert file.exists()
