"""The audit verb: receipts listed, shown, checked and given away, for the owner."""

from __future__ import annotations

from datetime import datetime

from kiwi_mcp.domain.errors import InvalidRequest, PolicyDenied
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.receipt import Entry
from kiwi_mcp.kernel.anchor import Anchor
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.moments import moment_in
from kiwi_mcp.kernel.requests import AuditRequest
from kiwi_mcp.kernel.runs import short
from kiwi_mcp.store.receipts import ReceiptFilter, Receipts

_MOST_ISSUES = 20
_EXPORTED = 1_000
_EXIT_DAMAGED = 5
_LISTED = ("seq", "id", "at", "actor", "surface", "action", "item", "status", "code", "duration_ms")


def audit(request: AuditRequest, receipts: Receipts, anchor: Anchor, *, now: datetime, is_owner: bool) -> Answer:
    """Answer one request about receipts."""
    if not is_owner:
        raise PolicyDenied(
            "Receipts tell what everybody did, so they are the owner's to read.",
            suggestion="Ask the owner to type `kiwi audit`. What you ran yourself is in `runs`.",
        )
    match request.action:
        case "list":
            return Answer(_list(request, receipts, now))
        case "show":
            return Answer(_told(receipts.required(_named(request.receipt))))
        case "verify":
            return _verify(receipts, anchor)
        case "export":
            return Answer(_export(request.after, receipts))


def _list(request: AuditRequest, receipts: Receipts, now: datetime) -> JsonObject:
    wanted = ReceiptFilter(
        item=short(request.tool) if request.tool else None,
        actor=request.actor,
        action=request.did,
        status=request.status,
        since=moment_in("since", request.since, now),
        until=moment_in("until", request.until, now),
        before=request.before,
        limit=request.limit + 1,  # one more than is told says whether there are more
    )
    found = receipts.list(wanted)
    told = found[: request.limit]
    lines: list[Json] = [_line(entry) for entry in told]
    return {"receipts": lines, "next": told[-1].seq if len(found) > len(told) else None}


def _line(entry: Entry) -> JsonObject:
    whole = entry.to_json()
    return {word: whole[word] for word in _LISTED if whole[word] != ""}


def _told(entry: Entry) -> JsonObject:
    return {word: value for word, value in entry.to_json().items() if value != ""}


def _named(receipt: str | None) -> str:
    if receipt is None:
        issue = Issue("receipt", "is missing", "Name the receipt, by the `seq` or the `id` that a list gives.")
        raise InvalidRequest("The request names no receipt.", suggestion=issue.fix, issues=[issue.to_json()])
    return receipt


def _verify(receipts: Receipts, anchor: Anchor) -> Answer:
    head, faults = receipts.verify(_MOST_ISSUES)
    issues = [*faults, *anchor.issues(receipts)][:_MOST_ISSUES]
    told: dict[str, Json] = {
        "action": "verify",
        "status": "damaged" if issues else "verified",
        "store": receipts.url,
        "count": head.count,
        "head": head.hash,
        "issues": [issue.to_json() for issue in issues],
        "message": (
            f"{len(issues)} fault{'s' * (len(issues) != 1)} found in {head.count} receipts"
            if issues
            else f"{head.count} receipts, each as it was written"
        ),
    }
    return Answer(told, exit_code=_EXIT_DAMAGED if issues else 0)


def _export(after: int, receipts: Receipts) -> JsonObject:
    found = receipts.after(after, _EXPORTED)
    told: list[Json] = [entry.to_json() for entry in found]
    return {"receipts": told, "next": found[-1].seq if len(found) == _EXPORTED else None}
