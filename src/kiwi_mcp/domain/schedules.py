"""Schedules: a directive that starts as a thread at the times of a cron expression."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.json import JsonObject

Overlap: TypeAlias = Literal["skip", "queue", "replace", "allow"]
"""What happens at a time when the thread of an earlier time has not ended."""
Misfire: TypeAlias = Literal["skip", "latest", "all"]
"""Which of the times that passed while no worker ran are made up for."""


class Schedule(Struct, frozen=True):
    """When which item starts, with which inputs. Times are milliseconds since 1970."""

    name: str
    item: str
    cron: str
    zone: str
    created_at: int
    inputs: JsonObject = field(default_factory=dict)
    limits: JsonObject = field(default_factory=dict)
    model: str = ""
    project: str = ""
    queue: str = "default"
    priority: int = 0
    overlap: Overlap = "skip"
    misfire: Misfire = "latest"
    jitter: int = 0
    """The largest delay of a start, in seconds; each time has its own."""
    is_paused: bool = False
    next_at: int = 0
    """The next time of the cron expression."""
    due_at: int = 0
    """The next time, with its delay."""

    @property
    def starter(self) -> str:
        """The identity of the threads that it starts."""
        return f"schedule:{self.name}"


class Occurrence(Struct, frozen=True):
    """One time of a schedule, and what came of it."""

    at: int
    status: Literal["pending", "started", "skipped", "failed"]
    thread_id: str = ""
    message: str = ""
