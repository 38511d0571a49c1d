"""Disks that are full or cannot be written, as errors with a next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from errno import EDQUOT, EFBIG, ENOSPC
from pathlib import Path

from kiwi_mcp.domain.errors import Unavailable

_FULL = frozenset({ENOSPC, EDQUOT, EFBIG})


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn every error of the operating system into `unavailable`, while the block writes below a folder."""
    try:
        yield
    except OSError as error:
        fix = f"Free some space for {folder}" if error.errno in _FULL else f"Give yourself write access to {folder}"
        raise Unavailable(
            f"{folder} cannot be written: {error.strerror or error}.",
            suggestion=f"{fix}, then try again.",
        ) from error
