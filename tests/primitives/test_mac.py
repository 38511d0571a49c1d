"""A MAC authenticates bytes: only the holder of the key can make it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kiwi_mcp.domain.errors import StoreDamaged
from kiwi_mcp.primitives.secrets.key_storage import Mac


def test_a_mac_matches_only_its_own_bytes(tmp_path: Path) -> None:
    mac = Mac(tmp_path / "state" / "a.key")
    mark = mac.of(b"one")
    assert mac.fits(b"one", mark)
    for data, other in ((b"two", mark), (b"one", ""), (b"one", mark[:-1]), (b"one", "\ud800ß")):
        assert not mac.fits(data, other)


def test_another_key_makes_another_mac(tmp_path: Path) -> None:
    first, second = Mac(tmp_path / "a.key"), Mac(tmp_path / "b.key")
    assert not second.fits(b"one", first.of(b"one"))
    assert Mac(tmp_path / "a.key").fits(b"one", first.of(b"one"))
    assert (tmp_path / "a.key").stat().st_mode & 0o777 == 0o600


def test_an_invalid_key_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.key").write_bytes(b"short")
    with pytest.raises(StoreDamaged):
        Mac(tmp_path / "a.key").of(b"one")
