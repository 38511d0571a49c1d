"""A large index is stored on disk: the next process loads it if it is intact and current."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Protocol

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.mcp_source import McpSource
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.cards import Card, CardFeatures
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord
from kiwi_mcp.kernel.verb import SearchRequest
from kiwi_mcp.kernel.verbs.search import card_sources, find
from kiwi_mcp.search import index_file, indexes
from kiwi_mcp.search.index import CardIndex
from kiwi_mcp.search.index_file import seal
from kiwi_mcp.search.indexes import SearchIndexes, SearchView
from kiwi_mcp.search.port import Encoder, Filter
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.store.mcp_definitions import McpDefinitions
from kiwi_mcp.store.open import open_database

MCP: tuple[Source, ...] = ("mcp",)
MIN_CARDS = 100
"""Fewer than in a real index, so that the tests are fast."""
COUNT = MIN_CARDS + 10


@pytest.fixture(autouse=True)
def small_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an index of a hundred cards count as large."""
    monkeypatch.setattr(indexes, "MIN_CARDS", MIN_CARDS)
    monkeypatch.setattr(indexes, "_SAMPLE", 50)


def tool(number: int, said: str = "bill") -> Definition:
    offered: JsonObject = {
        "name": f"tool_{number}",
        "description": f"Sends {said} {number}",
        "inputSchema": {"type": "object"},
    }
    digest = sha256(f"{said} {number}".encode()).hexdigest()
    return Definition("tool", f"tool_{number}", f"tool_{number}", "accepted", offered, digest, offered, digest)


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path / "project", tmp_path / "user", tmp_path / "cache")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[McpDefinitions]:
    database = open_database(f"sqlite://{tmp_path}/registry.db")
    yield McpDefinitions(database, "ana")
    database.close()


@pytest.fixture
def record(space: Space, store: McpDefinitions) -> ServerRecord:
    """Let a server have offered many tools."""
    record = ServerRecord(ServerKey(str(space.user), "wide"), "user/local/wide@1.0.0", "", "")
    store.change(record.key, lambda *_: (record, [tool(number) for number in range(COUNT)]))
    return record


class Memory:
    """Sheets, kept as long as the test lasts; it notes what was asked for."""

    def __init__(self) -> None:
        self.sheets: dict[bytes, CardFeatures] = {}
        self.asked: list[bytes] = []

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        self.asked += digests
        return {digest: self.sheets[digest] for digest in digests if digest in self.sheets}

    def write(self, kept: Mapping[bytes, CardFeatures]) -> None:
        self.sheets.update(kept)


class Counting(Encoder, Protocol):
    """An encoder that notes each text."""

    texts: list[str]


def settled(library: SearchIndexes, catalog: Catalog) -> SearchView:
    library.view(card_sources(catalog, MCP))
    assert library.wait_until_indexed(60)
    return library.view(card_sources(catalog, MCP))


def hits(view: SearchView, query: str) -> Sequence[tuple[str, float]]:
    need = view.parse(query)
    return [(hit.card.tool_id, hit.score) for hit in rank(need, view.pools(need, Filter()), limit=5).hits]


@pytest.mark.req("E1")
@pytest.mark.usefixtures("record")
def test_a_large_index_is_loaded_without_listing_a_source(
    space: Space, store: McpDefinitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    monkeypatch.setattr(McpSource, "entries", lambda _: pytest.fail("the source was listed"))
    view = SearchIndexes(load=lambda: encoder).view(card_sources(Catalog(space, definitions=lambda: store), MCP))
    assert view.progress == (COUNT, COUNT, COUNT)
    assert hits(view, "invoice 7") == hits(made, "invoice 7")
    assert hits(view, "tool_101")[0] == ("tool_101", 1.0)
    assert len([*view.cards]) == COUNT
    assert 0 < sum(map(len, view.sample)) < MIN_CARDS


@pytest.mark.usefixtures("record")
def test_a_month_old_index_is_rebuilt_so_that_its_features_count_as_used(
    space: Space, store: McpDefinitions, encoder: Counting
) -> None:
    keep = Memory()
    settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space, definitions=lambda: store))
    (place,) = (space.cache / "search").glob("*.index")
    month = 30 * 86_400
    for age, is_read in ((month - 3_600, False), (month + 3_600, True)):
        os.utime(place, (time() - age,) * 2)
        keep.asked.clear()
        settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space, definitions=lambda: store))
        assert bool(keep.asked) == is_read
    assert time() - place.stat().st_mtime < month
    assert len(encoder.texts) == COUNT


