"""Receipts: what is written down of every call that runs or changes something, each sealed with the one before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.run import RunStatus

AuditLevel: TypeAlias = Literal["minimal", "standard", "verbose"]
"""How much a receipt tells; there is one for every call at each level."""

Decision: TypeAlias = Literal["", "allow", "deny"]
"""What the owner's rules said, empty where a call was refused before they were asked."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is known of one call: who, what, by which rule and with what outcome; no value that came or went."""

    id: str
    """The id of the run, where the call left one."""
    at: str
    """When the call began: ISO 8601 in UTC, with milliseconds."""
    actor: str
    surface: str
    """The way it came: `cli`, `mcp`, `gateway` or `python`."""
    action: str
    """`run`, `create`, `publish`, …; other verbs with their action, such as `mcp add`."""
    item: str
    """The short name of what it was about, empty where it named nothing."""
    status: RunStatus
    level: AuditLevel
    code: str = ""
    """Why it did not succeed, as one of the codes that answers have."""
    identity: str = ""
    digest: str = ""
    plan_digest: str = ""
    verdict: Decision = ""
    arguments_sha256: str = ""
    """The hash of the canonical arguments, empty where they may hold a secret."""
    outcome_sha256: str = ""
    """The hash of the result as the caller was given it."""
    duration_ms: int = 0
    cost_micros: int = 0
    detail: str = ""
    """Words as JSON: what of the owner's it went on by, where that was asked for; more at the level `verbose`."""


@dataclass(frozen=True, slots=True)
class Head:
    """The end of a chain: how many receipts there are, and the hash of the last."""

    count: int = 0
    hash: str = "-"


class Entry(NamedTuple):
    """A receipt in its place: its number, the hash of the one before it, and its own."""

    seq: int
    receipt: Receipt
    previous: str
    hash: str

    def to_json(self) -> JsonObject:
        """Return all words of the receipt, also the empty ones, since they are part of what is hashed."""
        words = {word: getattr(self.receipt, word) for word in self.receipt.__dataclass_fields__}
        return {"seq": self.seq, **words, "previous": self.previous, "hash": self.hash}
