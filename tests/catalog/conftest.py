"""A space in a temporary folder, and a function that writes files into it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Space

Put = Callable[..., Path]


@pytest.fixture
def space(project: Path, home: Path) -> Space:
    return Space(project, home / ".ai", home / ".cache" / "kiwi")


@pytest.fixture
def catalog(space: Space) -> Catalog:
    return Catalog(space)


@pytest.fixture
def put(space: Space) -> Put:
    """Write a file below the project's `.ai`, or below the user's space."""

    def write(path: str, text: str = "", *, user: bool = False) -> Path:
        where = (space.user if user else space.project_ai) / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(text)
        return where

    return write


@pytest.fixture
def settle(space: Space) -> Callable[[], None]:
    """Return once no file is so young that it would be read again for that alone."""

    def wait() -> None:
        paths = [path for base in (space.project_ai, space.user) if base.exists() for path in (base, *base.rglob("*"))]
        youngest = max(os.lstat(path).st_ctime_ns for path in paths)
        while time.time_ns() - youngest <= 60_000_000:
            time.sleep(0.005)

    return wait
