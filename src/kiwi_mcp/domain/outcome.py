"""Outcomes: what happened when a plan was driven."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import Json, JsonObject

Status = Literal["success", "ready", "error", "timeout", "unavailable", "cancelled"]


@dataclass(frozen=True, slots=True)
class Logs:
    """What a tool printed, as text, capped; the totals say how much there was."""

    stdout: str = ""
    stderr: str = ""
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    is_truncated: bool = False

    def to_json(self) -> JsonObject:
        """Return the logs, without what is empty."""
        shown: dict[str, Json] = {}
        if self.stdout:
            shown["stdout"] = self.stdout
        if self.stderr:
            shown["stderr"] = self.stderr
        if self.is_truncated:
            shown |= {"truncated": True, "stdout_bytes": self.stdout_bytes, "stderr_bytes": self.stderr_bytes}
        return shown


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: a result, or why there is none. A tool that fails is an outcome, not a crash."""

    status: Status
    result: Json = None
    message: str = ""
    suggestion: str = ""
    logs: Logs = Logs()
    exit_code: int | None = None
    details: JsonObject = field(default_factory=dict)
    sent: JsonObject = field(default_factory=dict)
    """What went to which hosts and came from them, where the record alone is to tell of it."""
    passed: JsonObject | None = None
    """What an MCP server answered, word for word, for a client that speaks the same protocol."""

    @property
    def is_success(self) -> bool:
        """Whether the tool did what it was asked."""
        return self.status in {"success", "ready"}


@dataclass(frozen=True, slots=True)
class Progress:
    """One step of a long call: a sentence, and how much of the whole is done if that is known."""

    message: str
    done: float = 0.0
    total: float | None = None


Report: TypeAlias = Callable[[Progress], None]
"""Where a long call tells its progress. It must not block."""


def silent(_: Progress) -> None:
    """Report to nobody."""
