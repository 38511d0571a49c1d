"""What goes wrong with an SQLite file, in words for whoever uses the store: no statement, and nothing is deleted."""

from __future__ import annotations

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store.database import IntegrityFault
from kiwi_mcp.store.sqlite_library import library

PATIENCE = 30.0
"""How many seconds a writer waits for the writers before it."""
_MEND = (
    "Move {path} and the -wal and -shm files beside it to a safe place, then pull from a remote or restore a backup. "
    "Do not delete it: much of it may still be readable."
)


def code_of(error: BaseException) -> int:
    """Return SQLite's primary code for an error, 0 where it has none."""
    return int(getattr(error, "sqlite_errorcode", None) or 0) & 0xFF


def fault(error: BaseException, path: str) -> KiwiError | IntegrityFault:
    """Return what an error of the driver means for whoever uses the store."""
    code, told = code_of(error), str(error)
    match code:
        case library.SQLITE_CONSTRAINT:
            return IntegrityFault(told)
        case library.SQLITE_CORRUPT | library.SQLITE_NOTADB:
            return _damaged(path)
        case library.SQLITE_BUSY | library.SQLITE_LOCKED:
            return busy(path)
        case library.SQLITE_FULL:
            return _unavailable(path, "there is no space left", "Free some space on that disk, then try again.")
        case library.SQLITE_READONLY | library.SQLITE_PERM | library.SQLITE_CANTOPEN | library.SQLITE_AUTH:
            return _unavailable(
                path, "it cannot be written", f"Make {path} and its folder writable, or name another store."
            )
        case library.SQLITE_IOERR:
            return _unavailable(
                path, "the disk failed to read or write", "Check the disk and its limits, then try again."
            )
        case library.SQLITE_INTERRUPT:
            return _unavailable(path, "it took longer than a statement may", "Check the store with `kiwi verify`.")
        case library.SQLITE_ERROR if told.startswith("no such table"):
            return _incomplete(path, "table")
        case library.SQLITE_ERROR if told.startswith("no such column") or "has no column" in told:
            return _incomplete(path, "column")
    if isinstance(error, (UnicodeEncodeError, OverflowError, library.InterfaceError)) or code == library.SQLITE_TOOBIG:
        return InvalidRequest(
            "A value is too large or is not valid text.", suggestion="Send shorter values in valid Unicode."
        )
    if isinstance(error, library.ProgrammingError) and "closed" in told:
        return closed(path)
    return _unavailable(path, "it could not do what was asked", "Run `kiwi doctor`; the log holds the cause.")


def _damaged(path: str) -> StoreDamaged:
    return StoreDamaged(
        f"The store {path} is damaged, or is not a database.", suggestion=_MEND.format(path=path), path=path
    )


def _incomplete(path: str, missing: str) -> StoreDamaged:
    return StoreDamaged(
        f"The store {path} lacks a {missing} of Kiwi's schema.",
        suggestion=_MEND.format(path=path),
        path=path,
        missing=missing,
    )


def busy(path: str) -> StoreUnavailable:
    """Return that another writer has not ended in time."""
    return _unavailable(
        path, f"another process has been writing for over {PATIENCE:.0f} s", "Wait for it, then try again."
    )


def closed(path: str) -> StoreUnavailable:
    """Return that whoever opened the store has closed it."""
    return _unavailable(path, "it was closed meanwhile", "Try again.")


def _unavailable(path: str, why: str, suggestion: str) -> StoreUnavailable:
    return StoreUnavailable(f"The store {path} is not available: {why}. Nothing was written.", suggestion=suggestion)
