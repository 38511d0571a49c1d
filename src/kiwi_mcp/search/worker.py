"""A background thread that exists only while there is work."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic

_log = logging.getLogger("kiwi")
_STEP = 0.2  # how many seconds one step of work may take


class BackgroundWorker:
    """Does work in steps: `work` gets the seconds that it may take, and returns whether more is left."""

    def __init__(self, work: Callable[[float], bool]) -> None:
        self._work = work
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_woken = False
        self.is_closing = False

    def wake(self) -> None:
        """Check for work, in a new thread if none is running. This also works after a close."""
        with self._changed:
            self._is_woken, self.is_closing = True, False
            if self._thread is None:
                # A background thread must not keep the process from exiting.
                self._thread = Thread(target=self._run, name="kiwi-search", daemon=True)
                self._thread.start()

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait at most `seconds` until a condition is true or nothing is left to do; return whether it is true."""
        until = monotonic() + seconds
        with self._changed:
            while not is_done() and self._thread is not None and (left := until - monotonic()) > 0:
                self._changed.wait(left)
        return is_done()

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait at most `seconds` until nothing is left to do; return whether that is the case."""
        return self.wait(lambda: self._thread is None, seconds)

    def close(self, grace: float, seconds: float) -> None:
        """Let the worker continue for `grace` seconds, then stop it and wait at most `seconds` for the end."""
        self.wait_until_idle(grace)
        with self._changed:
            self.is_closing = True
        self.wait_until_idle(seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                is_woken, self._is_woken = self._is_woken, False
                if not is_woken or self.is_closing:
                    self._thread = None
                    self._changed.notify_all()
                    return
            try:
                has_more = self._work(_STEP)
            except Exception:  # noqa: BLE001 - no caller could handle it; the next search tries again
                _log.exception("a step in the background failed")
                has_more = False
            with self._changed:
                self._is_woken = self._is_woken or has_more
                self._changed.notify_all()
