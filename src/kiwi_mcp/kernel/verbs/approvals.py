"""approvals: list, show, approve, deny; rules: list, add, remove."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import partial
from glob import escape
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import Invalid, InvalidRequest, PolicyDenied
from kiwi_mcp.domain.grants import is_plain
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import text_of
from kiwi_mcp.domain.records import Approval, ApprovalRule
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.approvals import ALWAYS, answers_of, rule_from
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.paths import refuse_nowhere
from kiwi_mcp.kernel.threads.wake import wake_threads
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    LongText,
    NameText,
    NoArguments,
    Option,
    Request,
    Response,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, message_items, rows
from kiwi_mcp.policy.approval_rules import is_of_project
from kiwi_mcp.store.approvals import Approvals
from kiwi_mcp.store.runs import new_run

_DAY_MS = 86_400_000
_ANY_VERSION = "@*"
_NARROWED = ("project", "digest", "scope", "actor", "paths", "hosts", "argv", "expires_at")
_EXAMPLE = (
    "Name one item (`note`, `note@*` for all its versions), or write out what is meant: `user/local/*`, `*/note@*`."
)
_TELL = "Tell the owner that it waits: `kiwi approvals list` shows it to them."
_rules = partial(verb, group="approvals rules", access=OWNER)

ApprovalId = Annotated[NameText, Meta(min_length=1), Argument("The approval: its number or id.", "NUMBER")]


class ApprovalsListRequest(Request, frozen=True, kw_only=True):
    """Which approvals to list."""

    status: Annotated[
        Literal["pending", "approved", "denied", "expired", "used", "all"],
        Option("Also answered, used and expired ones.", "--all", kind="flag", value="all"),
    ] = "pending"
    limit: Annotated[int, Meta(ge=1, le=1_000), Option("At most this many.")] = 20


class RuleResponse(Response, frozen=True, kw_only=True):
    """A rule that approves calls beforehand, without what it does not restrict."""

    rule_id: str
    item: str
    project: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    scope: str | UnsetType = UNSET
    actor: str | UnsetType = UNSET
    paths: list[str] | UnsetType = UNSET
    hosts: list[str] | UnsetType = UNSET
    argv: list[str] | UnsetType = UNSET
    created_at: str
    created_by: str | UnsetType = UNSET
    expires_at: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class ApprovalResponse(Response, frozen=True, kw_only=True):
    """One question to the owner and its answer; `preview`, `plan` and `request` for the owner alone."""

    approval_id: str
    number: int
    identity: str | UnsetType = UNSET
    status: str
    reasons: list[str]
    actor: str | UnsetType = UNSET
    project: str | UnsetType = UNSET
    plan_digest: str | UnsetType = UNSET
    created_at: str
    expires_at: str
    decided_at: str | UnsetType = UNSET
    decided_by: str | UnsetType = UNSET
    decided_how: str | UnsetType = UNSET
    reason: str | UnsetType = UNSET
    run_id: str | UnsetType = UNSET
    preview: str | UnsetType = UNSET
    answers: list[str] | UnsetType = UNSET
    """What a yes may be from now on."""
    plan: AnyJson | UnsetType = UNSET
    warning: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    rule: RuleResponse | UnsetType = UNSET
    request: AnyJson | UnsetType = UNSET
    """The call to make again; only the owner's own calls have one."""


class ItemCount(Response, frozen=True, kw_only=True):
    """An item, and how many of the listed approvals are about it."""

    identity: str
    count: int


class ApprovalsListResponse(Response, frozen=True, kw_only=True):
    """Approvals, and the items that they are about."""

    approvals: list[ApprovalResponse]
    items: list[ItemCount]


def _list_view(response: ApprovalsListResponse) -> Iterator[ViewItem]:
    lines = (
        f"{one.number:>3}  {one.status:<8}  {one.identity or ''}  {'; '.join(one.reasons)}"
        for one in response.approvals
    )
    yield from rows(lines, "Nothing waits for you.")
    yield from (Notice(f"{item.identity}: {item.count} of them") for item in response.items if item.count != 1)
    if response.approvals:
        yield Hint("`kiwi approvals show NUMBER`, then `approve NUMBER` or `deny NUMBER`; `watch` asks you one by one.")


@verb("list", group="approvals", access=ANYONE, records=False, aliases=("approvals",), shows=_list_view)
def list_approvals(request: ApprovalsListRequest, context: VerbContext) -> ApprovalsListResponse:
    """List what waits for your approval."""
    store = context.services.store.approvals()
    status = None if request.status == "all" else request.status
    actor = None if context.is_owner else _actor(store, context)
    found = store.list(now_ms(), status=status, actor=actor, limit=request.limit)
    counted = Counter(one.identity for one in found)
    return ApprovalsListResponse(
        approvals=[_response(one) for one in found],
        items=[ItemCount(identity=identity, count=count) for identity, count in counted.most_common()],
    )


