"""What every test stands on: a home and a project of its own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder that is empty and goes away, so that no test ever touches the real one."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USER_SPACE", str(folder / ".ai"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
    # The interpreters that set-up chose come first, however the tests were started.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.prefix, "bin")), os.environ.get("PATH", os.defpath)]))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project folder with an empty `.ai` in it."""
    folder = tmp_path / "project"
    (folder / ".ai").mkdir(parents=True)
    return folder
