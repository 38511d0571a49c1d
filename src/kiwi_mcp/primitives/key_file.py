"""Keys in files that only their owner reads, made when they are first needed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.domain.errors import StoreDamaged, StoreUnavailable

KEY_BYTES = 32


def file_key(path: Path) -> Callable[[], bytes]:
    """Return the way to a key in a file that only its owner reads; it is made when it is first needed."""

    def key() -> bytes:
        try:
            found = path.read_bytes() if path.exists() else _new_key(path)
        except OSError as error:
            raise unusable(path, error) from error
        if len(found) != KEY_BYTES:
            raise StoreDamaged(
                f"{path} is no key any more, and nothing that was sealed with it can be opened.",
                suggestion="Put the key back, or remove the file and make anew what was sealed with it.",
                path=str(path),
            )
        return found

    return key


def write_private(path: Path, data: bytes) -> None:
    """Write a new file for its owner's eyes, to the disk."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def unusable(path: Path, error: OSError) -> StoreUnavailable:
    """Return what is raised where a file of the owner's cannot be read or written."""
    return StoreUnavailable(
        f"{path} cannot be used: {error.strerror or error}.",
        suggestion=f"Give yourself access to {path.parent}, or name another space with USER_SPACE.",
    )


def _new_key(path: Path) -> bytes:
    """Make a key; of two processes that do so at once, both use the one that was there first."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        write_private(draft, secrets.token_bytes(KEY_BYTES))
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path.read_bytes()
