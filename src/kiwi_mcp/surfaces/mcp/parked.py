"""Parked calls: those that wait with a question until their client comes back with the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from secrets import token_hex

from kiwi_mcp.surfaces.mcp.errands import Errand
from kiwi_mcp.surfaces.mcp.sealed import Seal

PARKED_SECONDS = 600.0
"""How long a call waits for its client to come back."""
MOST_PARKED = 64
"""How many calls of one principal may wait."""
_MOST_IN_ALL = 1_024


@dataclass(frozen=True, slots=True)
class _Place:
    errand: Errand
    end: asyncio.TimerHandle
    """What stops the call when nobody comes."""


class Parked:
    """The calls that wait, each by a ticket that is good once."""

    def __init__(self, *, seconds: float = PARKED_SECONDS) -> None:
        self._seconds = seconds
        self._seal = Seal()
        self._places: dict[str, _Place] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def park(self, errand: Errand, binding: str) -> str | None:
        """Let a call wait, and return the state by which its client comes back; None where too many wait already."""
        own = sum(place.errand.principal == errand.principal for place in self._places.values())
        if own >= MOST_PARKED or len(self._places) >= _MOST_IN_ALL:
            return None
        ticket = token_hex(16)
        end = asyncio.get_running_loop().call_later(self._seconds, self._drop, ticket)
        self._places[ticket] = _Place(errand, end)
        return self._seal.close(ticket, binding, seconds=self._seconds)

    def take(self, state: str, binding: str) -> Errand | None:
        """Return the call that a state is for; None where it is not for this one, or the call waits no longer."""
        ticket = self._seal.open(state, binding)
        place = self._places.pop(ticket, None) if ticket is not None else None
        if place is None:
            return None
        place.end.cancel()
        return place.errand

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop the calls of some principals."""
        for ticket, place in list(self._places.items()):
            if is_over(place.errand.principal):
                place.end.cancel()
                self._drop(ticket)

    async def aclose(self) -> None:
        """Stop every call that waits."""
        self.end_where(lambda _: True)
        if self._ending:
            await asyncio.wait(self._ending)

    def _drop(self, ticket: str) -> None:
        ending = asyncio.create_task(self._places.pop(ticket).errand.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
