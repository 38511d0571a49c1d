"""`kiwi setup`: the servers of clients come to Kiwi, Kiwi comes into the clients, and the files can be put back."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.calls import Answers, Caller, Questions
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel

SCRIPT = Path(__file__).parents[2] / "data" / "mcp" / "scripted.py"
TOKEN = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
CLAUDE = f"""#!{sys.executable}
import json, pathlib, sys
path = pathlib.Path.home() / ".claude.json"
words = json.loads(path.read_text())
_, _, verb, _, scope, name, *command = sys.argv
assert scope == "user"
if verb == "add":
    words["mcpServers"][name] = {{"type": "stdio", "command": command[1], "args": command[2:]}}
else:
    del words["mcpServers"][name]
path.write_text(json.dumps(words))
"""
Ask = Callable[..., Answer]


def entry(home: Path, name: str, **words: object) -> JsonObject:
    offers = home / f"{name}.json"
    tool = {"name": f"{name}_tool", "description": f"Does {name}. " * 200, "inputSchema": {"type": "object"}}
    offers.write_text(json.dumps({"by": name, "tools": [tool]}))
    return {"command": sys.executable, "args": [str(SCRIPT), str(offers)], **json.loads(json.dumps(words))}


@pytest.fixture
def files(home: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """A client with a file, one with a command of its own, and a project that brings a server."""
    found = {
        "cursor": home / ".cursor" / "mcp.json",
        "claude": home / ".claude.json",
        "project": project / ".mcp.json",
    }
    found["cursor"].parent.mkdir()
    mine = {"one": entry(home, "one"), "keyed": entry(home, "keyed", env={"KEY": TOKEN})}
    found["cursor"].write_text("// mine\n" + json.dumps({"mcpServers": mine}, indent=3))
    found["claude"].write_text(json.dumps({"startups": 1, "mcpServers": {"two": entry(home, "two")}}))
    found["project"].write_text(json.dumps({"mcpServers": {"brought": entry(home, "brought")}}))
    programs = home / "bin"
    programs.mkdir()
    (programs / "claude").write_text(CLAUDE)
    (programs / "claude").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return found


def entries(path: Path) -> set[str]:
    text = path.read_text()
    return set(json.loads(text[text.index("{") :])["mcpServers"])


@pytest.mark.usefixtures("sandbox")
def test_setup_moves_servers_to_kiwi_and_undo_puts_every_file_back(ask: Ask, files: dict[str, Path]) -> None:
    before = {name: path.read_bytes() for name, path in files.items()}

    done = ask("setup", yes=True)

    servers = {as_text(as_object(one)["server"]): as_object(one) for one in as_list(done.content["servers"])}
    assert {name: (one["may_reach"], one.get("fault")) for name, one in servers.items()} == {
        "one": ("no network", None),
        "keyed": ("no network", None),
        "two": ("no network", None),
    }
    assert done.content["project_files"] == {".mcp.json": ["brought"]}
    assert entries(files["cursor"]) == {"kiwi"}
    assert entries(files["claude"]) == {"kiwi"}
    assert files["project"].read_bytes() == before["project"]
    assert int(str(done.content["tokens_before"])) > 2 * int(str(done.content["tokens_after"]))
    assert TOKEN not in json.dumps(done.content)
    assert not ask("execute", item_id="keyed_tool").is_error

    back = ask("setup", undo=True)
    assert back.content["status"] == "done", back.content
    assert {name: path.read_bytes() for name, path in files.items()} == before
    assert ask("setup", undo=True).content["code"] == "not_found"


@pytest.mark.usefixtures("sandbox")
def test_undo_keeps_what_was_changed_since_and_shows_the_difference(ask: Ask, files: dict[str, Path]) -> None:
    ask("setup", yes=True)
    later = json.loads(files["claude"].read_text())
    files["claude"].write_text(json.dumps({**later, "startups": 2}))
    text = files["cursor"].read_text()
    files["cursor"].write_text(text.replace("// mine", "// mine, and more"))

    back = ask("setup", undo=True)

    claude = json.loads(files["claude"].read_text())
    assert (claude["startups"], set(claude["mcpServers"])) == (2, {"two"})
    assert files["cursor"].read_text().startswith("// mine, and more")
    assert entries(files["cursor"]) == {"one", "keyed"}
    differences = [as_text(as_object(one)["diff"]) for one in as_list(back.content["clients"])]
    assert all("-" in one and "+" in one and "kiwi" in one for one in differences)
    assert TOKEN not in json.dumps(back.content)


@pytest.mark.usefixtures("sandbox")
async def test_the_owner_is_asked_once_and_grants_hosts_or_stops(project: Path, files: dict[str, Path]) -> None:
    asked: list[str] = []
    before = files["cursor"].read_bytes()
    typed = iter(["no", "one=api.example.com two=example.org"])

    async def answer(questions: Questions) -> Answers:
        asked.extend(as_text(one.params["message"]) for one in questions.values())
        return {key: {"action": "accept", "content": {"hosts": next(typed)}} for key in questions}

    kernel = Kernel(project)
    stopped = await kernel.call("setup", {}, Caller(ask=answer, is_owner=True))
    assert (stopped.content["status"], files["cursor"].read_bytes()) == ("stopped", before)
    done = await kernel.call("setup", {}, Caller(ask=answer, is_owner=True))
    await kernel.aclose()

    assert not done.is_error, done.content
    assert len(asked) == 2
    assert "Without network: keyed, one, two." in asked[1]
    servers = [as_object(one) for one in as_list(done.content["servers"])]
    assert {as_text(one["server"]): one["may_reach"] for one in servers} == {
        "keyed": "no network",
        "one": "api.example.com",
        "two": "example.org",
    }
    assert entries(files["cursor"]) == {"kiwi"}
