"""What is remembered of use: bounded, for each owner and each actor apart, and gone when it is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kiwi_mcp.domain.trace import Trace
from kiwi_mcp.store import remembered as limits
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.migrate import migrate
from kiwi_mcp.store.remembered import LONGEST, PER_ITEM, Remembered

RAIN = Trace("user/local/umbrella", "will it rain", is_run=False, at=1)


@pytest.fixture
def store(empty: Database) -> Database:
    migrate(empty)
    return empty


def test_a_run_makes_more_of_a_look_and_not_the_other_way_round(store: Database) -> None:
    mine = Remembered(store, "ana")
    for trace in (RAIN, replace(RAIN, is_run=True, at=2), replace(RAIN, at=3)):
        mine.note("ana", trace)
    assert mine.of("ana") == [replace(RAIN, is_run=True, at=3)]


def test_one_owner_or_actor_sees_and_forgets_nothing_of_another(store: Database) -> None:
    ana, ben = Remembered(store, "ana"), Remembered(store, "ben")
    ana.note("ana", RAIN)
    ana.note("token:cy:1", RAIN)
    ben.note("ana", RAIN)
    assert ana.forget("ana") == 1
    assert (ana.of("ana"), ana.of("token:cy:1"), ben.of("ana")) == ([], [RAIN], [RAIN])


def test_the_oldest_requests_of_an_item_make_room(store: Database) -> None:
    mine = Remembered(store, "ana")
    for at in range(PER_ITEM + 5):
        mine.note("ana", replace(RAIN, request=f"rain on day {at}", at=at))
    mine.note("ana", replace(RAIN, item="user/local/ledger", at=0))
    kept = [trace.request for trace in mine.of("ana") if trace.item == RAIN.item]
    assert kept == [f"rain on day {at}" for at in range(PER_ITEM + 4, 4, -1)]
    assert len(mine.of("ana")) == PER_ITEM + 1


def test_all_that_is_remembered_is_bounded(store: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST", 3)
    monkeypatch.setattr(limits, "MOST_IN_ALL", 5)
    mine = Remembered(store, "ana")
    for at in range(8):
        mine.note("ana" if at % 2 else "token:cy:1", replace(RAIN, item=f"user/local/tool{at}", at=at))
    assert [trace.at for trace in mine.of("ana")] == [7, 5, 3]
    assert [trace.at for trace in mine.of("token:cy:1")] == [6, 4]


def test_a_request_takes_the_place_of_those_that_say_the_same(store: Database) -> None:
    mine = Remembered(store, "ana")
    mine.note("ana", RAIN)
    mine.note("ana", replace(RAIN, request="will it rain today", at=2), instead=[RAIN.request])
    assert [trace.request for trace in mine.of("ana")] == ["will it rain today"]


def test_a_vector_comes_later_and_the_mark_tells_of_it(store: Database) -> None:
    mine = Remembered(store, "ana")
    marks = [mine.mark("ana")]
    mine.note("ana", RAIN)
    marks.append(mine.mark("ana"))
    mine.encode("ana", "words-1", {RAIN: b"\x00\xff" * 4})
    marks.append(mine.mark("ana"))
    assert mine.of("ana") == [replace(RAIN, encoder="words-1", vector=b"\x00\xff" * 4)]
    assert mine.forget("ana", [RAIN.item, "user/local/other"]) == 1
    assert mine.mark("ana") == marks[0]
    assert len({*marks}) == len(marks)


def test_texts_that_no_database_holds_are_kept_as_well_as_can_be(store: Database) -> None:
    mine = Remembered(store, "ana")
    mine.note("ana", replace(RAIN, request="rain\0 \ud800" + "x" * 1_000))
    (kept,) = mine.of("ana")
    assert kept.request.startswith("rain\ufffd ?x")
    assert len(kept.request) == LONGEST
