"""The repository root, for tests of repository rules."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def modules() -> Mapping[str, ast.Module]:
    """Kiwi's own modules, parsed, by path below the package; the files of built-in tools are data, not modules."""
    package = ROOT / "src" / "kiwi_mcp"
    paths = (path.relative_to(package) for path in sorted(package.rglob("*.py")))
    return {
        str(path): ast.parse((package / path).read_text(encoding="utf-8"), filename=str(path))
        for path in paths
        if path.parts[0] != "data"
    }
