"""The index library follows catalogs, reports its progress, and computes nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Protocol

import numpy as np
import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.cards import CardFeatures
from kiwi_mcp.domain.items import Source
from kiwi_mcp.kernel.verbs.search import card_sources
from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.indexes import SearchIndexes, SearchView
from kiwi_mcp.search.port import Encoder, Filter, Floats, Hit
from kiwi_mcp.search.ranking import rank

OWN: tuple[Source, ...] = ("project", "user")


class Counting(Encoder, Protocol):
    """An encoder that notes each text."""

    texts: list[str]


class Memory:
    """Sheets, kept as long as the test lasts."""

    def __init__(self) -> None:
        self.sheets: dict[bytes, CardFeatures] = {}

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, CardFeatures]:
        return {digest: self.sheets[digest] for digest in digests if digest in self.sheets}

    def write(self, kept: Mapping[bytes, CardFeatures]) -> None:
        self.sheets.update(kept)


@pytest.fixture
def space(tmp_path: Path) -> Space:
    return Space(tmp_path / "project", tmp_path / "user", tmp_path / "cache")


@pytest.fixture
def write(space: Space) -> Callable[..., None]:
    """Write a tool of the project, or of the user."""

    def note(name: str, description: str, base: Path | None = None) -> None:
        folder = (base or space.project_ai) / "tools"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(
            f"tool_id: {name}\ntool_type: script\nversion: 1.0.0\nexecutor: bash_runtime\ndescription: {description}\n"
            "config: {entrypoint: main.sh}\n"
        )

    return note


def names(view: SearchView, query: str) -> list[str]:
    need = view.parse(query)
    return [hit.card.tool_id for hit in rank(need, view.pools(need, Filter()), limit=10).hits]


def settled(library: SearchIndexes, catalog: Catalog, sources: tuple[Source, ...] = OWN) -> SearchView:
    library.view(card_sources(catalog, sources))
    assert library.wait_until_indexed(30)
    return library.view(card_sources(catalog, sources))


def test_a_new_item_is_found_by_words_at_once_and_by_meaning_soon(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    assert names(library.view(card_sources(catalog, OWN)), "bill") == ["send_bill"]
    view = settled(library, catalog)
    assert view.indexing is None
    assert names(view, "invoice") == ["send_bill"]


@pytest.mark.req("E2")
def test_changed_and_removed_items_are_seen_by_the_next_search(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    assert names(settled(library, catalog), "send") == ["send_bill"]
    write("look_out", "Tells the weather")
    assert names(library.view(card_sources(catalog, OWN)), "weather") == ["look_out"]
    (space.project_ai / "tools" / "send_bill.yaml").unlink()
    view = settled(library, catalog)
    assert names(view, "send bill invoice") == []
    assert [card.tool_id for card in view.cards] == ["look_out"]


@pytest.mark.slow
def test_a_search_reports_the_index_progress(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    go_on = Event()

    class Slow:
        name, dimension = encoder_name(), 384

        def encode(self, texts: Sequence[str]) -> Floats:
            go_on.wait(20)
            return np.ones((len(texts), 384), np.float32)

    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=Slow), Catalog(space)
    assert library.view(card_sources(catalog, OWN)).indexing == {"cards": 1, "words": 1, "meaning": 0}
    go_on.set()
    assert settled(library, catalog).indexing is None


def _many(space: Space, write: Callable[..., None]) -> None:
    """Write what is found at once, and more beside it than is read at once."""
    write("look_out", "Tells the weather", space.user)
    for number in range(130):
        write(f"send_bill_{number}", f"Sends bill {number}")


def test_the_first_search_waits_for_the_word_index(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    def load() -> Encoder:
        Event().wait(0.6)  # as on a busy machine
        return encoder

    _many(space, write)
    assert words_of(SearchIndexes(load=load), Catalog(space)) == (131, 131)


def test_a_wait_that_timed_out_is_not_repeated(
    space: Space, write: Callable[..., None], encoder: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Event()

    def load() -> Encoder:
        go_on.wait(60)
        return encoder

    _many(space, write)
    library, catalog = SearchIndexes(load=load), Catalog(space)
    monkeypatch.setattr("kiwi_mcp.search.indexes._WAIT_FIRST", 0.05)
    assert words_of(library, catalog) == (131, 1)
    monkeypatch.setattr("kiwi_mcp.search.indexes._WAIT_FIRST", 50.0)
    began = monotonic()
    assert words_of(library, catalog) == (131, 1)
    assert monotonic() - began < 40
    go_on.set()
    assert settled(library, catalog).indexing is None


def words_of(library: SearchIndexes, catalog: Catalog) -> tuple[int, int]:
    """Return how many items a search knows of, and how many it finds by words."""
    cards, worded, _ = library.view(card_sources(catalog, OWN)).progress
    return cards, worded


def test_a_failing_encoder_leaves_word_search(space: Space, write: Callable[..., None]) -> None:
    class Broken:
        name, dimension = encoder_name(), 384

        def encode(self, texts: Sequence[str]) -> Floats:
            raise MemoryError(len(texts))

    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=Broken), Catalog(space)
    view = settled(library, catalog)
    assert names(view, "bill") == ["send_bill"]
    assert view.indexing == {"cards": 1, "words": 1, "meaning": 0}


def test_stored_features_are_maintained_when_the_worker_is_idle(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    tended: list[int] = []
    library, catalog = (
        SearchIndexes(load=lambda: encoder, maintain=lambda: tended.append(len(encoder.texts))),
        Catalog(space),
    )
    settled(library, catalog)  # the encoder is loaded before anything is known here
    tended.clear()
    write("send_bill", "Sends a bill")
    settled(library, catalog)
    assert tended
    assert {*tended} == {1}


@pytest.mark.req("E1")
def test_an_encoded_item_is_never_encoded_again(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    for number in range(100):  # more than are indexed at once
        write(f"send_bill_{number}", f"Sends bill {number}")
    keep = Memory()
    first = settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space))
    assert len(encoder.texts) == 100
    encoder.texts.clear()
    again = settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space))
    assert again.progress == (100, 100, 100)
    write("look_out", "Tells the weather")
    settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space))
    assert [text.partition(":")[0] for text in encoder.texts] == ["look out"]
    before, kept = [(hit.card.tool_id, hit.score) for hit in _hits(first)], dict(keep.sheets)
    keep.sheets.clear()
    (space.project_ai / "tools" / "look_out.yaml").unlink()
    anew = settled(SearchIndexes(lambda: keep, lambda: encoder), Catalog(space))
    assert [(hit.card.tool_id, hit.score) for hit in _hits(anew)] == before
    assert keep.sheets.items() < kept.items()


def _hits(view: SearchView) -> Sequence[Hit]:
    need = view.parse("invoice number 7")
    return rank(need, view.pools(need, Filter()), limit=20).hits


def test_catalogs_of_the_same_source_share_its_index(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill", space.user)
    library = SearchIndexes(load=lambda: encoder)
    other = Space(space.project.with_name("other"), space.user, space.cache)
    first, second = Catalog(space), Catalog(other)
    one, two = settled(library, first), settled(library, second)
    assert [*one.cards] == [*two.cards]
    assert [text.partition(":")[0] for text in encoder.texts] == ["send bill"]
    write("look_out", "Tells the weather", space.user)
    assert names(library.view(card_sources(second, OWN)), "weather") == ["look_out"]
    assert names(library.view(card_sources(first, OWN)), "weather") == ["look_out"]
    (space.user / "tools" / "look_out.yaml").unlink()
    assert names(library.view(card_sources(first, OWN)), "weather") == []
    assert names(library.view(card_sources(second, OWN)), "weather") == []


def test_an_index_is_dropped_with_its_last_catalog(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    settled(library, catalog)
    assert library.progress().cards == 1
    del catalog
    assert library.progress().cards == 0


def test_closing_waits_briefly_and_unfinished_work_is_done_later(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    library.view(card_sources(catalog, OWN))
    library.close()
    assert settled(library, catalog).indexing is None


@pytest.mark.parametrize("fault", [RuntimeError("out of order"), IndexError(), float("nan")])
def test_an_encoder_that_begins_to_fail_leaves_word_search_and_is_reported(
    space: Space, write: Callable[..., None], fault: Exception | float
) -> None:
    class Failing:
        name, dimension = encoder_name(), 384
        is_failing = False

        def encode(self, texts: Sequence[str]) -> Floats:
            if self.is_failing and isinstance(fault, Exception):
                raise fault
            return np.full((len(texts), 384), fault if self.is_failing else 0.05, np.float32)

    write("send_bill", "Sends a bill")
    encoder = Failing()
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    assert settled(library, catalog).indexing is None
    encoder.is_failing = True
    view = library.view(card_sources(catalog, OWN))
    assert names(view, "bill") == ["send_bill"]
    (response,) = view.faults
    assert "words only" in response.message


def test_an_empty_catalog_reports_nothing(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    assert [card.tool_id for card in settled(library, catalog).cards] == ["send_bill"]
    (space.project_ai / "tools" / "send_bill.yaml").unlink()
    assert [*settled(library, catalog).cards] == []


@pytest.mark.req("E2")
def test_the_sources_of_items_are_current(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = SearchIndexes(load=lambda: encoder), Catalog(space)
    view = settled(library, catalog)
    assert view.locations() == view.locations() == " Here: `send_bill`."
    assert view.locations(lambda _: False) == ""
    write("look_out", "Tells the weather")
    assert library.view(card_sources(catalog, OWN)).locations() == " Here: `look_out`, `send_bill`."


def test_a_name_is_shared_if_several_visible_items_have_it(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    write("look_out", "Tells the weather")
    write("send_bill", "Sends a bill by post", space.user)
    view = settled(SearchIndexes(load=lambda: encoder), Catalog(space))
    assert [view.is_shared(name) for name in ("send_bill", "look_out", "nothing")] == [True, False, False]
    assert not view.is_shared("send_bill", lambda card: card.source == "user")
