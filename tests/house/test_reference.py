"""The reference pages match the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kiwi_mcp.domain import errors
from kiwi_mcp.domain.errors import KiwiError


def family(base: type[KiwiError]) -> Iterator[type[KiwiError]]:
    for child in base.__subclasses__():
        yield child
        yield from family(child)


@pytest.mark.usefixtures("processes")
def test_the_reference_pages_match_the_code(root: Path) -> None:
    check = subprocess.run(
        [sys.executable, "scripts/reference.py", "--check"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert check.returncode == 0, check.stderr


def test_every_error_code_is_documented_once(root: Path) -> None:
    page = (root / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \| [^\d]", page, re.MULTILINE)
    assert sorted(documented) == sorted(kind.code for kind in family(KiwiError) if kind.__module__ == errors.__name__)


def test_every_error_is_in_the_tree_at_the_top_of_its_module() -> None:
    drawn = re.findall(r"^[│ ├└─]* ?([A-Z]\w+)", errors.__doc__ or "", re.MULTILINE)
    missing = [kind.__name__ for kind in family(KiwiError) if kind.__name__ not in drawn]
    assert missing == []


def test_no_two_errors_share_a_code() -> None:
    codes = [kind.code for kind in family(KiwiError)]
    assert sorted(codes) == sorted(set(codes))
