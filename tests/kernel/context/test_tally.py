"""The answer tally: sizes only, concurrent additions, bounded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.token_cost import TokenCost, cost_of_json
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.token_meter import DAYS, Mean, ResponseSizes

SHORT: JsonObject = {"results": [], "query": "a private text"}
LONG: JsonObject = {"results": [{"name": f"tool_{number}"} for number in range(50)]}
LOADED: JsonObject = {"identity": "project/local/weather@1.0.0", "parameters": {}}


@pytest.fixture
def tally(tmp_path: Path) -> ResponseSizes:
    return ResponseSizes(tmp_path, is_counting=True)


def note(tally: ResponseSizes, verb: str, content: JsonObject) -> None:
    answer = Answer(content)
    assert tally.count(verb, answer) is answer


def test_the_mean_covers_all_answers_of_a_verb(tally: ResponseSizes, tmp_path: Path) -> None:
    assert tally.means() == {}
    for content in (SHORT, LONG):
        note(tally, "search", content)
    note(tally, "load", LOADED)
    small, large = cost_of_json(SHORT), cost_of_json(LONG)
    middle = TokenCost(round((small.bytes + large.bytes) / 2), round((small.tokens + large.tokens) / 2))
    assert ResponseSizes(tmp_path).means() == {"search": Mean(2, middle), "load": Mean(1, cost_of_json(LOADED))}


def test_only_the_cost_of_finding_is_counted(tally: ResponseSizes, tmp_path: Path) -> None:
    note(tally, "execute", SHORT)
    note(tally, "help", SHORT)
    note(ResponseSizes(tmp_path), "search", SHORT)
    note(tally, "load", {"content": "a page of some output", "next_offset": 9})
    assert tally.means() == {}


def test_no_text_of_an_answer_is_stored(tally: ResponseSizes, tmp_path: Path) -> None:
    note(tally, "search", SHORT)
    (day,) = (tmp_path / "context").iterdir()
    assert day.read_text() == f"search {cost_of_json(SHORT).bytes} {cost_of_json(SHORT).tokens}\n"
    assert day.stat().st_mode & 0o777 == 0o600


def test_concurrent_additions_are_all_counted(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        for _ in range(400):
            threads.submit(note, ResponseSizes(tmp_path, is_counting=True), "search", LONG)
    assert ResponseSizes(tmp_path).means() == {"search": Mean(400, cost_of_json(LONG))}


def test_the_figures_per_day_and_the_number_of_days_are_limited(tally: ResponseSizes, tmp_path: Path) -> None:
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
def test_a_damaged_file_counts_as_empty(written: bytes, tally: ResponseSizes, tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "2099-01-01").write_bytes(written)
    assert tally.means() == {}
    note(tally, "search", LONG)
    assert tally.means()["search"].number == 1


def test_a_file_that_cannot_be_written_loses_only_the_figure(tmp_path: Path) -> None:
    (tmp_path / "context").write_text("a file in the way")
    tally = ResponseSizes(tmp_path, is_counting=True)
    note(tally, "search", LONG)
    note(tally, "search", {"number": float("nan")})
    assert tally.means() == {}


async def test_measuring_does_not_delay_the_answer(tally: ResponseSizes, tmp_path: Path) -> None:
    note(tally, "search", SHORT)
    assert not ((tmp_path / "context").exists())
    assert tally.means() == {"search": Mean(1, cost_of_json(SHORT))}


async def test_an_answer_given_during_a_measurement_is_counted_once(tmp_path: Path) -> None:
    tally = ResponseSizes(tmp_path, is_counting=True)

    class Late(Answer, frozen=True):
        """An answer that lets another thread read the means while it is counted."""

        def __getattribute__(self, name: str) -> object:
            if name == "content":
                with ThreadPoolExecutor(1) as threads:
                    threads.submit(tally.means).result(120)
            return super().__getattribute__(name)

    note(tally, "search", SHORT)
    tally.count("search", Late(LONG))
    assert tally.means()["search"].number == 2


async def test_the_queue_of_answers_to_measure_is_short(tally: ResponseSizes, tmp_path: Path) -> None:
    for _ in range(100):
        note(tally, "search", SHORT)
    assert 80 < ResponseSizes(tmp_path).means()["search"].number < 100
    tally.flush()
    assert ResponseSizes(tmp_path).means()["search"].number == 100
