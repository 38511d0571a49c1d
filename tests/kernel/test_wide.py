"""Thousands of tools of one server: nobody waits for whoever looks through them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, compact
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord, id_of
from kiwi_mcp.kernel.find import find
from kiwi_mcp.kernel.gathering import MOST
from kiwi_mcp.kernel.kernel import Kernel
from kiwi_mcp.kernel.offers import Offering
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.kernel.searching.library import Library
from kiwi_mcp.kernel.settings import registry_settings
from kiwi_mcp.policy.preferences import FILE_NAME
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.open import open_database

SERVER = """\
tool_id: wide
tool_type: mcp_server
version: 1.0.0
executor: subprocess
config: {transport: stdio, command: sh}
"""
WORDS = ("invoice", "payment", "calendar", "channel", "branch", "report", "customer")
MANY = 2_000
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
    return [tool(number) for number in range(MANY)]


@pytest.fixture
def space(tmp_path: Path) -> Space:
    (tmp_path / "user" / "tools").mkdir(parents=True)
    return Space(tmp_path / "project", tmp_path / "user", tmp_path / "cache")


@pytest.fixture
def store(space: Space) -> Iterator[Definitions]:
    settings = registry_settings(space.user)
    database = open_database(settings.url)
    yield Definitions(database, settings.actor.name)
    database.close()


@pytest.fixture
def record(space: Space, store: Definitions, tools: Sequence[Definition]) -> ServerRecord:
    """Let a server of the user have offered them all."""
    path = space.user / "tools" / "wide.yaml"
    path.write_text(SERVER)
    digest = Catalog(space).find("wide").digest
    record = ServerRecord(ServerKey(str(space.user), "wide"), "user/local/wide@1.0.0", str(path), digest)
    store.change(record.key, lambda *_: (record, tools))
    return record


@pytest.mark.usefixtures("record")
def test_a_search_says_why_only_of_what_it_shows(space: Space, store: Definitions) -> None:
    catalog, request = Catalog(space, definitions=lambda: store), SearchRequest(query="invoice report", limit=3)
    library = Library(load=lambda: None)
    find(request, catalog, library)
    assert library.settle(60)
    found = find(request, catalog, library)
    assert int(str(found["total"])) > MANY / 2
    assert [bool(as_object(one)["why"]) for one in as_list(found["results"])] == [True] * 3


def test_what_is_listed_again_as_it_was_keeps_its_entry_and_so_its_place_in_the_index(
    space: Space, store: Definitions, record: ServerRecord, tools: Sequence[Definition]
) -> None:
    catalog = Catalog(space, definitions=lambda: store)
    before = {entry.tool_id: entry for entry in catalog.all(MCP)}
    store.change(record.key, lambda *_: (record, [*tools[:-1], tool(MANY)]))
    after = {entry.tool_id: entry for entry in catalog.all(MCP)}
    assert after.keys() ^ before.keys() == {tools[-1].tool_id, tool(MANY).tool_id}
    assert all(entry is before[name] for name, entry in after.items() if name in before)


@pytest.mark.usefixtures("record")
def test_one_name_among_thousands_is_found(store: Definitions) -> None:
    assert [one.name for _, one in store.named("invoice_0")] == ["invoice_0"]


@pytest.mark.usefixtures("record")
def test_of_a_pattern_that_fits_thousands_of_tools_as_many_are_sent_as_ever_and_the_rest_is_counted(
    space: Space, store: Definitions
) -> None:
    offering = Offering(Catalog(space, definitions=lambda: store))
    (space.user / FILE_NAME).write_text("always_send: {wide/*: true}\n")
    offers = offering.now()
    assert len(offers.tools) == MOST["always_send"]
    left = MANY - MOST["always_send"]
    assert f"No more than {MOST['always_send']} tools are sent; {left} others are found by searching." in offers.notices


@pytest.mark.usefixtures("record")
def test_thousands_of_tools_are_looked_through_beside_the_loop(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    everything = Catalog.all

    def noted(catalog: Catalog, *words: object) -> object:
        threads.add(threading.current_thread().name)
        return everything(catalog, *words)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(Catalog, "all", noted)

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
