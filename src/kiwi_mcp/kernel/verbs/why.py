"""why: each reason why a call would not run, and its rights; relax: let a tool run less strictly, and undo that."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Call, Space
from kiwi_mcp.domain.errors import (
    AddressDenied,
    InvalidArguments,
    InvalidRequest,
    IsolationUnavailable,
    KiwiError,
    NotFound,
    PolicyDenied,
)
from kiwi_mcp.domain.grants import ALL, Allow, Deny, ResourceKind, Rights, Verdict
from kiwi_mcp.domain.isolation import LEVELS, Level
from kiwi_mcp.domain.items import Chain, Needs, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.domain.times import moment
from kiwi_mcp.drivers.composite import step_items
from kiwi_mcp.drivers.sandboxed import check_level
from kiwi_mcp.kernel.approvals import ApprovalGate
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.permission import reaching
from kiwi_mcp.kernel.pipeline import (
    RULES,
    Rule,
    bind,
    bind_plan,
    callable_chain,
    lock_changes,
    lost_links,
    offered_by,
    prepare,
)
from kiwi_mcp.kernel.provenance import Provenances, chain_digest, home_of, may_relax
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    Answer,
    AnyJson,
    Argument,
    NameText,
    Option,
    ProjectRequest,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.verbs.run import CallRequest, Parameters
from kiwi_mcp.kernel.view import Data, ViewItem, rows
from kiwi_mcp.manifest.composite import read_composite
from kiwi_mcp.manifest.templates import defaulted, variables
from kiwi_mcp.policy.authorize import use_verdicts, verify
from kiwi_mcp.policy.isolation import IsolationDecision, change_of, decide_isolation, external_code, remedy, with_remedy
from kiwi_mcp.policy.needs import FileRules, refuse_private_host
from kiwi_mcp.policy.policy_files import minimum
from kiwi_mcp.policy.secret_access import STORE, holder_of, stored_secrets
from kiwi_mcp.primitives.http.addresses import PORTS, is_address, refusal
from kiwi_mcp.primitives.secrets.grants import refuse_holder, refuse_target, refuse_untrusted
from kiwi_mcp.primitives.secrets.reveal import SecretScope, Variables
from kiwi_mcp.store.authors import Relaxation

_NEEDED: Sequence[tuple[ResourceKind, str]] = (
    ("read", "read"),
    ("write", "write"),
    ("host", "hosts"),
    ("command", "commands"),
)
"""The key of `needs` that declares each kind."""
_COMMANDS = (
    "rules for `commands` hold for the program that is started, and for those that `needs.commands` declares; what a "
    "program starts by itself is bounded by its sandbox"
)


def explain_rights(
    chain: Chain, needs: Needs, rights: Rights, space: Space, bind: Callable[[], Plan]
) -> list[JsonObject]:
    """Return a row for each resource that a call uses: whether it may use it, and which rule of which grant decides.

    `needs` are those of its process. `bind` gives the plan; if there is none, what only a plan shows is left out.
    """
    found: list[tuple[str, str, Sequence[Verdict]]] = []
    for place, link in enumerate(chain.links):
        verdicts = rights.verdicts("item", link.identity)
        # The links below an item need no rule of their own, but a rule that denies one of them blocks the item.
        denials = [one for one in verdicts if isinstance(one, Deny) and one.rule]
        found.append(("item", link.identity, denials if place else verdicts))
    for kind, word in _NEEDED:
        for text in getattr(needs, word):
            try:
                verdicts = _verdicts(kind, text, rights, space)
            except KiwiError as error:
                verdicts = (Deny(error.message, "", "the item's needs"),)
            found.append((kind, text, [*verdicts, Allow(f"needs.{word}", text)]))
    uses: dict[tuple[str, str], list[Verdict]] = {}
    try:
        plan = bind()
    except KiwiError:
        pass
    else:
        for kind, resource, verdict in use_verdicts(plan, rights):
            uses.setdefault((kind, resource), []).append(verdict)
    found += [(kind, resource, verdicts) for (kind, resource), verdicts in uses.items()]
    return [_row(kind, resource, verdicts) for kind, resource, verdicts in found if verdicts]


def _verdicts(kind: ResourceKind, text: str, rights: Rights, space: Space) -> tuple[Verdict, ...]:
    if kind in {"read", "write"}:
        return FileRules(rights, space).verdicts(kind, text)
    found = rights.verdicts(kind, text)
    if kind == "host" and not any(isinstance(one, Deny) for one in found):
        refuse_private_host(rights, text)
    return found


def _row(kind: str, resource: str, verdicts: Sequence[Verdict]) -> JsonObject:
    steps: list[Json] = [
        {"grant": one.grant, "rule": one.rule or None, "allowed": isinstance(one, Allow)} for one in verdicts
    ]
    refusal = next((one for one in verdicts if isinstance(one, Deny)), None)
    response: dict[str, Json] = {"kind": kind, "resource": resource, "allowed": refusal is None, "rules": steps}
    return {**response, "reason": refusal.reason} if refusal else response


class ChainLink(Struct, frozen=True):
    """One item of an executor chain."""

    tool_id: str
    tool_type: str
    version: str
    digest: str
    integrity: str
    path: str
    trust: str = ""
    signer: str = ""


class StepChain(Struct, frozen=True):
    """A step of a composite: what it waits for, the chain of what it calls, and why it may not, if it may not."""

    id: str
    needs: tuple[str, ...] = ()
    ask: str = ""
    chain: tuple[ChainLink, ...] = ()
    refused: str = ""
    steps: tuple[StepChain, ...] = ()


class RuleStep(Struct, frozen=True):
    """The rule of one grant about a resource."""

    grant: str
    rule: str | None
    allowed: bool


class ResourceRight(Struct, frozen=True):
    """A resource that a call uses, and whether it may."""

    kind: str
    resource: str
    allowed: bool
    rules: list[RuleStep]
    reason: str = ""


class IsolationNote(Struct, frozen=True):
    """How strictly a process is isolated, and why."""

    level: str = ""
    provenance: str = ""
    decided_by: str = ""
    limited_by: str = ""
    change: str = ""


class ClientNeeds(Struct, frozen=True):
    """What a process is given: hosts, folders to change, and what a server may ask clients for."""

    client: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class ApprovalPreview(Struct, frozen=True):
    """Whether the owner would be asked, and why."""

    needed: bool = False
    reasons: tuple[str, ...] = ()
    rule_id: str | None = None


class RefusalReason(Struct, frozen=True):
    """One reason why a call would not run."""

    code: str
    message: str
    suggestion: str


class WhyResponse(Response, frozen=True, kw_only=True):
    """The chain of an item, its variables and rights, and each reason why a call would not run."""

    tool_id: str
    action: str
    identity: str = ""
    driver: str = ""
    isolation: IsolationNote | None = None
    chain: tuple[ChainLink | str, ...] = ()
    """Names alone if the chain does not resolve."""
    steps: tuple[StepChain, ...] = ()
    """Of a composite: the chain of each step."""
    variables: dict[str, str | None] = field(default_factory=dict)
    needs: AnyJson = None
    rights: tuple[ResourceRight, ...] = ()
    lockfile: tuple[str, ...] = ()
    shadowed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    given: ClientNeeds = ClientNeeds()
    approval: ApprovalPreview = ApprovalPreview()
    would_run: bool
    reasons: list[RefusalReason]


def _view(response: WhyResponse) -> Iterator[ViewItem]:
    links = [link for link in response.chain if isinstance(link, ChainLink)]
    for depth, link in enumerate(links):
        branch = "   " * (depth - 1) + "└─ " if depth else ""
        signed = f"{link.trust.replace('_', ' ')}, {link.signer}" if link.signer else link.integrity
        yield Data(
            f"{branch}{link.tool_id} {link.version}  {link.tool_type}  {signed}  {link.digest[:12]}  {link.path}"
        )
    for line in _tree(response.steps, ""):
        yield Data(line)
    if response.isolation:
        yield Data(_isolation_text(response.isolation))
        if response.isolation.level in {"sandboxed", "restricted"}:
            hosts = ["any public host" if host == "*" else host for host in response.given.hosts]
            yield Data(f"network: {', '.join(hosts) or 'none'}")
            yield Data(f"may change: {', '.join(response.given.writable) or 'no files'}")
    for name, place in response.variables.items():
        yield Data(f"${{{name}}}  {place or 'not set'}")
    for row in response.rights:
        steps = " → ".join(f"{step.grant}: {step.rule or 'no rule'}" for step in row.rules)
        yield Data(f"{'✓' if row.allowed else '✗'} {row.kind} {row.resource}  ({steps})")
    if response.given.client:
        yield Data(f"may ask clients for: {', '.join(response.given.client)}")
    for change in response.lockfile:
        yield Data(f"changed since signing: {change}")
    for note in (*response.notes, *response.shadowed):
        yield Data(f"note: {note}")
    if response.approval.needed:
        yield Data(f"asks you first: it {'; '.join(response.approval.reasons)}")
    elif response.approval.rule_id:
        yield Data(f"needs no approval, by your rule {response.approval.rule_id}")
    yield Data("would run: " + ("yes" if response.would_run else "no"))
    for reason in response.reasons:
        yield Data(f"  ✗ {reason.message}\n      fix: {reason.suggestion}")


def _tree(steps: Sequence[StepChain], indent: str) -> Iterator[str]:
    """Yield the lines of the steps of a composite, with the chain of each below it."""
    for step in steps:
        is_last = step is steps[-1]
        needs = f"  after {', '.join(step.needs)}" if step.needs else ""
        called = [f"{link.tool_id} {link.version}" for link in step.chain]
        parts = ([f"asks: {step.ask}"] if step.ask else []) + ([" → ".join(called)] if called else [])
        yield f"{indent}{'└─' if is_last else '├─'} {step.id}: {'; '.join(parts)}{needs}"
        below = f"{indent}{'   ' if is_last else '│  '}"
        if step.refused:
            yield f"{below}✗ {step.refused}"
        yield from _tree(step.steps, below)


def _isolation_text(note: IsolationNote) -> str:
    """Return how strictly a process is isolated, why, and what would change it."""
    causes = {
        "manifest": "its manifest asks for it",
        "owner": "the owner said so",
        "deployment": "this machine says so",
    }
    cause = causes.get(note.decided_by, f"{note.decided_by} is {note.provenance}")
    limits = f", limits by {note.limited_by}" if note.limited_by else ""
    return f"isolation: {note.level} ({cause}){limits}" + (f"\n  {note.change}" if note.change else "")


class WhyRequest(CallRequest, frozen=True, kw_only=True):
    """The call to explain."""

    parameters: Annotated[Parameters, Argument("Parameters, as for `run`.", "NAME=VALUE", kind="parameters")] = field(
        default_factory=dict
    )


@verb("why", wire=("execute", "why"), access=ANYONE, records=False, everyday="why", response=WhyResponse, shows=_view)
async def why(request: WhyRequest, context: VerbContext) -> Answer:
    """Show an item's executor chain, where its variables come from, and whether it would run."""
    services = context.services
    catalog = services.catalogs.for_item(request.item_id, request.project_path)
    call_context = services.context(context.caller, catalog)
    call = request.call(call_context)
    response: JsonObject = {"tool_id": call.tool_id, "action": "why"}
    try:
        chain = callable_chain(call, call_context)
    except KiwiError as error:
        refused: JsonObject = {**response, "would_run": False, "reasons": [_reason(error)], **error.details}
        return Answer(refused, exit_code=error.exit_code)
    return Answer({**response, **_Question(call, chain, call_context).answered()})


