"""Marks of authenticity: whoever has the key can tell whether some bytes were written by whoever had it."""

from __future__ import annotations

from hmac import compare_digest, digest
from pathlib import Path

from kiwi_mcp.primitives.key_file import file_key


class Mac:
    """HMAC-SHA-256 under a key in a file that only its owner reads."""

    def __init__(self, path: Path) -> None:
        self._key = file_key(path)

    def of(self, data: bytes) -> str:
        """Return the mark of some bytes."""
        return digest(self._key(), data, "sha256").hex()

    def fits(self, data: bytes, mark: str) -> bool:
        """Whether a mark is that of some bytes."""
        return compare_digest(self.of(data).encode(), mark.encode(errors="replace"))
