"""Doctor: one line for each MCP server, and one for all that is preferred and elsewhere."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

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
