"""Grants and verdicts: what an actor may use, and the answer for one plan."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Rules:
    """Globs that allow and globs that deny. Deny wins, and the order never matters."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def match(self, name: str) -> str | None:
        """Return the rule that refuses `name`, empty if no rule allows it, or None where it is allowed."""
        for pattern in self.deny:
            if fnmatchcase(name, pattern):
                return pattern
        return None if any(fnmatchcase(name, pattern) for pattern in self.allow) else ""


@dataclass(frozen=True, slots=True)
class Grant:
    """What an actor may use: items by identity, and hosts beyond the public network."""

    items: Rules = Rules(allow=("*",))
    hosts: Rules = Rules()


@dataclass(frozen=True, slots=True)
class Allow:
    """The plan may go ahead."""


@dataclass(frozen=True, slots=True)
class Deny:
    """The plan may not go ahead, and why."""

    reason: str
    rule: str


Verdict = Allow | Deny
