"""`kiwi prefer`: the tools that models see."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.surfaces.cli.conftest import Kiwi

from kiwi_mcp.domain.records import Receipt
from kiwi_mcp.domain.times import iso, run_id
from kiwi_mcp.kernel.store import Store


@pytest.fixture
def kiwi(project: Path, kiwi: Kiwi) -> Kiwi:
    """Run a command in a project with one tool."""
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "weather.py").write_text(
        '"""Tell the weather"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n'
        '__executor_id__ = "python_runtime"\n\n\ndef main(city: str):\n    return city\n'
    )

    return kiwi


def test_the_list_goes_to_stdout_and_hints_to_stderr(kiwi: Kiwi) -> None:
    assert kiwi("prefer", "add", "weather", "--as", "sky").out == "`weather` is sent from now on, as `sky`\n"
    ended = kiwi("prefer")
    assert ended.code == 0
    lines = ended.out.splitlines()
    assert [line.split()[:2] for line in lines[:5]] == [
        ["tool", "search"], ["tool", "load"], ["tool", "execute"], ["tool", "help"], ["tool", "sky"],
    ]  # fmt: skip
    assert lines[4].split()[3] == "project/local/weather"
    assert any(line.split()[1] == "kiwi://help/{topic}" for line in lines)
    assert "tokens in every conversation" in ended.err


def test_notices_go_to_stderr_and_a_missing_item_is_not_a_failure(kiwi: Kiwi) -> None:
    added = kiwi("prefer", "add", "nowhere")
    assert added.code == 0
    assert "warning: `nowhere` is not sent" in added.err
    listed = kiwi("prefer")
    assert (listed.code, "nowhere" in listed.out) == (0, False)
    assert "notice: `nowhere` is not sent" in listed.err


def test_suggestions_are_commands_with_their_reasons(kiwi: Kiwi, home: Path) -> None:
    ended = kiwi("prefer", "suggest")
    assert (ended.code, ended.out, ended.err) == (0, "", "Nothing would save tokens, as far as is known.\n")
    store = Store(home / ".ai")
    for day in range(5):
        moment = int(time.time() - day * 86_400) * 1_000
        identity = "project/local/weather@1.0.0"
        store.receipts().add(
            Receipt(run_id(moment, 0), iso(moment), "ana", "mcp", "run", "weather", "success", "standard", "", identity)
        )
    store.close()
    ended = kiwi("prefer", "suggest")
    assert ended.out.startswith("kiwi prefer add weather  # called in 5 of 5 conversations: ")
    assert ended.err == "1 change would save tokens.\n"
    (response,) = json.loads(kiwi("prefer", "suggest", "--json").out)["suggestions"]
    assert response["command"] == "kiwi prefer add weather"


def test_json_is_the_answer_itself(kiwi: Kiwi) -> None:
    changed = json.loads(kiwi("prefer", "remove", "help", "--json").out)
    assert (changed["status"], changed["went"]) == ("removed", ["help"])
    assert json.loads(kiwi("prefer", "--json").out)["meta_tools"] == ["search", "load", "execute"]


def test_an_impossible_change_is_an_error_with_a_hint(kiwi: Kiwi) -> None:
    ended = kiwi("prefer", "remove", "search")
    assert ended.code != 0
    assert ended.err.startswith("error: `search` is always sent")
    assert "hint: " in ended.err
    assert "'song' is not one of" in kiwi("prefer", "add", "weather", "--kind", "song").err


def test_list_is_a_subcommand_too(kiwi: Kiwi) -> None:
    assert kiwi("prefer", "list").out == kiwi("prefer").out


def test_the_fix_of_an_issue_is_shown_once(kiwi: Kiwi) -> None:
    ended = kiwi("prefer", "add", "weather", "--as", "two words")
    assert ended.err.count("Use 1 to 64 letters") == 1
