"""Stores without a schema, and processes that use them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

import kiwi_mcp
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import connect_to


@pytest.fixture(params=["sqlite", "postgres"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Make one more store without any schema, and return its URL: the test runs once for each kind."""
    if request.param == "sqlite":
        numbers = count(1)
        return lambda: f"sqlite://{tmp_path}/new/{next(numbers)}.db"
    new_postgres: Callable[[], str] = request.getfixturevalue("new_postgres")
    return new_postgres


@pytest.fixture
def empty_url(new_url: Callable[[], str]) -> str:
    """The URL of a store without any schema, for this test alone."""
    return new_url()


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    """An open store without any schema, of each kind."""
    opened = connect_to(empty_url)
    yield opened
    opened.close()


@pytest.fixture
def begin(processes: None) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program beside this one, with arguments; whatever still runs after the test is ended."""
    begun: list[subprocess.Popen[str]] = []

    def begin(program: str, *arguments: str) -> subprocess.Popen[str]:
        path = str(Path(kiwi_mcp.__file__).parents[1])
        begun.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        )
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate(timeout=120)
