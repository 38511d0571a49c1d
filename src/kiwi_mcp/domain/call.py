"""A call: who wants which item to do what, where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kiwi_mcp.domain.json import JsonObject


@dataclass(frozen=True, slots=True)
class Space:
    """The folders a call sees: a project, the user's own, and where derived things are kept."""

    project: Path
    user: Path
    cache: Path

    @property
    def project_ai(self) -> Path:
        """The project's `.ai` folder."""
        return self.project / ".ai"


@dataclass(frozen=True, slots=True)
class Call:
    """One wish: an item by short name, identity or range, and the caller's parameters."""

    tool_id: str
    space: Space
    parameters: JsonObject = field(default_factory=dict)
    is_frozen: bool = False
    """Whether a chain that differs from the lockfile is refused instead of reported."""
