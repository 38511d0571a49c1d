"""Imports from other clients: where servers go, and what stays in the file of the client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.mcp_servers import launch_summary
from kiwi_mcp.manifest.mcp.clients import REPLACED

SCRIPT = Path(__file__).parents[2] / "data" / "mcp" / "scripted.py"
TOKEN = "ghp_abcdefghijklmnopqrstuvwxyz0123456789"
Ask = Callable[..., Answer]


@dataclass
class Desk:
    """A user with clients that start scripted servers."""

    home: Path
    project: Path
    entries: dict[str, JsonObject] = field(default_factory=dict)

    def server(self, name: str, **words: Json) -> JsonObject:
        """Return the entry of a server in a client's file."""
        offers = self.home / f"{name}.json"
        tool = {"name": f"{name}_tool", "description": f"Does {name}", "inputSchema": {"type": "object"}}
        offers.write_text(json.dumps({"by": name, "tools": [tool]}))
        return {"command": sys.executable, "args": [str(SCRIPT), str(offers)], **words}

    def cursor(self, **servers: JsonObject) -> Path:
        return self._client(self.home / ".cursor" / "mcp.json", servers)

    def shared(self, **servers: JsonObject) -> Path:
        return self._client(self.project / ".mcp.json", servers)

    def _client(self, path: Path, servers: dict[str, JsonObject]) -> Path:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"mcpServers": servers}, indent=2))
        return path


@pytest.fixture
def desk(home: Path, project: Path) -> Desk:
    return Desk(home, project)


def rows(answer: Answer) -> list[JsonObject]:
    assert not answer.is_error, answer.content
    return [as_object(row) for row in as_list(answer.content["servers"])]


def servers_in(path: Path) -> list[str]:
    return list(json.loads(path.read_text())["mcpServers"])


def without_project(verb: str, **words: Json) -> Answer:
    """What a model is answered by a server that was started for no project."""

    async def call() -> Answer:
        kernel = Kernel(is_owner=False)
        try:
            return await kernel.call(verb, words)
        finally:
            await kernel.aclose()

    return asyncio.run(call())


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-MC-06")
def test_user_servers_go_to_the_user_and_project_servers_to_the_project(ask: Ask, desk: Desk) -> None:
    desk.cursor(mine=desk.server("mine"))
    desk.shared(ours=desk.server("ours"))
    response = {as_text(row["server"]): row for row in rows(ask("mcp", action="import", all=True))}
    assert {name: (row["location"], row["from"], row["client"]) for name, row in response.items()} == {
        "mine": ("user", "~/.cursor/mcp.json", "Cursor"),
        "ours": ("project", ".mcp.json", "Claude Code"),
    }
    assert (desk.home / ".ai/tools/mcp/mine.yaml").is_file()
    assert (desk.project / ".ai/tools/mcp/ours.yaml").is_file()
    found = without_project("search", query="mine")
    assert {as_object(one)["name"] for one in as_list(found.content["results"])} == {"mine_tool"}
    for name in ("mine_tool", "mcp/mine/mine_tool"):
        assert as_object(without_project("execute", item_id=name).content["result"])["by"] == "mine"
    assert without_project("execute", item_id="ours_tool").content["code"] == "tool_not_found"


def test_the_owner_chooses_where_imported_servers_go(ask: Ask, desk: Desk) -> None:
    desk.cursor(mine=desk.server("mine"))
    (row,) = rows(ask("mcp", action="import", location="project", start=False))
    assert row["location"] == "project"
    assert (desk.project / ".ai/tools/mcp/mine.yaml").is_file()


def test_a_taken_server_name_is_reported_with_its_secrets(ask: Ask, desk: Desk) -> None:
    ask("mcp", action="add", server="memory", start=False, **desk.server("other"))
    desk.cursor(memory=desk.server("memory", env={"MEMORY_TOKEN": TOKEN}))
    answer = ask("mcp", action="import", start=False)
    (row,) = rows(answer)
    assert {word: row[word] for word in ("server", "name", "from", "reason")} == {
        "server": "memory_2",
        "name": "memory",
        "from": "~/.cursor/mcp.json",
        "reason": "the name is taken",
    }
    assert as_text(as_object(answer.content["variables"])["MEMORY_TOKEN"]).endswith("memory_2")
    (warning,) = [as_object(one) for one in as_list(answer.content["warnings"])]
    assert warning["place"] == "memory_2"
    assert "MEMORY_TOKEN" in as_text(warning["reason"])


