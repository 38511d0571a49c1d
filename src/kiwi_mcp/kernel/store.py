"""The user's store: opened when something first needs it, and opened again when the owner names another."""

from __future__ import annotations

import time
from pathlib import Path

from kiwi_mcp import __version__
from kiwi_mcp.catalog.seeds import seed
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.registry import Actor
from kiwi_mcp.kernel.settings import RegistrySettings, registry_settings
from kiwi_mcp.store.database import Database
from kiwi_mcp.store.open import open_database
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.runs import RunRetention, Runs

_PATIENCE = 5.0
"""For how many seconds a store that could not be opened is not tried again: a call must not wait each time."""


class Store:
    """What one user remembers: published versions and runs, in one database."""

    def __init__(self, user: Path) -> None:
        self._user = user
        self._settings: RegistrySettings | None = None
        self._database: Database | None = None
        self._registry: Registry | None = None
        self._runs: Runs | None = None
        self._fault: tuple[RegistrySettings, float, KiwiError] | None = None

    @property
    def settings(self) -> RegistrySettings:
        """What the owner chose."""
        return registry_settings(self._user)

    @property
    def actor(self) -> Actor:
        """As whom the store is used."""
        return self.settings.actor

    def registry(self) -> Registry:
        """Return the registry as the owner sees it; one that cannot be opened is an error that says why."""
        self._open()
        assert self._registry is not None  # noqa: S101 - opened, as the line above makes sure
        return self._registry

    def runs(self) -> Runs:
        """Return the runs."""
        self._open()
        assert self._runs is not None  # noqa: S101 - as above
        return self._runs

    def close(self) -> None:
        """Let go of the database."""
        if self._database is not None:
            self._database.close()
        self._settings = self._database = self._registry = self._runs = None

    def _open(self) -> None:
        settings = self.settings
        if settings is self._settings and self._database is not None and not self._database.is_lost:
            return
        if self._fault is not None:
            failed, at, fault = self._fault
            if failed is settings and time.monotonic() - at < _PATIENCE:
                raise fault.with_traceback(None)
        self.close()
        try:
            self._connect(settings)
        except KiwiError as error:
            self._fault = (settings, time.monotonic(), error)
            self.close()
            raise
        self._settings, self._fault = settings, None

    def _connect(self, settings: RegistrySettings) -> None:
        database = self._database = open_database(settings.url)
        self._registry = Registry(database, settings.actor)
        retention = RunRetention(settings.run_count, settings.run_days)
        self._runs = Runs(database, retention=retention, actor=settings.actor.name)
        seed(self._registry, __version__)
