"""Learning from use, measured: a history makes search find more among the first five, and no less at the very first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def learning() -> ModuleType:
    """The benchmark, as a module: it imports its neighbours by their plain names."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("learning", BENCHMARKS / "learning.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["learning"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def compared(learning: ModuleType, name: str, tmp_path: Path) -> tuple[Mapping[str, float], ...]:
    (own,) = learning.chosen(learning.read_sets(BENCHMARKS), None)
    tools = tmp_path / "tools.jsonl"
    learning.write_tools(tools, own.tools)
    with learning.started([name], tools) as (finder,):
        history = learning.History(own.needs, finder)
        return history.asked(0), history.asked(10), history.asked(10, is_foreign=True)


@pytest.mark.timeout(300)
def test_a_history_raises_recall_at_five_and_never_lowers_recall_at_one(learning: ModuleType, tmp_path: Path) -> None:
    before, after, foreign = compared(learning, learning.WORDS, tmp_path)
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]
    assert foreign["R@1"] >= before["R@1"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_so_it_does_where_meanings_are_compared(learning: ModuleType, tmp_path: Path) -> None:
    before, after, foreign = compared(learning, learning.DEFAULT, tmp_path)
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]
    assert foreign["R@1"] >= before["R@1"]


def test_nothing_is_remembered_of_the_requests_that_are_asked(learning: ModuleType) -> None:
    (own,) = learning.chosen(learning.read_sets(BENCHMARKS), None)
    hands = learning.dealt(own.needs)
    mine = [need for need, hand in zip(own.needs, hands, strict=True) if hand == 0]
    others = [need for need, hand in zip(own.needs, hands, strict=True) if hand != 0]
    known = {request for _, request in learning.remembered(others, 10, 0, frozenset())}
    assert known
    assert not known & {need.text for need in mine}
    wanted = frozenset(tool for need in mine for tool in need.gold)
    assert not wanted & {tool for tool, _ in learning.remembered(others, 10, 0, wanted)}