class _Question:
    """One call that is asked about, and what of it several gates look at."""

    def __init__(self, call: Call, chain: Chain, context: Context) -> None:
        space, provenance = call.space, context.services.provenance
        self._call, self._chain, self._context = call, chain, context
        self._process = chain.process
        self._changes = lock_changes(chain, call)
        self._holding = provenance.held(self._process or chain)
        # What a tool says itself, and what the links below it put into a process.
        below = [link.manifest.config if chain.server else link.manifest.config.get("env") for link in chain.links[1:]]
        named = [f"${{{text_of(name)}}}" for name in as_list(chain.tool.manifest.config.get("variables"))]
        templates: Json = [chain.tool.manifest.config, named, *below]
        names, self._spare = variables(templates), defaulted(templates)
        is_accepted = context.catalog.is_meant(chain.server.tool) if chain.server else None
        self._holder = holder_of(chain, space, provenance.authored, is_accepted=is_accepted)
        self._stored = stored_secrets(names, space.user)
        located = Variables().locate(names, project=space.project, user=space.user)
        refused = "" if self._holder.untrusted == () else ", not granted"
        self._places = {name: place and f"{place}{refused}" for name, place in located.items()}
        """Where each variable is set; empty or None where it is not."""
        for name, one in self._stored.items():
            self._places[name] = f"{STORE}, {'' if one.is_granted(self._holder) else 'not '}granted"

    def answered(self) -> JsonObject:
        """Return everything known about the call."""
        call, chain, process, context = self._call, self._chain, self._process, self._context
        rights = reaching(context.rights, chain.server.tool, context.catalog) if chain.server else context.rights
        reasons = self._refusals()
        needs = process.needs if process else Needs()
        rows = explain_rights(chain, needs, rights, call.space, lambda: self._judged().plan)
        # What may not be used is a reason too, where none speaks of it.
        listed = " ".join(text_of(reason["message"]) for reason in reasons)
        denials = [text_of(row["reason"]) for row in rows if "reason" in row]
        reasons += [_denial(reason) for reason in denials if reason not in listed]
        if not call.parameters:  # the question is about the tool, and missing ones are no reason
            reasons = [reason for reason in reasons if reason["code"] != InvalidArguments.code]
        is_ruled = process is not None and any(grant.commands != ALL for grant in rights.grants)
        return {
            "tool_id": chain.tool.id,
            "identity": chain.tool.identity,
            "driver": chain.driver,
            **({"isolation": self._isolation(process.tool)} if process else {}),
            "chain": chain.to_json(),
            **({"steps": steps} if (steps := _step_chains(chain, context)) else {}),
            "variables": {name: place or None for name, place in self._places.items()},
            "needs": chain.needs.to_json(),
            "rights": rows,
            "lockfile": list(self._changes),
            "shadowed": list(chain.shadowed),
            "notes": [*chain.drift, *chain.notes, *([_COMMANDS] if is_ruled else [])],
            **self._planned(),
            "would_run": not reasons,
            "reasons": [reason for place, reason in enumerate(reasons) if reason not in reasons[:place]],
        }

    def _isolation(self, tool: Tool) -> JsonObject:
        """Return how a process is isolated, and what limits all its processes together on this machine."""
        isolation = explain_holding(tool, self._holding)
        with suppress(IsolationUnavailable):
            if limited_by := check_level(self._holding.level, self._call.space):
                return {**isolation, "limited_by": limited_by}
        return isolation

    def _planned(self) -> JsonObject:
        """Return what the process is given, and whether the owner would be asked; nothing where there is no plan."""
        response: dict[str, Json] = {}
        with suppress(KiwiError):
            run = self._judged()
            profile = run.plan.profile.to_json() if run.plan.profile else {}
            given = {word: profile[word] for word in ("readable", "writable", "hidden", "hosts") if profile.get(word)}
            if asked := as_list(as_object(run.plan.facts.get("mcp")).get("client")):
                given["client"] = list(asked)
            if given:
                response["given"] = given
            response["approval"] = ApprovalGate(self._context).preview(run)
        return response

    def _refusals(self) -> list[JsonObject]:
        """Return why each gate refuses the call, those that do."""
        call, chain, context = self._call, self._chain, self._context
        lost = lost_links(chain, call.space, context.services.provenance.held)
        offered = partial(offered_by, chain.tool, context.catalog, context.rights)
        bounds = {name: one.bound for name, one in self._stored.items()}
        unstored = [name for name, place in self._places.items() if place and name not in self._stored]
        gates: list[Callable[[], object]] = [
            lambda: verify(chain, self._changes, lost, is_frozen=call.is_frozen),
            lambda: context.services.drivers.of(chain, offered),
            self._bound,
            *(partial(self._judge, rule) for rule in RULES),
            self._check_level,
            lambda: check_target(self._judged().plan, bounds),
            *(partial(refuse_holder, one, self._holder) for one in self._stored.values()),
            lambda: refuse_untrusted(unstored, self._holder),
        ]
        missing = [name for name, place in self._places.items() if place is None and name not in self._spare]
        return [
            *(reason for gate in gates for reason in _refusals(gate)),
            *(
                {
                    "code": "variable_missing",
                    "message": f"${{{name}}} is set nowhere.",
                    "suggestion": f"Set {name}, or add it to .env.",
                }
                for name in missing
            ),
        ]

    def _judge(self, rule: Rule) -> None:
        rule(self._bound())

    def _judged(self) -> Run:
        """Return the call, once every rule lets it pass."""
        run = self._bound()
        for rule in RULES:
            rule(run)
        return run

    def _bound(self) -> Run:
        """Return the plan of the call or, where no parameters are given, what does not depend on them."""
        call, chain, context = self._call, self._chain, self._context
        run = context.services.recorder.sketch(call)
        try:
            bind(run, context)
        except InvalidArguments:
            schema, url = chain.tool.manifest.parameters, as_text(chain.tool.manifest.config.get("url"))
            # Where it goes must not be made up.
            if call.parameters or (url and (not (host := urlsplit(url).netloc) or "{" in host)):
                raise
            places = {text_of(name): text_of(name) for name in as_list(schema.get("required"))}
            driver = context.services.drivers.of(chain, tuple)
            bind_plan(run, prepare(chain, driver, call, context), places, context)
        return run

    def _check_level(self) -> None:
        if self._process is not None:
            try:
                check_level(self._holding.level, self._call.space)
            except IsolationUnavailable as refused:
                raise with_remedy(refused, self._holding.provenance, self._process.tool) from None


