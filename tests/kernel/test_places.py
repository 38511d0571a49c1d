"""Where things are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.kernel import Kernel
from kiwi_mcp.kernel.places import made_private


def test_the_cache_is_open_to_its_owner_alone(
    home: Path, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "kiwi"
    folder.mkdir(parents=True, mode=0o755)

    Kernel(project)

    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert made_private(tmp_path / "file" / "x") == tmp_path / "file" / "x"
