"""An issue: one error in the input of an author or a caller."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.json import JsonObject


class Issue(Struct, frozen=True):
    """One fault, its place, and how to fix it.

    `place` is a path into the thing checked (`config.url`, `parameters[0].type`, `main.py:3`), empty for the whole.
    """

    place: str
    reason: str
    fix: str
    severity: Literal["error", "warning"] = "error"
    line: int | None = None

    @property
    def is_error(self) -> bool:
        """Whether this issue keeps the item from being used."""
        return self.severity == "error"

    def to_json(self) -> JsonObject:
        """Return the issue as every surface shows it."""
        shown: dict[str, str | int] = {"place": self.place, "reason": self.reason, "fix": self.fix}
        if self.severity != "error":
            shown["severity"] = self.severity
        if self.line is not None:
            shown["line"] = self.line
        return shown
