"""Identities at the gateway: rules for the name of a token apply to all its requests."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from mcp import Client
from tests.surfaces.gateway.conftest import ServeTools, Tools

from kiwi_mcp.domain.calls import STRANGER, Caller, Principal
from kiwi_mcp.domain.errors import InvalidRequest, KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.policy.tokens import FILE_NAME, FOLDER, TokenStore
from kiwi_mcp.surfaces import start
from kiwi_mcp.surfaces.gateway.auth import GatewayUser, visited_by

DIRECTIVE = """```xml
<directive name="{0}" version="1.0.0">
  <metadata><description>Daily duty {0}</description><category>work</category><author>me</author>
    <model tier="fast" /><permissions /></metadata>
  <process><step name="one"><action>Go</action></step></process>
</directive>
```
"""


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(120):
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
    serving_tools: ServeTools, project: Path, rules: None
) -> None:
    async def seen(served: Tools, name: str) -> tuple[set[str], set[str], JsonObject]:
        token = served.tokens.add(name, [], can_write=False, can_use_tools=True)
        async with served.client(token) as client:
            found = await called(client, "search", query="daily duty")
            listed = {prompt.name for prompt in (await client.list_prompts()).prompts}
            response = await called(client, "execute", item_id="report")
        return {as_text(as_object(card)["name"]) for card in as_list(found["results"])}, listed, response

    async def story() -> None:
        async with serving_tools(project=project) as served:
            found, listed, response = await seen(served, "eve")
            assert ({"greet", "report"} <= found, {"greet", "report"} <= listed) == (True, True)
            assert response["status"] == "ready"
            found, listed, response = await seen(served, "bob")
            assert ("greet" in found, "report" in found) == (True, False)
            assert ("greet" in listed, "report" in listed) == (True, False)
            assert response["code"] == "tool_not_found"

    run(story)


def test_a_forged_or_removed_token_has_no_identity(serving_tools: ServeTools, project: Path, rules: None) -> None:
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


def test_a_token_names_its_holder_and_only_an_owner_token_acts_for_the_owner(tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path)
    for kind in ("owner", "agent", "service"):
        tokens.add(f"a-{kind}", [], can_write=False, kind=kind)
    with pytest.raises(InvalidRequest):
        tokens.add("x", [], can_write=False, kind="thread")

    by_kind = {token.kind: token for token in TokenStore(tmp_path).all()}
    assert {kind: token.identity for kind, token in by_kind.items()} == {
        kind: Principal(kind, f"a-{kind}") for kind in ("owner", "agent", "service")
    }
    callers = {
        kind: visited_by(GatewayUser(Actor("x", ()), can_write=False, identity=token.identity), Caller(is_owner=True))
        for kind, token in by_kind.items()
    }
    assert {kind: caller.is_owner for kind, caller in callers.items()} == {
        "owner": True,
        "agent": False,
        "service": False,
    }
    anonymous = visited_by(None, Caller(is_owner=True))
    assert (anonymous.is_owner, anonymous.identity) == (False, STRANGER)


def test_a_legacy_token_belongs_to_an_agent_and_one_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path)
    tokens.add("old", [], can_write=False, kind="owner")
    file = tmp_path / FOLDER / FILE_NAME
    kept = file.read_text()
    file.write_text(kept.replace('"as": "owner",', ""))
    assert TokenStore(tmp_path).all()[0].kind == "agent"
    file.write_text(kept.replace('"as": "owner"', '"as": "root"'))
    with pytest.raises(KiwiError):
        TokenStore(tmp_path).all()


def test_a_legacy_token_may_not_manage_and_a_row_that_gives_this_to_an_agent_is_refused(tmp_path: Path) -> None:
    tokens = TokenStore(tmp_path)
    tokens.add("old", [], can_write=False, can_use_tools=True, kind="owner", can_manage=True)
    file = tmp_path / FOLDER / FILE_NAME
    stored = file.read_text()
    assert TokenStore(tmp_path).all()[0].can_manage
    file.write_text(stored.replace('"manage": true,', ""))
    assert not TokenStore(tmp_path).all()[0].can_manage
    file.write_text(stored.replace('"as": "owner"', '"as": "agent"'))
    with pytest.raises(KiwiError):
        TokenStore(tmp_path).all()


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[str, str]]:
    """Run `kiwi up` in this process, and return what it writes to standard output and to standard error."""

    def run(*words: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["kiwi", "up", *words])
        with pytest.raises(SystemExit) as ended:
            start.main()
        assert not ended.value.code
        printed = capsys.readouterr()
        return printed.out, printed.err

    return run


def test_the_kind_of_a_token_is_set_and_shown_on_the_terminal(home: Path, up: Callable[..., tuple[str, str]]) -> None:
    made = json.loads(up("token", "add", "ci", "--as", "service", "--json")[0])
    assert (made["name"], made["as"]) == ("ci", "service")
    listed = json.loads(up("token", "list", "--json")[0])
    assert [row["as"] for row in listed["tokens"]] == ["service"]
    assert "ci  service" in up("token", "list")[0]
