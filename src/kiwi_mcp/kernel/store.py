"""The user's store: opened when something first needs it, and opened again when the owner names another."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

from kiwi_mcp import __version__
from kiwi_mcp.catalog.seeds import seed
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.receipt import AuditLevel
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.kernel.settings import RegistrySettings, registry_settings
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.authors import Authors
from kiwi_mcp.store.database import Database, within
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.receipts import Receipts
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.runs import RunRetention, Runs

_PATIENCE, _MOST_PATIENCE = 5.0, 60.0
"""For how many seconds a store that could not be opened is not tried again, at first and at the most.

A call must not wait each time; each time that it could not be opened, this doubles.
"""
_FILE = "sqlite://"
_MOMENT = 0.001
_OPENING = 10.0
"""For how many seconds any step of opening a store may be silent."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """A store that is ready: all of it, so that nobody ever sees a part."""

    settings: RegistrySettings
    database: Database
    registry: Registry
    runs: Runs
    receipts: Receipts
    authors: Authors


@dataclass(frozen=True, slots=True)
class _Fault:
    """Why a store could not be opened, and until when that holds without another try."""

    settings: RegistrySettings
    error: KiwiError
    patience: float
    until: float


class Store:
    """What one user remembers: versions, runs and receipts, in one database; it may be used from several threads."""

    def __init__(self, user: Path) -> None:
        self.user = user
        self._lock = Lock()
        self._opened: _Opened | None = None
        self._fault: _Fault | None = None
        self._held_until = 0.0

    @property
    def settings(self) -> RegistrySettings:
        """What the owner chose."""
        return registry_settings(self.user)

    @property
    def actor(self) -> Actor:
        """As whom the store is used."""
        return self.settings.actor

    def registry(self) -> Registry:
        """Return the registry as the owner sees it; one that cannot be opened is an error that says why."""
        return (self._held() or self._open()).registry

    def registry_if_any(self) -> Registry | None:
        """Return the registry, or None where the file of the store was never made: it is not made to find out."""
        opened = self._opened_if_any()
        return opened.registry if opened else None

    def authors(self) -> Authors:
        """Return who wrote what."""
        return (self._held() or self._open()).authors

    def authors_if_any(self) -> Authors | None:
        """Return who wrote what, or None where the file of the store was never made."""
        opened = self._opened_if_any()
        return opened.authors if opened else None

    def approvals(self) -> Approvals:
        """Return what waits for the owner, and the owner's rules."""
        opened = self._held() or self._open()
        return Approvals(opened.database, opened.settings.actor.name)

    def runs(self) -> Runs:
        """Return the runs."""
        return self._open().runs

    def receipts(self) -> Receipts:
        """Return the receipts."""
        return self._open().receipts

    def receipts_if_open(self) -> Receipts | None:
        """Return the receipts, or None where the store would have to be opened first, which may take a while."""
        opened = self._current(self.settings)
        return opened.receipts if opened else None

    def audit_level(self) -> AuditLevel:
        """Return how much receipts tell: as the settings say by which the store was last opened."""
        opened = self._opened
        return (opened.settings if opened is not None else self.settings).audit

    def hold(self) -> None:
        """Let the store count as looked at for a moment, since one call asks for its registry several times.

        Whatever another process changes in that moment could as well have been changed right after it.
        """
        self._held_until = time.monotonic() + _MOMENT

    def look_again(self) -> None:
        """End the moment for which the store counted as looked at."""
        self._held_until = 0.0

    def _opened_if_any(self) -> _Opened | None:
        if (held := self._held()) is not None:
            return held
        settings = self.settings
        if (opened := self._current(settings)) is not None:
            return opened
        is_there = not settings.url.startswith(_FILE) or Path(settings.url.removeprefix(_FILE)).exists()
        return self._open() if is_there else None

    def _current(self, settings: RegistrySettings) -> _Opened | None:
        """Return the store that is open, where it is the one that the owner means, and its file is still there."""
        opened = self._opened
        if opened is None or (opened.settings is not settings and opened.settings != settings):
            return None
        return None if opened.database.is_lost else opened

    def _held(self) -> _Opened | None:
        return self._opened if time.monotonic() < self._held_until else None

    def close(self) -> None:
        """Let go of the database."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.database.close()

    def _open(self) -> _Opened:
        settings = self.settings
        if (opened := self._current(settings)) is not None:
            return opened
        # What is replaced is not closed, as another thread may be in the middle of using it: it is let go of, and is
        # closed with its last user.
        with self._lock:
            if (opened := self._current(settings)) is not None:
                return opened
            self._opened = None
            self._opened = self._tried(settings)
            return self._opened

    def _tried(self, settings: RegistrySettings) -> _Opened:
        fault = self._fault if self._fault and self._fault.settings == settings else None
        if fault and time.monotonic() < fault.until:
            raise fault.error.with_traceback(None)
        try:
            opened = _connected(settings)
        except KiwiError as error:
            patience = min(fault.patience * 2, _MOST_PATIENCE) if fault else _PATIENCE
            self._fault = _Fault(settings, error, patience, time.monotonic() + patience)
            raise
        self._fault = None
        return opened


def _connected(settings: RegistrySettings) -> _Opened:
    with within(_OPENING):
        database = open_database(settings.url)
        try:
            registry = Registry(database, settings.actor)
            seed(registry, __version__)
        except BaseException:
            database.close()
            raise
    retention = RunRetention(settings.run_count, settings.run_days)
    runs = Runs(database, retention=retention, actor=settings.actor.name)
    return _Opened(settings, database, registry, runs, Receipts(database), Authors(database, settings.actor.name))
