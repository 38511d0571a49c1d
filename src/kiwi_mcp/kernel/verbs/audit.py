"""audit: the receipts of all calls; list, show, verify, export."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from kiwi_mcp.domain.records import RunStatus
from kiwi_mcp.domain.times import moment_in
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import (
    OWNER,
    AnyJson,
    Argument,
    NameText,
    NoArguments,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, field_rows, issue_text, rows
from kiwi_mcp.manifest.names import short
from kiwi_mcp.store.receipts import ReceiptFilter

_MOST_ISSUES = 20
_EXPORTED = 1_000
_EXIT_DAMAGED = 5
_ASK = "Ask the owner to type `kiwi audit`. What you ran yourself is in `runs`."
_WHEN = "ISO 8601, or an age: 30m, 2h, 3d."


class AuditListRequest(Request, frozen=True, kw_only=True):
    """Which receipts to list."""

    tool: Annotated[NameText | None, Option("Only about this tool, by its short name.")] = None
    actor: Annotated[NameText | None, Option("Only calls of this actor.")] = None
    did: Annotated[
        NameText | None, Option("Only this action: run, create, 'mcp add', …", "--action", metavar="ACTION")
    ] = None
    status: Annotated[RunStatus | None, Option("success, error, refused, timeout, cancelled, …")] = None
    since: Annotated[NameText | None, Option(_WHEN, metavar="WHEN")] = None
    until: Annotated[NameText | None, Option(_WHEN, metavar="WHEN")] = None
    limit: Annotated[int, Meta(ge=1, le=1_000), Option("At most this many.")] = 20
    before: Annotated[Annotated[int, Meta(ge=1, le=2**62)] | None, Option("Continue before this number.")] = None


class ReceiptLine(Response, frozen=True, kw_only=True):
    """A receipt as lists show it."""

    seq: int
    id: str
    at: str
    actor: str
    surface: str
    action: str
    item: str | UnsetType = UNSET
    status: str
    code: str | UnsetType = UNSET
    duration_ms: int


class AuditListResponse(Response, frozen=True, kw_only=True):
    """Receipts, the newest first, and where the next page begins."""

    receipts: list[ReceiptLine]
    next: int | None


def _list_view(response: AuditListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_row, response.receipts), "No receipts to show.")
    if response.next is not None:
        yield Hint(f"continue with `kiwi audit list --before {response.next}`")


def _row(one: ReceiptLine) -> str:
    outcome = f"{one.status} {one.code or ''}".rstrip()
    did = f"{one.action} {one.item or ''}".rstrip()
    return f"{one.seq:>6}  {one.at[:19]}  {f'{one.actor}@{one.surface}':<16}  {did:<32}  {outcome}"


@verb("list", group="audit", access=OWNER, hint=_ASK, records=False, aliases=("audit",), shows=_list_view)
def list_receipts(request: AuditListRequest, context: VerbContext) -> AuditListResponse:
    """List receipts, the newest first."""
    now = datetime.now(UTC)
    wanted = ReceiptFilter(
        item=short(request.tool) if request.tool else None,
        actor=request.actor,
        action=request.did,
        status=request.status,
        since=moment_in("since", request.since, now),
        until=moment_in("until", request.until, now),
        before=request.before,
        limit=request.limit + 1,  # one more than is returned shows whether there are more
    )
    found = context.services.store.receipts().list(wanted)
    listed = found[: request.limit]
    following = listed[-1].seq if len(found) > len(listed) else None
    lines = [filled(ReceiptLine, entry.receipt, seq=entry.seq) for entry in listed]
    return AuditListResponse(receipts=lines, next=following)


class AuditShowRequest(Request, frozen=True, kw_only=True):
    """Which receipt to show."""

    receipt: Annotated[NameText, Argument("Its number, its id, or the beginning of that.", "RECEIPT")]


class ReceiptResponse(Response, frozen=True, kw_only=True):
    """One whole receipt."""

    seq: int
    id: str
    at: str
    actor: str
    surface: str
    action: str
    item: str | UnsetType = UNSET
    status: str
    level: str
    code: str | UnsetType = UNSET
    identity: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    plan_digest: str | UnsetType = UNSET
    verdict: str | UnsetType = UNSET
    arguments_sha256: str | UnsetType = UNSET
    outcome_sha256: str | UnsetType = UNSET
    duration_ms: int
    cost_micros: int
    detail: str | UnsetType = UNSET
    previous: str
    hash: str


@verb("show", group="audit", access=OWNER, hint=_ASK, records=False, shows=partial(field_rows, width=17))
def show_receipt(request: AuditShowRequest, context: VerbContext) -> ReceiptResponse:
    """Show one whole receipt."""
    entry = context.services.store.receipts().required(request.receipt)
    return filled(ReceiptResponse, entry.receipt, seq=entry.seq, previous=entry.previous, hash=entry.hash)


class AuditVerifyResponse(Response, frozen=True, kw_only=True):
    """Whether the chain of receipts is whole, and every fault found."""

    action: str = "verify"
    status: str
    store: str
    count: int
    head: str
    issues: list[dict[str, AnyJson]]
    message: str

    def exit_status(self) -> int:
        """Return 5 for damaged receipts."""
        return _EXIT_DAMAGED if self.issues else 0


def _verify_view(response: AuditVerifyResponse) -> Iterator[ViewItem]:
    for issue in response.issues:
        yield Data(issue_text(issue))
    yield Data(response.message)
    yield Notice(f"  store: {response.store}")
    yield Notice(f"  head:  {response.head}")


@verb("verify", group="audit", access=OWNER, hint=_ASK, records=False, shows=_verify_view)
def verify(request: NoArguments, context: VerbContext) -> AuditVerifyResponse:  # noqa: ARG001 - a verb
    """Check that no receipt was changed, removed, moved or cut off."""
    receipts = context.services.store.receipts()
    head, faults = receipts.verify(_MOST_ISSUES)
    issues = [*faults, *context.services.recorder.head.issues(receipts)][:_MOST_ISSUES]
    return AuditVerifyResponse(
        status="damaged" if issues else "verified",
        store=receipts.url,
        count=head.count,
        head=head.hash,
        issues=[dict(issue.to_json()) for issue in issues],
        message=(
            f"{len(issues)} fault{'s' * (len(issues) != 1)} found in {head.count} receipts"
            if issues
            else f"{head.count} receipts, each as it was written"
        ),
    )


class AuditExportRequest(Request, frozen=True, kw_only=True):
    """Where to start."""

    after: Annotated[int, Meta(ge=0, le=2**62), Option("Start after this number.")] = 0


class AuditExportResponse(Response, frozen=True, kw_only=True):
    """Whole receipts with all their fields, since they are part of the hash; and where the next page begins."""

    receipts: list[dict[str, AnyJson]]
    next: int | None


@verb("export", group="audit", access=OWNER, hint=_ASK, records=False)
def export(request: AuditExportRequest, context: VerbContext) -> AuditExportResponse:
    """Write all receipts to standard output, one line of JSON each, to be checked anywhere."""
    found = context.services.store.receipts().after(request.after, _EXPORTED)
    following = found[-1].seq if len(found) == _EXPORTED else None
    return AuditExportResponse(receipts=[dict(entry.to_json()) for entry in found], next=following)
