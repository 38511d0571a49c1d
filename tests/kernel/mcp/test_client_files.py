"""Each client's own file: its servers are read, Kiwi is written into it, servers are replaced, and undo restores it."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import Invalid
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.verbs.mcp.connect import _by_own_command
from kiwi_mcp.manifest.mcp.clients import SCOPES, Scope, apply, clients, plan_connect, plan_undo, read_configuration

Ask = Callable[..., Answer]
COMMAND = "/opt/kiwi/bin/kiwi"
ALL: list[tuple[str, Scope]] = [
    (client.id, scope) for client in clients().values() for scope in SCOPES if client.places(scope, "linux")
]
CODEX = """# mine
model = "o3"  # the model

[mcp_servers.time] # ticks
command = "uvx"
args = ["mcp-server-time"]

[mcp_servers.time.env]
TZ = "UTC"

# remote
[mcp_servers."my docs"]
url = "https://docs.test/mcp"
bearer_token_env_var = "DOCS_TOKEN"

[tui]
theme = "dark"
"""
GOOSE = """GOOSE_PROVIDER: anthropic # mine
extensions:
  developer: {type: builtin, name: developer, enabled: true}
  # ticks
  time:
    type: stdio
    name: time
    cmd: uvx
    args:
    - mcp-server-time
    envs:
      TZ: UTC
    enabled: true
    timeout: 300
  # remote
  docs:
    type: streamable_http
    uri: https://docs.test/mcp
    enabled: false
GOOSE_MODE: auto
"""
CONTINUE = """name: mine
version: 1.0.0
schema: v1
mcpServers:
- name: time # ticks
  command: uvx
  args: [mcp-server-time]
  env: {TZ: UTC}
- name: docs
  type: streamable-http
  url: https://docs.test/mcp
