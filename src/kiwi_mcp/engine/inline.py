"""The inline engine: runs the loop of a thread in this process until it waits or has ended, and stores nothing."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, TypeAlias, TypeVar


class EngineStep(Protocol):
    """The result of one step of a loop."""

    @property
    def is_next(self) -> bool:
        """Whether there is a further step."""


S = TypeVar("S", bound=EngineStep)
Live: TypeAlias = Callable[[], Awaitable[Collection[str]]]


class Engine(Protocol):
    """What runs the segments of threads. The journal of a thread and its lease decide what was done, not this."""

    async def run_to_wait(self, advance: Callable[[], Awaitable[S]], thread_id: str, lease: int) -> S:
        """Advance a thread under a lease until there is no further step; return the last one."""

    async def sweep(self, live: Live) -> None:
        """Close what lost workers left open; `live` returns the processes of workers that gave a sign of life in time.

        It is asked after what is open was read: a worker gives a sign of life before it opens anything.
        """

    async def aclose(self) -> None:
        """Free what the engine uses. No segment runs any more."""


async def run_to_wait(advance: Callable[[], Awaitable[S]]) -> S:
    """Advance until there is no further step; return the last one."""
    while (step := await advance()).is_next:
        pass
    return step


class InlineEngine:
    """Runs segments without a record of its own."""

    async def run_to_wait(self, advance: Callable[[], Awaitable[S]], *_: object) -> S:
        """Advance until there is no further step; return the last one."""
        return await run_to_wait(advance)

    async def sweep(self, live: Live) -> None:
        """Leave everything to the leases."""

    async def aclose(self) -> None:
        """Do nothing."""


def open_engine(*_: str) -> InlineEngine:
    """Return the engine, which needs nothing."""
    return InlineEngine()
