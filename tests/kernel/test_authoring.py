"""Items are created, changed, checked and removed atomically."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

SCRIPT: JsonObject = {
    "tool_type": "script",
    "executor": "python_runtime",
    "version": "1.0.0",
    "description": "Say a word",
    "config": {"entrypoint": "main.py"},
    "parameters": [{"name": "word", "type": "string", "required": True}],
    "files": {"main.py": "def main(word):\n    return word\n"},
}
API: JsonObject = {
    "tool_type": "api",
    "executor": "http_client",
    "version": "1.0.0",
    "description": "Look a word up",
    "config": {"method": "GET", "url_template": "https://words.example.com/{word}"},
    "parameters": [{"name": "word", "type": "string", "required": True}],
}
RUNTIME: JsonObject = {
    "tool_type": "runtime",
    "executor": "subprocess",
    "version": "1.0.0",
    "description": "Runs a Python file plainly",
    "config": {"command": "python3", "params_as": "flags", "result_from": "stdout"},
}
SERVER: JsonObject = {
    "tool_type": "mcp_server",
    "executor": "subprocess",
    "version": "1.0.0",
    "description": "A server of words",
    "config": {"transport": "stdio", "command": "words-server"},
}
MCP_TOOL: JsonObject = {
    "tool_type": "mcp_tool",
    "executor": "words_mcp",
    "version": "1.0.0",
    "description": "A tool of the server of words",
    "config": {"mcp_tool_name": "find"},
}
THREAD: JsonObject = {
    "tool_type": "thread",
    "executor": "llm_runtime",
    "version": "1.0.0",
    "description": "Research apart",
    "config": {"directive": "chat"},
}
COMPOSITE: JsonObject = {
    "tool_type": "composite",
    "version": "1.0.0",
    "description": "Say it twice",
    "config": {
        "steps": [{"id": "first", "tool": "memory_list"}, {"id": "second", "tool": "memory_list", "needs": ["first"]}]
    },
}
DIRECTIVE = """# Greet