@pytest.mark.usefixtures("sandbox")
def test_secrets_can_be_imported_later(ask: Ask, desk: Desk) -> None:
    desk.cursor(mine=desk.server("mine", env={"KEY": TOKEN}))
    ask("mcp", action="import")
    assert ask("execute", item_id="mine_tool").content["code"] == "tool_not_found"  # it could not be started
    answer = ask("mcp", action="import", with_secrets=True)
    (row,) = rows(answer)
    assert row["reason"] == "it is here already, as mine; KEY sealed and granted to it"
    assert not any(TOKEN.encode() in path.read_bytes() for path in (desk.home / ".ai").rglob("*") if path.is_file())
    (stored,) = as_list(ask("secrets").content["secrets"])
    assert as_object(stored)["grants"] == [{"item": "user/local/mine", "project": ""}]
    assert TOKEN not in json.dumps(answer.content)
    assert not ask("execute", item_id="mine_tool").is_error
    (row,) = rows(ask("mcp", action="import", with_secrets=True))
    assert row["reason"] == "it is here already, as mine"


@pytest.mark.usefixtures("sandbox")
def test_an_import_says_how_many_servers_did_not_start(ask: Ask, desk: Desk) -> None:
    desk.cursor(mine=desk.server("mine"), ghost={"command": "no-such-program"})
    message = as_text(ask("mcp", action="import").content["message"])
    assert message == "2 servers imported, with 1 item; 1 of them did not start"


def test_a_file_without_servers_is_an_error(ask: Ask, desk: Desk) -> None:
    path = desk.project / "other.json"
    path.write_text("{}")
    answer = ask("mcp", action="import", paths=[str(path)])
    assert (answer.content["message"], answer.exit_code) == ("other.json holds no MCP server", 1)
    desk.shared(ours=desk.server("ours"))
    assert ask("mcp", action="import", paths=[str(desk.project / ".mcp.json")], start=False).exit_code == 0


def test_a_new_project_ignores_derived_files_in_git(ask: Ask, desk: Desk) -> None:
    (desk.project / ".ai").rmdir()
    ask("mcp", action="add", server="one", start=False, dry_run=True, **desk.server("one"))
    assert not (desk.project / ".ai").exists()
    ask("mcp", action="add", server="one", start=False, **desk.server("one"))
    assert "outputs/" in (desk.project / ".ai/.gitignore").read_text()


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-MC-06")
def test_servers_that_kiwi_has_are_removed_from_a_client_file_and_restored(ask: Ask, desk: Desk) -> None:
    path = desk.cursor(mine=desk.server("mine"), theirs=desk.server("theirs"), off={"command": "x", "disabled": True})
    ask("mcp", action="import")
    ask("mcp", action="remove", server="theirs")
    before = path.read_bytes()
    hinted = ask("mcp", action="connect", client="cursor", location="user", dry_run=True).content
    assert hinted["next"] == (
        "1 server here is in Kiwi too: `kiwi connect cursor --location user --replace` takes it out of this file."
    )
    done = ask("mcp", action="connect", client="cursor", location="user", replace=True).content
    assert done["replaced"] == ["mine"]
    assert servers_in(path) == ["theirs", "off", "kiwi"]
    assert REPLACED in as_text(done["backup"])
    undone = ask("mcp", action="connect", client="cursor", location="user", undo=True).content
    assert undone["put_back"] == ["mine"]
    assert path.read_bytes() == before


@pytest.mark.usefixtures("sandbox")
def test_servers_are_restored_into_a_changed_file(ask: Ask, desk: Desk) -> None:
    entry = desk.server("mine")
    path = desk.cursor(mine=entry)
    ask("mcp", action="import")
    ask("mcp", action="connect", client="cursor", location="user", replace=True)
    table = json.loads(path.read_text())["mcpServers"]
    path.write_text(json.dumps({"mcpServers": {**table, "late": {"command": "late"}}}))
    ask("mcp", action="connect", client="cursor", location="user", undo=True)
    assert json.loads(path.read_text())["mcpServers"] == {"late": {"command": "late"}, "mine": entry}


