"""Approvals: what waits for the owner's word, what the owner said, and the rules by which nobody asks again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.run import iso

ApprovalStatus: TypeAlias = Literal["pending", "approved", "denied", "expired", "used"]
"""How it stands: `approved` is good for one run, and `used` from the moment before that run began."""

LIFETIME_MS = 86_400_000
"""How long a question waits, and an approval holds: both together a day."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What of the world a plan touches: the owner's paths that it may change, and the hosts that data may go to."""

    writes: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Approval:
    """One question to the owner, and its answer; times are milliseconds since 1970."""

    id: str
    plan_digest: str
    """The plan that it is about, and no other."""
    actor: str
    """Who wants to run it, and alone may."""
    project: str
    identity: str
    reasons: tuple[str, ...]
    plan: JsonObject
    """The plan as it is shown: bounded, and without what looks secret."""
    preview: str
    """The question, in words."""
    created_at: int
    expires_at: int
    touched: Touched = field(default_factory=Touched)
    first_runs: tuple[str, ...] = ()
    """The digests of what a model wrote and nobody ever ran."""
    request: JsonObject | None = None
    """The call that asked, where it holds nothing that may not be kept; gone once the question is over."""
    content: str = ""
    """The hash of all that would run: of every link of its chain, and of what that names."""
    status: ApprovalStatus = "pending"
    decided_at: int = 0
    decided_by: str = ""
    decided_how: str = ""
    """The way the answer came: `cli`, `mcp`, `python`."""
    reason: str = ""
    run_id: str = ""
    """The run that used it."""

    def to_json(self) -> JsonObject:
        """Return it as a list shows it."""
        told: dict[str, Json] = {
            "approval_id": self.id,
            "identity": self.identity,
            "status": self.status,
            "reasons": list(self.reasons),
            "actor": self.actor,
            "project": self.project,
            "plan_digest": self.plan_digest,
            "created_at": iso(self.created_at),
            "expires_at": iso(self.expires_at),
            "decided_at": iso(self.decided_at) if self.decided_at else "",
            "decided_by": self.decided_by,
            "decided_how": self.decided_how,
            "reason": self.reason,
            "run_id": self.run_id,
        }
        return {word: value for word, value in told.items() if value != ""}


@dataclass(frozen=True, slots=True)
class ApprovalRule:
    """A standing yes of the owner's: to which items, and how narrowly, as far as it says so."""

    id: str
    item: str
    """A glob over full identities."""
    created_at: int
    created_by: str
    actor: str = ""
    """Whose calls; everybody's where it is empty."""
    paths: tuple[str, ...] = ()
    """Globs over the real paths that may be changed; where paths or hosts are named, nothing else may be touched."""
    hosts: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    """The words that the command line begins with, each exactly so."""
    expires_at: int | None = None
    project: str = ""
    """In which project; in every one where it is empty, which a rule for items of a project never is."""
    digest: str = ""
    """Of which content, and then only as far as it touches what is named; of any where it is empty."""

    def to_json(self) -> JsonObject:
        """Return the rule as it is shown, without what it leaves open."""
        told: dict[str, Json] = {
            "rule_id": self.id,
            "item": self.item,
            "project": self.project,
            "digest": self.digest,
            "actor": self.actor,
            "paths": list(self.paths),
            "hosts": list(self.hosts),
            "argv": list(self.argv),
            "created_at": iso(self.created_at),
            "created_by": self.created_by,
            "expires_at": iso(self.expires_at) if self.expires_at is not None else "",
        }
        return {word: value for word, value in told.items() if value not in ("", [])}
