"""What goes wrong with a PostgreSQL server, in words for whoever uses the store: no statement, no password."""

from __future__ import annotations

import re

import psycopg
from psycopg import errors

from kiwi_mcp.domain.errors import InvalidRequest, KiwiError, StoreDamaged, StoreUnavailable
from kiwi_mcp.store.database import IntegrityFault
from kiwi_mcp.store.postgres_line import Silence

PATIENCE = 30.0
"""How many seconds a writer waits for the writers before it."""


def fault(error: BaseException, shown: str) -> KiwiError | IntegrityFault:
    """Return what an error of the driver means for whoever uses the store."""
    match error:
        case psycopg.IntegrityError() | errors.RaiseException():
            return IntegrityFault(error.diag.message_primary or "A rule of the schema refused it.")
        case errors.UndefinedTable():
            return _incomplete(shown, "table")
        case errors.UndefinedColumn():
            return _incomplete(shown, "column")
        case errors.LockNotAvailable() | errors.DeadlockDetected() | errors.SerializationFailure():
            return busy(shown)
        case errors.QueryCanceled():
            return _unavailable(
                shown, "it took longer than a statement may", "Try again when the server has less to do."
            )
        case errors.DiskFull():
            return _unavailable(shown, "its disk is full", "Free some space on the server, then try again.")
        case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
            return _unavailable(
                shown, "its user may not do that", "Grant the user of the URL its own schema, or use another."
            )
        case psycopg.DataError() | UnicodeEncodeError():
            return InvalidRequest(
                "A value is too large or is not valid text.", suggestion="Send shorter values in valid Unicode."
            )
        case Silence():
            return _unavailable(shown, "it does not answer", "Check the server; it is asked again in a while.")
        case psycopg.OperationalError():
            return _unavailable(shown, "the connection was lost", "Check that the server runs, then try again.")
    return _unavailable(shown, "it could not do what was asked", "Run `kiwi doctor`; the log holds the cause.")


def unreachable(shown: str, told: str) -> StoreUnavailable:
    """Return why there is no connection, in the server's own words where it spoke."""
    if refusal := re.search(r"FATAL:\s+(.+)", told):
        return _unavailable(shown, refusal[1], "Check the user, the password and the database in the URL.")
    if "no password supplied" in told:
        return _unavailable(shown, "it asks for a password", "Add the password to the URL.")
    reasons = {"refused": "nobody listens there", "timeout": "it does not answer", "resolve": "its host is not known"}
    reason = next((reason for word, reason in reasons.items() if word in told), "there is no connection")
    return _unavailable(shown, reason, "Check that the server runs and that the URL names its host and port.")


def _incomplete(shown: str, missing: str) -> StoreDamaged:
    return StoreDamaged(
        f"The store {shown} lacks a {missing} of Kiwi's schema.",
        suggestion="Restore the database from a backup, or name another one in registry.yaml and pull into it.",
        missing=missing,
    )


def busy(shown: str) -> StoreUnavailable:
    """Return that others hold the lock of the writers."""
    return _unavailable(shown, f"others have been writing for over {PATIENCE:.0f} s", "Wait for them, then try again.")


def occupied(shown: str) -> StoreUnavailable:
    """Return that other calls of this process are still being answered."""
    return _unavailable(shown, "it has other calls to answer first", "Try again in a moment.")


def _unavailable(shown: str, why: str, suggestion: str) -> StoreUnavailable:
    return StoreUnavailable(f"The store {shown} is not available: {why}. Nothing was written.", suggestion=suggestion)
