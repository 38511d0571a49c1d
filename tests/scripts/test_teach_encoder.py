"""Training starts only with labelled data."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_without_labelled_data_nothing_is_trained_or_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("benchmarks", "scripts"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    monkeypatch.delenv("KIWI_DISCOVERY_DATA", raising=False)
    monkeypatch.setattr(import_module("labelled"), "_NEARBY", tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "argv", ["teach_encoder.py", str(tmp_path / "taught.npz")])

    with pytest.raises(SystemExit, match="name its folder with --data"):
        import_module("teach_encoder").main()
    assert not (tmp_path / "taught.npz").exists()
