"""The inline engine: runs the loop of a thread in this process until it waits or has ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar


class EngineStep(Protocol):
    """The result of one step of a loop."""

    @property
    def is_next(self) -> bool:
        """Whether there is a further step."""


S = TypeVar("S", bound=EngineStep)


async def run_to_wait(advance: Callable[[], Awaitable[S]]) -> S:
    """Advance until there is no further step; return the last one."""
    while (step := await advance()).is_next:
        pass
    return step
