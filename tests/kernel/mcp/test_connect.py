"""Kiwi in the configuration of another client: one entry is added, the rest is unchanged, and undo restores it."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kiwi_mcp.domain.errors import Conflict, Invalid, InvalidRequest, NotFound
from kiwi_mcp.domain.json import Json, as_object
from kiwi_mcp.manifest.mcp.client_format import plain, read_object, with_member, without_member
from kiwi_mcp.manifest.mcp.clients import BACKUP, ClientFileChange, Scope, apply, clients, plan_connect, plan_undo

COMMAND = "/opt/kiwi/bin/kiwi"
NOON = datetime(2026, 1, 2, 12, 0, 0, tzinfo=UTC)
EXAMPLES = Path(__file__).parents[2] / "data" / "clients"
WRITTEN: dict[tuple[str, Scope], str] = {
    ("claude-code", "project"): ".mcp.json",
    ("claude-desktop", "user"): ".config/Claude/claude_desktop_config.json",
    ("cursor", "project"): ".cursor/mcp.json",
    ("cursor", "user"): ".cursor/mcp.json",
    ("vscode", "project"): ".vscode/mcp.json",
    ("vscode", "user"): ".config/Code/User/mcp.json",
    ("windsurf", "user"): ".codeium/windsurf/mcp_config.json",
}


def connect(client: str, scope: Scope, home: Path, project: Path, command: str = COMMAND) -> ClientFileChange:
    return plan_connect(client, scope, home=home, project=project, command=command)


def undo(client: str, scope: Scope, home: Path, project: Path) -> ClientFileChange:
    return plan_undo(client, scope, home=home, project=project)


HERE = {"claude-code": ".", "cursor": "${workspaceFolder}", "vscode": "${workspaceFolder}"}
STARTED = {
    (client, scope): ["serve", "--project", HERE[client]] if scope == "project" else ["serve"]
    for client, scope in WRITTEN
}
"""By which words each client starts Kiwi: a file of a project is about that project."""


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(("client", "scope"), WRITTEN)
def test_a_client_without_a_file_gets_one_and_undo_removes_it(
    client: str, scope: Scope, home: Path, project: Path
) -> None:
    path = (home if scope == "user" else project) / WRITTEN[client, scope]

    assert apply(connect(client, scope, home, project)) is None
    written = json.loads(path.read_text())
    for key in clients()[client].key:
        written = written[key]
    assert written == {"kiwi": {**clients()[client].entry, "command": COMMAND, "args": STARTED[client, scope]}}
    assert not connect(client, scope, home, project).is_needed

    apply(undo(client, scope, home, project))
    assert not path.exists()


@pytest.mark.parametrize(
    ("client", "scope", "example"),
    [
        ("claude-code", "project", "claude-code-project.json"),
        ("claude-desktop", "user", "claude-desktop.json"),
        ("vscode", "project", "vscode.json"),
        ("windsurf", "user", "windsurf.json"),
    ],
)
def test_each_client_example_gains_one_entry_and_is_restored_byte_for_byte(
    client: str, scope: Scope, example: str, home: Path, project: Path
) -> None:
    before = (EXAMPLES / example).read_text(encoding="utf-8")
    path = put((home if scope == "user" else project) / WRITTEN[client, scope], before)
    path.chmod(0o640)

    backup = apply(connect(client, scope, home, project), now=NOON)

    assert backup == path.with_name(f"{path.name}{BACKUP}20260102T120000Z")
    assert backup.read_text(encoding="utf-8") == before
    assert path.stat().st_mode & 0o777 == backup.stat().st_mode & 0o777 == 0o640
    after = path.read_text(encoding="utf-8")
    lines = iter(after.splitlines())
    # Every line is still there, in order; the line before the new entry may have got a comma.
    assert all(any(line in {old, f"{old},"} for line in lines) for old in before.splitlines())
    key = clients()[client].key[0]
    servers = dict(as_object(read_object(after, what="it")[key]))
    assert servers.pop("kiwi") == {**clients()[client].entry, "command": COMMAND, "args": STARTED[client, scope]}
    assert servers == read_object(before, what="it")[key]

    apply(undo(client, scope, home, project))
    assert path.read_text(encoding="utf-8") == before
    assert not backup.exists()


def test_comments_and_trailing_commas_stay_in_place(home: Path, project: Path) -> None:
    text = '{\n\t// mine\n\t"servers": {\n\t\t"a": {"command": "a"}, // last\n\t\t// "b": {}\n\t},\n}\n'
    path = put(project / ".vscode" / "mcp.json", text)

    apply(connect("vscode", "project", home, project))

    assert path.read_text() == (
        '{\n\t// mine\n\t"servers": {\n\t\t"a": {"command": "a"}, // last\n\t\t// "b": {}\n\t\t"kiwi": {\n'
        f'\t\t\t"type": "stdio",\n\t\t\t"command": "{COMMAND}",\n'
        '\t\t\t"args": [\n\t\t\t\t"serve",\n\t\t\t\t"--project",\n\t\t\t\t"${workspaceFolder}"\n\t\t\t]\n'
        "\t\t},\n\t},\n}\n"
    )


def test_an_existing_entry_keeps_its_other_keys(home: Path, project: Path) -> None:
    entry = {"command": "/old/kiwi", "args": ["serve"], "env": {"KEY_FILE": "x"}, "disabled": False}
    path = put(project / ".cursor" / "mcp.json", json.dumps({"mcpServers": {"kiwi": entry}}, indent=4))

    apply(connect("cursor", "project", home, project))

    changed = {**entry, "command": COMMAND, "args": STARTED["cursor", "project"]}
    assert json.loads(path.read_text()) == {"mcpServers": {"kiwi": changed}}


def test_later_changes_survive_an_undo(home: Path, project: Path) -> None:
    path = put(project / ".mcp.json", '{\n  "mcpServers": {\n    "a": {"command": "a"}\n  }\n}\n')
    apply(connect("claude-code", "project", home, project))
    path.write_text(path.read_text().replace('"a": {"command": "a"}', '"b": {"command": "b"}'))

    apply(undo("claude-code", "project", home, project))

    assert path.read_text() == '{\n  "mcpServers": {\n    "b": {"command": "b"}\n  }\n}\n'
    assert not undo("claude-code", "project", home, project).is_needed


def test_neither_a_diff_nor_a_repr_shows_values_of_other_servers(home: Path, project: Path) -> None:
    text = '{"mcpServers": {"a": {"env": {"TOKEN": "hunter2"}}}} // hunter2\n'
    put(project / ".cursor" / "mcp.json", text)

    change = connect("cursor", "project", home, project)
    apply(change)

    for one in (change, undo("cursor", "project", home, project)):
        assert "hunter2" not in one.diff
        assert "hunter2" not in repr(one)
        assert COMMAND in one.diff


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"mcpServers": []}',
        '{"mcpServers": {"a": 1,, "b": 2}}',
        '{"mcpServers": {}, "mcpServers": {}}',
        '{"mcpServers": {} /* open',
        "{" * 200,
        '{"mcpServers": {}} trailing',
    ],
)
def test_a_malformed_file_is_refused_and_not_changed(text: str, home: Path, project: Path) -> None:
    path = put(project / ".cursor" / "mcp.json", text)

    with pytest.raises(Invalid):
        connect("cursor", "project", home, project)

    assert path.read_text() == text
    assert [one.name for one in path.parent.iterdir()] == ["mcp.json"]


def test_nothing_is_written_among_comments_that_the_client_cannot_read(home: Path, project: Path) -> None:
    put(project / ".mcp.json", '{"mcpServers": {}} // note\n')

    with pytest.raises(Invalid, match="comments"):
        connect("claude-code", "project", home, project)


@pytest.mark.parametrize("data", [b"\xff\xfe{\x00}\x00", b'{"a": "\xff"}'])
def test_a_file_that_is_not_utf8_is_refused(data: bytes, home: Path, project: Path) -> None:
    (project / ".mcp.json").write_bytes(data)

    with pytest.raises(InvalidRequest, match="UTF-8"):
        connect("claude-code", "project", home, project)


def test_a_fifo_in_place_of_the_file_is_refused_at_once(home: Path, project: Path) -> None:
    os.mkfifo(project / ".mcp.json")

    with pytest.raises(InvalidRequest, match="regular"):
        connect("claude-code", "project", home, project)


def test_a_link_out_of_the_home_folder_is_not_followed(home: Path, project: Path, tmp_path: Path) -> None:
    outside = put(tmp_path / "elsewhere" / "mcp.json", "{}")
    (home / ".cursor").symlink_to(outside.parent)
    (project / ".mcp.json").symlink_to(outside)

    with pytest.raises(InvalidRequest, match="leads out"):
        connect("cursor", "user", home, project)
    with pytest.raises(InvalidRequest, match="leads out"):
        connect("claude-code", "project", home, project)
    assert outside.read_text() == "{}"


def test_a_link_within_the_home_folder_stays_a_link(home: Path, project: Path) -> None:
    real = put(home / "dotfiles" / "mcp.json", "{}")
    (home / ".cursor").mkdir()
    link = home / ".cursor" / "mcp.json"
    link.symlink_to(real)

    apply(connect("cursor", "user", home, project))

    assert link.is_symlink()
    assert "kiwi" in real.read_text()


def test_a_file_that_changed_since_the_plan_is_not_written(home: Path, project: Path) -> None:
    path = put(project / ".mcp.json", "{}")
    change = connect("claude-code", "project", home, project)
    path.write_text('{"mine": 1}')

    with pytest.raises(Conflict):
        apply(change)

    assert path.read_text() == '{"mine": 1}'


def test_an_unknown_client_a_missing_scope_and_a_relative_command_are_refused(home: Path, project: Path) -> None:
    with pytest.raises(NotFound) as unknown:
        connect("cursr", "user", home, project)
    assert "cursor" in unknown.value.suggestion
    with pytest.raises(InvalidRequest):
        connect("windsurf", "project", home, project)
    with pytest.raises(InvalidRequest, match="absolute"):
        connect("cursor", "user", home, project, command="kiwi")


def test_a_file_in_place_of_a_folder_is_reported(home: Path, project: Path) -> None:
    (project / ".cursor").write_text("mine")

    with pytest.raises(InvalidRequest, match="cannot be used"):
        apply(connect("cursor", "project", home, project))

    assert (project / ".cursor").read_text() == "mine"


def test_windows_line_ends_and_a_byte_order_mark_are_preserved(home: Path, project: Path) -> None:
    before = '\ufeff{\r\n  "mcpServers": {}\r\n}\r\n'
    path = put(project / ".mcp.json", before)

    apply(connect("claude-code", "project", home, project))

    after = path.read_bytes().decode()
    assert after.startswith('\ufeff{\r\n  "mcpServers": {\r\n    "kiwi": {\r\n')
    assert after.count("\n") == after.count("\r\n")


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)
VALUES: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)
SERVERS = st.dictionaries(TEXTS.filter(lambda name: name != "kiwi"), VALUES, max_size=4)
ROOTS = st.dictionaries(TEXTS.filter(lambda name: name != "mcpServers"), VALUES, max_size=3)
INDENTS = st.sampled_from([None, 0, 1, 2, 4, "\t"])
ENTRY: Json = {"command": COMMAND, "args": ["serve"]}
PATH = ("mcpServers", "kiwi")


@settings(max_examples=40, deadline=None)
@given(root=ROOTS, servers=SERVERS | st.none(), indent=INDENTS)
def test_any_configuration_gains_the_entry_and_nothing_else(
    root: dict[str, Json], servers: dict[str, Json] | None, indent: int | str | None
) -> None:
    whole = root if servers is None else {"mcpServers": servers, **root}
    before = json.dumps(whole, indent=indent, ensure_ascii=False)

    after = with_member(before, PATH, ENTRY, what="it")

    assert json.loads(after) == {**whole, "mcpServers": {**(servers or {}), "kiwi": ENTRY}}
    assert with_member(after, PATH, ENTRY, what="it") == after
    assert without_member(before, PATH, what="it") == before
    without = without_member(after, PATH, what="it")
    assert json.loads(without) == {**whole, "mcpServers": servers or {}}
    if servers and indent != 0:
        assert without == before


LAST_COMMA = st.sampled_from(["", "yes"])
JUNK = st.sampled_from(["", " ", "\n", "// c, } ]\n", '/* , " } */', "\t", "/**/", "//\n"])


@st.composite
def loose_texts(draw: st.DrawFn, value: Json) -> str:
    """A value as people write it: comments and white space anywhere, trailing commas."""

    def gap() -> str:
        return draw(JUNK)

    def end(inner: list[str]) -> str:
        has_comma = draw(LAST_COMMA)
        return f",{gap()}" if inner and has_comma else gap()

    def spell(part: Json) -> str:
        if isinstance(part, dict):
            inner = [f"{gap()}{json.dumps(key)}{gap()}:{gap()}{spell(one)}{gap()}" for key, one in part.items()]
            return "{" + ",".join(inner) + end(inner) + "}"
        if isinstance(part, list):
            inner = [f"{gap()}{spell(one)}{gap()}" for one in part]
            return "[" + ",".join(inner) + end(inner) + "]"
        return json.dumps(part)

    return gap() + spell(value) + gap()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), root=ROOTS, servers=SERVERS)
def test_a_configuration_with_comments_anywhere_gains_the_entry_and_loses_it(
    data: st.DataObject, root: dict[str, Json], servers: dict[str, Json]
) -> None:
    whole = {**root, "mcpServers": servers}
    before = data.draw(loose_texts(whole))
    assert read_object(before, what="it") == whole

    after = with_member(before, PATH, ENTRY, what="it")

    assert read_object(after, what="it") == {**whole, "mcpServers": {**servers, "kiwi": ENTRY}}
    without = without_member(after, PATH, what="it")
    assert read_object(without, what="it") == whole
    comments = [text.count("//") + text.count("/*") for text in (before, after, without)]
    assert len(set(comments)) == 1


@settings(max_examples=60, deadline=None)
@given(text=st.text(alphabet='{}[]",:/*\\ \n1a', max_size=40))
def test_any_text_is_read_with_its_length_preserved_or_refused(text: str) -> None:
    assert len(plain(text)) == len(text)
    try:
        read_object(text, what="it")
    except Invalid:
        return
    with_member(text, ("a",), 1, what="it")


@pytest.mark.parametrize("text", ['"' + '\\"' * 500_000, "/*" * 500_000, "[" * 300_000 + ",", '{"a":' * 100_000])
def test_a_text_of_quadratic_cost_is_refused_quickly(text: str) -> None:
    with pytest.raises(Invalid):
        read_object(text, what="it")
