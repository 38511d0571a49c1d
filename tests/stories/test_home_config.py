"""`config.yaml`: the four choices for this machine, and what follows each of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from tests.stories.conftest import asked

import kiwi_mcp
from kiwi_mcp.domain.calls import Caller, Space
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel
from kiwi_mcp.kernel.threads.instructions import instruction_texts
from kiwi_mcp.manifest.home_config import HomeConfig, home_config, memory_folder
from kiwi_mcp.policy.preferences import owner_preferences

pytestmark = pytest.mark.usefixtures("sandbox")
Ask = Callable[..., Answer]
KNOWLEDGE = "---\nid: {0}\ntitle: {0}\nversion: 1.0.0\ntype: reference\n---\n\nAll about {0}.\n"
SKILL = "---\nname: {0}\ndescription: How to {0}\n---\nDo {0}.\n"
TOOL = "# tool_type: script\n# executor: bash_runtime\n# version: 1.0.0\n# description: Says hello\n"


@pytest.fixture
def user(home: Path) -> Path:
    (home / ".ai").mkdir()
    return home / ".ai"


@pytest.fixture
def elsewhere(home: Path, user: Path) -> Path:
    """A memory that is not in the user's space."""
    root = home / "Documents" / "mine"
    root.mkdir(parents=True)
    (user / "config.yaml").write_text("memory_root: ~/Documents/mine\n")
    return root


@pytest.mark.req("N5")
def test_the_file_has_four_fields_and_no_others(user: Path) -> None:
    schema = msgspec.json.schema(HomeConfig)["$defs"]["HomeConfig"]
    assert [*schema["properties"]] == ["memory_root", "provider_adapter", "auth_mode", "tool_sources"]
    assert schema["additionalProperties"] is False
    assert home_config(user) == HomeConfig()
    (user / "config.yaml").write_text("provider_adapter: ollama_llm\nauth_mode: policy\ntool_sources: [builtin]\n")
    assert home_config(user) == HomeConfig(provider_adapter="ollama_llm", tool_sources=("builtin",))


KEY = "sk-proj-0123456789abcdefghij"


@pytest.mark.req("N5")
@pytest.mark.parametrize(
    ("text", "place", "fix"),
    [
        ("memory_rot: /srv/memory", "memory_rot", "memory_root"),
        ("model: gpt", "model", "provider_adapter"),
        ("[memory_root]", "", "memory_root"),
        ("provider_adapter: 7", "provider_adapter", "Write text"),
        ("auth_mode: allow_all", "auth_mode", "policy, locked"),
        ("tool_sources: builtin", "tool_sources", "Write a list"),
        ("tool_sources: [builtin, usr]", "tool_sources[1]", "`user`"),
        ("tool_sources: [user, .claude/skills]", "tool_sources", "builtin, .claude/skills]"),
        (f"provider_adapter: {KEY}", "provider_adapter", "kiwi secrets set"),
        (f"tool_sources: [builtin, {KEY}]", "tool_sources", "kiwi secrets set"),
        ("memory_root: https://ann:pass@cloud.test/memory", "memory_root", "kiwi secrets set"),
        ("memory_root: Documents/memory", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/Documents/../.ai/state", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/.ai/state", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/.ai/memory/inner", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/.ai", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/", "memory_root", "~/Documents/memory"),
        ("memory_root: /", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/.cache/memory", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/.ssh", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/code/.ai/memory", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/link", "memory_root", "~/Documents/memory"),
        ("memory_root: ~/file", "memory_root", "~/Documents/memory"),
    ],
)
def test_every_fault_is_named_with_its_place_and_a_fix_and_nothing_runs(
    text: str, place: str, fix: str, ask: Ask, home: Path, user: Path
) -> None:
    (user / "state").mkdir()
    (home / "link").symlink_to(user / "state")  # where it really leads counts
    (home / "file").touch()
    (user / "config.yaml").write_text(text)
    with pytest.raises(InvalidManifest) as refused:
        home_config(user)
    (issue,) = map(as_object, as_list(refused.value.details["issues"]))
    assert issue["place"] == place
    assert fix in as_text(issue["fix"])
    assert KEY not in f"{refused.value}{refused.value.details}"

    assert ask("execute", item_id="memory_list").content["code"] == "invalid_manifest"
    checks = map(as_object, as_list(ask("doctor").content["checks"]))
    (found,) = (one for one in checks if one["check"] == "config.yaml")
    assert (found["status"], fix in as_text(found["fix"])) == ("problem", True)
    assert KEY not in str(found)


def test_several_faults_are_named_at_once_and_a_fixed_file_holds_from_the_next_call(ask: Ask, user: Path) -> None:
    (user / "config.yaml").write_text("model: x\nauth_mode: open\nprovider_adapter: []\n")
    with pytest.raises(InvalidManifest) as refused:
        home_config(user)
    assert len(as_list(refused.value.details["issues"])) == 3
    assert ask("execute", item_id="memory_list").is_error
    (user / "config.yaml").unlink()
    assert not ask("execute", item_id="memory_list").is_error


def test_the_file_is_parsed_only_when_it_changed_and_a_command_that_needs_none_does_not_read_it(user: Path) -> None:
    config = user / "config.yaml"
    config.write_text("provider_adapter: first\n")
    assert home_config(user) is home_config(user)
    config.unlink()
    os.mkfifo(config)  # to read it would wait for ever
    said = subprocess.run(
        [sys.executable, "-m", "kiwi_mcp", "--help"], capture_output=True, check=True, timeout=60, env=variables()
    )
    assert b"kiwi" in said.stdout


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(kiwi_mcp.__file__).parents[1])}


