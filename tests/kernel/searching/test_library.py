"""The library follows catalogs, tells how far it is, and works out nothing twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Protocol

import numpy as np
import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.items import Source
from kiwi_mcp.domain.sheet import Kept
from kiwi_mcp.kernel.searching.library import Library
from kiwi_mcp.kernel.searching.view import View
from kiwi_mcp.search.choose import Filter
from kiwi_mcp.search.encoder import encoder_name
from kiwi_mcp.search.port import Encoder, Floats, Hit
from kiwi_mcp.search.ranking import rank

OWN: tuple[Source, ...] = ("project", "user")


class Counting(Encoder, Protocol):
    """An encoder that notes each text."""

    texts: list[str]


class Memory:
    """Sheets, kept as long as the test lasts."""

    def __init__(self) -> None:
        self.sheets: dict[bytes, Kept] = {}

    def read(self, digests: Sequence[bytes]) -> Mapping[bytes, Kept]:
        return {digest: self.sheets[digest] for digest in digests if digest in self.sheets}

    def write(self, kept: Mapping[bytes, Kept]) -> None:
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


def names(view: View, query: str) -> list[str]:
    need = view.read(query)
    return [hit.card.tool_id for hit in rank(need, view.pools(need, Filter()), limit=10).hits]


def settled(library: Library, catalog: Catalog, sources: tuple[Source, ...] = OWN) -> View:
    library.view(catalog, sources)
    assert library.settle(30)
    return library.view(catalog, sources)


def test_what_is_new_is_found_by_words_at_once_and_by_meaning_soon(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    assert names(library.view(catalog, OWN), "bill") == ["send_bill"]
    view = settled(library, catalog)
    assert view.indexing is None
    assert names(view, "invoice") == ["send_bill"]


@pytest.mark.req("E2")
def test_what_changes_and_goes_is_seen_by_the_next_search(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    assert names(settled(library, catalog), "send") == ["send_bill"]
    write("look_out", "Tells the weather")
    assert names(library.view(catalog, OWN), "weather") == ["look_out"]
    (space.project_ai / "tools" / "send_bill.yaml").unlink()
    view = settled(library, catalog)
    assert names(view, "send bill invoice") == []
    assert [card.tool_id for card in view.cards] == ["look_out"]


def test_a_search_tells_how_far_the_index_is(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    go_on = Event()

    class Slow:
        name, dimension = encoder_name(), 384

        def encode(self, texts: Sequence[str]) -> Floats:
            go_on.wait(20)
            return np.ones((len(texts), 384), np.float32)

    write("send_bill", "Sends a bill")
    library, catalog = Library(load=Slow), Catalog(space)
    assert library.view(catalog, OWN).indexing == {"cards": 1, "words": 1, "meaning": 0}
    go_on.set()
    assert settled(library, catalog).indexing is None


def _many(space: Space, write: Callable[..., None]) -> None:
    """Write what is found at once, and more beside it than is read at once."""
    write("look_out", "Tells the weather", space.user)
    for number in range(130):
        write(f"send_bill_{number}", f"Sends bill {number}")


def test_the_first_search_waits_until_all_is_found_by_words(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    def load() -> Encoder:
        Event().wait(0.6)  # as on a busy machine
        return encoder

    _many(space, write)
    assert words_of(Library(load=load), Catalog(space)) == (131, 131)


def test_what_was_waited_for_in_vain_is_not_waited_for_again(
    space: Space, write: Callable[..., None], encoder: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Event()

    def load() -> Encoder:
        go_on.wait(60)
        return encoder

    _many(space, write)
    library, catalog = Library(load=load), Catalog(space)
    monkeypatch.setattr("kiwi_mcp.kernel.searching.library._FIRST_PATIENCE", 0.05)
    assert words_of(library, catalog) == (131, 1)
    monkeypatch.setattr("kiwi_mcp.kernel.searching.library._FIRST_PATIENCE", 30.0)
    began = monotonic()
    assert words_of(library, catalog) == (131, 1)
    assert monotonic() - began < 15
    go_on.set()
    assert settled(library, catalog).indexing is None


def words_of(library: Library, catalog: Catalog) -> tuple[int, int]:
    """Return how many items a search knows of, and how many it finds by words."""
    cards, worded, _ = library.view(catalog, OWN).progress
    return cards, worded


def test_an_encoder_that_fails_leaves_the_words(space: Space, write: Callable[..., None]) -> None:
    class Broken:
        name, dimension = encoder_name(), 384

        def encode(self, texts: Sequence[str]) -> Floats:
            raise MemoryError(len(texts))

    write("send_bill", "Sends a bill")
    library, catalog = Library(load=Broken), Catalog(space)
    view = settled(library, catalog)
    assert names(view, "bill") == ["send_bill"]
    assert view.indexing == {"cards": 1, "words": 1, "meaning": 0}


def test_what_is_kept_is_looked_after_once_nothing_else_is_left_to_do(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    tended: list[int] = []
    library, catalog = Library(load=lambda: encoder, tend=lambda: tended.append(len(encoder.texts))), Catalog(space)
    settled(library, catalog)  # the encoder is loaded before anything is known here
    tended.clear()
    write("send_bill", "Sends a bill")
    settled(library, catalog)
    assert tended
    assert {*tended} == {1}


@pytest.mark.req("E1")
def test_what_was_encoded_once_is_never_encoded_again(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    for number in range(100):  # more than are indexed at once
        write(f"send_bill_{number}", f"Sends bill {number}")
    keep = Memory()
    first = settled(Library(lambda: keep, lambda: encoder), Catalog(space))
    assert len(encoder.texts) == 100
    encoder.texts.clear()
    again = settled(Library(lambda: keep, lambda: encoder), Catalog(space))
    assert again.progress == (100, 100, 100)
    write("look_out", "Tells the weather")
    settled(Library(lambda: keep, lambda: encoder), Catalog(space))
    assert [text.partition(":")[0] for text in encoder.texts] == ["look out"]
    before, kept = [(hit.card.tool_id, hit.score) for hit in _hits(first)], dict(keep.sheets)
    keep.sheets.clear()
    (space.project_ai / "tools" / "look_out.yaml").unlink()
    anew = settled(Library(lambda: keep, lambda: encoder), Catalog(space))
    assert [(hit.card.tool_id, hit.score) for hit in _hits(anew)] == before
    assert keep.sheets.items() < kept.items()


def _hits(view: View) -> Sequence[Hit]:
    need = view.read("invoice number 7")
    return rank(need, view.pools(need, Filter()), limit=20).hits


def test_catalogs_that_look_at_the_same_source_share_its_index(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill", space.user)
    library = Library(load=lambda: encoder)
    other = Space(space.project.with_name("other"), space.user, space.cache)
    first, second = Catalog(space), Catalog(other)
    one, two = settled(library, first), settled(library, second)
    assert [*one.cards] == [*two.cards]
    assert [text.partition(":")[0] for text in encoder.texts] == ["send bill"]
    write("look_out", "Tells the weather", space.user)
    assert names(library.view(second, OWN), "weather") == ["look_out"]
    assert names(library.view(first, OWN), "weather") == ["look_out"]
    (space.user / "tools" / "look_out.yaml").unlink()
    assert names(library.view(first, OWN), "weather") == []
    assert names(library.view(second, OWN), "weather") == []


def test_an_index_goes_with_the_last_catalog_that_looks_at_it(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    settled(library, catalog)
    assert library.progress().cards == 1
    del catalog
    assert library.progress().cards == 0


def test_a_close_waits_for_little_and_what_was_left_is_done_later(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    library.view(catalog, OWN)
    library.close()
    assert settled(library, catalog).indexing is None


@pytest.mark.parametrize("fault", [RuntimeError("out of order"), IndexError(), float("nan")])
def test_an_encoder_that_begins_to_fail_leaves_the_words_and_is_told_of(
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
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    assert settled(library, catalog).indexing is None
    encoder.is_failing = True
    view = library.view(catalog, OWN)
    assert names(view, "bill") == ["send_bill"]
    (told,) = view.faults
    assert "by its words only" in told.message


def test_when_all_is_gone_nothing_is_told_of(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    assert [card.tool_id for card in settled(library, catalog).cards] == ["send_bill"]
    (space.project_ai / "tools" / "send_bill.yaml").unlink()
    assert [*settled(library, catalog).cards] == []


@pytest.mark.req("E2")
def test_the_homes_of_items_are_those_of_now(space: Space, write: Callable[..., None], encoder: Counting) -> None:
    write("send_bill", "Sends a bill")
    library, catalog = Library(load=lambda: encoder), Catalog(space)
    view = settled(library, catalog)
    assert view.homes() == view.homes() == " Here: `send_bill`."
    assert view.homes(lambda _: False) == ""
    write("look_out", "Tells the weather")
    assert library.view(catalog, OWN).homes() == " Here: `look_out`, `send_bill`."


def test_a_name_is_shared_where_several_items_have_it_that_are_seen(
    space: Space, write: Callable[..., None], encoder: Counting
) -> None:
    write("send_bill", "Sends a bill")
    write("look_out", "Tells the weather")
    write("send_bill", "Sends a bill by post", space.user)
    view = settled(Library(load=lambda: encoder), Catalog(space))
    assert [view.is_shared(name) for name in ("send_bill", "look_out", "nothing")] == [True, False, False]
    assert not view.is_shared("send_bill", lambda card: card.source == "user")
