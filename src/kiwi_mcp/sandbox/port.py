"""What a backend is, and what it gives for one process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from kiwi_mcp.domain.isolation import Handover, Jail
from kiwi_mcp.domain.plan import ProcessSpec


class Ended(Protocol):
    """How a process ended and what it said, as the primitive that ran it tells."""

    @property
    def exit_code(self) -> int | None:
        """Its exit code; None where a signal ended it."""

    @property
    def stdout(self) -> bytes:
        """What it printed."""

    @property
    def stderr(self) -> bytes:
        """What it complained of."""


def began(_: Ended) -> None:
    """Take it that a process without a launcher has begun: nothing stands between its start and itself."""


def never() -> int:
    """Return that a process without a share of the processors was never held back."""
    return 0


@dataclass(frozen=True, slots=True)
class Confined:
    """A process that is ready to start, confined; it lasts as long as the block that gave it."""

    spec: ProcessSpec
    handover: Handover = field(default_factory=Handover)
    check: Callable[[Ended], None] = began
    """Raises where it was not the process that failed but what should have confined it, so that nothing ran."""
    held_back: Callable[[], int] = never
    """Counts how often the kernel stopped its processes because their share of the processors was used up."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """A process that tells which properties hold where it runs: one of these words on a line for each that does.

    The jail is as small as can be; what is asked of it must come true within `spec.timeout`.
    """

    spec: ProcessSpec
    jail: Jail


class Backend(Protocol):
    """Turns a process into the same process, confined."""

    @property
    def name(self) -> str:
        """The word for it in the data, which is also the name of its file."""

    def obstacles(self) -> tuple[str, ...]:
        """Return what on this machine keeps it from working at all, each with its remedy; none where it may work."""

    def fingerprint(self) -> str:
        """Return what its self-test's answer depends on, besides the kernel and the user."""

    def self_test(self, secret: str) -> SelfTest | None:
        """Return the process that shows what it does here, None where there is nothing to show.

        `secret` is the path of a file that the process must not be able to see.
        """

    def wrap(self, spec: ProcessSpec, jail: Jail) -> AbstractContextManager[Confined]:
        """Return the process confined; what was opened for it is closed when the block ends."""


Runner: TypeAlias = Callable[[Confined], Awaitable[Ended]]
"""Runs a confined process to its end: what a primitive does, handed down, since only primitives start processes."""
