"""Change notifications: every listening client gets those it asked for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import mcp_types as types
import pytest
from mcp import Client
from mcp.shared.exceptions import MCPError
from mcp.shared.subscriptions import PromptsListChanged, ResourcesListChanged, ToolsListChanged
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import ProjectPathInvalid
from kiwi_mcp.domain.items import ItemType
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.tasks import Tasks
from kiwi_mcp.surfaces.mcp.calls import Calls
from kiwi_mcp.surfaces.mcp.server import McpServer, build_server
from kiwi_mcp.surfaces.mcp.tool_list import ONLY_META_TOOLS, ClientToolList, ToolListWatcher, differences

PATIENCE = 120.0

pytestmark = pytest.mark.filterwarnings("ignore::mcp.shared.exceptions.MCPDeprecationWarning")


@dataclass
class Offering:
    """A kernel with scripted offers."""

    menu: Offers = ONLY_META_TOOLS
    fault: ProjectPathInvalid | None = None
    digests: dict[str, str] = field(default_factory=dict)
    is_ready: asyncio.Event | None = None
    """What new offers wait for, if anything."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        return Answer({})

    async def offers(self) -> Offers:
        if self.is_ready is not None:
            await self.is_ready.wait()
        return self.menu

    def offers_mark(self) -> str:
        if self.fault is not None:
            raise self.fault
        return repr(self.menu)

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:
        return Offer(name, name, digest=self.digests[name]) if name in self.digests else None

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        return ()

    async def aclose(self) -> None:
        """Hold nothing."""


def tasks() -> Tasks:
    raise NotImplementedError


@asynccontextmanager
async def serving(kernel: Offering, interval: float = 0.05) -> AsyncIterator[McpServer]:
    changes = ToolListWatcher(kernel, interval=interval, soon=0.02)
    calls = Calls(tasks, task_after=lambda: 60.0, principal=lambda _: "ben")
    async with asyncio.timeout(PATIENCE):
        yield build_server(kernel, calls=calls, changes=changes)
    await changes.aclose()
    await calls.aclose()


@dataclass
class Ears:
    """A handshake client that records its notifications."""

    heard: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    async def __call__(self, message: object) -> None:
        if isinstance(message, types.Notification):
            self.heard.put_nowait(message.method)


OTHER = replace(ONLY_META_TOOLS, tools=(Offer("a", "user/local/a@1.0.0"),))


def test_every_changed_list_is_announced_and_no_other() -> None:
    some = (Offer("x", "user/local/x@1.0.0"),)
    kinds = [ToolsListChanged(), PromptsListChanged(), ResourcesListChanged()]
    assert [*differences(ONLY_META_TOOLS, Offers(("search",), some, some, some, some))] == kinds
    assert [*differences(ONLY_META_TOOLS, replace(ONLY_META_TOOLS, meta_tools=("search",)))] == kinds[:1]
    assert [*differences(ONLY_META_TOOLS, replace(ONLY_META_TOOLS, prompts=some))] == kinds[1:2]
    assert [*differences(ONLY_META_TOOLS, replace(ONLY_META_TOOLS, templates=some))] == kinds[2:]
    assert [*differences(ONLY_META_TOOLS, replace(ONLY_META_TOOLS, notices=("odd",)))] == []


async def test_all_clients_of_both_eras_are_notified_of_a_change() -> None:
    kernel, ears = Offering(), [Ears(), Ears()]
    async with serving(kernel) as server, AsyncExitStack() as stack:
        for ear in ears:
            await stack.enter_async_context(Client(server, mode="legacy", message_handler=ear))
        modern = await stack.enter_async_context(Client(server))
        async with (
            modern.listen(tools_list_changed=True) as tools,
            modern.listen(prompts_list_changed=True) as others,
        ):
            kernel.menu = OTHER
            assert await anext(tools) == ToolsListChanged()
            kernel.menu = replace(OTHER, prompts=OTHER.tools)
            assert await anext(others) == PromptsListChanged()  # and nothing about tools before it
        for ear in ears:
            assert await ear.heard.get() == "notifications/tools/list_changed"
            assert await ear.heard.get() == "notifications/prompts/list_changed"


async def test_changes_before_a_client_listens_are_announced_when_it_begins() -> None:
    kernel = Offering()
    async with serving(kernel) as server, Client(server) as client:
        await client.list_tools()
        kernel.menu = OTHER
        async with client.listen(tools_list_changed=True) as news:
            assert await anext(news) == ToolsListChanged()


async def test_without_listeners_there_is_no_polling() -> None:
    async with serving(Offering()) as server:
        before = asyncio.all_tasks()
        async with Client(server, mode="legacy") as client:
            await client.list_tools()
        looking = asyncio.all_tasks() - before
        assert looking
        _, still_looking = await asyncio.wait(looking, timeout=PATIENCE / 2)
        assert not still_looking


async def test_a_call_brings_the_next_poll_forward() -> None:
    kernel, ear = Offering(), Ears()
    async with (
        serving(kernel, interval=600) as server,
        Client(server, mode="legacy", message_handler=ear) as client,
    ):
        await client.list_tools()
        kernel.menu = OTHER
        await client.call_tool("help", {})
        assert await ear.heard.get() == "notifications/tools/list_changed"


async def test_the_number_of_watched_resources_per_client_is_limited() -> None:
    async with serving(Offering()) as server, Client(server, mode="legacy") as client:
        for number in range(64):
            await client.subscribe_resource(f"kiwi://knowledge/{number}")
        await client.subscribe_resource("kiwi://knowledge/1")
        with pytest.raises(MCPError, match="At most 64"):
            await client.subscribe_resource("kiwi://knowledge/64")


async def test_only_watchers_of_a_resource_are_notified_even_if_it_appears_or_disappears() -> None:
    kernel, ears = Offering(), [Ears(), Ears()]
    async with serving(kernel) as server, AsyncExitStack() as stack:
        watcher, other = [
            await stack.enter_async_context(Client(server, mode="legacy", message_handler=ear)) for ear in ears
        ]
        await watcher.subscribe_resource("kiwi://knowledge/notes")
        for digests in ({"notes": "1"}, {"notes": "2"}, {}):
            kernel.digests = digests
            assert await ears[0].heard.get() == "notifications/resources/updated"
        await other.send_ping()
        assert ears[1].heard.empty()


async def test_a_missing_project_leaves_the_meta_tools() -> None:
    kernel = Offering(OTHER)
    menu = ClientToolList(kernel)
    assert await menu.now() == OTHER
    kernel.fault = ProjectPathInvalid("It is not there.", suggestion="Make it.")
    assert await menu.now() == ONLY_META_TOOLS
    kernel.fault = None
    assert await menu.now() == OTHER


@pytest.mark.slow
async def test_the_previous_offers_are_served_while_new_ones_are_computed() -> None:
    kernel = Offering(ONLY_META_TOOLS)
    menu = ClientToolList(kernel)
    assert await menu.now() == ONLY_META_TOOLS
    kernel.menu, kernel.is_ready = OTHER, asyncio.Event()
    async with asyncio.timeout(PATIENCE):
        assert await menu.now() == ONLY_META_TOOLS
        assert [*await asyncio.gather(menu.now(), menu.now())] == [ONLY_META_TOOLS] * 2
    kernel.is_ready.set()
    assert await menu.now() == OTHER