# after
models: []
"""
STDIO: JsonObject = {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "UTC"}}
OPENCODE: JsonObject = {"type": "local", "command": ["uvx", "mcp-server-time"], "environment": {"TZ": "UTC"}}


def text_for(client: str) -> str:
    """A file as the client would have it, with a server `time` in it."""
    if text := {"codex": CODEX, "goose": GOOSE, "continue": CONTINUE}.get(client):
        return text
    known = clients()[client]
    servers: JsonObject = {"time": OPENCODE if client == "opencode" else {**known.entry, **STDIO}}
    root: JsonObject = {"theme": "dark", known.key[0]: servers}
    comment = "// mine\n" if known.has_comments else ""
    return comment + json.dumps(root, indent=2) + "\n"


@pytest.mark.parametrize(("client", "scope"), ALL)
def test_a_client_file_is_read_written_replaced_and_restored(
    client: str, scope: Scope, home: Path, project: Path
) -> None:
    known, before = clients()[client], text_for(client)
    path = (home if scope == "user" else project) / known.places(scope, "linux")[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before)
    [time] = [one for one in read_configuration(path).servers if one.name == "time"]
    assert time.manifest["config"] == {"transport": "stdio", **STDIO}

    change = plan_connect(client, scope, home=home, project=project, command=COMMAND, without=("time",))
    assert COMMAND in change.diff
    assert "UTC" not in change.diff
    apply(change)
    left = known.file.servers(path.read_text(), what="it")
    assert "time" not in left
    assert left["kiwi"] == known.entry_of(COMMAND, known.arguments(scope))
    for comment in ("# mine", "# the model", "# remote", "# after", "// mine"):
        assert (comment in path.read_text()) is (comment in before)
    assert not plan_connect(client, scope, home=home, project=project, command=COMMAND).is_needed

    shutil.copy(path, path.with_name("touched"))
    apply(plan_undo(client, scope, home=home, project=project))
    assert path.read_text() == before


@pytest.mark.parametrize("client", ["codex", "goose", "continue", "zed", "opencode"])
def test_undo_of_a_file_that_changed_since_puts_back_only_the_entries(client: str, home: Path, project: Path) -> None:
    known = clients()[client]
    path = home / known.places("user", "linux")[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text_for(client))
    was = known.file.servers(path.read_text(), what="it")
    apply(plan_connect(client, "user", home=home, project=project, command=COMMAND, without=("time",)))
    mark = "// later\n" if known.format == "json" else "# later\n"
    path.write_text(mark + path.read_text())

    undone = plan_undo(client, "user", home=home, project=project)
    apply(undone)
    assert undone.put_back == ("time",)
    assert path.read_text().startswith(mark)
    assert known.file.servers(path.read_text(), what="it") == was


@pytest.mark.parametrize("is_added", [True, False])
def test_undo_after_a_second_connect_takes_kiwi_out_and_puts_all_servers_back(
    home: Path, project: Path, *, is_added: bool
) -> None:
    known, path = clients()["cursor"], home / ".cursor/mcp.json"
    path.parent.mkdir()
    before = json.dumps({"mcpServers": {"a": STDIO, "b": STDIO}}, indent=2)
    path.write_text(before)
    apply(plan_connect("cursor", "user", home=home, project=project, command=COMMAND, without=("a", "b")))
    if is_added:
        path.write_text(known.file.with_server(path.read_text(), "c", STDIO, what="it"))
    command = COMMAND if is_added else "/new/kiwi"
    apply(plan_connect("cursor", "user", home=home, project=project, command=command, without=("c",)))

    apply(plan_undo("cursor", "user", home=home, project=project))
    assert list(known.file.servers(path.read_text(), what="it")) == ["a", "b", *(["c"] if is_added else [])]
    assert is_added or path.read_text() == before


def test_a_style_that_cannot_be_edited_is_refused_and_left(home: Path, project: Path) -> None:
    path = home / ".codex/config.toml"
    path.parent.mkdir()
    for text in ('mcp_servers = { a = { command = "x" } }\n', "mcp_servers = 3\n", "[mcp_servers\n"):
        path.write_text(text)
        with pytest.raises(Invalid):
            plan_connect("codex", "user", home=home, project=project, command=COMMAND)
        assert path.read_text() == text


def test_the_words_of_each_client_are_understood(home: Path) -> None:
    def config(place: str, text: str) -> JsonObject:
        path = home / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        [server] = [one for one in read_configuration(path).servers if not one.is_disabled and one.name == "it"]
        return as_object(server.manifest["config"])

    bearer = config(".codex/config.toml", '[mcp_servers.it]\nurl = "https://a.test"\nbearer_token_env_var = "TOKEN"\n')
    assert bearer["headers"] == {"Authorization": "Bearer ${TOKEN}"}
    goose = "extensions:\n  it: {type: stdio, cmd: x, args: [], env_keys: [KEY], enabled: true}\n"
    assert config(".config/goose/config.yaml", goose)["env"] == {"KEY": "${KEY}"}
    old = {"context_servers": {"it": {"command": {"path": "x", "args": ["a"], "env": {"B": "c"}}}}}
    assert config(".config/zed/settings.json", json.dumps(old)) == {
        "transport": "stdio", "command": "x", "args": ["a"], "env": {"B": "c"},
    }  # fmt: skip
    remote = {"mcp": {"it": {"type": "remote", "url": "https://a.test", "headers": {"X-Key": "{env:KEY}"}}}}
    assert config("opencode.json", json.dumps(remote))["headers"] == {"X-Key": "${KEY}"}
    gemini = {"mcpServers": {"it": {"command": "x", "env": {"KEY": "$MY_KEY", "PRICE": "a$B"}}}}
    assert config(".gemini/settings.json", json.dumps(gemini))["env"] == {"KEY": "${MY_KEY}", "PRICE": "a$B"}


def test_connect_alone_lists_the_clients_that_are_here(ask: Ask, home: Path, project: Path) -> None:
    for client in ("codex", "goose"):
        path = home / clients()[client].places("user", "linux")[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_for(client))
    ask("mcp", action="connect", client="codex", location="user")
    found = ask("mcp", action="connect").content
    rows = {as_text(as_object(row)["client"]): as_object(row) for row in as_list(found["clients"])}
    assert {name: (row["connected"], row["servers"]) for name, row in rows.items()} == {
        "codex": (True, ["time", "my docs"]), "goose": (False, ["time", "docs"]),
    }  # fmt: skip
    assert len(as_list(found["known"])) == 16


@pytest.mark.usefixtures("processes")
def test_a_file_that_its_client_rewrites_is_changed_by_its_own_command(
    ask: Ask, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/typed\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    (home / ".claude.json").write_text(text_for("claude-code"))
    done = ask("mcp", action="connect", client="claude-code", location="user").content
    assert done["status"] == "done", done
    assert (home / ".claude.json").read_text() == text_for("claude-code")
    typed = (tmp_path / "typed").read_text()
    assert typed.startswith("mcp add --scope user kiwi -- /")
    assert typed.endswith("/kiwi serve\n")
    program.unlink()
    missing = ask("mcp", action="connect", client="claude-code", location="user").content
    assert "`claude mcp add --scope user kiwi -- /" in as_text(missing["suggestion"])


@pytest.mark.usefixtures("processes")
def test_a_client_adds_kiwi_before_it_removes_other_servers(
    home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "claude"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$2 $5" >> {tmp_path}/typed\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    path = home / ".claude.json"
    path.write_text(text_for("claude-code"))
    change = plan_connect("claude-code", "user", home=home, project=project, command=COMMAND, without=("time",))
    asyncio.run(_by_own_command(change, "claude-code", "user", COMMAND))
    assert (tmp_path / "typed").read_text().splitlines() == ["add kiwi", "remove time"]
