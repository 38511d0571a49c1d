"""Requests without a project: answered from the user space, and refused only if a project is needed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel import Answer, Kernel


def ask(verb: str, **words: Json) -> Answer:
    async def call() -> Answer:
        kernel = Kernel()
        try:
            return await kernel.call(verb, words)
        finally:
            await kernel.aclose()

    return asyncio.run(call())


def script(said: str) -> JsonObject:
    return {
        "tool_id": "say", "tool_type": "script", "executor": "bash_runtime", "version": "1.0.0",
        "description": "Say hello", "config": {"entrypoint": "say.sh"}, "files": {"say.sh": f"echo {said}\n"},
    }  # fmt: skip


@pytest.mark.usefixtures("sandbox")
def test_user_items_are_found_read_explained_and_run(home: Path) -> None:
    made = ask("execute", action="create", parameters={**script("hello"), "location": "user"})
    assert as_text(made.content["path"]).startswith(str(home / ".ai"))
    (found,) = as_list(ask("search", query="say hello").content["results"])
    assert as_object(found)["identity"] == "user/local/say@1.0.0"
    assert ask("load", item_id="say").content["source"] == "user"
    assert ask("execute", action="why", item_id="say").content["would_run"] is True
    assert ask("execute", item_id="say").content["result"] == "hello"
    assert ask("execute", action="sign", item_id="say").content["status"] == "signed"
    assert as_object(ask("help").content["installation"])["items_by_source"]


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("search", {"query": "x", "source": "project"}),
        ("load", {"item_id": "bash_runtime", "source": "project"}),
        ("load", {"item_id": "project/local/say"}),
        ("load", {"item_id": "say", "destination": "project"}),
        ("execute", {"item_id": "project/local/say"}),
        ("execute", {"action": "create", "parameters": script("hello")}),
        ("execute", {"action": "create", "parameters": {**script("hello"), "location": "project"}}),
        ("execute", {"action": "validate", "parameters": {"path": ".ai/tools/say.yaml"}}),
        ("execute", {"action": "pull", "item_id": "say", "parameters": {"from": "./shelf"}}),
        ("mcp", {"action": "add", "server": "one", "command": "sh"}),
        ("init", {}),
    ],
)
def test_project_verbs_ask_for_a_project(verb: str, words: JsonObject, home: Path) -> None:
    refused = ask(verb, **words)
    assert refused.content["code"] == "project_path_required"
    assert "project_path" in as_text(refused.content["suggestion"])
    assert not [path for path in (home / ".cache").rglob("say*") if path.is_file()]


def test_a_search_without_hits_says_that_no_project_was_searched(project: Path) -> None:
    for response in (ask("search", query="send a letter"), ask("search", query="zzqqxx", source="all")):
        assert response.content["total"] == 0
        assert "add `project_path`" in as_text(response.content["suggestion"])
    within = ask("search", query="send a letter", project_path=str(project))
    assert "project_path" not in as_text(within.content["suggestion"])


def test_an_unknown_item_may_be_in_a_project() -> None:
    refused = ask("execute", item_id="nothing")
    assert refused.content["code"] == "tool_not_found"
    assert "with its `project_path`" in as_text(refused.content["suggestion"])
