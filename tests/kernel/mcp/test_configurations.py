"""Server entries of other clients become drafts of items, without their secrets."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from kiwi_mcp.domain.errors import Invalid, InvalidRequest, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.secret import is_filler, is_secret, names_secret
from kiwi_mcp.kernel import Answer
from kiwi_mcp.manifest.mcp.client_format import MAX_BYTES
from kiwi_mcp.manifest.mcp.clients import find_configurations, read_configuration, read_servers
from kiwi_mcp.manifest.mcp.server_entry import EntryOrigin, ImportedServers

Ask = Callable[..., Answer]
EXAMPLES = Path(__file__).parents[2] / "data" / "clients"
PLACES = {
    "claude-desktop": ".config/Claude/claude_desktop_config.json",
    "claude-code-project": ".mcp.json",
    "claude-code-user": ".claude.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".vscode/mcp.json",
    "vscode-settings": ".vscode/settings.json",
    "windsurf": ".codeium/windsurf/mcp_config.json",
}
SECRETS = (
    *("ghp_0000example1111EXAMPLE2222example3333", "hunter2hunter2", "correct horse", "plainkey", "abc.def.ghi"),
    *("9f8e7d6c5b4a39281706f5e4d3c2b1a0", "4f1c2b7a9d3e8f60a1b2c3d4e5f60718"),
)


def example(name: str, folder: Path, *, home: Path | None = None) -> ImportedServers:
    path = folder / PLACES[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(EXAMPLES / f"{name}.json", path)
    return read_configuration(path, home=home)


def read(servers: Json, **root: Json) -> ImportedServers:
    text = json.dumps({"mcpServers": servers, **root})
    return read_servers(text, what="it", origin=EntryOrigin("Cursor", Path("/home/sam"), Path("/home/sam/shop")))


def config_of(words: JsonObject) -> JsonObject:
    [server] = read({"one": words}).servers
    return as_object(server.manifest["config"])


def configs(imported: ImportedServers) -> dict[str, Json]:
    return {server.name: server.manifest["config"] for server in imported.servers}


def shown(imported: ImportedServers) -> list[str]:
    return [f"{issue.severity} {issue.place}: {issue.reason}" for issue in imported.issues]


@pytest.mark.req("K-MC-06")
@pytest.mark.parametrize("name", PLACES)
def test_every_server_of_an_example_becomes_an_item(name: str, home: Path, ask: Ask) -> None:
    imported = example(name, home, home=home)

    assert imported.servers
    for server in imported.servers:
        answer = ask("execute", item_id=server.tool_id, action="create", parameters={"manifest": server.manifest})
        assert not answer.is_error, answer.content


@pytest.mark.parametrize("name", PLACES)
def test_no_secret_of_an_example_is_in_the_output(name: str, home: Path) -> None:
    imported = example(name, home, home=home)
    written = (EXAMPLES / f"{name}.json").read_text(encoding="utf-8")
    inside = {secret for secret in SECRETS if secret in written}

    response = repr(imported) + json.dumps([server.manifest for server in imported.servers])
    assert not [secret for secret in inside if secret in response]
    kept = [secret.reveal() for secret in imported.secrets.values()]
    assert all(any(secret in value for value in kept) for secret in inside)
    assert set(imported.secrets) <= set(imported.variables)


@pytest.mark.req("K-MC-06")
def test_claude_desktop(home: Path) -> None:
    imported = example("claude-desktop", home, home=home)
    assert configs(imported) == snapshot(
        {
            "filesystem": {
                "transport": "stdio",
                "command": "npx",
                "args": ["-y", "@modelcontextprotocol/server-filesystem", "/Users/sam/Desktop", "/Users/sam/Downloads"],
            },
            "github": {
                "transport": "stdio",
                "command": "docker",
                "args": ["run", "-i", "--rm", "-e", "GITHUB_PERSONAL_ACCESS_TOKEN", "ghcr.io/github/github-mcp-server"],
                "env": {"GITHUB_PERSONAL_ACCESS_TOKEN": "${GITHUB_PERSONAL_ACCESS_TOKEN}"},
            },
            "postgres": {"transport": "stdio", "command": "uvx", "args": ["postgres-mcp==0.3.0", "${POSTGRES_URL}"]},
            "notes": {
                "transport": "stdio",
                "command": "npx",
                "args": ["-y", "notes-server@2.1.0"],
                "env": {"NOTES_FOLDER": "C:\\Users\\sam\\Notes"},
            },
        }
    )
    assert shown(imported) == snapshot(
        [
            "warning github.args: `ghcr.io/github/github-mcp-server` is fetched in whatever version there is that day",
            "warning postgres.args: holds a secret, and the words of a command are visible to every user",
            "warning notes.env.PATH: is left out: loaders, interpreters or Kiwi itself obey this variable",
        ]
    )


@pytest.mark.req("K-MC-06")
def test_claude_code(home: Path, project: Path) -> None:
    shared = example("claude-code-project", project, home=home)
    own = example("claude-code-user", home, home=home)

    assert configs(shared) == {
        "weather": {
            "transport": "http",
            "url": "${WEATHER_BASE:-https://weather.example.com}/mcp",
            "headers": {"Authorization": "Bearer ${WEATHER_TOKEN}"},
        },
        "build tools": {
            "transport": "stdio",
            "command": str(project / "scripts" / "mcp.sh"),
            "args": ["--root", "{project}"],
            "env": {"CACHE_DIR": "${HOME}/.cache/build", "LOG_LEVEL": "debug"},
        },
    }
    assert [server.tool_id for server in shared.servers] == ["weather", "build_tools"]
    assert [(one.name, one.project, one.is_disabled) for one in own.servers] == [
        ("sentry", "", False),
        ("shop-db", "/home/sam/shop", True),
    ]


@pytest.mark.req("K-MC-06")
def test_cursor(home: Path, project: Path) -> None:
    imported = example("cursor", project, home=home)
    assert configs(imported) == snapshot(
        {
            "search": {
                "transport": "stdio",
                "command": "npx",
                "args": ["-y", "search-mcp@latest", "--depth", "3"],
                "env": {"SEARCH_API_KEY": "${SEARCH_API_KEY}"},
            },
            "designs": {
                "transport": "http",
                "url": "https://designs.example.com/mcp?api_key=${DESIGNS_API_KEY}&team=blue",
                "headers": {"X-Api-Key": "${DESIGNS_API_KEY_2}", "X-Team": "blue"},
            },
            "remote": {
                "transport": "stdio",
                "command": "npx",
                "args": [
                    "mcp-remote@0.1.29",
                    "https://remote.example.com/mcp",
                    "--header",
                    "Authorization: Bearer ${REMOTE_TOKEN}",
                ],
            },
        }
    )
    assert [server.is_disabled for server in imported.servers] == [False, False, True]
    assert shown(imported) == snapshot(
        [
            "warning remote.args: holds a secret, and the words of a command are visible to every user",
            "warning remote: not carried over: `envFile`",
            "warning kiwi: is Kiwi itself, and is left out",
        ]
    )


@pytest.mark.req("K-MC-06")
def test_vs_code(home: Path, project: Path) -> None:
    imported = example("vscode", project, home=home)
    assert configs(imported) == snapshot(
        {
            "tracker": {
                "transport": "stdio",
                "command": "uvx",
                "args": ["tracker-mcp", "--region", "${REGION:-eu}", "--root", "{project}/src"],
                "env": {"TRACKER_KEY": "${TRACKER_KEY}", "RETRIES": "3"},
            },
            "docs": {
                "transport": "http",
                "url": "https://docs.example.com/mcp",
                "headers": {"Authorization": "Bearer ${DOCS}"},
            },
            "live": {"transport": "websocket", "url": "wss://live.example.com/mcp"},
        }
    )
    assert shown(imported) == snapshot(
        [
            "error socket.url: is not an address of the web",
        ]
    )
    assert imported.variables == {"TRACKER_KEY": "Key of the issue tracker", "DOCS": "the input `docs`"}
    assert list(configs(example("vscode-settings", project))) == ["time"]


def test_windsurf(home: Path) -> None:
    imported = example("windsurf", home, home=home)
    assert configs(imported) == snapshot(
        {
            "automation": {"transport": "sse", "url": "https://actions.example.com/mcp/${AUTOMATION_KEY}/sse"},
            "tickets": {
                "transport": "stdio",
                "command": "python3",
                "args": ["-m", "tickets_mcp"],
                "env": {"TICKETS_TOKEN": "${TICKETS_TOKEN}", "TICKETS_URL": "https://tickets.example.com"},
            },
        }
    )
    assert shown(imported) == snapshot(
        [
            "warning automation: not carried over: `disabledTools`",
            "warning tickets.env.TICKETS_TOKEN: `${file…}` means something to that client alone",
        ]
    )


def test_the_files_that_exist_are_found(home: Path, project: Path) -> None:
    for name, folder in {"cursor": home, "claude-code-project": project, "vscode": project, "windsurf": home}.items():
        example(name, folder)

    found = find_configurations(home, project, platform="linux")

    assert [(one.client.id, one.scope, str(one.path.relative_to(home.parent))) for one in found] == [
        ("claude-code", "project", "project/.mcp.json"),
        ("vscode", "project", "project/.vscode/mcp.json"),
        ("cursor", "user", "home/.cursor/mcp.json"),
        ("windsurf", "user", "home/.codeium/windsurf/mcp_config.json"),
    ]
    mac = home / "Library/Application Support/Claude/claude_desktop_config.json"
    mac.parent.mkdir(parents=True)
    mac.write_text("{}")
    assert mac in [one.path for one in find_configurations(home, project, platform="darwin")]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"command": "npx -y a@1.0.0"}, ["npx", "-y", "a@1.0.0"]),
        ({"command": "bash", "args": ["-lc", "A=1 uvx a==1.0 --x 'two words'"]}, ["uvx", "a==1.0", "--x", "two words"]),
        ({"command": "bash", "args": ["-c", "cd /x && node y"]}, ["bash", "-c", "cd /x && node y"]),
        ({"command": "cd /x && node y"}, ["sh", "-c", "cd /x && node y"]),
        ({"command": "cmd.exe", "args": ["/C", "npx -y a@1.0.0"]}, ["npx", "-y", "a@1.0.0"]),
        ({"command": "C:\\Windows\\System32\\cmd.exe", "args": ["/c", "npx.cmd", "a@1.0.0"]}, ["npx", "a@1.0.0"]),
        ({"command": "/usr/bin/env", "args": ["MODE=x", "node", "s.js"]}, ["node", "s.js"]),
        ({"command": "/opt/My App/server"}, ["/opt/My App/server"]),
        ({"command": "./bin/server"}, ["/home/sam/shop/bin/server"]),
        ({"command": "bin/server", "cwd": "/srv"}, ["/srv/bin/server"]),
        ({"command": "~/bin/server"}, ["/home/sam/bin/server"]),
        ({"command": "${env:HOME}/bin/server"}, ["/home/sam/bin/server"]),
        ({"command": "${workspaceFolder}/bin/server"}, ["{project}/bin/server"]),
        ({"command": "a", "args": ["{id}", "{}", "${env:X}", 3]}, ["a", "{{id}}", "{}", "${X}", "3"]),
        ({"command": "a", "args": ["${userHome}/x${/}y", "${cwd}"]}, ["a", "${HOME}/x/y", "{project}"]),
    ],
)
def test_a_command_is_one_program_and_its_arguments(words: JsonObject, expected: list[str]) -> None:
    config = config_of(words)
    assert [config["command"], *as_list(config.get("args"))] == expected


def test_the_working_folder_of_a_server_is_preserved_unless_it_is_the_project() -> None:
    assert config_of({"command": "a", "cwd": "/srv/a"})["cwd"] == "/srv/a"
    assert config_of({"command": "a", "cwd": "tools"})["cwd"] == "/home/sam/shop/tools"
    assert "cwd" not in config_of({"command": "a", "cwd": "${workspaceFolder}"})
    assert "cwd" not in config_of({"command": "a", "cwd": "."})
    assert config_of({"command": "a", "cwd": "${workspaceFolder}/api"})["cwd"] == "{project}/api"
    assert config_of({"command": "a", "cwd": "${userHome}/api"})["cwd"] == "/home/sam/api"
    assert "cwd" not in config_of({"command": "a", "cwd": "${env:ELSEWHERE}"})


@pytest.mark.parametrize(
    ("url", "words", "transport"),
    [
        ("https://a.example.com/mcp", {}, "http"),
        ("https://a.example.com/sse", {}, "sse"),
        ("https://a.example.com/x", {"type": "streamable-http"}, "http"),
        ("https://a.example.com/x", {"transport": "sse"}, "sse"),
        ("wss://a.example.com/x", {}, "websocket"),
    ],
)
def test_the_transport_is_declared_or_derived_from_the_url(url: str, words: JsonObject, transport: str) -> None:
    assert config_of({"url": url, **words}) == {"transport": transport, "url": url}


@pytest.mark.parametrize(
    ("args", "expected", "value"),
    [
        (["--api-key", "abc"], ["--api-key", "${ONE_API_KEY}"], "abc"),
        (["--token=abc"], ["--token=${ONE_TOKEN}"], "abc"),
        (["-e", "GITHUB_TOKEN=abc"], ["-e", "GITHUB_TOKEN=${GITHUB_TOKEN}"], "abc"),
        (["-c", "export API_KEY=abc; a"], ["-c", "${ONE_C}"], "export API_KEY=abc; a"),
        (["sk-abcdefgh12345678"], ["${ONE_SECRET}"], "sk-abcdefgh12345678"),
        (["https://h.example.com/mcp?token=a%2Fb"], ["https://h.example.com/mcp?token=${ONE_TOKEN}"], "a/b"),
        (["https://sam:pw@h.example.com/mcp"], ["https://${ONE_LOGIN}@h.example.com/mcp"], "sam:pw"),
    ],
)
def test_a_secret_argument_becomes_a_reference(args: list[str], expected: list[str], value: str) -> None:
    imported = read({"one": {"command": "server", "args": args}})

    assert as_object(imported.servers[0].manifest["config"])["args"] == expected
    assert [secret.reveal() for secret in imported.secrets.values()] == [value]
    assert "visible to every user" in shown(imported)[0]


def test_two_values_under_one_name_get_two_variables_and_one_value_gets_one() -> None:
    imported = read(
        {
            "a": {"command": "a", "env": {"API_KEY": "first"}},
            "b": {"command": "b", "env": {"API_KEY": "second"}},
            "c": {"command": "c", "env": {"API_KEY": "first"}},
        }
    )

    assert [as_object(config)["env"] for config in configs(imported).values()] == [
        {"API_KEY": "${API_KEY}"}, {"API_KEY": "${B_API_KEY}"}, {"API_KEY": "${API_KEY}"},
    ]  # fmt: skip
    assert {name: secret.reveal() for name, secret in imported.secrets.items()} == {
        "API_KEY": "first",
        "B_API_KEY": "second",
    }


def test_a_placeholder_value_is_a_variable_to_set_and_not_a_secret() -> None:
    imported = read({"a": {"command": "a", "env": {"API_KEY": "<your key>"}}})

    assert imported.secrets == {}
    assert list(imported.variables) == ["API_KEY"]


def test_names_follow_the_rules_of_items_and_clashes_are_numbered() -> None:
    text = json.dumps(
        {"mcpServers": {name: {"command": "a"} for name in ["My Tool!", "my_tool", "ÄÖ", "con", "taken"]}}
    )
    imported = read_servers(text, what="it", origin=EntryOrigin("x", Path("/h")), taken={"taken"})

    assert [server.tool_id for server in imported.servers] == ["my_tool", "my_tool_2", "server", "mcp_con", "taken_2"]


@pytest.mark.parametrize(
    ("command", "args", "is_flagged"),
    [
        ("npx", ["-y", "a@latest"], False),
        ("npx", ["-y", "@scope/a"], False),
        ("npx", ["-y", "github:someone/a"], True),
        ("bunx", ["a@latest"], True),
        ("bunx", ["@scope/a"], True),
        ("bunx", ["@scope/a@1.2.3"], False),
        ("npx", ["-y", "@scope/a@1.2.3"], False),
        ("uvx", ["--from", "git+https://example.com/a", "a"], True),
        ("uvx", ["a==1.2"], False),
        ("docker", ["run", "-i", "-e", "A", "image"], True),
        ("docker", ["run", "-i", "image:1.2.3"], False),
        ("docker", ["run", f"image@sha256:{'0a' * 32}"], False),
        ("node", ["server.js"], False),
    ],
)
def test_an_unpinned_package_is_flagged_unless_kiwi_locks_it(command: str, args: list[str], is_flagged: bool) -> None:
    imported = read({"a": {"command": command, "args": args}})

    assert as_object(configs(imported)["a"])["args"] == args
    assert any("whatever version" in line for line in shown(imported)) is is_flagged


def test_a_bare_table_of_servers_is_read() -> None:
    text = '{"a": {"command": "x"}, "b": {"url": "https://b.example.com/mcp"}}'
    imported = read_servers(text, what="it", origin=EntryOrigin("x", Path("/h")))
    assert [server.name for server in imported.servers] == ["a", "b"]


@pytest.mark.parametrize(
    ("servers", "place"),
    [
        ({"a": {}}, "a"),
        ({"a": {"command": "x", "args": "-y b"}}, "a.args"),
        ({"a": {"url": "ftp://a.example.com"}}, "a.url"),
        ({"a": {"env": {}}}, "a"),
        ({"a": 3}, "a"),
    ],
)
def test_an_invalid_server_entry_is_reported_and_the_others_are_read(servers: dict[str, Json], place: str) -> None:
    imported = read({**servers, "good": {"command": "x"}})

    assert [server.name for server in imported.servers] == ["good"]
    assert [issue.place for issue in imported.issues if issue.is_error] == [place]


def test_files_that_are_missing_huge_or_malformed_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    with pytest.raises(InvalidRequest, match="no such file"):
        read_configuration(path)
    path.write_text('{"mcpServers": {"a": {"env": {"TOKEN": "hunter2"}}')
    with pytest.raises(Invalid) as refused:
        read_configuration(path)
    assert "hunter2" not in str(refused.value.to_response())
    path.write_bytes(b" " * (MAX_BYTES + 1))
    with pytest.raises(TooLarge):
        read_configuration(path)


def test_comments_are_reported_for_clients_that_cannot_read_them(project: Path) -> None:
    path = project / ".mcp.json"
    path.write_text('{"mcpServers": {"a": {"command": "x"}}, /* note */ }')

    imported = read_configuration(path)

    assert [server.name for server in imported.servers] == ["a"]
    assert "which Claude Code does not read" in shown(imported)[0]


WORDS = st.text(max_size=12)
SERVER_WORDS = st.dictionaries(
    st.sampled_from(["command", "args", "env", "url", "headers", "type", "cwd", "disabled", "serverUrl", "x"]),
    WORDS
    | st.lists(WORDS, max_size=3)
    | st.dictionaries(WORDS, WORDS, max_size=3)
    | st.booleans()
    | st.integers(0, 99),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(servers=st.dictionaries(WORDS, SERVER_WORDS, max_size=4))
def test_any_server_entry_is_read_or_refused(servers: dict[str, Json]) -> None:
    try:
        imported = read(servers)
    except Invalid:
        return
    assert len({server.tool_id for server in imported.servers}) == len(imported.servers)


KEYS = st.text(alphabet="abcdefghjkmnpqrstuvwxyz23456789", min_size=8, max_size=40)


@settings(max_examples=40, deadline=None)
@given(key=KEYS.filter(lambda key: not is_filler(key) and key not in "authorization bearer servers"))
def test_a_secret_literal_is_never_in_a_manifest(key: str) -> None:
    server: JsonObject = {"command": "npx", "args": ["--password", key], "env": {"MY_SECRET": key}}
    remote: JsonObject = {"url": f"https://x.example.com/?api_key={key}", "headers": {"Authorization": f"Bearer {key}"}}

    imported = read({"a": server, "b": remote})

    assert key not in repr(imported)
    assert key not in json.dumps([one.manifest for one in imported.servers])


@pytest.mark.parametrize(
    "name", ["API_KEY", "apiKey", "X-Api-Key", "GH_TOKEN", "PGPASSWORD", "--auth", "DB_PASS", "Cookie"]
)
def test_secret_names_are_recognised(name: str) -> None:
    assert names_secret(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_TOKENS", "4096"), ("AUTH_MODE", "oauth"), ("KEY_FILE", "/etc/key.pem"), ("SECRET_KEY", "true"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "/home/sam/service.json"), ("LOG_LEVEL", "debug"),
        ("PACKAGE", "@modelcontextprotocol/server-filesystem@2025.8.21"), ("MONKEY", "banana"),
        ("PROGRAM", "/nix/store/0c5ax1b2kdh3h4p5yz9qj6w7r8v0n1m2-node-22/bin/node"), ("MOTTO", "an auth flow = good"),
        ("SCRIPT", "/home/sam/task_list_server/main.py"),
    ],
)  # fmt: skip
def test_ordinary_names_are_not_secrets(name: str, value: str) -> None:
    assert not is_secret(name, value)


@pytest.mark.parametrize(
    "value", ["t7Xq2LmP9vKc4RzW8nYb", "0c5ax1b2kdh3h4p5yz9qj6w7r8v0n1m2", "a" * 20 + "1b2c3d4e5f6g"]
)
def test_a_random_text_under_an_ordinary_name_is_not_a_secret(value: str) -> None:
    assert not is_secret("BUILD", value)
    assert is_secret("BUILD_TOKEN", value)


@pytest.mark.parametrize("value", ["ghp_0000example1111", "sk-example-0000", "AKIAEXAMPLE000000", "postgres://a:b@db"])
def test_a_known_token_prefix_is_a_secret_under_any_name(value: str) -> None:
    assert is_secret("BUILD", value)


def test_a_secret_that_begins_with_a_slash_is_not_a_path() -> None:
    assert is_secret("AWS_SECRET_ACCESS_KEY", "/bPxRfiCY/EXAMPLEKEY")
    assert not is_secret("AWS_SECRET_ACCESS_KEY", "/run/secrets/aws")


@pytest.mark.parametrize("words", [{"packages": []}, {"name": "com.example/a", "remotes": [{"url": "https://a.b"}]}])
def test_a_server_json_is_refused_with_the_command_to_type(words: JsonObject, tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "server.json"
    path.write_text(json.dumps(words))

    answer = ask("mcp", action="import", paths=[str(path)])

    assert answer.is_error
    assert "server.json of an MCP registry, which Kiwi does not import" in str(answer.content["message"])
    assert "`kiwi mcp add NAME --url URL`" in str(answer.content["suggestion"])
