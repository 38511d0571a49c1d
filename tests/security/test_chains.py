"""Cyclic, deep, broken and forbidden chains: distinguished, and drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]


def put(project: Path, name: str, kind: str, executor: str | None, config: str = "{}", files: str = "") -> None:
    """Write an item as a folder of files, past the checks of create."""
    folder = project / ".ai" / "tools" / name
    folder.mkdir(parents=True, exist_ok=True)
    below = f"executor: {executor}\n" if executor else ""
    text = f"tool_id: {name}\ntool_type: {kind}\nversion: 1.0.0\ndescription: x\n{below}config: {config}\n"
    (folder / "tool.yaml").write_text(text)
    (folder / "main.sh").write_text(files or "echo hello\n")


SCRIPT = "{entrypoint: main.sh}"
COMMAND = "{command: bash}"


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-01")
@pytest.mark.parametrize(("a", "b"), [("loop_b", "loop_a"), ("loop_a", "loop_a")], ids=["two", "itself"])
def test_a_cycle_is_named(a: str, b: str, project: Path, ask: Ask) -> None:
    put(project, "loop_a", "runtime", a, COMMAND)
    put(project, "loop_b", "runtime", b, COMMAND)
    put(project, "top", "script", "loop_a", SCRIPT)

    refused = ask("execute", item_id="top").content

    assert (refused["error"], refused["code"]) == ("Executor cycle", "chain_cycle")
    assert " → loop_a" in str(refused["message"])
    assert as_list(refused["chain"])[0] == "top"


@pytest.mark.case("CHAIN-01")
def test_a_tool_that_runs_on_itself_is_not_created(project: Path, ask: Ask) -> None:
    words = {
        "tool_type": "runtime", "executor": "me", "version": "1.0.0", "description": "x", "config": {"command": "bash"},
    }  # fmt: skip
    refused = ask("execute", action="create", item_id="me", parameters=words)

    assert refused.content["code"] == "invalid_manifest"
    assert not (project / ".ai" / "tools").exists()


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-02")
def test_a_chain_of_more_than_sixteen_links_is_too_deep(project: Path, ask: Ask) -> None:
    for number in range(20):
        put(project, f"r{number}", "runtime", f"r{number + 1}" if number < 19 else "subprocess", COMMAND)

    refused = ask("execute", item_id="r0").content

    assert (refused["error"], refused["limit"]) == ("Executor chain too deep", 16)
    assert "r0 → r1 → r2" in str(refused["message"])


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-03")
def test_a_missing_link_is_named_with_the_chain_so_far(project: Path, ask: Ask) -> None:
    put(project, "mid", "runtime", "lost_primitive", COMMAND)
    put(project, "top", "script", "mid", SCRIPT)

    refused = ask("execute", item_id="top").content

    assert (refused["error"], refused["code"]) == ("Executor not found", "executor_not_found")
    assert "top → mid → lost_primitive (missing)" in str(refused["message"])


WRONG = {
    "an api on subprocess": ("api", "subprocess", "{method: GET, url: 'https://a.test/'}"),
    "a script on a server": ("script", "server", SCRIPT),
    "a script on a primitive": ("script", "subprocess", SCRIPT),
    "a server's tool on a runtime": ("mcp_tool", "bash_runtime", "{mcp_tool_name: x}"),
    "knowledge on a runtime": ("knowledge", "bash_runtime", "{}"),
    "a runtime on a runtime": ("runtime", "bash_runtime", COMMAND),
    "a server on a runtime": ("mcp_server", "bash_runtime", "{transport: stdio, command: x}"),
}


@pytest.mark.req("K-CH-02")
@pytest.mark.case("CHAIN-04")
@pytest.mark.parametrize("what", WRONG)
def test_a_link_of_the_wrong_type_is_refused_when_made_and_when_run(what: str, project: Path, ask: Ask) -> None:
    put(project, "server", "mcp_server", "subprocess", "{transport: stdio, command: x}")
    put(project, "top", *WRONG[what])

    made = ask("execute", action="validate", item_id="top").content
    ran = ask("execute", item_id="top").content

    assert made["status"] == "invalid"
    assert "executor" in [as_object(issue)["place"] for issue in as_list(made["issues"])]
    assert (ran["error"], ran["code"]) == ("Wrong executor type", "chain_mistyped")
    assert "top → " in str(ran["message"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-CH-03")
def test_an_executor_is_judged_by_its_type_and_not_by_its_name(project: Path, ask: Ask) -> None:
    put(project, "my_shell", "runtime", "subprocess", COMMAND)
    put(project, "odd_runtime", "script", "bash_runtime", SCRIPT)
    put(project, "top", "script", "my_shell", SCRIPT)
    put(project, "other", "script", "odd_runtime", SCRIPT)

    assert ask("execute", item_id="top").content["result"] == "hello"
    assert ask("execute", item_id="other").content["code"] == "chain_mistyped"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("CHAIN-05")
@pytest.mark.parametrize("name", ["subprocess", "http_client", "bash_runtime", "python_runtime"])
def test_a_file_named_like_a_built_in_link_is_never_used(name: str, project: Path, ask: Ask, tree: Tree) -> None:
    created = ask("execute", action="create", item_id=name, parameters={"tool_type": "runtime", "version": "1.0.0"})
    put(project, "top", "script", "bash_runtime", SCRIPT)
    put(project, name, "runtime", "subprocess", "{command: touch, args: [canary]}")
    before = tree(project)

    ran = ask("execute", item_id="top").content

    assert created.content["code"] == "reserved_name"
    assert ran["result"] == "hello"
    assert not (project / "canary").exists()
    assert tree(project).keys() - before.keys() == {str(ran["output_path"])}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("CHAIN-06")
def test_a_link_replaced_while_a_kernel_runs_is_seen_at_the_next_call(project: Path, ask: Ask) -> None:
    put(project, "my_shell", "runtime", "subprocess", COMMAND)
    put(project, "top", "script", "my_shell", SCRIPT)
    ask("execute", action="sign", item_id="my_shell")
    assert ask("execute", item_id="top").content["result"] == "hello"

    path = project / ".ai" / "tools" / "my_shell" / "tool.yaml"
    path.write_text(path.read_text().replace("command: bash", "command: cat"))

    assert ask("execute", item_id="top").content["code"] == "content_hash_mismatch"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("CHAIN-07")
def test_a_project_item_hides_the_user_item_and_both_are_reported(project: Path, home: Path, ask: Ask) -> None:
    put(project, "say", "script", "bash_runtime", SCRIPT, "echo project\n")
    put(home, "say", "script", "bash_runtime", SCRIPT, "echo user\n")

    ran = ask("execute", item_id="say").content
    other = ask("execute", item_id="user/local/say@1.0.0").content
    explained = ask("execute", action="why", item_id="say").content

    assert ran["result"] == "project"
    assert other["result"] == "user"
    sentence = "project/local/say@1.0.0 is used, and hides user/local/say@1.0.0"
    assert sentence in str(ran["warnings"])
    assert sentence in str(explained["shadowed"])


@pytest.mark.req("K-CH-01")
@pytest.mark.case("CHAIN-08")
def test_a_third_primitive_cannot_be_declared(project: Path, ask: Ask) -> None:
    words = {"tool_type": "primitive", "version": "1.0.0", "description": "x"}
    created = ask("execute", action="create", item_id="disk", parameters=words)
    put(project, "disk", "primitive", None)
    put(project, "disk_runtime", "runtime", "disk", COMMAND)
    put(project, "top", "script", "disk_runtime", SCRIPT)
    (project / ".ai" / "types").mkdir()
    (project / ".ai" / "types" / "primitive.yaml").write_text(
        "type: primitive\ndriver: ''\nneeds_executor: none\nfiles: none\nids: [disk]\n"
        "config: {type: object, additionalProperties: false}\n"
    )

    assert created.content["code"] == "invalid_manifest"
    assert ask("execute", action="validate", item_id="disk").content["status"] == "invalid"
    assert ask("execute", item_id="top").content["code"] == "chain_mistyped"


@pytest.mark.req("K-CH-01")
def test_why_prints_the_chain_down_to_a_primitive(project: Path, ask: Ask) -> None:
    put(project, "top", "script", "bash_runtime", SCRIPT)

    explained = ask("execute", action="why", item_id="top").content
    links = [as_object(link) for link in as_list(explained["chain"])]

    assert [link["tool_id"] for link in links] == ["top", "bash_runtime", "subprocess"]
    assert [link["tool_type"] for link in links] == ["script", "runtime", "primitive"]
    assert explained["would_run"] is True


@pytest.mark.req("K-CH-05")
@pytest.mark.case("INJ-10")
@pytest.mark.parametrize("word", ["command", "args", "params_as", "check", "run_command"])
def test_a_tool_cannot_set_keys_of_its_executor(word: str, ask: Ask, project: Path) -> None:
    value: Json = ["x"] if word in {"args", "check"} else "json_stdin"
    words: JsonObject = {
        "tool_type": "script",
        "executor": "bash_runtime",
        "version": "1.0.0",
        "description": "x",
        "config": {"entrypoint": "main.sh", word: value},
        "files": {"main.sh": "echo hello\n"},
    }

    refused = ask("execute", action="create", item_id="top", parameters=words)

    assert refused.content["code"] == "invalid_manifest"
    assert f"`{word}` is a word of the runtime below" in str(refused.content["message"])
    assert not (project / ".ai" / "tools").exists()


@pytest.mark.req("K-CH-06")
def test_rules_of_a_parent_for_its_children_apply_if_declared(project: Path, ask: Ask) -> None:
    put(project, "free", "runtime", "subprocess", COMMAND)
    put(project, "strict", "runtime", "subprocess", COMMAND)
    rules = (
        "validation:\n  child_schemas:\n    - match: {tool_type: script}\n"
        "      schema: {properties: {manifest: {required: [tags]}}}\n"
        "  child_constraints: {on_strict: '>=1,<2'}\n"
    )
    path = project / ".ai" / "tools" / "strict" / "tool.yaml"
    path.write_text(path.read_text() + rules)
    for name, executor in (("on_free", "free"), ("on_strict", "strict")):
        put(project, name, "script", executor, SCRIPT)

    assert ask("execute", action="validate", item_id="on_free").content["status"] == "valid"
    refused = ask("execute", action="validate", item_id="on_strict").content
    assert refused["status"] == "invalid", refused
    child = project / ".ai" / "tools" / "on_strict" / "tool.yaml"
    child.write_text(child.read_text() + "tags: [checked]\n")
    assert ask("execute", action="validate", item_id="on_strict").content["status"] == "valid"
    child.write_text(child.read_text().replace("1.0.0", "2.0.0"))
    assert ask("execute", action="validate", item_id="on_strict").content["status"] == "invalid"
