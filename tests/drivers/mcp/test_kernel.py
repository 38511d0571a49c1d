"""Items of a server, called through the kernel as any other."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.drivers.mcp.conftest import HOSTILE

from kiwi_mcp.kernel import Answer


@pytest.fixture
def written(project: Path) -> Path:
    """A project with a server and three items of its."""
    folder = project / ".ai" / "tools"
    folder.mkdir(parents=True, exist_ok=True)
    # What a project's server is lies in the project: nothing else may be named that is not declared.
    program = shutil.copy(HOSTILE, project / "server.py")
    (folder / "helper.yaml").write_text(
        f"tool_id: helper\ntool_type: mcp_server\nexecutor: subprocess\nversion: '1.0.0'\n"
        f"description: A server\nconfig:\n  transport: stdio\n  command: {sys.executable}\n"
        f"  args: [{program}]\n  env: {{KEY: '${{HELPER_KEY}}'}}\n"
    )
    for name, words in {
        "shout": "mcp_tool_name: echo",
        "break": "mcp_tool_name: exit",
        "hello": "mcp_prompt_name: greet",
        "memo": "mcp_resource_uri: 'memo://{name}'",
    }.items():
        (folder / f"{name}.yaml").write_text(
            f"tool_id: {name}\ntool_type: mcp_tool\nexecutor: helper\nversion: '1.0.0'\ndescription: An item\n"
            f"config: {{{words}}}\nparameters: {{type: object, properties: {{}}, additionalProperties: true}}\n"
        )
    (project / ".env").write_text("HELPER_KEY=s3cr3t-value\n")
    return project


@pytest.mark.req("K-MC-05")
def test_tools_prompts_and_resources_run_like_any_item(written: Path, ask: Callable[..., Answer]) -> None:
    assert ask("execute", item_id="shout", parameters={"text": "hi"}).content["result"] == "hi"
    assert "Hello Ann" in str(ask("execute", item_id="hello", parameters={"who": "Ann"}).content["result"])
    assert ask("execute", item_id="memo", parameters={"name": "tea"}).content["result"] == "about memo://tea"


@pytest.mark.req("I3")
def test_a_server_that_dies_is_told_as_unavailable_without_the_secret(
    written: Path, ask: Callable[..., Answer]
) -> None:
    content = ask("execute", item_id="break").content

    assert content["status"] == "unavailable"
    assert "the cup is broken" in str(content["message"])
    assert "s3cr3t" not in str(content)


def test_a_dry_run_starts_nothing_and_shows_names_for_secrets(written: Path, ask: Callable[..., Answer]) -> None:
    content = ask("execute", item_id="shout", parameters={"text": "hi"}, dry_run=True).content

    assert content["status"] == "planned"
    assert "${HELPER_KEY}" in str(content["plan"])
    assert "s3cr3t" not in str(content)


@pytest.mark.parametrize(
    "words", ["{mcp_tool_name: a, mcp_prompt_name: b}", "{mcp_prompt_name: a, mcp_resource_uri: b}"]
)
def test_an_item_is_one_of_the_three(written: Path, ask: Callable[..., Answer], words: str) -> None:
    path = written / ".ai" / "tools" / "shout.yaml"
    path.write_text(path.read_text().replace("{mcp_tool_name: echo}", words))

    assert ask("execute", item_id="shout", parameters={}).content["code"] == "invalid_manifest"
