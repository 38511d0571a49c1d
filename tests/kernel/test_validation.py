"""Required and forbidden keys of each type, in both directions."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

pytestmark = pytest.mark.usefixtures("sandbox")

Ask = Callable[..., Answer]

SCRIPT: JsonObject = {
    "tool_type": "script",
    "executor": "bash_runtime",
    "config": {"entrypoint": "main.sh"},
    "files": {"main.sh": "echo hello\n"},
}
API: JsonObject = {
    "tool_type": "api",
    "executor": "http_client",
    "config": {"method": "GET", "url": "https://a.example.com/{word}"},
    "parameters": [{"name": "word", "type": "string"}],
}
SERVER: JsonObject = {
    "tool_type": "mcp_server",
    "executor": "subprocess",
    "config": {"transport": "stdio", "command": "npx"},
}
REMOTE: JsonObject = {
    "tool_type": "mcp_server",
    "executor": "http_client",
    "config": {"transport": "sse", "url": "https://a.example.com/sse"},
}
MCP_TOOL: JsonObject = {"tool_type": "mcp_tool", "executor": "server", "config": {"mcp_tool_name": "find"}}
RUNTIME: JsonObject = {"tool_type": "runtime", "executor": "subprocess", "config": {"command": "lua"}}
KNOWLEDGE: JsonObject = {
    "tool_type": "knowledge",
    "files": {
        "tool.yaml": "tool_id: it\ntool_type: knowledge\nversion: 1.0.0\nconfig: {title: Notes}\n",
        "README.md": "x",
    },
}
GOOD: Mapping[str, JsonObject] = {
    "script": SCRIPT, "api": API, "server": SERVER, "remote server": REMOTE, "mcp tool": MCP_TOOL, "runtime": RUNTIME,
    "knowledge": KNOWLEDGE,
}  # fmt: skip


def without(words: JsonObject, word: str) -> JsonObject:
    return {name: value for name, value in words.items() if name != word}


def config(words: JsonObject, **changes: Json) -> JsonObject:
    changed = {**as_object(words["config"]), **changes}
    return {**words, "config": {name: value for name, value in changed.items() if value is not None}}


BAD: Mapping[str, tuple[JsonObject, str]] = {
    "a version that is missing": ({**API, "version": ""}, "version"),
    "a type that is missing": (without(API, "tool_type"), "tool_type"),
    "an executor that is missing": (without(SCRIPT, "executor"), "executor"),
    "a script on a primitive": ({**SCRIPT, "executor": "subprocess"}, "executor"),
    "a script without an entrypoint": (
        {**config(SCRIPT, entrypoint=None), "files": {"main.sh": "true\n", "more.sh": "true\n"}},
        "config.entrypoint",
    ),
    "a script without its file": (config(SCRIPT, entrypoint="lost.sh"), "config.entrypoint"),
    "a script with a syntax error": ({**SCRIPT, "files": {"main.sh": "if then\n"}}, "main.sh"),
    "an api on subprocess": ({**API, "executor": "subprocess"}, "executor"),
    "an api without a method": (config(API, method=None), "config.method"),
    "an api with an unknown method": (config(API, method="FETCH"), "config.method"),
    "an api without a url": (config(API, url=None), "config"),
    "an api with a url that is none": (config(API, url="not a url"), "config.url"),
    "an api with a file url": (config(API, url="file:///etc/passwd"), "config.url"),
    "an api with a host from a parameter": (config(API, url="https://{word}.example.com/"), "config.url"),
    "an api with an unknown variable": (config(API, url="https://a.example.com/{lost}"), "config.url"),
    "an api with a bad transform": (config(API, response_transform="$.["), "config.response_transform"),
    "an mcp tool on a runtime": ({**MCP_TOOL, "executor": "bash_runtime"}, "executor"),
    "an mcp tool without a name": ({**MCP_TOOL, "config": {}}, "config.mcp_tool_name"),
    "a server without a transport": (config(SERVER, transport=None), "config.transport"),
    "a server with an unknown transport": (config(SERVER, transport="pigeon"), "config.transport"),
    "a stdio server without a command": (config(SERVER, command=None), "config.command"),
    "an sse server without a url": (config(REMOTE, url=None), "config.url"),
    "a server on a runtime": ({**SERVER, "executor": "bash_runtime"}, "executor"),
    "a runtime on a runtime": ({**RUNTIME, "executor": "bash_runtime"}, "executor"),
    "a runtime without a command": ({**RUNTIME, "config": {}}, "config"),
    "a runtime with an unknown word": (config(RUNTIME, comand="lua"), "config.comand"),
    "a parameter of no type": ({**API, "parameters": [{"name": "word", "type": "strnig"}]}, "parameters[0].type"),
}  # fmt: skip


def validated(ask: Ask, words: JsonObject) -> JsonObject:
    ask("execute", action="create", item_id="server", parameters={"version": "1.0.0", "description": "x", **SERVER})
    whole = {"version": "1.0.0", "description": "x", **words}
    return ask("execute", action="validate", item_id="it", parameters=whole).content


@pytest.mark.req("K-VA-01", "K-VA-04")
@pytest.mark.parametrize("kind", GOOD)
def test_an_item_with_all_required_keys_is_valid(kind: str, ask: Ask) -> None:
    assert validated(ask, GOOD[kind])["issues"] == []


@pytest.mark.req("K-VA-01", "K-VA-04")
@pytest.mark.parametrize("what", BAD)
def test_a_missing_required_key_is_reported_with_its_place(what: str, ask: Ask) -> None:
    words, place = BAD[what]

    response = validated(ask, words)

    issues = [as_object(issue) for issue in as_list(response["issues"])]
    assert response["status"] == "invalid"
    assert any(str(issue["place"]).startswith(place) for issue in issues), issues
    assert all(issue["reason"] and issue["fix"] for issue in issues)


@pytest.mark.req("K-VA-03")
@pytest.mark.parametrize(
    ("runtime", "file", "good", "bad"),
    [
        ("python_runtime", "a.py", "x = 1\n", "def main(:\n"),
        ("bash_runtime", "a.sh", "echo\n", "if then\n"),
        ("node_runtime", "a.mjs", "export const main = () => 1;\n", "export const = ;\n"),
    ],
)
def test_the_syntax_of_an_entrypoint_is_checked_by_its_runtime(
    runtime: str, file: str, good: str, bad: str, ask: Ask
) -> None:
    words = {**SCRIPT, "executor": runtime, "config": {"entrypoint": file}}

    assert validated(ask, {**words, "files": {file: good}})["issues"] == []
    faulty = as_list(validated(ask, {**words, "files": {file: bad}})["issues"])
    assert str(as_object(faulty[0])["place"]).startswith(file)


@pytest.mark.req("K-VA-01")
def test_a_custom_runtime_has_its_own_check(ask: Ask) -> None:
    runtime = {
        **RUNTIME,
        "version": "1.0.0",
        "description": "x",
        "config": {"command": "bash", "check": ["grep", "-q", "^recipe", "{tool.files}/{tool.entrypoint}"]},
    }
    ask("execute", action="create", item_id="recipes", parameters=runtime)
    words = {**SCRIPT, "executor": "recipes"}

    assert validated(ask, {**words, "files": {"main.sh": "recipe\n"}})["status"] == "valid"
    assert validated(ask, {**words, "files": {"main.sh": "soup\n"}})["status"] == "invalid"


@pytest.mark.req("K-VA-01")
def test_parameters_are_checked_when_the_item_runs(ask: Ask) -> None:
    words = {
        **SCRIPT,
        "version": "1.0.0",
        "description": "x",
        "parameters": [{"name": "n", "type": "integer", "max": 3}],
    }
    ask("execute", action="create", item_id="it", parameters=words)

    assert ask("execute", item_id="it", parameters={"n": 3}).content["result"] == "hello"
    assert ask("execute", item_id="it", parameters={"n": 4}).content["code"] == "invalid_input"
