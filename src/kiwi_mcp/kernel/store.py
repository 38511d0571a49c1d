"""The user's store: opened when something first needs it, and opened again when the owner names another."""

from __future__ import annotations

import os
import time
from contextlib import closing, suppress
from pathlib import Path
from threading import Lock

from msgspec import Struct

from kiwi_mcp import __version__
from kiwi_mcp.catalog.release import seed
from kiwi_mcp.domain.errors import KiwiError, StoreUnavailable
from kiwi_mcp.domain.records import AuditLevel
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.kernel.settings import RegistrySettings, default_url, registry_settings
from kiwi_mcp.manifest.owner_file import put_file
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.authors import Authors
from kiwi_mcp.store.database import Database, within
from kiwi_mcp.store.kernel_lock import KernelLock
from kiwi_mcp.store.move import has_data
from kiwi_mcp.store.open import connect_to, masked, open_database
from kiwi_mcp.store.receipts import Receipts, close_abandoned
from kiwi_mcp.store.registry.registry import Registry
from kiwi_mcp.store.runs import RunRetention, Runs

_PATIENCE, _MOST_PATIENCE = 5.0, 60.0
"""How many seconds pass before a store that could not be opened is tried again: at first, and at most.

A call must not wait each time, so the pause doubles after each failure.
"""
_FILE = "sqlite://"
_LAST = ("state", "last_store")
"""The file that notes which store was used last."""
_MOMENT = 0.01
_OPENING = 10.0
"""For how many seconds any step of opening a store may be silent."""


class _Opened(Struct, frozen=True):
    """A store that is completely open: no caller ever sees a part of it."""

    settings: RegistrySettings
    database: Database
    registry: Registry
    runs: Runs
    receipts: Receipts
    authors: Authors


class _Fault(Struct, frozen=True):
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
        self._fresh_until = 0.0
        self.kernel_lock = KernelLock(user)

    @property
    def settings(self) -> RegistrySettings:
        """What the owner chose."""
        opened = self._fresh()
        return opened.settings if opened else registry_settings(self.user)

    @property
    def actor(self) -> Actor:
        """The actor that uses the store."""
        return self.settings.actor

    def registry(self) -> Registry:
        """Return the registry as the owner sees it; one that cannot be opened is an error that says why."""
        return (self._fresh() or self.open()).registry

    def registry_if_any(self) -> Registry | None:
        """Return the registry, or None where the file of the store was never made: it is not made to find out."""
        opened = self._opened_if_any()
        return opened.registry if opened else None

    def authors(self) -> Authors:
        """Return who wrote what."""
        return (self._fresh() or self.open()).authors

    def authors_if_any(self) -> Authors | None:
        """Return who wrote what, or None where the file of the store was never made."""
        opened = self._opened_if_any()
        return opened.authors if opened else None

    def state(self) -> tuple[object, int]:
        """Return what differs from the last one if the store may have changed: the open store and its counter."""
        try:
            opened = self._opened if time.monotonic() < self._fresh_until else self._opened_if_any()
            return opened, (opened.database.stamp() if opened else 0)
        except KiwiError:
            return object(), 0  # equal to no other

    def approvals(self) -> Approvals:
        """Return what waits for the owner, and the owner's rules."""
        opened = self._fresh() or self.open()
        return Approvals(opened.database, opened.settings.actor.name)

    def runs(self) -> Runs:
        """Return the runs."""
        return self.open().runs

    def receipts(self) -> Receipts:
        """Return the receipts."""
        return self.open().receipts

    def receipts_if_open(self) -> Receipts | None:
        """Return the receipts, or None where the store would have to be opened first, which may take a while."""
        opened = self._fresh() or self._current(self.settings)
        return opened.receipts if opened else None

    def close_abandoned(self) -> None:
        """Mark what kernels that disappeared had started as unknown."""
        close_abandoned(self.open().database, self.kernel_lock.is_gone)

    def audit_level(self) -> AuditLevel:
        """Return how much receipts tell: as the settings say by which the store was last opened."""
        opened = self._opened
        return (opened.settings if opened is not None else self.settings).audit

    def look_again(self) -> None:
        """End the moment for which the store counted as looked at."""
        self._fresh_until = 0.0

    def try_again(self) -> None:
        """Forget why the store could not be opened: it may be another one now."""
        self._fault, self._fresh_until = None, 0.0

    def _opened_if_any(self) -> _Opened | None:
        if (opened := self._fresh()) is not None:
            return opened
        settings = self.settings
        if (opened := self._current(settings)) is not None:
            return opened
        is_there = not settings.url.startswith(_FILE) or Path(settings.url.removeprefix(_FILE)).exists()
        return self.open() if is_there else None

    def _current(self, settings: RegistrySettings) -> _Opened | None:
        """Return the store that is open, where it is the one that the owner means, and its file is still there."""
        opened = self._opened
        if opened is None or (opened.settings is not settings and opened.settings != settings):
            return None
        if opened.database.is_lost:
            return None
        # One call asks for the store several times: it is checked once in a moment. What another process changes in
        # that moment could as well have been changed right after it.
        self._fresh_until = time.monotonic() + _MOMENT
        return opened

    def _fresh(self) -> _Opened | None:
        return self._opened if time.monotonic() < self._fresh_until else None

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.database.close()
        self.kernel_lock.close()

    def open(self) -> _Opened:
        """Return the store, opened where it is not, or where the owner names another one."""
        settings = registry_settings(self.user)
        if (opened := self._current(settings)) is not None:
            return opened
        # The replaced store is not closed here, as another thread may be using it: it closes when its last user
        # releases it.
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
            _refuse_forgetting(self.user, settings)
            opened = _connected(settings)
        except KiwiError as error:
            patience = min(fault.patience * 2, _MOST_PATIENCE) if fault else _PATIENCE
            self._fault = _Fault(settings, error, patience, time.monotonic() + patience)
            raise
        self._fault = None
        note_url(self.user, settings.url)
        with suppress(KiwiError):  # the next opening does it
            close_abandoned(opened.database, self.kernel_lock.is_gone)
        return opened


