"""Doctor: one line for each MCP server, and one for missing preferred items."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer

SCRIPT = Path(__file__).parents[1] / "data" / "mcp" / "scripted.py"
Ask = Callable[..., Answer]


def checks(ask: Ask, name: str) -> list[JsonObject]:
    found = map(as_object, as_list(ask("doctor").content["checks"]))
    return [check for check in found if as_text(check["check"]) == name]


def offer(file: Path, *names: str) -> None:
    tools = [{"name": name, "inputSchema": {"type": "object"}} for name in names]
    file.write_text(json.dumps({"tools": tools}))


@pytest.mark.usefixtures("sandbox")
def test_each_server_has_a_line_with_pending_changes_and_missing_parts(ask: Ask, tmp_path: Path) -> None:
    file = tmp_path / "offers.json"
    offer(file, "echo")
    words = {"command": sys.executable, "args": [str(SCRIPT), str(file)]}
    ask("mcp", action="add", server="one", **words)
    (check,) = checks(ask, "MCP server one")
    assert (check["status"], check["detail"]) == ("ok", "known: 1 accepted")

    offer(file, "echo", "fresh")
    ask("mcp", action="refresh", server="one")
    ask("mcp", action="add", server="two", start=False, env={"KEY": "${NOWHERE_SET}"}, **words)
    (check,) = checks(ask, "MCP server one")
    assert (check["status"], check["detail"]) == ("warning", "known: 1 accepted, 1 new")
    assert "kiwi mcp accept one" in as_text(check["fix"])
    (check,) = checks(ask, "MCP server two")
    assert as_text(check["detail"]).startswith("never asked")
    assert "not set: ${NOWHERE_SET}" in as_text(check["detail"])


@pytest.mark.usefixtures("sandbox")
def test_preferred_items_of_other_projects_are_one_line(ask: Ask, home: Path) -> None:
    (home / ".ai").mkdir()
    (home / ".ai" / "preferences.yaml").write_text("always_send: [here, there, elsewhere]\n")
    (check,) = (check for check in checks(ask, "preferences") if check["status"] == "warning")
    assert as_text(check["detail"]).startswith("3 of what you prefer is not here")
    assert "`there`" in as_text(check["detail"])


@pytest.mark.usefixtures("sandbox")
def test_doctor_tests_the_machine_if_no_tool_did(ask: Ask, home: Path) -> None:
    kept = home / ".cache" / "kiwi" / "isolation.json"
    kept.unlink()
    (check,) = checks(ask, "isolation")
    assert "standard by rlimits" in as_text(check["detail"])
    assert kept.is_file()


@pytest.mark.usefixtures("sandbox")
def test_programs_that_kiwi_installs_are_not_missing(
    ask: Ask, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = project / ".ai" / "tools"
    folder.mkdir()
    head = "tool_type: mcp_server\nversion: 1.0.0\nexecutor: subprocess\ndescription: One\n"
    for name, command in {
        "clock": "uvx, args: [mcp-server-time]",
        "board": "npx, args: [-y, board-server]",
        "odd": "uvx, args: [git+https://code.test/odd]",
    }.items():
        config = f"config: {{transport: stdio, command: {command}}}\n"
        (folder / f"{name}.yaml").write_text(f"tool_id: {name}\n{head}{config}")
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))

    assert [check["status"] for check in checks(ask, "clock")] == ["ok"]
    assert "`npm` is not on the PATH" in [check["detail"] for check in checks(ask, "board")]
    assert "`uvx` is not on the PATH" in [check["detail"] for check in checks(ask, "odd")]


@pytest.mark.usefixtures("sandbox")
def test_an_invalid_search_mode_variable_is_reported_and_ignored(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [check["status"] for check in checks(ask, "search")] == ["ok"]
    monkeypatch.setenv("KIWI_SEARCH", "bogus")
    fault = checks(ask, "search")[0]
    assert (fault["status"], fault["fix"]) == ("problem", "Write one of: meaning, words.")
    assert fault["detail"] == "KIWI_SEARCH is not how items are found, so it is ignored"