def test_all_that_reads_the_memory_follows_its_root(project: Path, user: Path, elsewhere: Path) -> None:
    (user / "memory" / "knowledge").mkdir(parents=True)
    (user / "memory" / "knowledge" / "stale.md").write_text(KNOWLEDGE.format("stale"))
    (user / "memory" / "AGENT.md").write_text("Stale.")
    for place, text in (
        ("notes/tea.md", "Green.\n"),
        ("knowledge/clouds.md", KNOWLEDGE.format("clouds")),
        ("skills/tidy/SKILL.md", SKILL.format("tidy")),
        ("AGENT.md", "Be brief."),
        ("AGENT-user.md", "Be kind."),
        ("preferences.yaml", "always_send: [memory_read]\n"),
    ):
        (elsewhere / place).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / place).write_text(text)

    read, listed, clouds, stale, skills, prefer, history = asked(
        project,
        ("execute", {"item_id": "memory_read", "parameters": {"path": "notes/tea.md"}}),
        ("execute", {"item_id": "memory_list", "parameters": {}}),
        ("load", {"item_id": "clouds", "item_type": "knowledge"}),
        ("load", {"item_id": "stale", "item_type": "knowledge"}),
        ("skill", {"action": "list"}),
        ("prefer", {"action": "add", "name": "memory_list"}),
        ("execute", {"item_id": "memory_history", "parameters": {}}),
    )
    assert as_object(read["result"])["content"] == "Green.\n"
    assert len(as_list(as_object(listed["result"])["entries"])) == 6
    assert clouds["identity"] == "user/local/clouds@1.0.0"
    assert stale["code"] == "tool_not_found"
    assert [as_object(one)["name"] for one in as_list(skills["skills"])] == ["tidy"]
    assert prefer["path"] == str(elsewhere / "preferences.yaml")
    assert owner_preferences(user).sections["always_send"].about(["memory_list"])
    assert as_list(as_object(history["result"])["changes"])
    assert (elsewhere / ".git").is_dir()
    assert not (user / "memory" / ".git").exists()
    kernel = Kernel(project)
    files = instruction_texts(kernel.catalog().space, None)  # type: ignore[arg-type]  # no file of a project is asked about
    assert [one.text for one in files] == ["Be brief.", "Be kind."]


def test_the_memory_server_and_an_export_follow_the_root(project: Path, elsewhere: Path, tmp_path: Path) -> None:
    (elsewhere / "tea.md").write_text("Green.\n")

    async def served() -> bool:
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "kiwi_mcp", "memory", "serve"], env=variables()
        )
        async with Client(stdio_client(server)) as client:
            return "Green." in (await client.call_tool("memory_read", {"path": "tea.md"})).model_dump_json()

    assert asyncio.run(served())
    (done,) = asked(project, ("memory", {"action": "export", "path": str(tmp_path / "out")}))
    assert done["status"] == "exported"
    assert b"Green." in (tmp_path / "out").read_bytes()