def _step_chains(chain: Chain, context: Context) -> list[JsonObject]:
    """Return the steps of a composite, each with the chain of what it calls; none of what is no composite."""
    if "steps" not in chain.tool.manifest.config or chain.faults:
        return []
    items, found = step_items(chain), list[JsonObject]()
    for step in read_composite(chain.tool.manifest.config).steps:
        ask = step.ask.message if step.ask else ""
        shown: JsonObject = {"id": step.id, "needs": list(step.depends_on()), "ask": ask}
        if step.tool:
            inner = context.catalog.resolve(items[step.tool])
            call = Call(inner.tool.identity, context.space)
            judge = partial(prepare, inner, context.services.drivers.of(inner, tuple), call, context)
            refused = next((text_of(reason["message"]) for reason in _refusals(judge)), "")
            shown = {**shown, "chain": inner.to_json(), "refused": refused, "steps": _step_chains(inner, context)}
        found.append(shown)
    return found


def explain_holding(tool: Tool, holding: IsolationDecision) -> JsonObject:
    """Return how strictly a tool's process is isolated, what decided that, and what would change it."""
    response = holding.to_json()
    change = change_of(tool, holding)
    return {**response, "change": change} if change else response


def check_target(plan: Plan, bounds: Mapping[str, SecretScope]) -> None:
    """Refuse a plan if its address alone shows that it may not be called; `bounds` hold its stored secrets."""
    if not isinstance(plan.spec, HttpSpec):
        return
    target = urlsplit(plan.spec.url)
    host, port = target.hostname or "", target.port or PORTS.get(target.scheme, 0)
    reason = refusal(host, host=host, port=port, granted=plan.spec.granted) if is_address(host) else None
    if reason:
        raise AddressDenied(
            f"{host} cannot be called: {reason}.",
            suggestion=f"If the owner means it, add {target.netloc!r} to `hosts.allow` in ~/.ai/policy.yaml.",
        )
    refuse_target(plan.spec, bounds)


