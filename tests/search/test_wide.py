"""Thousands of tools of one server: a search does not block other calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, compact
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord, id_of
from kiwi_mcp.kernel.kernel import Kernel
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.kernel.tool_list import MOST, ToolListCache
from kiwi_mcp.kernel.verb import SearchRequest
from kiwi_mcp.kernel.verbs.search import find
from kiwi_mcp.policy.preferences import FILE_NAME
from kiwi_mcp.search.indexes import SearchIndexes
from kiwi_mcp.store.mcp_definitions import McpDefinitions
from kiwi_mcp.store.open import open_database

SERVER = """\
tool_id: wide
tool_type: mcp_server
version: 1.0.0
executor: subprocess
config: {transport: stdio, command: sh}
"""
WORDS = ("invoice", "payment", "calendar", "channel", "branch", "report", "customer")
MIN_CARDS = 600
MCP: tuple[Source, ...] = ("mcp",)


def tool(number: int) -> Definition:
    said = " ".join(WORDS[(number + step) % len(WORDS)] for step in range(5))
    properties = {word: {"type": "string", "description": said} for word in WORDS[:3]}
    offered: JsonObject = {
        "name": f"{WORDS[number % len(WORDS)]}_{number}",
        "description": said,
        "inputSchema": {"type": "object", "properties": properties},
    }
    digest = sha256(compact(offered).encode()).hexdigest()
    tool_id = id_of("tool", offered, ())
    return Definition("tool", str(offered["name"]), tool_id, "accepted", offered, digest, offered, digest)


@pytest.fixture(scope="module")
def tools() -> Sequence[Definition]:
    return [tool(number) for number in range(MIN_CARDS)]


@pytest.fixture
def space(tmp_path: Path) -> Space:
    (tmp_path / "user" / "tools").mkdir(parents=True)
    return Space(tmp_path / "project", tmp_path / "user", tmp_path / "cache")


@pytest.fixture
def store(space: Space) -> Iterator[McpDefinitions]:
    settings = registry_settings(space.user)
    database = open_database(settings.url)
    yield McpDefinitions(database, settings.actor.name)
    database.close()


@pytest.fixture
def record(space: Space, store: McpDefinitions, tools: Sequence[Definition]) -> ServerRecord:
    """Let a server of the user have offered them all."""
    path = space.user / "tools" / "wide.yaml"
    path.write_text(SERVER)
    digest = Catalog(space).find("wide").digest
    record = ServerRecord(ServerKey(str(space.user), "wide"), "user/local/wide@1.0.0", str(path), digest)
    store.change(record.key, lambda *_: (record, tools))
    return record


@pytest.mark.usefixtures("record")
def test_a_search_explains_only_the_hits_it_shows(space: Space, store: McpDefinitions) -> None:
    catalog, request = Catalog(space, definitions=lambda: store), SearchRequest(query="invoice report", limit=3)
    library = SearchIndexes(load=lambda: None)
    find(request, catalog, library)
    assert library.wait_until_indexed(60)
    found = find(request, catalog, library)
    assert int(str(found["total"])) > MIN_CARDS / 2
    assert [bool(as_object(one)["why"]) for one in as_list(found["results"])] == [True] * 3


def test_an_unchanged_listing_keeps_its_entry_and_its_place_in_the_index(
    space: Space, store: McpDefinitions, record: ServerRecord, tools: Sequence[Definition]
) -> None:
    catalog = Catalog(space, definitions=lambda: store)
    before = {entry.tool_id: entry for entry in catalog.all(MCP)}
    store.change(record.key, lambda *_: (record, [*tools[:-1], tool(MIN_CARDS)]))
    after = {entry.tool_id: entry for entry in catalog.all(MCP)}
    assert after.keys() ^ before.keys() == {tools[-1].tool_id, tool(MIN_CARDS).tool_id}
    assert all(entry is before[name] for name, entry in after.items() if name in before)


@pytest.mark.usefixtures("record")
def test_one_name_among_hundreds_is_found(store: McpDefinitions) -> None:
    assert [one.name for _, one in store.named("invoice_0")] == ["invoice_0"]


@pytest.mark.usefixtures("record")
def test_a_pattern_that_matches_hundreds_of_tools_sends_the_usual_number_and_counts_the_rest(
    space: Space, store: McpDefinitions
) -> None:
    offering = ToolListCache(Catalog(space, definitions=lambda: store))
    (space.user / FILE_NAME).write_text("always_send: {wide/*: true}\n")
    offers = offering.now()
    assert len(offers.tools) == MOST["always_send"]
    left = MIN_CARDS - MOST["always_send"]
    assert f"No more than {MOST['always_send']} tools are sent; {left} others are found by searching." in offers.notices


@pytest.mark.usefixtures("record")
def test_hundreds_of_tools_are_searched_outside_the_event_loop(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    everything = Catalog.cards

    def noted(catalog: Catalog, *words: object) -> object:
        threads.add(threading.current_thread().name)
        return everything(catalog, *words)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Catalog, "cards", noted)

    async def story() -> None:
        kernel = Kernel(space.project, user=space.user, cache=space.cache)
        space.project_ai.mkdir(parents=True)
        try:
            words: JsonObject = {"query": "invoice", "source": "local"}
            found: JsonObject = {}
            for _ in range(100):  # each waits for a moment
                found = (await kernel.call("search", words)).content
                if "indexing" not in found:
                    break
            assert int(str(found["total"])) > 0
            for action in ("list", "diff"):
                assert not (await kernel.call("mcp", {"action": action, "server": "wide"})).is_error
        finally:
            await kernel.aclose()

    asyncio.run(story())
    assert threads
    assert threading.main_thread().name not in threads
