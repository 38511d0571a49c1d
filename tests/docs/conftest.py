"""The command `kiwi` on the PATH, whether or not this folder was installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def kiwi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: None) -> Path:
    """A program `kiwi` that runs this source tree."""
    program = tmp_path / "bin" / "kiwi"
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nfrom kiwi_mcp.surfaces.start import main\n\nmain()\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(program.parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    return program
