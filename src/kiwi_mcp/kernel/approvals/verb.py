"""The approvals verb: what waits for the owner, the owner's answers, and the owner's rules."""

from __future__ import annotations

import time
from collections import Counter
from glob import escape

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.approval import Approval, ApprovalRule
from kiwi_mcp.domain.errors import Invalid, InvalidRequest, PolicyDenied
from kiwi_mcp.domain.globs import is_plain
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.kernel.approvals.gate import rule_from
from kiwi_mcp.kernel.approvals.question import ALWAYS
from kiwi_mcp.kernel.places import refuse_nowhere
from kiwi_mcp.kernel.requests import ApprovalsRequest
from kiwi_mcp.policy.asking import is_of_project
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.runs import new_run

_DAY_MS = 86_400_000
_LOOKS = frozenset({"list", "show"})
_ANY_VERSION = "@*"
_EXAMPLE = (
    "Name one item (`note`, `note@*` for all its versions), or write out what is meant: `user/local/*`, `*/note@*`."
)
_NOTHING = ("", "")


def items_meant(item: str, catalog: Catalog) -> tuple[str, str]:
    """Return the items that a rule is to be for, as a pattern of full names, and the project where they are of one.

    A name means the one item that a call of it finds; more is meant only where it is written out.
    """
    name = item.removesuffix(_ANY_VERSION)
    if is_plain(name):
        identity = catalog.resolve(name).tool.identity
        meant = f"{escape(identity.rpartition('@')[0])}{_ANY_VERSION}" if name != item else escape(identity)
    elif "/" in item or item.startswith("*"):
        meant = item
    else:
        issue = Issue("item", "is a pattern of no full name", _EXAMPLE)
        raise Invalid("A rule is for full names.", suggestion=_EXAMPLE, issues=[issue.to_json()])
    if not is_of_project(meant):
        return meant, ""
    refuse_nowhere(catalog.space)
    return meant, str(catalog.space.project)


def answer_approvals(
    request: ApprovalsRequest,
    store: Approvals,
    *,
    is_owner: bool,
    actor: str,
    how: str,
    meant: tuple[str, str] = _NOTHING,
) -> JsonObject:
    """Answer one request about approvals; whoever is not the owner sees how their own questions stand, and no more.

    `meant` are the items that a new rule is for, and their project.
    """
    if not is_owner and request.action not in _LOOKS:
        raise PolicyDenied(
            "What waits for the owner is answered by the owner's own hand, and by nothing that is called.",
            suggestion="Tell the owner that it waits: `kiwi approvals list` shows it to them.",
        )
    now = time.time_ns() // 1_000_000
    match request.action:
        case "list":
            return _list(request, store, now, whose=None if is_owner else actor)
        case "show":
            found = store.get(_named(request), now)
            if not is_owner and found.actor != actor:
                raise PolicyDenied("That question is not yours.", suggestion="Name one that you were given the id of.")
            return _shown(found, store) if is_owner else found.to_json()
        case "approve":
            return _approve(request, store, now, how)
        case "deny":
            found = store.get(_named(request), now)
            reason = request.reason or ""
            denied = store.decide(found.id, "denied", by=store.owner, how=how, now=now, reason=reason)
            return {**denied.to_json(), "message": f"{denied.identity} is denied; whoever asks again is told so."}
        case "rules":
            return {"rules": [rule.to_json() for rule in store.rules()]}
        case "add_rule":
            return _rule_told(store.add_rule(_rule(request, store.owner, now, meant)), "is not asked about any more")
        case "remove_rule":
            return _rule_told(store.remove_rule(_rule_named(request)), "is asked about again")


def _list(request: ApprovalsRequest, store: Approvals, now: int, whose: str | None) -> JsonObject:
    status = None if request.status == "all" else request.status
    found = store.list(now, status=status, actor=whose, limit=request.limit)
    counted = Counter(one.identity for one in found)
    items: list[Json] = [{"identity": identity, "count": count} for identity, count in counted.most_common()]
    return {"approvals": [one.to_json() for one in found], "items": items}


def _shown(found: Approval, store: Approvals) -> JsonObject:
    told = {**found.to_json(), "preview": found.preview, "plan": found.plan}
    if found.status == "used" and store.unfinished(found) == found.run_id:
        told["warning"] = f"The run {found.run_id} began, and left no record: whether it was done is unknown."
    return told


def _approve(request: ApprovalsRequest, store: Approvals, now: int, how: str) -> JsonObject:
    found = store.get(_named(request), now)
    approved = store.decide(found.id, "approved", by=store.owner, how=how, now=now)
    told: dict[str, Json] = {
        **approved.to_json(),
        "preview": approved.preview,
        "message": f"{approved.identity} may run once, exactly so.",
    }
    if request.always != ALWAYS[0]:
        rule = store.add_rule(rule_from(approved, store.owner))
        told["rule"] = rule.to_json()
    # Only whoever asked may use it, so only for the owner's own calls it can be run at once.
    if approved.request is not None and approved.actor == store.owner:
        told["request"] = {**approved.request, "project_path": approved.project}
    return told


def _rule(request: ApprovalsRequest, owner: str, now: int, meant: tuple[str, str]) -> ApprovalRule:
    if not request.item:
        raise _missing("item", _EXAMPLE)
    if any(not path.startswith("/") for path in request.paths):
        issue = Issue("paths", "is not absolute", "Begin it with `/`; links are followed before it is compared.")
        raise Invalid("A rule names real paths.", suggestion=issue.fix, issues=[issue.to_json()])
    return ApprovalRule(
        id=new_run(now)[0],
        item=meant[0],
        project=meant[1],
        created_at=now,
        created_by=owner,
        actor=request.actor or "",
        paths=tuple(request.paths),
        hosts=tuple(request.hosts),
        argv=tuple(request.argv),
        expires_at=now + request.days * _DAY_MS if request.days else None,
    )


def _rule_told(rule: ApprovalRule, said: str) -> JsonObject:
    return {**rule.to_json(), "message": f"{rule.item} {said}, as far as the rule goes."}


def _named(request: ApprovalsRequest) -> str:
    if not request.approval_id:
        raise _missing("approval_id", "Name the question, by the `approval_id` that a list gives.")
    return request.approval_id


def _rule_named(request: ApprovalsRequest) -> str:
    if not request.rule_id:
        raise _missing("rule_id", "Name the rule, by the `rule_id` that `kiwi approvals rules` gives.")
    return request.rule_id


def _missing(place: str, fix: str) -> InvalidRequest:
    issue = Issue(place, "is missing", fix)
    return InvalidRequest(f"The request has no `{place}`.", suggestion=fix, issues=[issue.to_json()])
