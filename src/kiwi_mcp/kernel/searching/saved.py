"""An index on disk between processes, for a source that can tell whether it is the same; safe to delete at any time."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from hashlib import sha256
from io import BufferedReader
from pathlib import Path
from stat import S_ISREG
from time import time

import numpy as np

from kiwi_mcp import __version__
from kiwi_mcp.search.frozen import DamagedIndex, freeze, recipe_of, thaw
from kiwi_mcp.search.index import Index

MANY, MOST = 1_000, 50_000
"""How many items are worth a file, and how many are too many for one."""
_MAX_BYTES = 400_000_000
_SEAL = 32
_OLDEST = 30 * 86_400
"""After how many seconds it is made again from what is kept of each item, which else would count as unused."""


def load_index(place: Path, mark: str, encoder: str) -> Index | None:
    """Return the index of a source at a mark; None where it was not kept, is damaged, or is from another Kiwi."""
    try:
        with _opened(place) as file:
            state = os.fstat(file.fileno())
            if not S_ISREG(state.st_mode) or state.st_size > _MAX_BYTES or time() - state.st_mtime > _OLDEST:
                return None
            if file.read(_SEAL) != _named(mark, encoder):
                return None
            seal, data = file.read(_SEAL), np.empty(max(state.st_size - 2 * _SEAL, 0), np.uint8).data
            file.readinto(data)
        # The seal shows that it is whole; whoever else can write here can seal as well.
        return thaw(data, encoder) if sha256(data).digest() == seal else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DamagedIndex):
        return None


def save_index(place: Path, mark: str, encoder: str, index: Index) -> None:
    """Keep an index; where nothing can be written, nothing is kept."""
    data = freeze(index)
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=place.parent, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_named(mark, encoder) + sha256(data).digest())
                file.write(data)
            os.replace(name, place)  # noqa: PTH105 - text from mkstemp
        except OSError:
            os.unlink(name)  # noqa: PTH108 - text from mkstemp
            raise


def place_for(cache: Path, name: str, home: str) -> Path:
    """Return where the index of a source is kept."""
    return cache / "search" / f"{sha256(os.fsencode(f'{name} {home}')).hexdigest()[:32]}.index"


def _opened(place: Path) -> BufferedReader:
    # A pipe in its place would let whoever opens it wait for a writer.
    return os.fdopen(os.open(place, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")


def _named(mark: str, encoder: str) -> bytes:
    return sha256(f"{__version__} {recipe_of(encoder)} {mark}".encode()).digest()
