"""Identities at the gateway: a token is somebody, and the rules by its name hold for all that it is used for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import httpx2
import pytest
from mcp import Client
from typer.testing import CliRunner

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError
from kiwi_mcp.domain.identity import STRANGER, Identity
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.surfaces.cli.gateway import up
from kiwi_mcp.surfaces.gateway.tokens import FILE_NAME, FOLDER, Tokens
from kiwi_mcp.surfaces.gateway.visited import visited_by
from kiwi_mcp.surfaces.gateway.visitors import Visitor

DIRECTIVE = """```xml
<directive name="{0}" version="1.0.0">
  <metadata><description>Daily duty {0}</description><category>work</category><author>me</author>
    <model tier="fast" /><permissions /></metadata>
  <process><step name="one"><action>Go</action></step></process>
</directive>
```
"""


class Served(Protocol):
    tokens: Tokens

    def client(self, token: str) -> AbstractAsyncContextManager[Client]: ...
    async def post(self, token: str, body: Json, **headers: str) -> httpx2.Response: ...


class Serve(Protocol):
    def __call__(self, *, project: Path | None = None) -> AbstractAsyncContextManager[Served]: ...


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(45):
            await story()

    asyncio.run(in_time())


@pytest.fixture
def rules(project: Path, home: Path) -> None:
    folder = project / ".ai" / "directives" / "work"
    folder.mkdir(parents=True)
    for name in ("greet", "report"):
        (folder / f"{name}.md").write_text(DIRECTIVE.format(name))
    (home / ".ai").mkdir(exist_ok=True)
    (home / ".ai" / "policy.yaml").write_text("actors: {bob: {items: {allow: ['*/greet@*']}}}\n")
    (home / ".ai" / "preferences.yaml").write_text("prompts: {greet: true, report: true}\n")


async def called(client: Client, verb: str, **arguments: Json) -> JsonObject:
    result = await client.call_tool(verb, dict(arguments))
    return as_object(result.structured_content or json.loads(getattr(result.content[0], "text", "{}")))


@pytest.mark.req("B4")
@pytest.mark.case("PERM-01", "PERM-09")
def test_a_token_sees_and_uses_what_the_rules_for_its_name_allow(
    serving_tools: Serve, project: Path, rules: None
) -> None:
    async def seen(served: Served, name: str) -> tuple[set[str], set[str], JsonObject]:
        token = served.tokens.add(name, [], can_write=False, can_use_tools=True)
        async with served.client(token) as client:
            found = await called(client, "search", query="daily duty")
            listed = {prompt.name for prompt in (await client.list_prompts()).prompts}
            told = await called(client, "execute", item_id="report")
        return {as_text(as_object(card)["name"]) for card in as_list(found["results"])}, listed, told

    async def story() -> None:
        async with serving_tools(project=project) as served:
            found, listed, told = await seen(served, "eve")
            assert ({"greet", "report"} <= found, {"greet", "report"} <= listed) == (True, True)
            assert told["status"] == "ready"
            found, listed, told = await seen(served, "bob")
            assert ("greet" in found, "report" in found) == (True, False)
            assert ("greet" in listed, "report" in listed) == (True, False)
            assert told["code"] == "tool_not_found"

    run(story)


def test_a_token_that_is_forged_or_removed_is_nobody(serving_tools: Serve, project: Path, rules: None) -> None:
    async def story() -> None:
        async with serving_tools(project=project) as served:
            token = served.tokens.add("bob", [], can_write=False, can_use_tools=True, kind="owner")
            body: Json = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
            assert (await served.post(token, body)).status_code != 401
            assert (await served.post(f"{token[:-1]}x", body)).status_code == 401
            assert (await served.post("token:bob:12345678", body)).status_code == 401
            served.tokens.remove("bob")
            assert (await served.post(token, body)).status_code == 401

    run(story)


def test_a_token_says_whose_it_is_and_only_an_owners_speaks_for_the_owner(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    for kind in ("owner", "agent", "service"):
        tokens.add(f"a-{kind}", [], can_write=False, kind=kind)
    with pytest.raises(InvalidRequest):
        tokens.add("x", [], can_write=False, kind="thread")

    by_kind = {token.kind: token for token in Tokens(tmp_path).all()}
    assert {kind: token.identity for kind, token in by_kind.items()} == {
        kind: Identity(kind, f"a-{kind}") for kind in ("owner", "agent", "service")
    }
    callers = {
        kind: visited_by(Visitor(Actor("x", ()), can_write=False, identity=token.identity), Caller(is_owner=True))
        for kind, token in by_kind.items()
    }
    assert {kind: caller.is_owner for kind, caller in callers.items()} == {
        "owner": True,
        "agent": False,
        "service": False,
    }
    nobody = visited_by(None, Caller(is_owner=True))
    assert (nobody.is_owner, nobody.identity) == (False, STRANGER)


def test_a_token_from_before_is_an_agents_and_one_of_no_known_kind_lets_nobody_in(tmp_path: Path) -> None:
    tokens = Tokens(tmp_path)
    tokens.add("old", [], can_write=False, kind="owner")
    file = tmp_path / FOLDER / FILE_NAME
    kept = file.read_text()
    file.write_text(kept.replace('"as": "owner",', ""))
    assert Tokens(tmp_path).all()[0].kind == "agent"
    file.write_text(kept.replace('"as": "owner"', '"as": "root"'))
    with pytest.raises(KiwiError):
        Tokens(tmp_path).all()


def test_the_kind_of_a_token_is_said_and_shown_at_the_terminal(home: Path) -> None:
    runner = CliRunner()
    made = json.loads(runner.invoke(up, ["token", "add", "ci", "--as", "service", "--json"]).stdout)
    assert (made["name"], made["as"]) == ("ci", "service")
    listed = json.loads(runner.invoke(up, ["token", "list", "--json"]).stdout)
    assert [row["as"] for row in listed["tokens"]] == ["service"]
    assert "ci  service" in runner.invoke(up, ["token", "list"]).stdout
