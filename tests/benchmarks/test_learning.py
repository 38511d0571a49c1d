"""The learning benchmark: a history of use improves recall at five and does not reduce recall at one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from kiwi_mcp.domain.json import JsonObject

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def learning(benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return benchmark("learning")


def compared(learning: ModuleType, name: str, tmp_path: Path) -> tuple[Mapping[str, float], ...]:
    (own,) = learning.chosen(learning.read_sets(BENCHMARKS), None)
    tools = tmp_path / "tools.jsonl"
    learning.write_tools(tools, own.tools)
    with learning.started([name], tools) as (finder,):
        history = learning.History(own.needs, finder, is_taught=False)
        return history.asked(0), history.asked(10), history.asked(10, is_foreign=True)


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(300)
def test_a_history_raises_recall_at_five_and_never_lowers_recall_at_one(learning: ModuleType, tmp_path: Path) -> None:
    before, after, foreign = compared(learning, learning.WORDS, tmp_path)
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]
    assert foreign["R@1"] >= before["R@1"]


@pytest.mark.usefixtures("processes")
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_history_also_helps_when_meanings_are_compared(learning: ModuleType, tmp_path: Path) -> None:
    before, after, foreign = compared(learning, learning.DEFAULT, tmp_path)
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]
    assert foreign["R@1"] >= before["R@1"]


class Listening:
    """A finder that finds nothing, and records its requests and its feedback."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.feedback: list[JsonObject] = []

    def ask(self, text: str) -> Sequence[str]:
        self.asked.append(text)
        return ()

    def tell(self, said: JsonObject) -> None:
        self.feedback.append(said)


def test_only_requests_that_were_not_used_for_teaching_are_asked(learning: ModuleType) -> None:
    (own,) = learning.chosen(learning.read_sets(BENCHMARKS), None)
    left_out = sorted(need.text for need in own.needs if need.is_left_out)
    assert 0 < len(left_out) < len(own.needs)
    judged, every = Listening(), Listening()
    learning.History(own.needs, judged).asked(10)
    learning.History(own.needs, every, is_taught=False).asked(10)
    assert sorted(judged.asked) == left_out
    assert sorted(every.asked) == sorted(need.text for need in own.needs)
    assert {str(one["query"]) for one in judged.feedback if "query" in one} > {*left_out}
    taught = [need for need in own.needs if not need.is_left_out]
    with pytest.raises(SystemExit, match="taught"):
        learning.History(taught, judged).asked(0)


def test_the_requests_that_are_asked_are_not_in_the_history(learning: ModuleType) -> None:
    (own,) = learning.chosen(learning.read_sets(BENCHMARKS), None)
    hands = learning.dealt(own.needs)
    mine = [need for need, hand in zip(own.needs, hands, strict=True) if hand == 0]
    others = [need for need, hand in zip(own.needs, hands, strict=True) if hand != 0]
    known = {request for _, request in learning.remembered(others, 10, 0, frozenset())}
    assert known
    assert not known & {need.text for need in mine}
    wanted = frozenset(tool for need in mine for tool in need.gold)
    assert not wanted & {tool for tool, _ in learning.remembered(others, 10, 0, wanted)}
