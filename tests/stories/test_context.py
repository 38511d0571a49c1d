"""The context of a model: preferred and loaded definitions only."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from tests.stories.conftest import PATIENCE, House

from kiwi_mcp.domain.json import Json, compact
from kiwi_mcp.domain.token_cost import cost_of
from kiwi_mcp.surfaces.mcp import tool_list

META = ["search", "load", "execute", "help"]


def write_tools(house: House, count: int) -> list[str]:
    """Write tools of which each has a parameter that no other has."""
    names = [f"tool_{number:04}" for number in range(count)]
    for name in names:
        head = f'"""Handle the matter of {name}"""\n__version__ = "1.0.0"\n__tool_type__ = "python"\n'
        code = f'__executor_id__ = "python_runtime"\n\n\ndef main(only_of_{name}: str):\n    return only_of_{name}\n'
        house.write(f"tools/{name}.py", head + code)
    return names


class Context:
    """A client, and every word that its model was given."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.words = ""

    async def listed(self) -> list[str]:
        tools = (await self.client.list_tools(cache_mode="refresh")).tools
        self.words += json.dumps([tool.model_dump(mode="json") for tool in tools])
        return [tool.name for tool in tools]

    async def call(self, tool: str, **arguments: Json) -> types.CallToolResult:
        result = await self.client.call_tool(tool, dict(arguments))
        self.words += result.model_dump_json()
        return result

    async def ask(self, verb: str, **request: Json) -> dict[str, Any]:
        return dict((await self.call(verb, **request)).structured_content)

    def holds(self, names: list[str]) -> set[str]:
        """The tools with a definition that the model received."""
        return {name for name in names if f"only_of_{name}" in self.words}


async def found_by_words(client: Client, query: str) -> types.CallToolResult:
    """Search once all that there is can be found by its words; what is new in great number is indexed beside."""
    while True:
        found = await client.call_tool("search", {"query": query})
        left = found.structured_content.get("indexing")
        if left is None or left["words"] == left["cards"]:
            return found
        await asyncio.sleep(0.02)


async def refusal(work: Awaitable[object]) -> Any:
    with pytest.raises(MCPError) as refused:
        await work
    return refused.value.data


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("D1", "D7", "E3", "E4", "E5")
@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_a_model_gets_the_preferred_and_the_loaded_definitions_and_no_others(
    count: int, house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_list, "_FIRST_PATIENCE", 50.0)  # on a busy machine, too
    names = write_tools(house, count)
    house.settle("preferences.yaml", {"always_send": {"tool_0003": True}})

    async with house.client() as client:
        context = Context(client)
        assert await context.listed() == [*META, "tool_0003"]
        assert context.holds(names) == {"tool_0003"}
        await found_by_words(client, "the matter")
        cards = (await context.ask("search", query="handle the matter"))["results"]
        assert len(cards) == 10
        (card, *_) = (await context.ask("search", query="the matter of tool_0017"))["results"]
        assert context.holds(names) == {"tool_0003"}
        await context.ask("load", item_id=card["identity"])
        assert context.holds(names) == {"tool_0003", "tool_0017"}
        done = await context.ask("execute", item_id=card["identity"], parameters={"only_of_tool_0017": "yes"})
        assert done["result"] == "yes"
        assert await context.listed() == [*META, "tool_0003"]
        assert context.holds(names) == {"tool_0003", "tool_0017"}


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("D5", "E5")
@pytest.mark.parametrize("count", [40, pytest.param(2_000, marks=pytest.mark.slow)])
async def test_finding_and_running_a_tool_costs_no_more_among_many_tools(count: int, house: House) -> None:
    write_tools(house, count)

    async with house.client() as client:
        tools = (await client.list_tools()).tools
        assert sum(cost_of(tool.model_dump_json(by_alias=True, exclude_none=True)).tokens for tool in tools) < 900
        found = await found_by_words(client, "the matter of tool_0017")
        card = found.structured_content["results"][0]
        loaded = await client.call_tool("load", {"item_id": card["identity"]})
        request = {"item_id": card["identity"], "parameters": {"only_of_tool_0017": "yes"}}
        done = await client.call_tool("execute", request)
        spent = [result.meta["kiwi/context"]["tokens"] for result in (found, loaded, done) if result.meta]
        # Ten cards, one definition with its code, and one short result, whatever else is here.
        assert all(tokens < most for tokens, most in zip(spent, (1_500, 600, 300), strict=True)), spent
        assert spent[0] == cost_of(compact(found.structured_content)).tokens


@pytest.mark.smoke
@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("D4", "D6")
async def test_nothing_is_searched_before_the_model_asks(house: House) -> None:
    names = write_tools(house, 8)
    house.settle("preferences.yaml", {"always_send": dict.fromkeys(names, True)})

    async with house.client() as client:
        context = Context(client)
        assert await context.listed() == [*META, *names]
        await client.list_prompts()
        await client.list_resources()
        for name in names[:2]:
            done = await context.call(name, **{f"only_of_{name}": "done"})
            assert done.content == [types.TextContent(text="done")]
        await context.call(names[0])  # wrong, and refused
        assert house.heard == ["execute"] * 3
        await context.ask("search", query="matter")
        assert house.heard == [*["execute"] * 3, "search"]  # through the same door as every verb


@pytest.mark.usefixtures("sandbox")
@pytest.mark.req("B2", "C6")
async def test_a_preferred_but_missing_item_is_reported_and_harmless(house: House) -> None:
    write_tools(house, 1)
    house.settle("preferences.yaml", {"always_send": {"tool_0000": True, "mcp/absent/echo": True}})

    async with house.client() as client:
        context = Context(client)
        assert await context.listed() == [*META, "tool_0000"]
        (notice,) = (await context.ask("help"))["installation"]["notices"]
        assert "`mcp/absent/echo`" in notice
        assert (await context.ask("search", query="absent echo"))["results"] == []
        assert (await context.ask("execute", item_id="mcp/absent/echo"))["code"] == "tool_not_found"
        assert (await refusal(context.call("absent_echo")))["code"] == "tool_not_found"
        assert not (await context.call("tool_0000", only_of_tool_0000="x")).is_error


@pytest.mark.req("D2", "D3", "D8")
async def test_the_owner_changes_what_is_sent_during_a_session_except_search_and_denied_items(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A slow machine would be given the older list meanwhile.
    monkeypatch.setattr(tool_list, "_PATIENCE", PATIENCE)
    write_tools(house, 3)
    wish: dict[str, Json] = {"tool_0000": True, "tool_0001": True, "search": False, "help": False}

    async with house.client() as client:
        context = Context(client)
        assert await context.listed() == META
        house.settle("preferences.yaml", {"always_send": wish})
        assert await context.listed() == ["search", "load", "execute", "tool_0000", "tool_0001"]
        notices = (await context.ask("help"))["installation"]["notices"]
        assert any("`search` is always sent" in notice for notice in notices)
        house.settle("policy.yaml", {"items": {"allow": ["*"], "deny": ["project/local/tool_0001@*"]}})
        assert await context.listed() == ["search", "load", "execute", "tool_0000"]
        house.settle("preferences.yaml", {"always_send": {**wish, "help": True}})
        assert await context.listed() == [*META, "tool_0000"]
