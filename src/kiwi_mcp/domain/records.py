"""Rows of the store: `RunRecord`, `Receipt`, `Approval`, `ApprovalRule`."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct, field
from msgspec.structs import asdict

from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.times import iso

RunStatus = Literal["success", "ready", "error", "timeout", "unavailable", "cancelled", "refused", "started", "unknown"]
"""How a call ended: as its outcome says, or `refused` where a gate let nothing run.

`started` has not ended yet. `unknown` was started, and the process that made the call is gone.
"""
ApprovalStatus: TypeAlias = Literal["pending", "approved", "denied", "expired", "used"]
"""The status of an approval: `approved` is valid for one run, and `used` from just before that run."""
LIFETIME_MS = 86_400_000
"""The lifetime of a question and of an approval: one day together."""
AuditLevel: TypeAlias = Literal["minimal", "standard", "verbose"]
"""The level of detail of receipts; every level has one receipt per call."""
Decision: TypeAlias = Literal["", "allow", "deny"]
"""The verdict of the rules; empty if the call was refused before."""


class RunRecord(Struct, frozen=True):
    """The record of one call that was made or refused, without parameters and secrets."""

    id: str
    tool_id: str
    status: RunStatus
    started_at: str
    """ISO 8601 in UTC, with milliseconds."""
    duration_ms: int
    actor: str
    project: str
    """The path of the project in which the call was made."""
    identity: str = ""
    """Empty, as are the two digests, where the call was refused before that was known."""
    digest: str = ""
    plan_digest: str = ""
    code: str = ""
    """Why it did not succeed, as one of the codes that answers have."""
    message: str = ""
    exit_code: int | None = None
    cost_micros: int = 0
    output: str = ""
    """The handle of the output file in the project, empty where there is none."""
    result_sha256: str | None = None
    """The hash of a large result, which is kept once however many runs gave it."""
    result_size: int | None = None
    """The size of a large result in bytes, also when it is no longer kept."""

    def to_json(self) -> JsonObject:
        """Return the whole record, without empty fields."""
        return {word: value for word, value in asdict(self).items() if value not in {"", None}}


class ApprovedBy(Struct, frozen=True):
    """Why a plan continued that needed an approval: a rule, or an approval that is used up now."""

    rule_id: str = ""
    approval_id: str = ""

    def to_json(self) -> JsonObject:
        """Return it as answers and receipts show it."""
        return {"rule_id": self.rule_id} if self.rule_id else {"approval_id": self.approval_id}


class Effects(Struct, frozen=True):
    """The effects of a plan: paths of the owner that it may change, and hosts that it may send data to."""

    writes: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()


class Approval(Struct, frozen=True):
    """One question to the owner, and its answer; times are milliseconds since 1970."""

    id: str
    plan_digest: str
    """The digest of the only plan that it covers."""
    actor: str
    """The only actor that may run it."""
    project: str
    identity: str
    reasons: tuple[str, ...]
    plan: JsonObject
    """The plan as it is shown: limited in size, and without values that look secret."""
    preview: str
    """The text of the question."""
    created_at: int
    expires_at: int
    touched: Effects = field(default_factory=Effects)
    first_runs: tuple[str, ...] = ()
    """The digests of code that a model wrote and that has never run."""
    request: JsonObject | None = None
    """The call that asked, if it contains no secret; removed when the question ends."""
    content: str = ""
    """The hash of all code that would run: every link of the chain, and the files it names."""
    status: ApprovalStatus = "pending"
    decided_at: int = 0
    decided_by: str = ""
    decided_how: str = ""
    """The surface of the answer: `cli`, `mcp`, `python`."""
    reason: str = ""
    run_id: str = ""
    """The run that used it."""
    number: int = 0
    """The number that its owner knows it by."""

    def to_json(self) -> JsonObject:
        """Return it as a list shows it."""
        response: dict[str, Json] = {
            "approval_id": self.id,
            "number": self.number,
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
        return {word: value for word, value in response.items() if value != ""}


class ApprovalRule(Struct, frozen=True):
    """A standing approval of the owner: the items that it covers, and its limits."""

    id: str
    item: str
    """A glob over full identities."""
    created_at: int
    created_by: str
    actor: str = ""
    """The actor of the calls; empty for all actors."""
    paths: tuple[str, ...] = ()
    """Globs over the real paths that may be changed; where paths or hosts are named, nothing else may be touched."""
    hosts: tuple[str, ...] = ()
    argv: tuple[str, ...] = ()
    """The exact first arguments of the command line."""
    expires_at: int | None = None
    project: str = ""
    """The project; empty for every project. A rule for project items always names one."""
    digest: str = ""
    """The digest of the content that it covers, limited to the named effects; empty for any content."""
    scope: str = ""
    """The one thread that it is for (`thread:ID`), or the directive with this content (`directive:DIGEST`)."""

    def to_json(self) -> JsonObject:
        """Return the rule as it is shown, without fields that are not set."""
        response: dict[str, Json] = {
            "rule_id": self.id,
            "item": self.item,
            "project": self.project,
            "digest": self.digest,
            "scope": self.scope,
            "actor": self.actor,
            "paths": list(self.paths),
            "hosts": list(self.hosts),
            "argv": list(self.argv),
            "created_at": iso(self.created_at),
            "created_by": self.created_by,
            "expires_at": iso(self.expires_at) if self.expires_at is not None else "",
        }
        return {word: value for word, value in response.items() if value not in ("", [])}


class Receipt(Struct, frozen=True):
    """The record of one call for the audit log: who, what, by which rule and with what outcome; no input or output."""

    id: str
    """The id of the run, where the call left one."""
    at: str
    """When the call began: ISO 8601 in UTC, with milliseconds."""
    actor: str
    surface: str
    """The surface: `cli`, `mcp`, `gateway` or `python`."""
    action: str
    """`run`, `create`, `publish`, …; other verbs with their action, such as `mcp add`."""
    item: str
    """The short name of the item; empty without one."""
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
    """Details as JSON: the approval or rule of the call; more at the level `verbose`."""


class ReceiptHead(Struct, frozen=True):
    """The end of a chain: the number of receipts, and the hash of the last one."""

    count: int = 0
    hash: str = "-"


class ReceiptEntry(Struct, frozen=True):
    """A receipt in its chain: its number, the hash of the previous one, and its own hash."""

    seq: int
    receipt: Receipt
    previous: str
    hash: str

    def to_json(self) -> JsonObject:
        """Return all fields of the receipt, including empty ones, since they are part of the hash."""
        return {"seq": self.seq, **asdict(self.receipt), "previous": self.previous, "hash": self.hash}
