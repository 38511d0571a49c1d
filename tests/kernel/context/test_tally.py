"""The tally of answers: sizes alone, added to by many at once, and bounded."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.context.cost import Cost, cost_of_json
from kiwi_mcp.kernel.context.tally import DAYS, Mean, Tally

SHORT: JsonObject = {"results": [], "query": "the word that nobody shall read"}
LONG: JsonObject = {"results": [{"name": f"tool_{number}"} for number in range(50)]}
LOADED: JsonObject = {"identity": "project/local/weather@1.0.0", "parameters": {}}


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path, "mcp")


def note(tally: Tally, verb: str, content: JsonObject) -> None:
    answer = Answer(content)
    assert tally.counted(verb, answer) is answer


def test_the_mean_is_that_of_all_answers_of_a_verb(tally: Tally, tmp_path: Path) -> None:
    assert tally.means() == {}
    for content in (SHORT, LONG):
        note(tally, "search", content)
    note(tally, "load", LOADED)
    small, large = cost_of_json(SHORT), cost_of_json(LONG)
    middle = Cost(round((small.bytes + large.bytes) / 2), round((small.tokens + large.tokens) / 2))
    assert Tally(tmp_path).means() == {"search": Mean(2, middle), "load": Mean(1, cost_of_json(LOADED))}


def test_only_what_finding_costs_a_model_is_counted(tally: Tally, tmp_path: Path) -> None:
    note(tally, "execute", SHORT)
    note(tally, "help", SHORT)
    note(Tally(tmp_path, "cli"), "search", SHORT)
    note(tally, "load", {"content": "a page of some output", "next_offset": 9})
    assert tally.means() == {}


def test_no_word_of_an_answer_is_kept(tally: Tally, tmp_path: Path) -> None:
    note(tally, "search", SHORT)
    (day,) = (tmp_path / "context").iterdir()
    assert day.read_text() == f"search {cost_of_json(SHORT).bytes} {cost_of_json(SHORT).tokens}\n"
    assert day.stat().st_mode & 0o777 == 0o600


def test_many_add_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(400):
            threads.submit(note, Tally(tmp_path, "gateway"), "search", LONG)
    assert Tally(tmp_path).means() == {"search": Mean(400, cost_of_json(LONG))}


def test_a_day_and_the_number_of_days_have_an_end(tally: Tally, tmp_path: Path) -> None:
    folder = tmp_path / "context"
    folder.mkdir()
    for month in (1, 2, 3):
        for day in range(1, 29):
            (folder / f"2020-{month:02}-{day:02}").write_text("search 100 10\n")
    note(tally, "search", SHORT)
    assert len([*folder.iterdir()]) == DAYS
    today = folder / datetime.now(UTC).date().isoformat()
    assert today.exists()
    today.write_text("search 100 10\n" * 10_000)
    size = today.stat().st_size
    note(tally, "search", SHORT)
    assert today.stat().st_size == size


@pytest.mark.parametrize(
    "written", [b"", b"\xff\xfe", b"search one 2\nload\nsearch -1 2\nrun 1 2\n", b"search 1 2 3\n"]
)
def test_what_is_damaged_counts_as_nothing(written: bytes, tally: Tally, tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "2099-01-01").write_bytes(written)
    assert tally.means() == {}
    note(tally, "search", LONG)
    assert tally.means()["search"].number == 1


def test_where_nothing_can_be_written_nothing_is_lost_but_the_figure(tmp_path: Path) -> None:
    (tmp_path / "context").write_text("a file in the way")
    tally = Tally(tmp_path, "mcp")
    note(tally, "search", LONG)
    note(tally, "search", {"number": float("nan")})
    assert tally.means() == {}


def test_whoever_waits_for_an_answer_does_not_wait_for_it_to_be_measured(tally: Tally, tmp_path: Path) -> None:
    async def given() -> bool:
        note(tally, "search", SHORT)
        return (tmp_path / "context").exists()

    assert not asyncio.run(given())
    assert tally.means() == {"search": Mean(1, cost_of_json(SHORT))}


def test_an_answer_that_is_given_while_others_are_measured_is_counted_once(tmp_path: Path) -> None:
    tally = Tally(tmp_path, "mcp")

    class Late(Answer):
        """An answer during whose counting another thread asks for the means."""

        def __getattribute__(self, name: str) -> object:
            if name == "content":
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(tally.means).result(20)
            return super().__getattribute__(name)

    async def given() -> None:
        note(tally, "search", SHORT)
        tally.counted("search", Late(LONG))

    asyncio.run(given())
    assert tally.means()["search"].number == 2


def test_few_answers_wait_to_be_measured(tally: Tally, tmp_path: Path) -> None:
    async def given() -> None:
        for _ in range(100):
            note(tally, "search", SHORT)

    asyncio.run(given())
    assert 80 < Tally(tmp_path).means()["search"].number < 100
    tally.settle()
    assert Tally(tmp_path).means()["search"].number == 100
