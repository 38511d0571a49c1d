"""Trouble with the store that tasks are kept in: said once when it begins and once when it is over."""

from __future__ import annotations

import logging

from kiwi_mcp.domain.errors import KiwiError

_log = logging.getLogger("kiwi")

LONGEST_PAUSE = 10.0
"""How long a store that fails is left alone at the most, in seconds; a task counts as lost soon after."""


class Trouble:
    """How it is with the store, which is asked the less often the longer it fails."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, error: KiwiError) -> None:
        """Note that it failed."""
        if not self._failures:
            _log.warning("tasks cannot be kept for now: %s", error.message)
        self._failures += 1

    def worked(self) -> None:
        """Note that it works."""
        if self._failures:
            _log.warning("tasks are kept again, after %d failures", self._failures)
        self._failures = 0

    def pause(self, seconds: float) -> float:
        """Return how long to wait before it is asked again, instead of so many seconds."""
        return min(seconds * 2.0 ** min(self._failures, 10), LONGEST_PAUSE)
