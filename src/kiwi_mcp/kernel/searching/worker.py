"""The worker: one thread in the background, which is there as long as there is something to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Condition, Thread
from time import monotonic

_log = logging.getLogger("kiwi")
_STEP = 0.2
"""For how many seconds it works before it looks up."""


class Worker:
    """Does some work, a step at a time: `work` is told for how many seconds, and says whether more is to do."""

    def __init__(self, work: Callable[[float], bool]) -> None:
        self._work = work
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_woken = False
        self.is_closing = False

    def wake(self) -> None:
        """Let it look whether there is something to do; it comes back from a close, too."""
        with self._changed:
            self._is_woken, self.is_closing = True, False
            if self._thread is None:
                # A thread that nobody waits for must not keep a process from its end.
                self._thread = Thread(target=self._run, name="kiwi-search", daemon=True)
                self._thread.start()

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait, for so long at the most, until something holds or nothing is left to do; return whether it holds."""
        until = monotonic() + seconds
        with self._changed:
            while not is_done() and self._thread is not None and (left := until - monotonic()) > 0:
                self._changed.wait(left)
        return is_done()

    def rest(self, seconds: float) -> bool:
        """Wait, for so long at the most, until nothing is left to do; return whether that is so."""
        return self.wait(lambda: self._thread is None, seconds)

    def close(self, spare: float, seconds: float) -> None:
        """Let it go on for a moment, then stop; wait for that, but not longer than so many seconds."""
        self.rest(spare)
        with self._changed:
            self.is_closing = True
        self.rest(seconds)

    def _run(self) -> None:
        while self._goes_on():
            more = self._stepped()
            with self._changed:
                self._is_woken = self._is_woken or more
                self._changed.notify_all()

    def _goes_on(self) -> bool:
        """Take up what it was woken for; where there is nothing, or an end, the thread is over."""
        with self._changed:
            is_woken, self._is_woken = self._is_woken, False
            if is_woken and not self.is_closing:
                return True
            self._thread = None
            self._changed.notify_all()
            return False

    def _stepped(self) -> bool:
        try:
            return self._work(_STEP)
        except Exception:  # noqa: BLE001 - nobody is there to be told; the next search tries again
            _log.exception("a step in the background failed")
            return False