def test_a_changed_root_holds_from_the_next_call_of_a_running_kernel(project: Path, home: Path, user: Path) -> None:
    for name in ("one", "two"):
        (home / name / "knowledge").mkdir(parents=True)
        (home / name / "knowledge" / f"{name}.md").write_text(KNOWLEDGE.format(name))

    async def story() -> list[bool]:
        kernel, found = Kernel(project), []
        for name in ("one", "two"):
            (user / "config.yaml").write_text(f"memory_root: {home / name}\n")
            for other in ("one", "two"):
                answer = await kernel.call("load", {"item_id": other, "item_type": "knowledge"}, Caller())
                found.append(not answer.is_error)
                listed = await kernel.call("execute", {"item_id": "memory_list", "parameters": {"recursive": True}})
                assert f"{name}.md" in str(listed.content)
        await kernel.aclose()
        return found

    assert asyncio.run(story()) == [True, False, False, True]


def test_a_chosen_folder_that_is_missing_is_not_made_and_the_rest_works(project: Path, home: Path, user: Path) -> None:
    (user / "config.yaml").write_text("memory_root: ~/usb/memory\n")
    with pytest.raises(KiwiError, match="not there"):
        memory_folder(user)
    listed, prefer, found, doctor = asked(
        project,
        ("execute", {"item_id": "memory_list"}),
        ("prefer", {"action": "add", "name": "memory_list"}),
        ("load", {"item_id": "memory_list"}),
        ("doctor", {}),
    )
    assert (listed["code"], prefer["code"]) == ("unavailable", "unavailable")
    assert "code" not in found
    problems = [as_object(one) for one in as_list(doctor["checks"]) if as_object(one)["check"] == "config.yaml"]
    assert "mkdir" in as_text(problems[0]["fix"])
    assert not (home / "usb").exists()


def test_a_tool_is_kept_away_from_a_memory_wherever_it_is(project: Path, home: Path, elsewhere: Path) -> None:
    (elsewhere / "tea.md").write_text("Green.\n")
    (elsewhere.parent / "plain.md").write_text("Anyone may read this.\n")
    (home / ".ai" / "policy.yaml").write_text("files: {read: {allow: ['~/Documents/**']}}\n")
    tools = project / ".ai" / "tools"
    tools.mkdir()
    for name, needs in (("around", "~/Documents"), ("inside", "~/Documents/mine")):
        (tools / f"{name}.sh").write_text(
            f"{TOOL}# needs: {{read: ['{needs}']}}\ncat {elsewhere.parent}/plain.md; ls {elsewhere}; true\n"
        )
    signed: list[tuple[str, JsonObject]] = [
        ("execute", {"action": "sign", "item_id": name}) for name in ("around", "inside")
    ]
    *_, around, inside = asked(project, *signed, *(("execute", {"item_id": name}) for name in ("around", "inside")))
    assert "Anyone may read this." in str(around)
    assert "tea.md" not in str(around)
    assert (inside["code"], "Kiwi's own folder" in as_text(inside["message"])) == ("not_permitted", True)


@pytest.mark.req("N3")
def test_locked_runs_nothing_from_the_next_call_and_shows_everything(project: Path, user: Path) -> None:
    tools = project / ".ai" / "tools"
    tools.mkdir()
    (tools / "hello.sh").write_text(f"{TOOL}echo hello\n")

    async def story(*modes: str) -> list[list[JsonObject]]:
        kernel, seen = Kernel(project), []
        await kernel.call("execute", {"action": "sign", "item_id": "hello"})
        for mode in modes:
            (user / "config.yaml").write_text(f"auth_mode: {mode}\n")
            requests: tuple[tuple[str, JsonObject], ...] = (
                ("execute", {"item_id": "hello"}),
                ("execute", {"item_id": "memory_list"}),
                ("search", {"query": "hello"}),
                ("execute", {"action": "why", "item_id": "hello"}),
                ("doctor", {}),
            )
            seen.append([(await kernel.call(verb, request)).content for verb, request in requests])
        await kernel.aclose()
        return seen

    before, locked, after = asyncio.run(story("policy", "locked", "policy"))
    assert [one.get("code") for one in before] == [None] * 5
    assert [one.get("code") for one in locked] == ["not_permitted", "not_permitted", None, None, None]
    assert "auth_mode: locked" in as_text(locked[0]["message"])
    assert locked[3]["would_run"] is False
    assert "no item runs" in str(locked[4])
    assert [one.get("code") for one in after] == [None] * 5