def _refusals(gate: Callable[[], object]) -> list[JsonObject]:
    try:
        gate()
    except KiwiError as error:
        return [_reason(error)]
    return []


def _reason(error: KiwiError) -> JsonObject:
    return {"code": error.code, "message": error.message, "suggestion": error.suggestion}


def _denial(reason: str) -> JsonObject:
    fix = "The owner's rules stand in policy.yaml of the user space; `kiwi help policy` tells of them."
    return {"code": PolicyDenied.code, "message": f"{reason.rstrip('.')}.", "suggestion": fix}


class RelaxedTool(Response, frozen=True, kw_only=True):
    """One relaxed tool; `holds` says whether it is what would run here under its name."""

    identity: str
    digest: str
    level: str
    reason: str
    actor: str
    at: str
    project: str | UnsetType = UNSET
    holds: bool | UnsetType = UNSET


class RelaxListResponse(Response, frozen=True, kw_only=True):
    """The tools that run less strictly than their origin demands."""

    action: str = "list"
    relaxed: list[RelaxedTool]


def _relaxed_view(response: RelaxListResponse) -> Iterator[ViewItem]:
    lines = (
        f"{one.identity}  {one.level}  {one.at[:10]}"
        f"{f'  {one.reason}' if one.reason else ''}{'' if one.holds else '  (not as it is here)'}"
        for one in response.relaxed
    )
    return rows(lines, "Nothing is relaxed: every item runs at the level of its origin.")


