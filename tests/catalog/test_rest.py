"""A folder source that is not scanned at every call still returns current items."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.source import FolderSource
from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import ToolNotFound


def write(base: Path, name: str, text: str = "first") -> Path:
    path = base / "knowledge" / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"---\nid: {name}\ntitle: {name}\nversion: 1.0.0\n---\n{text}\n")
    os.utime(path, (1, 1))
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write(tmp_path / "base", "known")
    return tmp_path / "base"


@pytest.fixture
def catalog(tmp_path: Path, base: Path) -> Catalog:
    source = FolderSource("builtin", base, namespace="kiwi", rest=3_600.0)
    catalog = Catalog(Space(tmp_path, tmp_path / "user", tmp_path / "cache"), sources=[source])
    catalog.find("known")
    return catalog


def test_a_new_file_is_found_by_the_next_call(catalog: Catalog, base: Path) -> None:
    write(base, "added")
    assert catalog.find("added").id == "added"


def test_a_changed_file_is_seen_by_the_next_call(catalog: Catalog, base: Path) -> None:
    before = catalog.find("known").digest
    write(base, "known", "second")
    assert catalog.find("known").digest != before


def test_a_removed_file_is_not_found_by_the_next_call(catalog: Catalog, base: Path) -> None:
    (base / "knowledge" / "known.md").unlink()
    with pytest.raises(ToolNotFound):
        catalog.find("known")