def test_a_repository_of_the_owner_does_not_become_the_memory(project: Path, elsewhere: Path) -> None:
    subprocess.run(["git", "init", "-q", str(elsewhere)], check=True, timeout=60)
    (elsewhere / "draft.md").write_text("not committed yet\n")
    (found,) = asked(project, ("execute", {"item_id": "memory_list"}))
    assert "is a git repository of yours" in str(found)
    status = ["git", "-C", str(elsewhere), "status", "--porcelain"]
    assert subprocess.run(status, capture_output=True, text=True, check=True, timeout=60).stdout == "?? draft.md\n"


@pytest.mark.req("N3")
def test_a_file_that_is_gone_behind_its_link_permits_nothing(project: Path, user: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.yaml"
    kept.write_text("auth_mode: locked\n")
    (user / "config.yaml").symlink_to(kept)
    assert home_config(user).auth_mode == "locked"
    kept.unlink()
    with pytest.raises(InvalidManifest, match="cannot be read"):
        home_config(user)

    async def story() -> JsonObject:
        kernel = Kernel(project)
        try:
            return (await kernel.call("execute", {"item_id": "memory_list"})).content
        finally:
            await kernel.aclose()

    assert asyncio.run(story())["code"] == "invalid_manifest"


def test_locked_allows_no_verb_that_the_policy_denies(project: Path, user: Path) -> None:
    (user / "policy.yaml").write_text("verbs: {deny: [search]}\n")
    (user / "config.yaml").write_text("auth_mode: locked\n")
    (found,) = asked(project, ("search", {"query": "hello"}))
    assert found["code"] == "not_permitted"


@pytest.mark.req("C8", "N5")
def test_items_come_from_the_listed_sources_alone(project: Path, user: Path) -> None:
    for place, name in (
        (project / ".ai" / "skills", "ours"),
        (user / "skills", "mine"),
        (user / "memory" / "skills", "noted"),
        (project / ".claude" / "skills", "claude"),
        (project / ".agents" / "skills", "agents"),
    ):
        (place / name).mkdir(parents=True)
        (place / name / "SKILL.md").write_text(SKILL.format(name))

    async def story(*listed: str) -> list[set[str]]:
        kernel, seen = Kernel(project), []
        for text in listed:
            (user / "config.yaml").write_text(text and f"tool_sources: [{text}]\n")
            skills = as_list((await kernel.call("skill", {"action": "list"})).content["skills"])
            seen.append({as_text(as_object(one)["name"]) for one in skills})
        await kernel.aclose()
        return seen

    everything = {"ours", "mine", "noted"}
    lists = ("", "builtin", "user, builtin", "project, builtin, .agents/skills", "builtin, .claude/skills", "")
    assert asyncio.run(story(*lists)) == [
        everything, set(), {"mine", "noted"}, {"ours", "agents"}, {"claude"}, everything
    ]  # fmt: skip


def test_a_space_without_choices_uses_the_five_sources(tmp_path: Path) -> None:
    assert Space(tmp_path, tmp_path, tmp_path).sources == ("project", "user", "registry", "mcp", "builtin")


def tree(root: Path) -> dict[str, bytes]:
    """Return every file of a memory, without its history."""
    files = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


PAGE = "---\ntitle: Page\nversion: 1.0.0\n{0}---\n\nThe printer is at http://10.0.0.7:631.\n"


@pytest.mark.req("C3", "C7")
def test_what_is_installed_configured_and_used_leaves_no_plumbing_in_the_memory(project: Path, user: Path) -> None:
    memory = user / "memory"
    for place, text in (
        ("AGENT.md", "Be brief."),
        ("knowledge/page.md", PAGE.format("entry_type: reference\n")),  # what a person notes is theirs
        ("skills/tidy/SKILL.md", SKILL.format("tidy")),
        (
            "directives/go/tool.yaml",
            "tool_id: go\ntool_type: directive\nversion: 1.0.0\nparameters: {url: {type: string}}\n",
        ),
    ):
        (memory / place).parent.mkdir(parents=True, exist_ok=True)
        (memory / place).write_text(text)
    before = tree(memory)
    api = (
        "tool_id: api\ntool_type: api\nversion: 1.0.0\nexecutor: http_client\ndescription: x\n"
        "config: {method: GET, url: 'https://api.test:8443/v1'}\n"
    )
    hi: JsonObject = {"content": f"{TOOL}echo hi\n", "filename": "hi.sh"}
    add: JsonObject = {"action": "add", "location": "user", "accept": False, "start": False}
    added = asked(
        project,
        ("execute", {"action": "create", "item_id": "hi", "parameters": hi}),
        ("execute", {"action": "sign", "item_id": "hi"}),
        ("execute", {"item_id": "hi"}),
        ("execute", {"action": "create", "item_id": "api", "parameters": {"content": api, "location": "user"}}),
        ("mcp", {**add, "server": "local", "command": "/opt/servers/files", "args": ["--port", "7431"]}),
        ("mcp", {**add, "server": "far", "url": "https://mcp.test:9443/mcp"}),
        ("secrets", {"action": "set", "name": "API_KEY", "value": "0123456789abcdef"}),
    )
    assert [one for one in added if "error" in one] == []
    assert "https://mcp.test:9443" in "".join(path.read_text() for path in (user / "tools").rglob("*.yaml"))
    assert tree(memory) == before
    removed = asked(
        project,
        ("execute", {"action": "delete", "item_id": "hi", "parameters": {"confirm": True}}),
        ("mcp", {"action": "remove", "server": "local"}),
        ("mcp", {"action": "remove", "server": "far"}),
        ("prefer", {"action": "add", "name": "hi"}),  # the owner's own wish is the one exception
        ("doctor", {}),
    )
    assert [one for one in removed if "error" in one] == []
    assert {name for name in tree(memory) if tree(memory)[name] != before.get(name)} == {"preferences.yaml"}
    assert lint(removed[-1]) == []


def lint(doctor: JsonObject) -> list[str]:
    """Return what `kiwi doctor` finds in the memory that belongs elsewhere."""
    checks = map(as_object, as_list(doctor["checks"]))
    return [as_text(one["detail"]) for one in checks if one["check"] == "memory" and one["status"] != "ok"]


@pytest.mark.req("C3")
def test_the_lint_of_the_memory_finds_addresses_commands_and_locations(project: Path, user: Path) -> None:
    for place, text in (
        ("tools/local.yaml", "tool_id: local\nconfig:\n  command: /opt/servers/files\n  args: [--port, '7431']\n"),
        ("far.json", '{"mcpServers": {"far": {"url": "https://mcp.test"}}}'),
        ("knowledge/page.md", PAGE.format("host: 10.0.0.7\nport: 631\n")),
        ("notes/broken.yaml", "a: [b"),
    ):
        (user / "memory" / place).parent.mkdir(parents=True, exist_ok=True)
        (user / "memory" / place).write_text(text)
    (doctor,) = asked(project, ("doctor", {}))
    assert [one.partition(",")[0] for one in lint(doctor)] == [
        "far.json has `mcpServers`", "far.json has `url`",
        "knowledge/page.md has `host`", "knowledge/page.md has `port`",
        "tools/local.yaml has `command`", "tools/local.yaml has `args`",
    ]  # fmt: skip


@pytest.mark.req("C3")
@pytest.mark.parametrize("file", ["config.yaml", "policy.yaml", "registry.yaml"])
@pytest.mark.parametrize(
    "preference", ["always_send: [hello]", "prompts: [hello]", "resources: [hello]", "task_after: 5"]
)
def test_no_file_of_the_environment_takes_a_preference(file: str, preference: str, ask: Ask, user: Path) -> None:
    (user / file).write_text(f"{preference}\n")
    checks = map(as_object, as_list(ask("doctor").content["checks"]))
    faults = [one for one in checks if one["status"] == "problem" and "known" in f"{one['detail']}{one.get('fix')}"]
    assert any(preference.partition(":")[0] in f"{one['detail']} {one.get('fix')}" for one in faults), faults


@pytest.mark.req("C2")
def test_preferences_and_style_move_with_an_export_and_hold_on_another_host(
    project: Path, user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user / "tools").mkdir()
    (user / "tools" / "hello.sh").write_text(f"{TOOL}echo hello\n")
    (user / "memory").mkdir()
    (user / "memory" / "AGENT.md").write_text("Be brief.")
    stream = str(tmp_path / "stream")
    *done, exported = asked(
        project,
        ("prefer", {"action": "add", "name": "memory_read", "as": "recall_note"}),
        ("prefer", {"action": "add", "name": "hello"}),
        ("memory", {"action": "export", "path": stream}),
    )
    assert [one for one in done if "error" in one] == []
    assert exported["status"] == "exported"
    assert "recall_note" in (user / "memory" / "preferences.yaml").read_text()

    other = tmp_path / "other"
    monkeypatch.setenv("USER_SPACE", str(other))
    imported, prefer = asked(project, ("memory", {"action": "import", "path": stream}), ("prefer", {"action": "list"}))
    # A tool that is missing here is information, and no error.
    assert (imported["status"], "hello" in str(imported["warnings"])) == ("imported", True)
    assert [as_object(one)["name"] for one in as_list(prefer["tools"])] == ["recall_note"]
    assert prefer["path"] == str(other / "memory" / "preferences.yaml")
    space = Kernel(project).catalog().space
    assert [one.text for one in instruction_texts(space, None)] == ["Be brief."]  # type: ignore[arg-type]  # as above


BOOT = """
import os, sys
log = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, args):
    if event in ("open", "os.scandir", "os.listdir") and str(args[0]).startswith(os.environ["USER_SPACE"]):
        os.write(log, f"{args[0]}\\n".encode())
    elif event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        os.write(log, f"{event}\\n".encode())
sys.addaudithook(note)
from kiwi_mcp.__main__ import main
main()
"""


@pytest.mark.req("N6")
def test_a_start_without_any_network_reads_its_configuration_in_order_and_connects_to_nothing(
    user: Path, tmp_path: Path
) -> None:
    for place, text in (
        ("config.yaml", "provider_adapter: far_llm\n"),
        ("providers/far_llm.yaml", "providers: {far: {dialect: openai_chat, url: 'https://models.test/v1'}}\n"),
        ("tools/hello.sh", f"{TOOL}echo hello\n"),
        ("tools/mcp/far.yaml", "tool_id: far\ntool_type: mcp_server\nversion: 1.0.0\nexecutor: http_client\n"
         "config: {url: 'https://mcp.test/mcp'}\n"),
        ("memory/knowledge/clouds.md", KNOWLEDGE.format("clouds")),
        ("memory/preferences.yaml", "always_send: [memory_read]\n"),
    ):  # fmt: skip
        (user / place).parent.mkdir(parents=True, exist_ok=True)
        (user / place).write_text(text)
    log = tmp_path / "log"
    words = ["--dev-bind", "/", "/", "--unshare-net", sys.executable, "-c", BOOT, str(log), "serve"]

    async def started() -> set[str]:
        server = StdioServerParameters(command="bwrap", args=words, env=variables())
        async with Client(stdio_client(server)) as client:
            return {tool.name for tool in (await client.list_tools()).tools}

    assert "memory_read" in asyncio.run(started())
    lines = [line.removeprefix(f"{user}/") for line in log.read_text().splitlines()]
    steps = ["config.yaml", "providers", "tools", "memory/knowledge", "memory/preferences.yaml"]
    assert sorted(steps, key=lines.index) == steps, lines
    assert [line for line in lines if line.startswith("socket.")] == []


# --- kiwi alone ---


def test_kiwi_alone_says_that_the_home_is_locked_or_its_memory_is_away(ask: Ask, user: Path) -> None:
    assert ask("status").content["blocked"] == ""
    (user / "config.yaml").write_text("auth_mode: locked\n")
    assert "No item runs" in as_text(ask("status").content["blocked"])
    (user / "config.yaml").write_text("memory_root: ~/away\n")
    assert "is not there" in as_text(ask("status").content["blocked"])


def test_a_provider_that_is_not_here_is_named_by_doctor_and_by_a_start(ask: Ask, user: Path) -> None:
    (user / "config.yaml").write_text("provider_adapter: nowhere\n")
    checks = map(as_object, as_list(ask("doctor").content["checks"]))
    (found,) = (one for one in checks if one["check"] == "config.yaml")
    assert (found["status"], "'nowhere' is not here" in as_text(found["detail"])) == ("warning", True)
    refused = ask("thread", action="start", item_id="summarize", inputs={"text": "Tea."}).content
    assert (refused["code"], "provider_adapter" in as_text(refused["message"])) == ("invalid_manifest", True)


def test_a_fault_is_noted_once_and_not_for_each_preferred_tool(ask: Ask, user: Path) -> None:
    ask("prefer", action="add", name="files_read")
    (user / "config.yaml").write_text("auth_mod: locked\n")
    checks = map(as_object, as_list(ask("doctor").content["checks"]))
    (noted,) = (as_text(one["detail"]) for one in checks if one["check"] == "preferences" and one["status"] != "ok")
    assert noted.endswith("Until it is fixed, nothing else is sent.")
