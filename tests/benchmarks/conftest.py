"""Makes the benchmark programs importable by their plain names."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Gives a benchmark by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return import_module
