"""Directives and knowledge: running one returns its text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel import Answer, Kernel

DIRECTIVE = """# Greet

```xml
<directive name="greet" version="1.0.0">
  <metadata><description>Greet a person</description><model tier="fast" /><permissions /></metadata>
  <inputs>
    <input name="who" type="string" required="true">Whom to greet</input>
    <input name="mood" type="string" default="good">How</input>
  </inputs>
  <process>
    <step name="say"><description>Say it</description><action>Say hello to the one named in `who`.</action></step>
  </process>
</directive>
```
"""
KNOWLEDGE = (
    "---\nid: naming\ntitle: Names\nversion: 1.0.0\nentry_type: decision\n---\n"
    "Tables are plural, see [[style]] and [[sql|SQL]].\n"
)
MANIFEST = "tool_id: {name}\ntool_type: {kind}\nversion: 1.0.0\ndescription: x\n"


def put(project: Path, name: str, text: str) -> None:
    path = project / ".ai" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def run(project: Path, name: str, **parameters: str) -> Answer:
    return asyncio.run(Kernel(project).call("execute", {"item_id": name, "parameters": parameters}))


def test_running_a_directive_returns_its_program_for_the_model_of_the_caller(project: Path) -> None:
    put(project, "directives/greet.md", DIRECTIVE)

    response = run(project, "greet", who="Ada").content
    program = as_object(response["result"])

    assert response["status"] == "ready"
    assert program["name"] == "greet"
    assert program["provided_inputs"] == {"who": "Ada", "mood": "good"}
    assert as_object(as_list(program["process"])[0])["name"] == "say"
    assert as_object(program["input_schema"])["required"] == ["who"]
    assert program["integrity"] == "unsigned"


def test_a_directive_without_its_inputs_is_refused(project: Path) -> None:
    put(project, "directives/greet.md", DIRECTIVE)

    assert run(project, "greet").content["code"] == "invalid_input"
    assert run(project, "greet", who="Ada", lost="x").content["code"] == "invalid_input"


def test_running_knowledge_gives_its_text_and_its_links(project: Path) -> None:
    put(project, "knowledge/naming.md", KNOWLEDGE)

    response = run(project, "naming").content

    assert response["status"] == "success"
    assert response["result"] == {
        "content": "Tables are plural, see [[style]] and [[sql|SQL]].",
        "links": ["style", "sql"],
    }


@pytest.mark.parametrize("file", ["directive.md", "content.md", "README.md", "anything.md"])
def test_the_text_of_an_item_with_a_manifest_is_beside_it(file: str, project: Path) -> None:
    put(project, "tools/naming/tool.yaml", MANIFEST.format(name="naming", kind="knowledge"))
    put(project, f"tools/naming/{file}", "Tables are plural.\n")

    assert as_object(run(project, "naming").content["result"])["content"] == "Tables are plural."


def test_an_item_without_a_text_reports_what_is_missing(project: Path) -> None:
    put(project, "tools/naming/tool.yaml", MANIFEST.format(name="naming", kind="knowledge"))

    refused: JsonObject = run(project, "naming").content

    assert refused["code"] == "not_callable"
    assert "Markdown" in str(refused["message"])


async def test_a_plan_to_read_uses_no_primitive(project: Path) -> None:
    put(project, "knowledge/naming.md", KNOWLEDGE)

    planned = (await Kernel(project).call("execute", {"item_id": "naming", "dry_run": True})).content
    plan = as_object(planned["plan"])

    assert as_object(plan["spec"])["primitive"] is None
    assert plan["effect"] == "pure"
