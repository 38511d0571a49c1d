"""A tool, a directive and knowledge of one name: the requested type selects among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.kernel import Answer
from kiwi_mcp.manifest.type_specs import BUILT_IN

Ask = Callable[..., Answer]

TOOL = """\
tool_id: send
tool_type: script
executor: bash_runtime
version: {version}
description: Send it
config: {{entrypoint: main.sh}}
"""
DIRECTIVE = """\
# Send
```xml
<directive name="send" version="{version}">
  <metadata><description>How to send</description><model tier="fast"/><permissions/></metadata>
  <process><step name="ask"><action>Ask before sending.</action></step></process>
</directive>
```
"""
KNOWLEDGE = """\
---
id: send
title: Sending
version: {version}
entry_type: reference
---

What sending is.
"""
PATHS = {"tool": "tools/send/tool.yaml", "directive": "directives/send.md", "knowledge": "knowledge/send.md"}
TEXTS = {"tool": TOOL, "directive": DIRECTIVE, "knowledge": KNOWLEDGE}
TYPES = ["tool", "directive", "knowledge"]


def put(base: Path, **versions: str) -> None:
    """Write the items of these types, each in a version."""
    for item_type, version in versions.items():
        path = base / PATHS[item_type]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TEXTS[item_type].format(version=version))
        if item_type == "tool":
            (path.parent / "main.sh").write_text("echo sent\n")


@pytest.fixture(params=["tool", "directive", "knowledge", "none"])
def newest(request: pytest.FixtureRequest, project: Path) -> str:
    """The type with the highest version; with `none` all three have the same full name."""
    found = str(request.param)
    put(project / ".ai", **{one: "2.0.0" if one == found else "1.0.0" for one in TYPES})
    return found


def texts(project: Path) -> Mapping[str, str]:
    return {one: (project / ".ai" / path).read_text() for one, path in PATHS.items()}


def type_of(content: JsonObject) -> str:
    written = as_object(content["metadata"])["tool_type"]
    return "tool" if written == "script" else str(written)


@pytest.mark.parametrize("item_type", TYPES)
def test_load_returns_the_item_of_the_requested_type(item_type: str, newest: str, ask: Ask) -> None:
    for item_id in ("send", f"project/local/send@{'2.0.0' if newest == item_type else '1.0.0'}"):
        loaded = ask("load", item_id=item_id, item_type=item_type).content
        assert type_of(loaded) == item_type, newest
        assert loaded["chain"] == {"tool": ["send", "bash_runtime", "subprocess"]}.get(item_type, loaded["chain"])
        assert "warnings" not in loaded


@pytest.mark.parametrize("item_type", TYPES)
def test_the_item_of_the_requested_type_is_planned_and_explained(item_type: str, newest: str, ask: Ask) -> None:
    planned = ask("execute", item_id="send", item_type=item_type, dry_run=True).content
    why = ask("execute", action="why", item_id="send", item_type=item_type).content

    assert ("argv" in str(planned["plan"])) == (item_type == "tool"), newest
    assert why["driver"] == {"tool": "process"}.get(item_type, "read")
    assert why["shadowed"] == []
    assert "warnings" not in planned or "hides" not in str(planned["warnings"])


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("item_type", TYPES)
def test_only_the_item_of_the_requested_type_is_signed(item_type: str, newest: str, ask: Ask, project: Path) -> None:
    before = texts(project)

    signed = ask("execute", action="sign", item_id="send", item_type=item_type).content
    again = ask("execute", action="sign", item_id="send", item_type=TYPES[TYPES.index(item_type) - 1]).content

    assert signed["path"] == str(project / ".ai" / PATHS[item_type]), newest
    assert again["status"] == "signed"
    changed = {one for one, text in texts(project).items() if text != before[one]}
    assert changed == {item_type, TYPES[TYPES.index(item_type) - 1]}
    for one in changed:  # each has a record of its own in the lockfile
        planned = ask("execute", item_id="send", item_type=one, dry_run=True, frozen=True).content
        assert planned["status"] == "planned", planned
    (other,) = {*TYPES} - changed
    assert ask("execute", item_id="send", item_type=other, dry_run=True, frozen=True).is_error


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("item_type", TYPES)
def test_only_the_item_of_the_requested_type_is_changed_and_removed(
    item_type: str, newest: str, ask: Ask, project: Path
) -> None:
    before = texts(project)
    text = TEXTS[item_type].format(version="3.0.0")

    valid = ask("execute", action="validate", item_id="send", item_type=item_type).content
    updated = ask("execute", action="update", item_id="send", item_type=item_type, parameters={"content": text}).content

    assert valid["valid"], (newest, valid)
    assert updated["status"] == "updated", updated
    assert texts(project) == {**before, item_type: text}
    deleted = ask("execute", action="delete", item_id="send", item_type=item_type).content
    assert deleted["status"] == "deleted"
    assert {one for one, path in PATHS.items() if (project / ".ai" / path).exists()} == {*TYPES} - {item_type}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("item_type", TYPES)
def test_the_item_of_the_requested_type_is_published(item_type: str, newest: str, ask: Ask) -> None:
    published = ask("execute", action="publish", item_id="send", item_type=item_type)
    assert not published.is_error, published.content
    loaded = ask("load", item_id="send", item_type=item_type, source="registry").content
    assert type_of(loaded) == item_type, newest


@pytest.mark.parametrize("item_type", TYPES)
def test_the_item_of_the_requested_type_is_copied(item_type: str, newest: str, ask: Ask, home: Path) -> None:
    for one in (item_type, TYPES[TYPES.index(item_type) - 1]):
        copied = ask("load", item_id="send", item_type=one, destination="user")
        assert not copied.is_error, (newest, copied.content)
        assert (home / ".ai" / PATHS[one]).exists()


def test_without_a_type_the_name_resolves_as_before_and_the_others_are_named(ask: Ask, project: Path) -> None:
    put(project / ".ai", tool="1.0.0", directive="2.0.0")

    loaded = ask("load", item_id="send").content
    ran = ask("execute", item_id="send").content
    signed = ask("execute", action="sign", item_id="send").content

    assert type_of(loaded) == "directive"
    assert ran["status"] == "ready"
    assert signed["path"] == str(project / ".ai" / "directives" / "send.md")
    path = project / ".ai" / "tools" / "send" / "tool.yaml"
    sentence = (
        f"project/local/send@2.0.0 is used, and hides project/local/send@1.0.0 ({path}); "
        "`item_type: tool` asks for that one"
    )
    for content in (loaded, ran, signed):
        assert content["warnings"] == [sentence]


def test_an_item_of_another_type_is_found_if_no_tool_has_the_name(ask: Ask, project: Path) -> None:
    put(project / ".ai", directive="1.0.0")

    assert type_of(ask("load", item_id="send", item_type="tool").content) == "directive"
    assert ask("execute", item_id="send", item_type="tool").content["status"] == "ready"


def test_a_project_directive_does_not_hide_a_user_tool(ask: Ask, project: Path, home: Path) -> None:
    put(project / ".ai", directive="1.0.0")
    put(home / ".ai", tool="1.0.0")

    assert type_of(ask("load", item_id="send", item_type="tool").content) == "tool"
    assert type_of(ask("load", item_id="send").content) == "directive"


@pytest.mark.parametrize("item_type", ["directive", "knowledge"])
@pytest.mark.parametrize("action", ["run", "sign", "validate", "delete", "publish"])
def test_a_tool_is_never_returned_as_a_directive_or_knowledge(
    action: str, item_type: str, ask: Ask, project: Path
) -> None:
    put(project / ".ai", tool="1.0.0")

    refused = ask("execute", action=action, item_id="send", item_type=item_type).content
    loaded = ask("load", item_id="send", item_type=item_type).content

    for content in (refused, loaded):
        assert content["code"] == "tool_not_found"
        assert content["message"] == f"No {item_type} is named 'send'; project/local/send@1.0.0 is a tool."
        assert content["suggestion"] == "Send `item_type: tool`, or leave it out."


def test_a_broken_tool_is_not_replaced_by_a_directive_of_the_same_name(ask: Ask, project: Path) -> None:
    put(project / ".ai", directive="1.0.0")
    (project / ".ai" / "tools").mkdir()
    (project / ".ai" / "tools" / "send.yaml").write_text("tool_id: [\n")

    assert ask("execute", item_id="send", item_type="tool").content["code"] == "invalid_manifest"
    assert type_of(ask("load", item_id="send", item_type="directive").content) == "directive"


def test_an_executor_is_never_a_directive_of_the_same_name(ask: Ask, project: Path) -> None:
    put(project / ".ai", tool="1.0.0")
    runtime = (
        "tool_id: {}\ntool_type: runtime\nexecutor: subprocess\nversion: 1.0.0\ndescription: Runs it\nconfig: {}\n"
    )
    command = "{command: bash, args: ['{tool.files}/{tool.entrypoint}']}"
    (project / ".ai" / "tools" / "own.yaml").write_text(runtime.format("own", command))
    tool = project / ".ai" / "tools" / "send" / "tool.yaml"
    tool.write_text(tool.read_text().replace("bash_runtime", "own"))
    directive = DIRECTIVE.format(version="9.0.0").replace('name="send"', 'name="own"')
    (project / ".ai" / "directives").mkdir()
    (project / ".ai" / "directives" / "own.md").write_text(directive)

    assert ask("load", item_id="send").content["chain"] == ["send", "own", "subprocess"]


def test_a_project_cannot_turn_results_of_built_in_types_into_instructions(ask: Ask, project: Path) -> None:
    put(project / ".ai", knowledge="1.0.0")
    sheet = (BUILT_IN / "knowledge.yaml").read_text().replace("result_kind: text", "result_kind: instructions")
    (project / ".ai" / "types").mkdir()
    (project / ".ai" / "types" / "knowledge.yaml").write_text(sheet)
    assert ask("execute", action="sign", item_id="send").content["status"] == "signed"

    assert not ask("load", item_id="send", item_type="knowledge").is_instructions
    assert not ask("execute", item_id="send").is_instructions
