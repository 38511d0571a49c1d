"""Doctor: one line for each MCP server, and one for all that is preferred and elsewhere."""

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


def test_each_server_has_a_line_that_says_what_waits_and_what_is_missing(ask: Ask, tmp_path: Path) -> None:
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


def test_what_is_preferred_and_in_other_projects_is_one_line(ask: Ask, home: Path) -> None:
    (home / ".ai").mkdir()
    (home / ".ai" / "preferences.yaml").write_text("always_send: [here, there, elsewhere]\n")
    (check,) = (check for check in checks(ask, "preferences") if check["status"] == "warning")
    assert as_text(check["detail"]).startswith("3 of what you prefer is not here")
    assert "`there`" in as_text(check["detail"])


def test_the_machine_is_tested_where_no_tool_had_that_done(ask: Ask, home: Path) -> None:
    kept = home / ".cache" / "kiwi" / "isolation.json"
    kept.unlink()
    (check,) = checks(ask, "isolation")
    assert "standard by rlimits" in as_text(check["detail"])
    assert kept.is_file()


def test_what_kiwi_installs_by_itself_lacks_no_program(
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


def test_a_word_of_the_environment_that_is_no_half_of_search_is_told_and_ignored(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [check["status"] for check in checks(ask, "search")] == ["ok"]
    monkeypatch.setenv("KIWI_SEARCH", "bogus")
    fault = checks(ask, "search")[0]
    assert (fault["status"], fault["fix"]) == ("problem", "Write one of: meaning, words.")
    assert fault["detail"] == "KIWI_SEARCH is not how items are found, so it is ignored"
