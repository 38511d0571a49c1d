"""Items of a server, called through the kernel."""

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


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-MC-05")
def test_tools_prompts_and_resources_run_like_any_item(written: Path, ask: Callable[..., Answer]) -> None:
    ask("mcp", action="accept", server="helper")
    assert ask("execute", item_id="shout", parameters={"text": "hi"}).content["result"] == "hi"
    assert "Hello Ann" in str(ask("execute", item_id="hello", parameters={"who": "Ann"}).content["result"])
    assert ask("execute", item_id="memo", parameters={"name": "tea"}).content["result"] == "about memo://tea"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("I3")
def test_a_server_that_dies_is_unavailable_and_the_secret_is_not_shown(
    written: Path, ask: Callable[..., Answer]
) -> None:
    ask("mcp", action="accept", server="helper")
    content = ask("execute", item_id="break").content

    assert content["status"] == "unavailable"
    assert "the cup is broken" in str(content["message"])
    assert "s3cr3t" not in str(content)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.case("TR-F01")
def test_a_server_that_the_owner_never_accepted_gets_no_variables(written: Path, ask: Callable[..., Answer]) -> None:
    for _ in range(2):  # an edit after the acceptance takes the variables away again
        refused = ask("execute", item_id="shout", parameters={"text": "hi"}).content
        assert refused["code"] in {"secret_not_granted", "definition_changed"}
        assert "`kiwi mcp accept helper`" in str(refused["suggestion"])
        ask("mcp", action="accept", server="helper")
        assert ask("execute", item_id="shout", parameters={"text": "hi"}).content["status"] == "success"
        manifest = written / ".ai" / "tools" / "helper.yaml"
        manifest.write_text(manifest.read_text().replace("KEY:", "OTHER:"))


def test_a_dry_run_starts_nothing_and_shows_names_for_secrets(written: Path, ask: Callable[..., Answer]) -> None:
    content = ask("execute", item_id="shout", parameters={"text": "hi"}, dry_run=True).content

    assert content["status"] == "planned"
    assert "${HELPER_KEY}" in str(content["plan"])
    assert "s3cr3t" not in str(content)


@pytest.mark.parametrize(
    "words", ["{mcp_tool_name: a, mcp_prompt_name: b}", "{mcp_prompt_name: a, mcp_resource_uri: b}"]
)
def test_an_item_of_a_server_is_a_tool_a_prompt_or_a_resource(
    written: Path, ask: Callable[..., Answer], words: str
) -> None:
    path = written / ".ai" / "tools" / "shout.yaml"
    path.write_text(path.read_text().replace("{mcp_tool_name: echo}", words))

    assert ask("execute", item_id="shout", parameters={}).content["code"] == "invalid_manifest"
