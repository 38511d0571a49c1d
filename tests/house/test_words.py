"""The repository contains no path of a machine and no address of a package index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SKIPPED = {".git", ".venv", ".cache", ".hypothesis", "node_modules", "__pycache__", "dist", "build"}
MOST_BYTES = 2_000_000

FORBIDDEN = {
    "an absolute path of some machine": r"(?<![\w.~}$])/(?:work|root)/",
    # Spelled with a class, so that the pattern is not what it looks for.
    "the address of a package index": r"p[y]pi\.org|p[y]thonhosted|n[p]mjs",
}


def texts(root: Path) -> Iterator[tuple[Path, str]]:
    """Every file of the repository, as text."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in SKIPPED and not name.endswith("_cache")]
        for path in (Path(folder, name) for name in names if name not in SKIPPED):
            if path.is_file() and path.stat().st_size <= MOST_BYTES:
                yield path, path.read_bytes().decode("utf-8", errors="ignore")


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str, root: Path) -> None:
    pattern = re.compile(FORBIDDEN[what], re.IGNORECASE)
    found = [
        f"{path.relative_to(root)}:{text.count(chr(10), 0, hit.start()) + 1} {hit.group()}"
        for path, text in texts(root)
        for hit in pattern.finditer(text)
    ]
    assert found == []