def _actor(store: Approvals, context: VerbContext) -> str:
    return context.caller.name or store.owner


def _response(approval: Approval) -> ApprovalResponse:
    return msgspec.convert(approval.to_json(), ApprovalResponse)


class ApprovalShowRequest(Request, frozen=True, kw_only=True):
    """Which approval to show."""

    approval_id: ApprovalId


def _show_view(response: ApprovalResponse) -> Iterator[ViewItem]:
    yield Data(response.preview or "")
    yield Notice(f"question {response.number}: {response.status}; until {response.expires_at}")
    for name in ("decided_at", "decided_how", "reason", "run_id", "warning"):
        if value := getattr(response, name):
            yield Notice(f"{name.replace('_', ' ')}: {value}")
    yield Hint("`--json` shows the whole plan.")


@verb("show", group="approvals", access=ANYONE, records=False, shows=_show_view)
def show_approval(request: ApprovalShowRequest, context: VerbContext) -> ApprovalResponse:
    """Show one approval: the call, its arguments, what it touches, and when the question expires."""
    store = context.services.store.approvals()
    found = store.get(request.approval_id, now_ms())
    if not context.is_owner:  # others see only the status of their own questions
        if found.actor != _actor(store, context):
            raise PolicyDenied("That question is not yours.", suggestion="Name one that you were given the id of.")
        return _response(found)
    response = replace(_response(found), preview=found.preview, answers=[*answers_of(found)], plan=found.plan)
    if found.status == "used" and store.unfinished(found) == found.run_id:
        warning = f"The run {found.run_id} began, and left no record: whether it was done is unknown."
        return replace(response, warning=warning)
    return response


class ApproveRequest(Request, frozen=True, kw_only=True):
    """Which call to approve, and whether also later calls of its tool."""

    approval_id: Annotated[
        Annotated[NameText, Meta(min_length=1)] | None,
        Argument("The approval: its number or id; on a terminal the newest otherwise.", "NUMBER"),
    ] = None
    always: Annotated[
        Literal["none", "this tool", "this server", "this thread", "this directive"],
        Option("Do not ask about this tool again, until it changes.", kind="flag", value="this tool"),
    ] = "none"
    scope: Annotated[
        Literal["once", "tool", "server", "thread", "directive"],
        Option("Approve also later calls: of the tool, of its server, in this thread or by this directive."),
    ] = "once"


def _change_view(response: ApprovalResponse | RuleResponse) -> Iterator[ViewItem]:
    content = response.to_json()
    if preview := content.get("preview"):
        yield Notice(text_of(preview))
    yield from message_items(content)
    if isinstance(response, ApprovalResponse) and response.rule:
        yield Hint(f"`kiwi approvals rules remove {response.rule.rule_id}` takes the rule back.")


@verb("approve", group="approvals", access=OWNER, needs_receipt=True, hint=_TELL, shows=_change_view)
def approve(request: ApproveRequest, context: VerbContext) -> ApprovalResponse:
    """Approve exactly this call, once; also after a denial."""
    store, now, how = context.services.store.approvals(), now_ms(), context.services.surface
    if request.approval_id is None:
        raise InvalidRequest("No question is named.", suggestion="Name one, such as `kiwi approvals approve 3`.")
    found = store.get(request.approval_id, now)
    always = request.always if request.scope == "once" else f"this {request.scope}"
    rule = rule_from(found, store.owner, always) if always != ALWAYS[0] else None
    approved = store.decide(found.id, "approved", by=store.owner, how=how, now=now)
    wake_threads(context.services)
    # Only the caller that asked may use the approval, so only the owner's own calls can run at once.
    is_own = approved.request is not None and approved.actor == store.owner
    return replace(
        _response(approved),
        preview=approved.preview,
        message=f"{approved.identity} may run once, exactly so.",
        rule=_rule_response(store.add_rule(rule)) if rule else UNSET,
        request={**(approved.request or {}), "project_path": approved.project} if is_own else UNSET,
    )


class DenyRequest(Request, frozen=True, kw_only=True):
    """Which call to deny, and why."""

    approval_id: ApprovalId
    reason: Annotated[LongText | None, Option("Why; the caller sees it.")] = None


