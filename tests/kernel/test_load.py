"""Loading an item, copying it to another space, and paging through large results."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject, as_object
from kiwi_mcp.kernel import Answer, Kernel

Ask = Callable[..., Answer]
Tree = Callable[[Path], Mapping[str, str]]

RUNTIME: JsonObject = {
    "tool_type": "runtime",
    "executor": "subprocess",
    "version": "1.0.0",
    "description": "Runs a shell file plainly",
    "config": {"command": "bash", "params_as": "environment", "result_from": "stdout"},
}
TOOL: JsonObject = {
    "tool_type": "script",
    "executor": "plain_runtime",
    "version": "1.0.0",
    "description": "Say something long",
    "config": {"entrypoint": "main.sh"},
    "parameters": [{"name": "size", "type": "integer", "default": 4}],
    "files": {"main.sh": 'printf "%*s" "$KIWI_PARAM_size" | tr " " x\n', "lib/more.sh": "true\n"},
}


@pytest.fixture(autouse=True)
def tools(ask: Ask) -> None:
    for name, words in (("plain_runtime", RUNTIME), ("say", TOOL)):
        assert ask("execute", action="create", item_id=name, parameters=words).content["status"] == "created"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-ME-04")
def test_a_copy_brings_its_executors_and_runs_from_the_other_space(ask: Ask, home: Path, tmp_path: Path) -> None:
    copied = ask("load", item_id="say", source="project", destination="user")

    assert copied.content["also_copied"] == ["plain_runtime"]
    assert copied.content["message"] == "Tool copied from project to user"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    answer = asyncio.run(Kernel(elsewhere).call("execute", {"item_id": "say"}))
    assert answer.content["result"] == "xxxx"
    assert answer.content["identity"] == "user/local/say@1.0.0"
    back = asyncio.run(Kernel(elsewhere).call("load", {"item_id": "say", "destination": "project"}))
    assert back.content["also_copied"] == ["plain_runtime"]
    assert (elsewhere / ".ai" / "tools" / "say" / "lib" / "more.sh").read_text() == "true\n"


def test_an_existing_identical_copy_is_reported(ask: Ask, home: Path, tree: Tree) -> None:
    ask("load", item_id="say", destination="user")
    before = tree(home / ".ai")

    again = ask("load", item_id="say", source="project", destination="user")

    assert again.content["message"] == "Tool is in user already, with the same content"
    assert tree(home / ".ai") == before


def test_a_copy_never_overwrites_other_content(ask: Ask, home: Path, tree: Tree) -> None:
    ask("execute", action="create", item_id="say", parameters={**RUNTIME, "location": "user"})
    before = tree(home / ".ai")

    refused = ask("load", item_id="say", source="project", destination="user")

    assert refused.content["code"] == "already_exists"
    assert tree(home / ".ai") == before


@pytest.mark.case("PATH-05")
@pytest.mark.parametrize("destination", ["/tmp", "../..", "builtin", "registry", "", "project/../.."])
def test_a_destination_is_one_of_the_two_spaces(destination: str, ask: Ask, home: Path, tree: Tree) -> None:
    before = tree(home / ".ai")

    refused = ask("load", item_id="say", destination=destination)

    assert refused.content["code"] == "invalid_request"
    assert tree(home / ".ai") == before


def test_one_file_of_several_is_read_by_its_name(ask: Ask) -> None:
    assert ask("load", item_id="say", file="lib/more.sh").content["content"] == "true\n"
    for name in ("../../../policy.yaml", "/etc/hostname", "lost.sh"):
        assert ask("load", item_id="say", file=name).content["code"] == "not_found"


def test_a_built_in_is_read_like_any_other_item(ask: Ask) -> None:
    loaded = ask("load", item_id="bash_runtime").content

    assert loaded["source"] == "builtin"
    assert loaded["chain"] == ["bash_runtime", "subprocess"]
    assert ask("load", item_id="bash_runtime", destination="user").content["code"] == "invalid_request"


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("K-RT-05")
def test_a_large_result_is_a_preview_with_a_handle(ask: Ask) -> None:
    response = ask("execute", item_id="say", parameters={"size": 150_000}).content

    assert response["result_is_preview"] is True
    assert len(str(response["result"])) == 2_000
    pages, offset = [], 0
    for _ in range(10):
        page = ask("load", item_type="output", item_id=response["result_handle"], offset=offset).content
        pages.append(str(page["content"]))
        if page["next_offset"] is None:
            break
        offset = int(str(page["next_offset"]))
    assert len(pages) == 3
    assert "".join(pages) == "x" * 150_000
    assert response["result_characters"] == sum(map(len, pages))


@pytest.mark.parametrize(
    "handle", ["say", "say/../../x", "/etc/passwd", "../say/output_20260101_000000", "say/output_1"]
)
def test_a_handle_is_not_a_path(handle: str, ask: Ask) -> None:
    assert ask("load", item_type="output", item_id=handle).content["code"] == "invalid_request"


def test_a_deleted_output_is_not_found(ask: Ask) -> None:
    gone = ask("load", item_type="output", item_id="say/output_20260101_000000").content

    assert gone["code"] == "not_found"


@pytest.mark.usefixtures("sandbox")
def test_a_read_only_project_loses_the_output_file_and_not_the_result(ask: Ask, project: Path) -> None:
    (project / ".ai" / "outputs").write_text("in the way")

    response = ask("execute", item_id="say").content

    assert response["result"] == "xxxx"
    assert response["output_path"] is None
    assert "could not be kept" in str(response["warnings"])


def test_an_executable_file_stays_executable_in_a_copy(ask: Ask, project: Path, home: Path) -> None:
    (project / ".ai" / "tools" / "say" / "lib" / "more.sh").chmod(0o755)

    ask("load", item_id="say", destination="user")

    assert os.access(home / ".ai" / "tools" / "say" / "lib" / "more.sh", os.X_OK)


def test_load_returns_the_parameters_and_the_chain_of_an_item(ask: Ask) -> None:
    loaded = ask("load", item_id="say@^1.0").content

    assert loaded["chain"] == ["say", "plain_runtime", "subprocess"]
    assert as_object(as_object(loaded["parameters"])["properties"]) == {"size": {"type": "integer", "default": 4}}
    assert ask("load", item_id="say@^2").content["code"] == "version_not_found"