@verb(
    "relaxed", group="tool", wire=("relax", "list"), access=OWNER, records=False, is_local=True,
    aliases=("relax", "relax --list"), shows=_relaxed_view,
)  # fmt: skip
async def list_relaxed(request: ProjectRequest, context: VerbContext) -> RelaxListResponse:
    """List the tools that run less strictly than their origin demands."""
    services = context.services
    return await asyncio.to_thread(_all_relaxed, services.store, services.catalogs.of(request.project_path))


def _all_relaxed(store: Store, catalog: Catalog) -> RelaxListResponse:
    found = store.authors().relaxations()
    return RelaxListResponse(relaxed=[filled(RelaxedTool, one, holds=holds(one, catalog)) for one in found])


def holds(one: Relaxation, catalog: Catalog) -> bool:
    """Whether what was relaxed is what would run here under its name."""
    try:
        process = catalog.resolve(one.identity).process
        return process is not None and chain_digest(process) == one.chain
    except KiwiError:
        return False


class UnrelaxRequest(ProjectRequest, frozen=True, kw_only=True):
    """Which tool."""

    item_id: Annotated[NameText, Argument("A tool, by any of its names.", "ITEM")]


class RelaxRequest(UnrelaxRequest, frozen=True, kw_only=True):
    """Which tool, to which level, and why."""

    to: Annotated[
        Literal["trusted", "standard", "sandboxed"], Option("trusted, standard or sandboxed.", metavar="LEVEL")
    ] = "standard"
    reason: Annotated[NameText, Option("Why, for the record.")] = ""


