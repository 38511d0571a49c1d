"""Runs commands in this process, through their entry point."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from kiwi_mcp.surfaces import start


class Ended(NamedTuple):
    """How a command ended: its exit code, its data and its talk."""

    code: int
    out: str
    err: str


Kiwi: TypeAlias = Callable[..., Ended]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Kiwi:
    """Run a command where this process is; `given` is what is on its standard input."""

    def run(*words: str, given: str | None = None) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kiwi", *words])
        if given is not None:
            monkeypatch.setattr(sys, "stdin", io.StringIO(given))
        code = 0
        try:
            start.main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        except KeyboardInterrupt:
            code = start.INTERRUPTED
        printed = capsys.readouterr()
        return Ended(code, printed.out, printed.err)

    return run


@pytest.fixture
def kiwi(project: Path, command: Kiwi, monkeypatch: pytest.MonkeyPatch) -> Kiwi:
    """Run a command in the project."""
    monkeypatch.chdir(project)
    return command
