"""Learning from use, measured: a history makes search find more among the first five, and no less at the very first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import pytest

from kiwi_mcp.search.encoder import load_encoder

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


def compared(learning: ModuleType, encoder: object) -> tuple[Mapping[str, float], Mapping[str, float]]:
    own = learning.chosen(learning.read_sets(BENCHMARKS), None)
    history = learning.history(own, encoder)
    return history.asked(0), history.asked(10)


def test_a_history_raises_recall_at_five_and_never_lowers_recall_at_one(learning: ModuleType) -> None:
    before, after = compared(learning, None)
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]


@pytest.mark.full
def test_so_it_does_where_meanings_are_compared(learning: ModuleType) -> None:
    before, after = compared(learning, load_encoder())
    assert after["R@5"] > before["R@5"]
    assert after["R@1"] >= before["R@1"]


def test_nothing_is_remembered_of_the_requests_that_are_asked(learning: ModuleType) -> None:
    own = learning.chosen(learning.read_sets(BENCHMARKS), None)
    history = learning.history(own, None)
    asked = {need.text for need, dealt in zip(history.needs, history.hands, strict=True) if dealt == 0}
    remembered = {trace.request for trace in history._remembered(0, 10)}
    assert remembered
    assert not remembered & asked