class RelaxResponse(Response, frozen=True, kw_only=True):
    """The tool, and the level that it runs under now."""

    tool_id: str
    action: str = "apply"
    identity: str
    digest: str
    status: str
    level: str
    message: str
    isolation: AnyJson | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


@verb(
    "relax",
    group="tool",
    wire=("relax", "apply"),
    access=OWNER,
    needs_receipt=True,
    is_local=True,
    aliases=("relax ITEM",),
)
async def relax_tool(request: RelaxRequest, context: VerbContext) -> RelaxResponse:
    """Let a tool, exactly as it is now, run less strictly than its origin demands."""
    services = context.services
    catalog = services.catalogs.of(request.project_path)
    return await asyncio.to_thread(_relaxed, request, catalog, services.store, services.provenance)


def _relaxed(request: RelaxRequest, catalog: Catalog, store: Store, origins: Provenances) -> RelaxResponse:
    whole = catalog.resolve(request.item_id)
    chain = whole.process
    if chain is None:
        raise InvalidRequest(
            f"{whole.tool.id!r} starts no process of its own, so it runs in no sandbox.",
            suggestion="What it may reach is set in policy.yaml of the user space.",
            tool_id=whole.tool.id,
        )
    verify(chain, (), lost_links(chain, catalog.space, origins.held), is_frozen=False)
    tool, level = chain.tool, request.to
    before = origins.held(chain)
    _refuse_relaxing(chain, before, level)
    response = RelaxResponse(
        tool_id=tool.id,
        identity=tool.identity,
        digest=tool.digest,
        status="unchanged",
        level=before.level,
        message=f"{tool.id} runs under {before.level} already",
    )
    if LEVELS.index(before.level) <= LEVELS.index(level):
        return response
    home = next(filter(None, map(home_of, chain.links)), "")
    store.authors().relax(
        Relaxation(
            chain=chain_digest(chain),
            identity=tool.identity,
            digest=tool.digest,
            level=level,
            reason=request.reason,
            actor=store.actor.name,
            at=moment(),
            project=str(Path(home).parent) if home else "",
        )
    )
    after = decide_isolation(chain, [link.provenance for link in before.floors], level)
    return replace(
        response,
        status="relaxed",
        level=after.level,
        message=f"{tool.id} runs under {after.level} from now on, as it is now; an edit ends that",
        isolation=explain_holding(tool, after),
        warnings=_relax_warnings(chain, level) or UNSET,
    )


