"""A large index is kept on disk: the next process reads it at once, if it is whole and still true."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Protocol

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.mcp import McpSource
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.domain.mcp import Definition, ServerKey, ServerRecord
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.kernel.find import find
from kiwi_mcp.kernel.requests import SearchRequest
from kiwi_mcp.kernel.searching import saved
from kiwi_mcp.kernel.searching.library import Library
from kiwi_mcp.kernel.searching.saved import MANY
from kiwi_mcp.kernel.searching.view import View
from kiwi_mcp.search.choose import Filter
from kiwi_mcp.search.port import Encoder
from kiwi_mcp.search.ranking import rank
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.open import open_database

MCP: tuple[Source, ...] = ("mcp",)
COUNT = MANY + 10


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
def store(tmp_path: Path) -> Iterator[Definitions]:
    database = open_database(f"sqlite://{tmp_path}/registry.db")
    yield Definitions(database, "ana")
    database.close()


@pytest.fixture
def record(space: Space, store: Definitions) -> ServerRecord:
    """Let a server have offered many tools."""
    record = ServerRecord(ServerKey(str(space.user), "wide"), "user/local/wide@1.0.0", "", "")
    store.change(record.key, lambda *_: (record, [tool(number) for number in range(COUNT)]))
    return record


class Memory:
    """Sheets, kept as long as the test lasts; it notes what was asked for."""

    def __init__(self) -> None:
        self.sheets: dict[bytes, Kept] = {}
        self.asked: list[bytes] = []

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        self.asked += digests
        return {digest: self.sheets[digest] for digest in digests if digest in self.sheets}

    def write(self, kept: Mapping[bytes, Kept]) -> None:
        self.sheets.update(kept)


class Counting(Encoder, Protocol):
    """An encoder that notes each text."""

    texts: list[str]


def settled(library: Library, catalog: Catalog) -> View:
    library.view(catalog, MCP)
    assert library.settle(60)
    return library.view(catalog, MCP)


def hits(view: View, query: str) -> Sequence[tuple[str, float]]:
    need = view.read(query)
    return [(hit.card.tool_id, hit.score) for hit in rank(need, view.pools(need, Filter()), limit=5).hits]


@pytest.mark.req("E1")
@pytest.mark.usefixtures("record")
def test_a_large_index_is_read_at_once_and_lists_no_source(
    space: Space, store: Definitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    monkeypatch.setattr(McpSource, "entries", lambda _: pytest.fail("the source was listed"))
    view = Library(load=lambda: encoder).view(Catalog(space, definitions=lambda: store), MCP)
    assert view.progress == (COUNT, COUNT, COUNT)
    assert hits(view, "invoice 7") == hits(made, "invoice 7")
    assert hits(view, "tool_1001")[0] == ("tool_1001", 1.0)
    assert len([*view.cards]) == COUNT
    assert 0 < sum(map(len, view.glimpse)) < MANY


@pytest.mark.usefixtures("record")
def test_an_index_that_is_a_month_old_is_made_again_so_that_what_it_stands_for_counts_as_used(
    space: Space, store: Definitions, encoder: Counting
) -> None:
    keep = Memory()
    settled(Library(lambda: keep, lambda: encoder), Catalog(space, definitions=lambda: store))
    (place,) = (space.cache / "search").glob("*.index")
    month = 30 * 86_400
    for age, is_read in ((month - 3_600, False), (month + 3_600, True)):
        os.utime(place, (time() - age,) * 2)
        keep.asked.clear()
        settled(Library(lambda: keep, lambda: encoder), Catalog(space, definitions=lambda: store))
        assert bool(keep.asked) == is_read
    assert time() - place.stat().st_mtime < month
    assert len(encoder.texts) == COUNT


def test_what_changed_since_is_found_and_what_went_is_not(
    space: Space, store: Definitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    offered = [tool(0, "weather"), *(tool(number) for number in range(1, COUNT - 1))]
    store.change(record.key, lambda *_: (record, offered))
    catalog, library = Catalog(space, definitions=lambda: store), Library(load=lambda: encoder)
    assert hits(settled(library, catalog), "weather")[0][0] == "tool_0"
    store.change(record.key, lambda *_: (record, offered[1:]))
    view = settled(library, catalog)
    assert view.progress.cards == COUNT - 2
    assert not [name for name, score in hits(view, "tool_0") if score == 1.0]
    assert not [name for name, score in hits(view, f"tool_{COUNT - 1}") if score == 1.0]


@pytest.mark.usefixtures("record")
def test_a_file_that_is_damaged_or_gone_is_made_again(space: Space, store: Definitions, encoder: Encoder) -> None:
    made = hits(settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store)), "invoice 7")
    (file,) = (space.cache / "search").iterdir()
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], whole[:-1] + b"x", whole + b"x"):
        file.write_bytes(damaged)
        view = settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
        assert hits(view, "invoice 7") == made
    assert file.read_bytes()[:32] == whole[:32]


def plant(file: Path, was: bytes, instead: bytes) -> None:
    """Change what a file holds, and seal it as it was sealed."""
    whole = file.read_bytes()
    assert was in whole
    data = whole[64:].replace(was, instead)
    file.write_bytes(whole[:32] + sha256(data).digest() + data)


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_search_is_answered_although_somebody_planted_an_index(
    space: Space, store: Definitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch, *, is_stuck: bool
) -> None:
    settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    plant(file, b'"Sends bill ', b'"Sends \xffill ')
    if is_stuck:
        monkeypatch.setattr(Path, "unlink", _raising(PermissionError()))
    library, catalog = Library(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    for query in ("bill 7", "tool_7"):
        told = find(SearchRequest(query=query, source="mcp"), catalog, library)
        assert library.settle(60)
        assert as_object(as_list(told["results"])[0])["name"] == "tool_7"
    assert b'"Sends \xffill ' not in file.read_bytes()


def test_what_changed_since_somebody_planted_an_index_is_found(
    space: Space, store: Definitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    plant(file, b'"Sends bill ', b'"Sends \xffill ')
    library, catalog = Library(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    library.view(catalog, MCP)
    store.change(record.key, lambda *_: (record, [tool(number, "weather") for number in range(COUNT)]))
    assert hits(settled(library, catalog), "weather 7")[0][0] == "tool_7"


@pytest.mark.usefixtures("record")
def test_a_pipe_or_nonsense_in_place_of_the_file_keeps_nobody_waiting(
    space: Space, store: Definitions, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    (file,) = (space.cache / "search").iterdir()
    for nonsense in (KeyError("said"), TypeError(), RecursionError(), IndexError()):
        with monkeypatch.context() as damage:
            damage.setattr(saved, "thaw", _raising(nonsense))
            assert Library(load=lambda: encoder).view(Catalog(space, definitions=lambda: store), MCP).progress.cards
    file.unlink()
    os.mkfifo(file)
    view = settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    assert view.progress == (COUNT, COUNT, COUNT)
    assert file.is_file()


def test_an_index_from_disk_whose_items_are_all_gone_finds_nothing(
    space: Space, store: Definitions, record: ServerRecord, encoder: Encoder
) -> None:
    settled(Library(load=lambda: encoder), Catalog(space, definitions=lambda: store))
    library, catalog = Library(load=lambda: encoder), Catalog(space, definitions=lambda: store)
    assert len([*library.view(catalog, MCP).cards]) == COUNT
    store.change(record.key, lambda *_: (record, []))
    view = settled(library, catalog)
    assert [*view.cards] == []
    assert hits(view, "bill") == []


def _raising(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail
