"""Following servers: each asked anew when it says that its list has changed, and the more it says so the later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
"""How long a server that goes on saying that its list has changed waits to be asked, at first and at the most."""


class Speaker(Protocol):
    """The driver that hears servers."""

    on_change: Callable[[str], None] | None


class Following:
    """Asks servers that say that their list has changed: each once at a time, and the more it says so the later."""

    def __init__(self) -> None:
        self._refresh: Callable[[str], Awaitable[None]] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._again: set[str] = set()

    def start(self, speaker: Speaker, refresh: Callable[[str], Awaitable[None]]) -> bool:
        """Hear servers from now on, and say whether they were not heard before."""
        if self._refresh is not None:
            return False
        self._refresh = refresh
        speaker.on_change = self.heard
        return True

    def heard(self, identity: str) -> None:
        """Ask a server that says that its list has changed."""
        self._again.add(identity)
        if identity not in self._tasks:
            self._tasks[identity] = asyncio.get_running_loop().create_task(self._follow(identity))

    async def aclose(self) -> None:
        """Stop asking."""
        tasks, self._tasks, self._refresh = [*self._tasks.values()], {}, None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, identity: str) -> None:
        pause = _PAUSE
        try:
            while identity in self._again and self._refresh is not None:
                self._again.discard(identity)
                await self._refresh(identity)
                await asyncio.sleep(pause)
                pause = min(pause * 2, _LONGEST_PAUSE)
        finally:
            self._tasks.pop(identity, None)