```xml
<directive name="greet" version="1.0.0">
  <metadata><description>Greet a person</description><model tier="fast" /><permissions /></metadata>
  <inputs><input name="who" type="string" required="true">Whom</input></inputs>
  <process><step name="say"><action>Say hello.</action></step></process>
</directive>
```
"""
KNOWLEDGE = (
    "---\nid: naming\ntitle: Names\nversion: 1.0.0\nentry_type: decision\n---\nTables are plural. See [[style]].\n"
)

KINDS: Mapping[str, tuple[str, str, JsonObject]] = {
    "script": ("tool", "say", SCRIPT),
    "api": ("tool", "look_up", API),
    "runtime": ("tool", "plain_runtime", RUNTIME),
    "mcp_server": ("tool", "words_mcp", SERVER),
    "mcp_tool": ("tool", "words_find", MCP_TOOL),
    "thread": ("tool", "research_thread", THREAD),
    "composite": ("tool", "twice", COMPOSITE),
    "directive": ("directive", "greet", {"content": DIRECTIVE}),
    "knowledge": ("knowledge", "naming", {"content": KNOWLEDGE}),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, ask: Ask) -> tuple[str, str, JsonObject]:
    """One item of each type that can be authored: its item type, its name, and the words that create it."""
    if request.param == "mcp_tool":
        ask("execute", action="create", item_id="words_mcp", parameters=SERVER)
    return KINDS[request.param]


def change(words: JsonObject) -> JsonObject:
    """Words that change an item, whatever its type."""
    content = words.get("content")
    return {"content": f"{content}\nMore.\n"} if isinstance(content, str) else {"description": "Something new"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02")
def test_every_type_is_created_validated_signed_changed_and_removed(
    kind: tuple[str, str, JsonObject], project: Path, ask: Ask
) -> None:
    item_type, name, words = kind

    def act(action: str, parameters: JsonObject | None = None) -> JsonObject:
        answer = ask("execute", item_type=item_type, action=action, item_id=name, parameters=parameters or {})
        assert not answer.is_error, answer.content
        return answer.content

    created = act("create", words)
    assert (created["status"], created["tool_id"]) == ("created", name)
    assert Path(str(created["path"])).is_relative_to(project / ".ai")
    assert act("validate")["status"] == "valid"
    assert act("sign")["status"] == "signed"
    assert ask("load", item_type=item_type, item_id=name).content["integrity"] == "hashed"
    assert act("update", change(words))["status"] == "updated"
    assert ask("load", item_type=item_type, item_id=name).content["integrity"] == "unsigned"
    deleted = act("delete")
    assert deleted["status"] == "deleted"
    assert Path(str(deleted["trash_path"])).exists()
    assert ask("load", item_type=item_type, item_id=name).content["code"] == "tool_not_found"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02")
def test_a_dry_run_of_any_action_changes_nothing(
    kind: tuple[str, str, JsonObject], project: Path, home: Path, ask: Ask, tree: Tree
) -> None:
    item_type, name, words = kind

    def dry(action: str, parameters: JsonObject | None = None) -> Json:
        before = tree(project), tree(home / ".ai")
        answer = ask(
            "execute", item_type=item_type, action=action, item_id=name, parameters=parameters or {}, dry_run=True
        )
        assert (tree(project), tree(home / ".ai")) == before
        return answer.content.get("status")

    assert dry("create", words) == "planned"
    ask("execute", item_type=item_type, action="create", item_id=name, parameters=words)
    assert dry("update", change(words)) == "planned"
    assert dry("sign") == "planned"
    assert dry("delete") == "planned"


REFUSED: Mapping[str, tuple[str, JsonObject, str]] = {
    "a version that is none": ("new", {**SCRIPT, "version": "one"}, "invalid_manifest"),
    "a missing entrypoint": ("new", {**SCRIPT, "files": {"other.py": ""}}, "invalid_manifest"),
    "a syntax error": ("new", {**SCRIPT, "files": {"main.py": "def main(:\n"}}, "invalid_manifest"),
    "an unknown type": ("new", {**SCRIPT, "tool_type": "scrpt"}, "invalid_manifest"),
    "a missing executor": ("new", {**SCRIPT, "executor": "lua_runtime"}, "invalid_manifest"),
    "a reserved name": ("python_runtime", RUNTIME, "reserved_name"),
    "a file outside": ("new", {**SCRIPT, "files": {"../x.py": ""}}, "invalid_manifest"),
    "a place outside": ("new", {**SCRIPT, "location": "/etc"}, "invalid_request"),
    "a category outside": ("new", {**SCRIPT, "category": "../.."}, "invalid_request"),
    "a taken name": ("say", SCRIPT, "already_exists"),
    "two names": ("new", {**SCRIPT, "tool_id": "other"}, "invalid_request"),
}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02", "K-ME-03")
@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_create_leaves_the_disk_unchanged(why: str, project: Path, home: Path, ask: Ask, tree: Tree) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    before = tree(project), tree(home / ".ai")
    name, words, code = REFUSED[why]

    answer = ask("execute", action="create", item_id=name, parameters=words)

    assert answer.is_error
    assert answer.content["code"] == code
    assert answer.content["suggestion"]
    assert (tree(project), tree(home / ".ai")) == before


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-02")
def test_a_refused_update_leaves_the_item_unchanged(project: Path, ask: Ask, tree: Tree) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    before = tree(project)

    for words in ({"version": "x"}, {"files": {"main.py": "def main(:\n"}}, {"files": {"main.py": None}}):
        assert ask("execute", action="update", item_id="say", parameters=words).content["code"] == "invalid_manifest"

    assert tree(project) == before
    assert ask("execute", item_id="say", parameters={"word": "kiwi"}).content["result"] == "kiwi"


def test_an_update_preserves_comments_and_unnamed_keys(project: Path, ask: Ask) -> None:
    text = (
        "tool_id: look_up\n"
        "tool_type: api\n"
        'version: "1.0.0"  # counted by hand\n'
        "executor: http_client\n"
        "description: Look a word up\n"
        "# The service is slow on Mondays.\n"
        "config:\n"
        "  method: GET\n"
        "  url: https://words.example.com/all\n"
    )
    path = project / ".ai" / "tools" / "look_up.yaml"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")

    ask("execute", action="update", item_id="look_up", parameters={"description": "Look every word up"})

    assert path.read_text(encoding="utf-8") == text.replace("Look a word up", "Look every word up")


@pytest.mark.usefixtures("sandbox")
def test_an_update_adds_replaces_and_removes_files(project: Path, ask: Ask) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    files = {"main.py": "from lib.loud import loud\n\n\ndef main(word):\n    return loud(word)\n", "notes.txt": "x"}

    ask("execute", action="update", item_id="say", parameters={"files": {**files, "lib/loud.py": "loud = str.upper\n"}})
    removed = ask("execute", action="update", item_id="say", parameters={"files": {"notes.txt": None}})

    assert removed.content["files"] == ["lib/loud.py", "main.py", "tool.yaml"]
    assert ask("execute", item_id="say", parameters={"word": "kiwi"}).content["result"] == "KIWI"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(
    "words",
    [
        {"files": {"main.py": "def main(word):\n    return word * 2\n"}},
        {"description": "Say it twice", "files": {"main.py": "def main(word):\n    return word * 2\n"}},
        {"content": None, "files": {"main.py": "def main(word):\n    return word * 2\n"}},
    ],
    ids=["a file", "a word and a file", "the text as it was loaded"],
)
def test_a_signed_item_that_is_updated_is_unsigned_and_runs(words: JsonObject, ask: Ask) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    ask("execute", action="sign", item_id="say")
    if "content" in words:
        words = {**words, "content": ask("load", item_id="say").content["content"]}

    updated = ask("execute", action="update", item_id="say", parameters=words)

    ran = ask("execute", item_id="say", parameters={"word": "kiwi"}).content
    assert updated.content["status"] == "updated"
    assert (ran.get("result"), ran.get("integrity")) == ("kiwikiwi", "unsigned")


@pytest.mark.usefixtures("sandbox")
def test_a_deleted_item_can_be_restored_from_the_trash(project: Path, ask: Ask) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    deleted = ask("execute", action="delete", item_id="say").content

    Path(str(deleted["trash_path"])).rename(str(deleted["path"]))

    assert ask("execute", item_id="say", parameters={"word": "back"}).content["result"] == "back"


def test_a_built_in_is_neither_changed_nor_removed(ask: Ask) -> None:
    for action in ("update", "delete", "sign"):
        assert ask("execute", action=action, item_id="python_runtime").content["code"] == "reserved_name"


@pytest.mark.usefixtures("sandbox")
def test_one_of_many_concurrent_creates_of_a_name_wins(project: Path, ask: Ask, kernel: Kernel) -> None:
    async def race() -> list[Answer]:
        requests: list[JsonObject] = [
            {"action": "create", "item_id": "say", "parameters": {**SCRIPT, "description": f"Number {number}"}}
            for number in range(8)
        ]
        return list(await asyncio.gather(*(kernel.call("execute", request) for request in requests)))

    answers = asyncio.run(race())

    assert sorted(str(answer.content.get("status", answer.content.get("code"))) for answer in answers) == [
        *["already_exists"] * 7,
        "created",
    ]
    won = next(answer.content for answer in answers if not answer.is_error)
    loaded = ask("load", item_id="say").content
    number = answers.index(next(answer for answer in answers if not answer.is_error))
    assert as_object(loaded["metadata"])["description"] == f"Number {number}"
    assert won["path"] == loaded["path"]
    assert not list((project / ".ai").glob(".staging-*"))


@pytest.mark.usefixtures("sandbox")
def test_the_user_space_accepts_items_too(home: Path, ask: Ask) -> None:
    created = ask("execute", action="create", item_id="say", parameters={**SCRIPT, "location": "user"})

    assert Path(str(created.content["path"])) == home / ".ai" / "tools" / "say" / "tool.yaml"
    assert ask("load", item_id="say").content["source"] == "user"


@pytest.mark.req("K-VA-02")
def test_a_manifest_with_seven_faults_lists_seven(ask: Ask) -> None:
    faulty = {
        "tool_type": "api",
        "version": "first",
        "executor": "subprocess",
        "effect": "sometimes",
        "config": {"method": "FETCH", "url": "ftp://files.example.com/{lost}", "timeout": 0},
        "parameters": [{"name": "word", "type": "strnig"}],
    }

    answer = ask("execute", action="validate", item_id="faulty", parameters={"manifest": faulty})

    issues = [as_object(issue) for issue in as_list(answer.content["issues"])]
    places = [issue["place"] for issue in issues]
    assert len(issues) >= 7, places
    assert {
        "version", "executor", "effect", "config.method", "config.url", "config.timeout", "parameters[0].type",
    } <= set(places)  # fmt: skip
    assert all(issue["reason"] and issue["fix"] for issue in issues)


@pytest.mark.usefixtures("sandbox")
def test_a_file_is_validated_only_in_its_place(project: Path, ask: Ask, tmp_path: Path) -> None:
    ask("execute", action="create", item_id="say", parameters=SCRIPT)
    (tmp_path / "outside.yaml").write_text("tool_id: outside\n")

    inside = ask("execute", action="validate", parameters={"path": ".ai/tools/say"})
    outside = ask("execute", action="validate", parameters={"path": str(tmp_path / "outside.yaml")})
    missing = ask("execute", action="validate", parameters={"path": ".ai/tools/lost"})

    assert inside.content["status"] == "valid"
    assert outside.content["code"] == "invalid_request"
    assert missing.content["code"] == "not_found"


@pytest.mark.usefixtures("sandbox")
def test_the_category_of_a_signature_is_that_of_the_file(ask: Ask) -> None:
    ask("execute", action="create", item_id="say", parameters={**SCRIPT, "category": "speech"})

    wrong = ask("execute", action="sign", item_id="say", parameters={"category": "mail"})
    right = ask("execute", action="sign", item_id="say", parameters={"category": "speech"})

    assert wrong.content["code"] == "invalid_request"
    assert right.content["status"] == "signed"
