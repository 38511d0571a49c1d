"""Needs of servers: found in commands, declared by the owner, stored in manifests, and granted to processes."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Needs
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.mcp.clients import read_servers
from kiwi_mcp.manifest.mcp.launch_command import known_servers_table
from kiwi_mcp.manifest.mcp.server_entry import EntryOrigin
from kiwi_mcp.policy.needs import needs_named

NPM = "@modelcontextprotocol/server-"
READER = """
import json, sys

def answer(method, params):
    if method == "initialize":
        return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                "serverInfo": {"name": "reader", "version": "1"}}
    if method == "tools/list":
        hint = {"readOnlyHint": True}
        return {"tools": [{"name": "peek", "inputSchema": {"type": "object"}, "annotations": hint}]}
    try:
        return {"content": [{"type": "text", "text": open(params["arguments"]["path"]).read()}]}
    except OSError as fault:
        return {"content": [{"type": "text", "text": str(fault)}], "isError": True}

for line in sys.stdin:
    message = json.loads(line)
    known = message["method"] in {"initialize", "tools/list", "tools/call"}
    if "id" in message:
        said = {"result": answer(message["method"], message.get("params", {}))} if known else {
            "error": {"code": -32601, "message": "Method not found"}}
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], **said}), flush=True)
"""
Ask = Callable[..., Answer]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "reader" / "reader.py"
    path.parent.mkdir()
    path.write_text(READER)
    return path


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder with a note in it, outside of the project."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "note.txt").write_text("tea at five")
    return folder


def add(ask: Ask, script: Path, *args: str, **words: Json) -> Answer:
    return ask("mcp", action="add", server="reader", command=sys.executable, args=[str(script), *args], **words)


def peek(ask: Ask, path: Path) -> Answer:
    return ask("execute", item_id="peek", parameters={"path": str(path)})


def written(project: Path) -> JsonObject:
    text = (project / ".ai/tools/mcp/reader.yaml").read_text()
    return as_object(as_object(read_yaml(text, what="it").value).get("needs"))


@pytest.mark.usefixtures("sandbox")
def test_the_paths_in_a_command_are_its_needs(ask: Ask, script: Path, outside: Path, project: Path) -> None:
    note = outside / "note.txt"
    added = add(ask, script, f"--notes={note}")
    assert written(project) == {"read": [str(note)]}
    assert f"it may read {note}" in as_text(added.content["message"])
    assert peek(ask, note).content["result"] == "tea at five"
    assert as_object(ask("mcp", action="list", server="reader").content["needs"]) == {"read": [str(note)]}


@pytest.mark.usefixtures("sandbox")
def test_the_files_of_a_command_are_part_of_the_plan(ask: Ask, script: Path, outside: Path) -> None:
    (script.parent / "deep").mkdir()
    for name in (".env", "deep/.env.local", ".npmrc"):
        (script.parent / name).write_text("TOKEN=1")
    add(ask, script)

    planned = ask("execute", item_id="peek", parameters={"path": str(outside)}, dry_run=True).content
    profile = as_object(as_object(planned["plan"])["jail"])
    assert str(script.parent) in as_list(profile["readable"])
    why = ask("execute", action="why", item_id="peek").content
    assert as_object(why["given"])["readable"] == profile["readable"]
    assert {str(script.parent / name) for name in (".env", "deep/.env.local", ".npmrc")} == set(
        as_list(profile["hidden"])
    )


def test_a_script_in_a_hidden_folder_of_the_home_is_a_need(home: Path) -> None:
    (home / ".servers").mkdir()
    (home / ".servers" / "one.py").touch()
    config: JsonObject = {"transport": "stdio", "command": "python3", "args": [str(home / ".servers/one.py")]}

    assert needs_named(config, []).read == (str(home / ".servers"),)


def test_hidden_folders_of_the_home_are_not_given_by_an_entry(home: Path) -> None:
    (home / ".ssh").mkdir()
    (home / ".ssh" / "id").touch()
    args: list[Json] = ["~/.ssh", "--x=~/.local/bin", "~/.ssh/id"]
    issues: list[Issue] = []
    found = needs_named({"transport": "stdio", "command": "x", "args": args}, issues, server="notes")
    assert found == Needs()
    assert [issue.fix for issue in issues] == [
        f"If it needs that: `kiwi mcp allow notes --{words}`."
        for words in (f"write {home}/.ssh", f"write {home}/.local/bin", f"read {home}/.ssh/id")
    ]
    memory: JsonObject = {"MEMORY_FILE_PATH": "~/.local/share/mcp-memory/memory.jsonl"}
    config: JsonObject = {"transport": "stdio", "command": "npx", "args": [f"{NPM}memory"], "env": memory}
    assert needs_named(config, [], project=home / "clone").write == (str(home / ".local/share/mcp-memory"),)


def test_a_folder_may_be_writable_with_its_contents(outside: Path) -> None:
    args: list[Json] = [str(outside), str(outside / "note.txt"), "/usr/share", "/", str(Path.home()), "${HOME_OF_IT}/x"]
    issues: list[Issue] = []
    found = needs_named({"transport": "stdio", "command": "server", "args": args}, issues)
    assert (found.read, found.write) == ((), (str(outside),))
    assert {issue.reason for issue in issues} == {
        f"{path} is more than a server is given" for path in ("/", str(Path.home()))
    }


@pytest.mark.usefixtures("sandbox")
def test_a_server_sees_nothing_else_without_a_grant_of_the_owner(
    ask: Ask, script: Path, outside: Path, project: Path
) -> None:
    note = outside / "note.txt"
    add(ask, script)
    refused = peek(ask, note)
    assert refused.is_error
    assert f"`kiwi mcp allow reader --read {note}`" in as_text(refused.content["suggestion"])
    allowed = ask("mcp", action="allow", server="reader", read=[str(outside)], hosts=["api.example.test"])
    assert allowed.content["status"] == "allowed", allowed.content
    assert "`kiwi approvals rules add 'mcp/reader/*'`" in as_text(allowed.content["next"])
    assert written(project) == {"read": [str(outside)], "hosts": ["api.example.test"]}
    # What it offered was accepted before, and the owner has just said what else it may have.
    assert peek(ask, note).content["result"] == "tea at five"
    assert ask("mcp", action="diff", server="reader").content["status"] == "same"


@pytest.mark.usefixtures("sandbox")
def test_a_host_pattern_of_a_server_opens_no_private_address(ask: Ask, script: Path, home: Path) -> None:
    def planned_hosts() -> tuple[Json, Json]:
        plan = ask("execute", item_id="peek", parameters={"path": "/"}, dry_run=True).content["plan"]
        profile = as_object(as_object(plan)["jail"])
        return profile["hosts"], profile["private_hosts"]

    hosts = ["*.example.test", "*", "db.example.test:5432"]
    add(ask, script)
    ask("mcp", action="allow", server="reader", hosts=hosts)
    assert planned_hosts() == (hosts, ["db.example.test:5432"])
    (home / ".ai/policy.yaml").write_text("hosts: {allow: ['*.example.test']}\n")
    assert planned_hosts() == (hosts, ["*.example.test", "db.example.test:5432"])


@pytest.mark.usefixtures("sandbox")
def test_a_granted_path_is_made_and_does_not_belong_to_kiwi(ask: Ask, script: Path, home: Path, project: Path) -> None:
    add(ask, script)
    (home / ".ai").mkdir(exist_ok=True)
    for path in (str(home / "memory.json"), str(home / ".ai"), str(home / ".cache" / "kiwi")):
        assert ask("mcp", action="allow", server="reader", write=[path]).content["code"] == "invalid_request"
    assert ask("mcp", action="allow", server="reader", read=["nowhere"]).content["code"] == "invalid_request"
    assert ask("mcp", action="allow", server="reader").content["code"] == "invalid_request"
    allowed = ask("mcp", action="allow", server="reader", write=["fresh", str(home / "mem" / "memory.json")])
    assert allowed.content["status"] == "allowed", allowed.content
    assert written(project)["write"] == ["fresh", str(home / "mem")]
    assert (project / "fresh").is_dir()
    assert (home / "mem").is_dir()


@pytest.mark.usefixtures("sandbox")
def test_a_model_grants_nothing(ask: Ask, script: Path, project: Path, outside: Path) -> None:
    add(ask, script)
    stranger = Kernel(project, is_owner=False)
    request: JsonObject = {"action": "allow", "server": "reader", "read": [str(outside)]}
    assert asyncio.run(stranger.call("mcp", request)).content["code"] == "not_permitted"
    assert written(project) == {}


@pytest.mark.usefixtures("sandbox")
def test_an_imported_server_needs_the_paths_in_its_command(
    ask: Ask, script: Path, outside: Path, project: Path
) -> None:
    entry: JsonObject = {"command": sys.executable, "args": [str(script), str(outside)]}
    (outside / "servers.json").write_text(json.dumps({"mcpServers": {"reader": entry}}))
    ask("mcp", action="import", paths=[str(outside / "servers.json")], location="project")
    assert written(project) == {"write": [str(outside)]}


@pytest.mark.parametrize("location", ["project", "user"])
def test_the_file_of_a_project_gives_nothing_outside_the_project(
    ask: Ask, outside: Path, project: Path, location: str
) -> None:
    (project / "data").mkdir()
    entry: JsonObject = {"command": sys.executable, "args": [str(outside), str(project / "data")]}
    (project / ".mcp.json").write_text(json.dumps({"mcpServers": {"reader": entry}}))
    imported = ask("mcp", action="import", paths=[".mcp.json"], location=location, start=False).content
    allow = f"`kiwi mcp allow reader --write {outside}`"
    assert [one for one in as_list(imported["warnings"]) if allow in as_text(as_object(one)["fix"])]
    needs = as_object(ask("mcp", action="list", server="reader").content["needs"])
    assert needs == {"write": [str(project / "data")]}


@pytest.mark.usefixtures("sandbox")
def test_a_manifest_that_was_not_accepted_gets_nothing_outside_the_project(
    ask: Ask, script: Path, outside: Path, project: Path
) -> None:
    add(ask, script)
    path = project / ".ai/tools/mcp/reader.yaml"
    path.write_text(path.read_text() + f"needs: {{read: [{outside}]}}\n")
    refreshed = ask("mcp", action="refresh", server="reader", yes=True)
    assert refreshed.content["code"] == "not_permitted"
    assert "`kiwi mcp accept reader`" in as_text(refreshed.content["suggestion"])
    shown = as_text(ask("mcp", action="diff", server="reader").content["manifest"])
    assert str(outside) in shown
    ask("mcp", action="accept", server="reader")
    assert peek(ask, outside / "note.txt").content["result"] == "tea at five"


def test_a_denying_rule_wins_over_an_accepted_need(ask: Ask, script: Path, outside: Path, home: Path) -> None:
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text(f'files: {{read: {{allow: ["**"], deny: ["{outside}"]}}}}\n')
    added = add(ask, script, read=[str(outside)])
    assert [one for one in as_list(added.content["warnings"]) if str(outside) in str(one)]


@pytest.mark.usefixtures("sandbox")
def test_the_owner_relaxes_a_server_until_its_script_changes(ask: Ask, script: Path, outside: Path) -> None:
    add(ask, script)
    assert peek(ask, outside / "note.txt").is_error
    relaxed = ask("relax", action="apply", item_id="reader", to="trusted")
    assert relaxed.content["status"] == "relaxed", relaxed.content
    assert peek(ask, outside / "note.txt").content["result"] == "tea at five"
    script.write_text(script.read_text() + "# edited\n")
    assert peek(ask, outside / "note.txt").is_error


@pytest.mark.usefixtures("sandbox")
def test_why_reports_the_isolation_and_the_needs_of_a_server(ask: Ask, script: Path, outside: Path) -> None:
    add(ask, script, str(outside))
    why = ask("execute", action="why", item_id="peek").content
    assert as_object(why["isolation"])["level"] == "sandboxed"
    assert as_object(why["isolation"])["provenance"] == "mcp_server"
    assert as_object(why["needs"]) == {"write": [str(outside)]}


@pytest.mark.usefixtures("sandbox")
def test_servers_have_higher_limits_than_tools(ask: Ask, script: Path) -> None:
    add(ask, script)
    plan = as_object(ask("execute", item_id="peek", parameters={"path": "x"}, dry_run=True).content["plan"])
    assert as_object(as_object(plan["jail"])["limits"])["cpu_seconds"] == 86_400


WRITER = READER.replace('["path"]).read()', '["path"], "w").write("x") and "written"')


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("TR-F07")
def test_a_tool_of_a_writing_server_needs_approval_even_if_declared_as_reading(
    kernel: Kernel, script: Path, project: Path
) -> None:
    script.write_text(WRITER)
    place = project / "work"
    place.mkdir()

    async def story() -> Answer:
        words: JsonObject = {"server": "reader", "command": sys.executable, "args": [str(script)], "write": ["work"]}
        added = await kernel.call("mcp", {"action": "add", **words})
        assert not added.is_error, added.content
        parameters: JsonObject = {"path": str(place / "made")}
        called = await kernel.call("execute", {"item_id": "peek", "parameters": parameters})
        await kernel.aclose()
        return called

    answer = asyncio.run(story())
    assert answer.content["code"] == "approval_required"
    assert not (place / "made").exists()


def test_paths_in_the_entry_of_a_server_are_needs(home: Path) -> None:
    (home / "notes").mkdir()
    (home / "data").mkdir()
    (home / "data" / "shop.db").touch()
    (home / "key.json").touch()
    env: JsonObject = {
        "MEMORY_FILE_PATH": "~/mem/memory.json",
        "DIRS": f"{home}/notes,{home}/more",
        "KEY": str(home / "key.json"),
        "NO_PATH": "/api/v1",
    }
    issues: list[Issue] = []
    config: JsonObject = {"transport": "stdio", "command": "x", "args": ["--db", "~/data/shop.db"], "env": env}
    found = needs_named(config, issues)
    assert found.write == tuple(str(home / name) for name in ("data", "mem", "notes", "more"))
    assert (found.read, found.hosts, issues) == ((str(home / "key.json"),), (), [])

    wide: list[Issue] = []
    needs_named({"transport": "stdio", "command": "x", "env": {"F": "~/memory.json"}}, wide)
    assert [issue.fix for issue in wide] == ["Move memory.json to a folder of its own, and change the entry."]


def test_a_well_known_server_gets_what_it_needs_and_another_nothing() -> None:
    def needs(*words: str, **env: Json) -> Needs:
        return needs_named({"transport": "stdio", "command": words[0], "args": [*words[1:]], "env": env}, [])

    assert needs("npx", "-y", "@modelcontextprotocol/server-github@1.2.3").hosts == ("api.github.com",)
    assert needs("uvx", "mcp-server-fetch==2025.1.1").hosts == ("*",)
    image = ("docker", "run", "-i", "--rm", "-e", "TOKEN", "ghcr.io/github/github-mcp-server:0.5.0")
    assert needs(*image).hosts == ("api.github.com",)
    servers: JsonObject = {
        "shop": {"command": "npx", "args": ["-y", f"{NPM}postgres", "postgresql://ann:hunter2hunter2@db.test/shop"]},
        "lab": {"command": "npx", "args": [f"{NPM}gitlab"], "env": {"GITLAB_API_URL": "https://git.test:8443/api"}},
    }
    read = read_servers(json.dumps({"mcpServers": servers}), what="it", origin=EntryOrigin("it", Path("/home/ann")))
    assert [as_object(one.manifest["needs"]) for one in read.servers] == [
        {"hosts": ["db.test:5432"]}, {"hosts": ["git.test:8443"]},
    ]  # fmt: skip
    assert needs("npx", "-y", "github", URL="https://api.test") == Needs()
    assert len({row.packages for row in known_servers_table().values()}) > 40
