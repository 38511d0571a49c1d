"""The recall store: bounded, separate for each owner and actor, and removable."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kiwi_mcp.store.database import Database
from kiwi_mcp.store.search_index import recall as limits
from kiwi_mcp.store.search_index.recall import MAX_LENGTH, MAX_PER_ITEM, RecallEntry, RecallStore

RAIN = RecallEntry("user/local/umbrella", "will it rain", is_run=False, at=1)


@pytest.fixture
def store(database: Database) -> Database:
    return database


def test_a_run_replaces_a_load_and_not_the_reverse(store: Database) -> None:
    mine = RecallStore(store, "ana")
    for trace in (RAIN, replace(RAIN, is_run=True, at=2), replace(RAIN, at=3)):
        mine.add("ana", trace)
    assert mine.of("ana") == [replace(RAIN, is_run=True, at=3)]


def test_entries_of_one_owner_or_actor_are_invisible_to_another(store: Database) -> None:
    ana, ben = RecallStore(store, "ana"), RecallStore(store, "ben")
    ana.add("ana", RAIN)
    ana.add("token:cy:1", RAIN)
    ben.add("ana", RAIN)
    assert ana.forget("ana") == 1
    assert (ana.of("ana"), ana.of("token:cy:1"), ben.of("ana")) == ([], [RAIN], [RAIN])


def test_the_oldest_requests_of_an_item_are_removed_first(store: Database) -> None:
    mine = RecallStore(store, "ana")
    for at in range(MAX_PER_ITEM + 5):
        mine.add("ana", replace(RAIN, request=f"rain on day {at}", at=at))
    mine.add("ana", replace(RAIN, item="user/local/ledger", at=0))
    kept = [trace.request for trace in mine.of("ana") if trace.item == RAIN.item]
    assert kept == [f"rain on day {at}" for at in range(MAX_PER_ITEM + 4, 4, -1)]
    assert len(mine.of("ana")) == MAX_PER_ITEM + 1


def test_the_number_of_entries_is_limited(store: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_PER_ACTOR", 3)
    monkeypatch.setattr(limits, "MAX_TOTAL", 5)
    mine = RecallStore(store, "ana")
    for at in range(8):
        mine.add("ana" if at % 2 else "token:cy:1", replace(RAIN, item=f"user/local/tool{at}", at=at))
    assert [trace.at for trace in mine.of("ana")] == [7, 5, 3]
    assert [trace.at for trace in mine.of("token:cy:1")] == [6, 4]


def test_a_request_replaces_equal_ones(store: Database) -> None:
    mine = RecallStore(store, "ana")
    mine.add("ana", RAIN)
    mine.add("ana", replace(RAIN, request="will it rain today", at=2), instead=[RAIN.request])
    assert [trace.request for trace in mine.of("ana")] == ["will it rain today"]


def test_a_later_vector_changes_the_etag(store: Database) -> None:
    mine = RecallStore(store, "ana")
    marks = [mine.etag("ana")]
    mine.add("ana", RAIN)
    marks.append(mine.etag("ana"))
    mine.encode("ana", "words-1", {RAIN: b"\x00\xff" * 4})
    marks.append(mine.etag("ana"))
    assert mine.of("ana") == [replace(RAIN, encoder="words-1", vector=b"\x00\xff" * 4)]
    assert mine.forget("ana", [RAIN.item, "user/local/other"]) == 1
    assert mine.etag("ana") == marks[0]
    assert len({*marks}) == len(marks)


def test_texts_that_no_database_can_hold_are_stored_approximately(store: Database) -> None:
    mine = RecallStore(store, "ana")
    mine.add("ana", replace(RAIN, request="rain\0 \ud800" + "x" * 1_000))
    (kept,) = mine.of("ana")
    assert kept.request.startswith("rain\ufffd ?x")
    assert len(kept.request) == MAX_LENGTH
