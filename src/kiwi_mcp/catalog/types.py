"""The type sheets of a space, read again only where one changed."""

from __future__ import annotations

import os
from pathlib import Path

from kiwi_mcp.catalog.files import Stamps, are_fresh, settled, stamp_of
from kiwi_mcp.manifest.sheets import MAX_SHEETS, Sheets, load_sheets


class TypeSheets:
    """The built-in types, and those that a project adds in `.ai/types`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stamps: Stamps = ()
        self._sheets: Sheets | None = None

    def now(self) -> Sheets:
        """Return the sheets as they are; the same object as long as no file changes."""
        if self._sheets is None or not are_fresh(self._stamps):
            self._stamps = self._looked()
            self._sheets = load_sheets(self._folder)
        return self._sheets

    def _looked(self) -> Stamps:
        folder = str(self._folder)
        try:
            names = sorted(os.listdir(folder))[:MAX_SHEETS]  # noqa: PTH208 - names, not paths
        except OSError:
            names = []
        paths = [folder, *(f"{folder}/{name}" for name in names)]
        return tuple((path, settled(stamp_of(path))) for path in paths)
