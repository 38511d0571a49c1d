"""Rates: how many requests a provider gets in a minute."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

_MINUTE = 60.0


class RequestRates:
    """When requests were sent in the last minute, by the name of a provider; for the threads of this process."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._sent: dict[str, deque[float]] = {}

    async def wait(self, name: str, per_minute: int) -> None:
        """Wait until one more request may be sent, and count it; 0 sets no limit."""
        sent = self._sent.setdefault(name, deque())
        while per_minute:
            now = self._clock()
            while sent and sent[0] <= now - _MINUTE:
                sent.popleft()
            if len(sent) < per_minute:
                sent.append(now)
                return
            await self._sleep(sent[0] + _MINUTE - now)