def _relax_warnings(chain: Chain, level: Level) -> list[str]:
    tool = chain.tool
    is_outside = level in {"trusted", "standard"}
    warnings = [f"under {level} it sees and reaches what you do"] if is_outside else []
    if is_outside and (chain.server or tool.manifest.mutates_state or chain.needs.write):
        named = f"'mcp/{tool.id}/*'" if chain.server else tool.id
        warnings.append(f"what changes things asks you first; for a standing yes: `kiwi approvals rules add {named}`")
    if beside := [path for path, _ in external_code(chain)]:
        warnings.append(f"an edit of {', '.join(beside)} ends it too; files beside those, and modules, are not watched")
    return warnings


def _refuse_relaxing(chain: Chain, before: IsolationDecision, level: Level) -> None:
    """Refuse what an owner cannot relax: a stricter level that is required, or code of unknown origin."""
    tool = chain.tool
    least = minimum()
    if least is not None and LEVELS.index(least) > LEVELS.index(level):
        raise PolicyDenied(
            f"This machine holds every process by {least!r} at least, so nothing is relaxed to {level!r}.",
            suggestion="Ask the administrator of this machine: the minimum level is in its deployment file.",
            tool_id=tool.id,
        )
    if LEVELS.index(before.asked) > LEVELS.index(level):
        raise InvalidRequest(
            f"A manifest of its chain asks for {before.asked}, which counts whatever its owner says of {tool.id!r}.",
            suggestion="Take the word `isolation` out of the manifest, if that is yours to do.",
            tool_id=tool.id,
        )
    if not may_relax([link.provenance for link in before.floors], level):
        strange = next(
            link for link, one in zip(chain.links, before.floors, strict=True) if one.provenance == "unknown"
        )
        raise PolicyDenied(
            f"The origin of {strange.identity} is unknown, so it runs only in a sandbox.",
            suggestion=f"{remedy('unknown', strange.identity)} Or relax it to `sandboxed`.",
            tool_id=tool.id,
        )


class UnrelaxResponse(Response, frozen=True, kw_only=True):
    """What is relaxed no longer."""

    action: str = "undo"
    item_id: str
    status: str = "undone"
    message: str
    undone: list[RelaxedTool]


@verb("unrelax", group="tool", wire=("relax", "undo"), access=OWNER, is_local=True, aliases=("relax --undo",))
async def unrelax_tool(request: UnrelaxRequest, context: VerbContext) -> UnrelaxResponse:
    """Run a tool as strictly as its origin demands again."""
    context.services.catalogs.of(request.project_path)  # refuses a project that cannot be used
    return await asyncio.to_thread(_undone, request.item_id, context.services.store)


def _undone(item: str, store: Store) -> UnrelaxResponse:
    authors = store.authors()
    named = item.partition("@")[0]
    gone = list[Relaxation]()
    for one in authors.relaxations():
        full = one.identity.partition("@")[0]
        if named in {full, full.partition("/")[2], full.rpartition("/")[2]}:
            gone.append(one)
    if not gone:
        raise NotFound(f"Nothing by the name {item!r} is relaxed.", suggestion="`kiwi relax --list` shows what is.")
    authors.tighten([one.chain for one in gone])
    identities = ", ".join(dict.fromkeys(one.identity for one in gone))
    return UnrelaxResponse(
        item_id=item,
        message=f"{identities} runs at the level of its origin again",
        undone=[filled(RelaxedTool, one) for one in gone],
    )