@verb("deny", group="approvals", access=OWNER, hint=_TELL, shows=_change_view)
def deny(request: DenyRequest, context: VerbContext) -> ApprovalResponse:
    """Deny a call; also after an approval that was not used yet."""
    store, now, how = context.services.store.approvals(), now_ms(), context.services.surface
    found = store.get(request.approval_id, now)
    denied = store.decide(found.id, "denied", by=store.owner, how=how, now=now, reason=request.reason or "")
    wake_threads(context.services)
    return replace(_response(denied), message=f"{denied.identity} is denied. The same call will be refused.")


class RulesListResponse(Response, frozen=True, kw_only=True):
    """All rules."""

    rules: list[RuleResponse]


def _rules_view(response: RulesListResponse) -> Iterator[ViewItem]:
    lines: list[str] = []
    for content in (rule.to_json() for rule in response.rules):
        narrowed = [f"{name}={text_of(content[name])}" for name in _NARROWED if name in content]
        lines.append(f"{content['rule_id']}  {content['item']}  {'  '.join(narrowed)}".rstrip())
    return rows(lines, "There are no rules: you are asked about everything that changes your files or sends data out.")


@_rules("list", wire=("approvals", "rules"), records=False, aliases=("approvals rules",), shows=_rules_view)
def list_rules(request: NoArguments, context: VerbContext) -> RulesListResponse:  # noqa: ARG001 - a verb
    """List the rules that approve calls beforehand."""
    return RulesListResponse(rules=[*map(_rule_response, context.services.store.approvals().rules())])


def _rule_response(rule: ApprovalRule) -> RuleResponse:
    return msgspec.convert(rule.to_json(), RuleResponse)


class RuleAddRequest(Request, frozen=True, kw_only=True):
    """The items that a rule is for, and how narrowly."""

    item: Annotated[
        NameText,
        Meta(min_length=1),
        Argument("One item, NAME@* for all its versions, or a pattern such as 'user/local/*'.", "ITEM"),
    ]
    paths: Annotated[
        tuple[LongText, ...],
        Meta(max_length=50),
        Option("Only if it changes these real paths.", "--path", metavar="PATH", kind="path"),
    ] = ()
    hosts: Annotated[
        tuple[NameText, ...], Meta(max_length=50), Option("Only if it sends to these hosts.", "--host", metavar="HOST")
    ] = ()
    argv: Annotated[
        tuple[LongText, ...],
        Meta(max_length=50),
        Option("The first words of the command, one each, exactly.", "--word", metavar="WORD"),
    ] = ()
    actor: Annotated[LongText | None, Option("Only calls of this actor.")] = None
    days: Annotated[Annotated[int, Meta(ge=1, le=3_650)] | None, Option("For this many days.")] = None


@_rules("add", wire=("approvals", "add_rule"), needs_receipt=True, hint=_TELL, shows=_change_view)
async def add_rule(request: RuleAddRequest, context: VerbContext) -> RuleResponse:
    """Approve calls of an item beforehand."""
    catalogs = context.services.catalogs
    paths = tuple(f"{Path.home()}{path[1:]}" if path.startswith("~/") else path for path in request.paths)
    if any(not path.startswith("/") for path in paths):
        issue = Issue(
            "paths", "is not absolute", "Begin it with `/` or `~/`; links are followed before the comparison."
        )
        raise Invalid("A rule names real paths.", suggestion=issue.fix, issues=[issue.to_json()])
    item, project = await catalogs.near.do(catalogs.space_if_any(None), partial(_items, request.item))
    store, now = context.services.store.approvals(), now_ms()
    rule = ApprovalRule(
        id=new_run(now)[0],
        item=item,
        project=project,
        created_at=now,
        created_by=store.owner,
        actor=request.actor or "",
        paths=paths,
        hosts=request.hosts,
        argv=request.argv,
        expires_at=now + request.days * _DAY_MS if request.days else None,
    )
    added = await asyncio.to_thread(store.add_rule, rule)
    return replace(_rule_response(added), message=f"{added.item} needs no approval, within the limits of the rule.")


def _items(item: str, catalog: Catalog) -> tuple[str, str]:
    """Return the items that a rule is for, as a pattern of full names, and their project if they belong to one.

    A name means the one item that a call of it finds; a rule is for more only if that is written out.
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


class RuleRemoveRequest(Request, frozen=True, kw_only=True):
    """Which rule to remove."""

    rule_id: Annotated[NameText, Meta(min_length=1), Argument("The rule: its id, or the beginning of it.", "RULE")]


@_rules("remove", wire=("approvals", "remove_rule"), hint=_TELL, shows=_change_view)
def remove_rule(request: RuleRemoveRequest, context: VerbContext) -> RuleResponse:
    """Remove a rule."""
    removed = context.services.store.approvals().remove_rule(request.rule_id)
    return replace(
        _rule_response(removed), message=f"{removed.item} needs approval again, within the limits of the rule."
    )