def test_changed_items_are_found_and_removed_ones_are_not(
    space: Space, store: McpDefinitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    offered = [tool(0, "weather"), *(tool(number) for number in range(1, COUNT - 1))]
    store.change(record.key, lambda *_: (record, offered))
    catalog, library = Catalog(space, definitions=lambda: store), SearchIndexes(load=lambda: encoder)
    assert hits(settled(library, catalog), "weather")[0][0] == "tool_0"
    store.change(record.key, lambda *_: (record, offered[1:]))
    view = settled(library, catalog)
    assert view.progress.cards == COUNT - 2
    assert not [name for name, score in hits(view, "tool_0") if score == 1.0]
    assert not [name for name, score in hits(view, f"tool_{COUNT - 1}") if score == 1.0]


@pytest.mark.slow
@pytest.mark.usefixtures("record")
def test_a_damaged_or_missing_file_is_rebuilt(space: Space, store: McpDefinitions, encoder: Encoder) -> None:
    made = hits(settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)), "invoice 7")
    (file,) = (space.cache / "search").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1] + b"x", whole + b"x"):
        file.write_bytes(damaged)
        library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)
        settled(library, catalog)  # some damage is found by the check in the background
        assert hits(settled(library, catalog), "invoice 7") == made
    assert file.read_bytes()[:32] == whole[:32]


def plant(file: Path, was: bytes, instead: bytes) -> None:
    """Change what a file holds, and seal it as it was sealed."""
    whole = file.read_bytes()
    assert was in whole
    blocks = int.from_bytes(whole[64:72], "little")
    start = 72 + 32 * blocks
    data = whole[start + -start % 64 :].replace(was, instead)
    file.write_bytes(whole[:32] + seal(data) + data)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_search_works_despite_a_planted_index(
    space: Space, store: McpDefinitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, *, is_stuck: bool
) -> None:
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    plant(file, b'"Sends bill ', b'"Sends \xffill ')
    if is_stuck:
        monkeypatch.setattr(Path, "unlink", _raising(PermissionError()))
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    for query in ("bill 7", "tool_7"):
        response = find(SearchRequest(query=query, source="mcp"), catalog, library)
        assert library.wait_until_indexed(60)
        assert as_object(as_list(response["results"])[0])["name"] == "tool_7"
    assert b'"Sends \xffill ' not in file.read_bytes()


def test_changes_after_a_planted_index_are_found(
    space: Space, store: McpDefinitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    plant(file, b'"Sends bill ', b'"Sends \xffill ')
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    library.view(card_sources(catalog, MCP))
    store.change(record.key, lambda *_: (record, [tool(number, "weather") for number in range(COUNT)]))
    assert hits(settled(library, catalog), "weather 7")[0][0] == "tool_7"


@pytest.mark.usefixtures("record")
def test_a_pipe_or_garbage_in_place_of_the_file_delays_no_search(
    space: Space, store: McpDefinitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    for nonsense in (KeyError("said"), TypeError(), RecursionError(), IndexError()):
        with monkeypatch.context() as damage:
            damage.setattr(index_file, "deserialize", _raising(nonsense))
            assert (
                SearchIndexes(load=lambda: encoder)
                .view(card_sources(Catalog(space, definitions=lambda: store), MCP))
                .progress.cards
            )
    file.unlink()
    os.mkfifo(file)
    view = settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    assert view.progress == (COUNT, COUNT, COUNT)
    assert file.is_file()


def test_an_index_of_removed_items_finds_nothing(
    space: Space, store: McpDefinitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    assert len([*library.view(card_sources(catalog, MCP)).cards]) == COUNT
    store.change(record.key, lambda *_: (record, []))
    view = settled(library, catalog)
    assert [*view.cards] == []
    assert hits(view, "bill") == []


@pytest.mark.usefixtures("record")
def test_an_index_over_the_limit_is_not_saved(
    space: Space, store: McpDefinitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "MAX_CARDS", COUNT - 1)
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    assert not (space.cache / "search").exists()
    monkeypatch.setattr(indexes, "MAX_CARDS", COUNT)
    settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    assert len([*(space.cache / "search").iterdir()]) == 1


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("is_late", [False, True])
def test_damage_of_any_block_is_found(
    space: Space, store: McpDefinitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, *, is_late: bool
) -> None:
    monkeypatch.setattr(index_file, "_BLOCK", 4_096)
    made = hits(settled(SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)), "invoice 7")
    (file,) = (space.cache / "search").iterdir()
    whole = bytearray(file.read_bytes())
    place = len(whole) - 70 if is_late else len(whole) - len(whole) * 9 // 10
    whole[place] ^= 1
    file.write_bytes(whole)
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    library.view(card_sources(catalog, MCP))
    assert library.wait_until_indexed(60)
    assert not file.exists()  # the background check removes a damaged file
    assert hits(settled(library, catalog), "invoice 7") == made
    assert file.exists()


def test_a_block_that_is_read_at_once_is_checked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_file, "_BLOCK", 4_096)
    index = CardIndex("shapes")
    index.follow([Card("mcp", "one", f"tool_{number}", "1.0.0") for number in range(50)])
    path = tmp_path / "one.index"
    index_file.save_index(path, "etag", "shapes", index)
    assert index_file.load_index(path, "other", "shapes") is None
    loaded = index_file.load_index(path, "etag", "shapes")
    assert loaded is not None
    _, check = loaded
    assert check.blocks
    assert not check.run(seconds=60)
    whole = bytearray(path.read_bytes())
    for place in (40, 80, 2_100):  # the seal, the digest of a block, the first block
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert index_file.load_index(path, "etag", "shapes") is None


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