def last_url(user: Path) -> str:
    """Return the store that was used last; the default one if none is noted."""
    try:
        return user.joinpath(*_LAST).read_text(encoding="utf-8").strip()
    except OSError:
        return default_url(user)


def note_url(user: Path, url: str) -> None:
    """Note which store is used, unless the variable KIWI_REGISTRY names it for this process alone."""
    if not os.environ.get("KIWI_REGISTRY") and last_url(user) != url:
        with suppress(OSError):  # then the default store counts as the last one
            put_file(user.joinpath(*_LAST), url.encode(), 0o600)


def _refuse_forgetting(user: Path, settings: RegistrySettings) -> None:
    """Refuse an empty store while the one that was used before has data: everything would seem forgotten."""
    before, url = last_url(user), settings.url
    if os.environ.get("KIWI_REGISTRY") or before == url or not _is_used(before):
        return
    # A server that does not answer now is not waited for a second time: the store cannot be opened.
    if not _is_used(url, is_wanted=True):
        raise StoreUnavailable(
            f"The store {masked(url)} is empty, and {masked(before)}, which was used before, has data.",
            suggestion=f"`kiwi registry move {masked(url)}` copies it; with `--empty` it starts anew.",
        )


def _is_used(url: str, *, is_wanted: bool = False) -> bool:
    """Whether a store has data; a file is not made to find out.

    A store that cannot be read counts as used. One that `is_wanted` and is unavailable raises the reason.
    """
    if url.startswith(_FILE) and not Path(url.removeprefix(_FILE)).exists():
        return False
    try:
        with within(_OPENING), closing(connect_to(url)) as database:
            return has_data(database)
    except StoreUnavailable:
        if is_wanted:
            raise
        return True
    except KiwiError:
        return True


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