@pytest.mark.usefixtures("sandbox")
def test_only_servers_that_work_in_kiwi_are_removed(ask: Ask, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    path = desk.cursor(
        new=desk.server("new"),
        keyed=desk.server("keyed", env={"KEY": TOKEN}),
        edited=desk.server("edited"),
        mine=desk.server("mine"),
        here=desk.server("here"),
    )
    monkeypatch.setenv("KEY", TOKEN)  # in this shell, and in no client's
    ask("mcp", action="import")
    ask("mcp", action="remove", server="new")
    ask("mcp", action="import", accept=False)
    ask("mcp", action="remove", server="here")
    ask("mcp", action="add", server="here", **desk.server("here"))
    manifest = desk.home / ".ai/tools/mcp/edited.yaml"
    manifest.write_text(manifest.read_text().replace("MCP server", "The MCP server"))
    done = ask("mcp", action="connect", client="cursor", location="user", replace=True).content
    assert done["replaced"] == ["mine"]
    assert as_object(done["kept"]) == {
        "new": "nothing of new is accepted",
        "keyed": "KEY is not kept here: import it with `--with-secrets`",
        "edited": "the manifest of edited is not accepted as it is",
        "here": "here is in one project, and this file is for all",
    }
    assert servers_in(path) == ["new", "keyed", "edited", "here", "kiwi"]


@pytest.mark.usefixtures("sandbox")
def test_a_different_key_under_the_same_name_is_not_lost(ask: Ask, desk: Desk) -> None:
    path = desk.cursor(keyed=desk.server("keyed", env={"KEY": TOKEN}))
    (desk.home / ".ai").mkdir()
    (desk.home / ".ai/.env").write_text("KEY=another-value-than-that\n")
    assert "could not be asked" not in json.dumps(ask("mcp", action="import").content)
    done = ask("mcp", action="connect", client="cursor", location="user", replace=True).content
    assert as_object(done["kept"]) == {"keyed": "KEY is another one here"}
    assert servers_in(path) == ["keyed", "kiwi"]


@pytest.mark.usefixtures("sandbox")
def test_connecting_a_project_reports_servers_that_the_user_file_still_starts(ask: Ask, desk: Desk) -> None:
    desk.cursor(mine=desk.server("mine"))
    ask("mcp", action="import")
    response = ask("mcp", action="connect", client="cursor").content
    assert "1 server in ~/.cursor/mcp.json is in Kiwi too: `kiwi connect cursor --location user --replace`" in as_text(
        response["next"]
    )


@pytest.mark.usefixtures("processes")
def test_a_shared_project_file_starts_kiwi_by_its_path_and_has_no_backup(ask: Ask, desk: Desk) -> None:
    path = desk.shared(theirs={"command": "x"})
    subprocess.run(["git", "init", "-q", str(desk.project)], check=True)
    before = path.read_bytes()
    done = ask("mcp", action="connect", client="claude-code").content
    assert Path(json.loads(path.read_text())["mcpServers"]["kiwi"]["command"]).is_absolute()
    assert "which others that share the project may not have" in as_text(done["next"])
    assert Path(as_text(done["backup"])).is_relative_to(desk.home / ".ai/state/backups")
    assert [one.name for one in desk.project.iterdir() if "kiwi" in one.name] == []
    ask("mcp", action="connect", client="claude-code", undo=True)
    assert path.read_bytes() == before


def test_an_unknown_server_is_reported_with_the_known_ones(ask: Ask, desk: Desk) -> None:
    ask("mcp", action="add", server="memory", start=False, **desk.server("memory"))
    for action in ("list", "accept", "remove", "diff", "refresh", "login", "logout"):
        answer = ask("mcp", action=action, server="memroy")
        assert answer.content["message"] == "No MCP server 'memroy'; there are: memory."
        assert as_text(answer.content["suggestion"]).startswith("Did you mean `memory`? ")
    taken = ask("mcp", action="add", server="memory", start=False, **desk.server("memory"))
    assert taken.content["suggestion"] == "`kiwi mcp remove memory` first, or choose another name."


@pytest.mark.usefixtures("sandbox")
def test_changes_of_a_manifest_are_shown_without_secrets(ask: Ask, desk: Desk, kernel: Kernel) -> None:
    ask("mcp", action="add", server="one", env={"MODE": "quiet"}, **desk.server("one"))
    manifest = desk.project / ".ai/tools/mcp/one.yaml"
    manifest.write_text(manifest.read_text().replace("MODE: quiet", f"MODE: loud\n    API_KEY: {TOKEN}"))
    (row,) = rows(ask("mcp", action="list"))
    assert row["status"] == "changed"
    assert "nothing of it runs" in as_text(row["notice"])
    diff = ask("mcp", action="diff", server="one").content
    changed = [line for line in as_text(diff["manifest"]).splitlines() if line[:1] in "+-" and line[:3] not in "+++---"]
    assert [line[0] + line[1:].strip() for line in changed] == [
        '-"MODE": "quiet"',
        '+"MODE": "loud",',
        '+"API_KEY": "…"',
    ]
    assert TOKEN not in json.dumps(diff)
    assert as_text(diff["next"]).startswith("`kiwi mcp accept one@")
    assert ask("execute", item_id="one_tool").content["code"] == "definition_changed"
    ask("mcp", action="accept", server="one")
    assert ask("mcp", action="diff", server="one").content["status"] == "same"
    key = ServerKey(str(desk.project / ".ai"), "one")
    record = kernel._services.catalogs.definitions().find(key)
    assert record is not None
    assert TOKEN not in json.dumps(record.words)


@pytest.mark.usefixtures("sandbox")
def test_a_tool_that_is_no_longer_offered_is_reported_and_removed_on_acceptance(ask: Ask, desk: Desk) -> None:
    ask("mcp", action="add", server="one", **desk.server("one"))
    (desk.home / "one.json").write_text("{}")
    refreshed = ask("mcp", action="refresh", server="one")
    assert "next" not in refreshed.content  # nothing waits to be accepted
    for name in ("one_tool", "mcp/one/one_tool"):
        gone = ask("execute", item_id=name)
        assert (gone.content["code"], gone.content["message"]) == ("tool_not_found", "one no longer offers 'one_tool'.")
    ask("mcp", action="accept", server="one")
    assert ask("mcp", action="list", server="one").content["items"] == []
    assert "no longer" not in as_text(ask("execute", item_id="one_tool").content["message"])


@pytest.mark.usefixtures("sandbox")
def test_a_refresh_with_changes_names_the_command_that_shows_them(ask: Ask, desk: Desk) -> None:
    ask("mcp", action="add", server="one", **desk.server("one"))
    path = desk.home / "one.json"
    path.write_text(path.read_text().replace("Does one", "Does two"))
    for words in ({"server": "one"}, {}):
        response = ask("mcp", action="refresh", **words).content
        assert response["next"] == "`kiwi mcp diff one` shows what they are."


def test_stored_definitions_contain_no_secret(ask: Ask, kernel: Kernel) -> None:
    config: JsonObject = {
        "transport": "stdio",
        "command": "server",
        "args": ["--token", "abc123", f"--key={TOKEN}", "--level", "info", "${KEPT}"],
        "env": {"PASSWORD": "hunter2", "KEPT": "${KEPT}"},
        "timeout": 5,
    }
    manifest: JsonObject = {"executor": "subprocess", "config": config, "description": "x"}
    ask("mcp", action="add", server="one", start=False, manifest=manifest)
    server = kernel._services.catalogs.of(None).find("one")
    assert launch_summary(server) == {
        "transport": "stdio",
        "command": "server",
        "args": ["--token", "…", "…", "--level", "info", "${KEPT}"],
        "env": {"PASSWORD": "…", "KEPT": "${KEPT}"},
    }


@pytest.mark.usefixtures("sandbox")
def test_in_the_home_folder_everything_belongs_to_the_user(home: Path) -> None:
    desk = Desk(home, home)
    desk.cursor(mine=desk.server("mine"))

    async def story() -> None:
        kernel = Kernel(home)
        await kernel.call("mcp", {"action": "import"})
        await kernel.call("mcp", {"action": "add", "server": "other", **desk.server("other")})
        for name in ("mine", "other"):
            found = await kernel.call("load", {"item_id": name, "source": "project"})
            assert found.content["identity"] == f"user/local/{name}@1.0.0"
            assert not (await kernel.call("execute", {"item_id": f"mcp/{name}/{name}_tool"})).is_error
        manifest = home / ".ai/tools/mcp/mine.yaml"
        manifest.write_text(manifest.read_text().replace("MCP server", "The MCP server"))
        assert (await kernel.call("execute", {"item_id": "mine_tool"})).content["code"] == "definition_changed"
        head = '"""Count the words"""\n__version__ = "1.0.0"\n__tool_type__ = "script"\n'
        (home / ".ai/tools/count_words.py").write_text(f'{head}__executor_id__ = "python_runtime"\n')
        listed = await kernel.call("search", {"query": "count words", "source": "project"})
        (one,) = map(as_object, as_list(listed.content["results"]))
        assert one["name"] == "count_words"
        assert one["identity"] == "user/local/count_words@1.0.0"
        await kernel.aclose()

    asyncio.run(story())
    assert as_object(without_project("execute", item_id="other_tool").content["result"])["by"] == "other"
