"""Outcomes: what happened when a plan was driven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.json import Json, JsonObject

Status = Literal["success", "ready", "error", "timeout", "unavailable", "cancelled"]


class Logs(Struct, frozen=True):
    """The output of a tool, as text, limited; the totals count all of it."""

    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    is_truncated: bool = False

    def to_json(self) -> JsonObject:
        """Return the logs, without empty ones."""
        shown: dict[str, Json] = {}
        if self.stdout:
            shown["stdout"] = self.stdout
        if self.stderr:
            shown["stderr"] = self.stderr
        if self.is_truncated:
            shown |= {"truncated": True, "stdout_bytes": self.stdout_bytes, "stderr_bytes": self.stderr_bytes}
        return shown


class Cost(Struct, frozen=True):
    """What a call cost: money in millionths, and tokens by class."""

    micros: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


FREE = Cost()


class Outcome(Struct, frozen=True):
    """What happened: a result, or why there is none. A tool that fails is an outcome, not a crash."""

    status: Status
    result: Json = None
    message: str = ""
    suggestion: str = ""
    logs: Logs = Logs()
    exit_code: int | None = None
    details: JsonObject = field(default_factory=dict)
    sent: JsonObject = field(default_factory=dict)
    """The traffic by host, if only the record shows it."""
    warnings: tuple[str, ...] = ()
    """Warnings for the owner, beside the result."""
    cost: Cost = FREE
    passed: JsonObject | None = None
    """The unchanged answer of an MCP server, for a client of the same protocol."""

    @property
    def is_success(self) -> bool:
        """Whether the tool did what it was asked."""
        return self.status in {"success", "ready"}


class Progress(Struct, frozen=True):
    """One step of a long call: a sentence, and how much of the whole is done if that is known."""

    message: str
    done: float = 0.0
    total: float | None = None
    thread_id: str = ""
    """The thread that the call has started, in the report that says so."""


Report: TypeAlias = Callable[[Progress], None]
"""Receives the progress of a long call. It must not block."""


def silent(_: Progress) -> None:
    """Discard a progress report."""
