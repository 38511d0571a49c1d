"""The pipeline: one call of one item, through every gate, in one order.

`run` is the whole story. What a call must pass is in the lists `RULES` and `GATES`, and nowhere else; each gate has a
number, and a test of its own in tests/kernel/test_gates.py.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from heapq import nsmallest
from types import MappingProxyType
from typing import TypeAlias

from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lockfile import lock_at, lock_path, lost_signatures
from kiwi_mcp.catalog.mcp_source import is_accepted
from kiwi_mcp.domain.calls import Call, Space, no_answers
from kiwi_mcp.domain.errors import Conflict, LockMismatch, PolicyDenied, RateLimited, SignatureRefused, Unavailable
from kiwi_mcp.domain.grants import Allow, Deny, Rights, Verdict
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.drivers import Driver, unavailable
from kiwi_mcp.kernel.approvals import ApprovalGate
from kiwi_mcp.kernel.checkpoints import checkpoint
from kiwi_mcp.kernel.context import Context
from kiwi_mcp.kernel.permission import reaching
from kiwi_mcp.kernel.prepared import Prepared, plan_digest
from kiwi_mcp.kernel.recorder import CallRecord, Run
from kiwi_mcp.manifest.parameters import accept, output_faults
from kiwi_mcp.policy import secret_access
from kiwi_mcp.policy.approval_rules import hinted_effect, returns_untrusted_text
from kiwi_mcp.policy.authorize import failed_condition, permit, rates_of, use_verdicts, verify, with_file
from kiwi_mcp.policy.isolation import Judge, isolate, names_code
from kiwi_mcp.policy.policy_files import owner_policy
from kiwi_mcp.primitives.secrets import grants
from kiwi_mcp.primitives.secrets.redaction import redacted, without_secrets
from kiwi_mcp.store.rates import Rates

NO_SECRETS: Mapping[str, str] = MappingProxyType({})
_NO_CHECKPOINT = nullcontext()
_MOST_OFFERED = 3
"""How many items of a server an error names, where the server itself was called."""
Rule: TypeAlias = Callable[[Run], None]
"""Raises a KiwiError, or returns. It asks nothing but what is known here."""
Gate: TypeAlias = Callable[[Run, Context], Awaitable[None]]
"""As a rule; it may wait for a server, a machine test or the owner. No gate has a default that lets a call pass."""


async def run(call: Call, context: Context, record: CallRecord | None) -> Run:
    """Resolve, accept, prepare, bind, pass every gate, begin, drive, redact, record: in this order, once per call."""
    services, caller = context.services, context.caller
    async with Run(call, services.runs_or_error(caller), services.recorder, record, caller.journal) as run:
        bind(run, context)  # 1 to 7
        try:
            for rule in RULES:
                rule(run)
            if run.prepared.rates:
                await rate_allows(run, context)  # 11
            for gate in GATES:
                await gate(run, context)
        except _Unreachable as fault:  # a result for the model, no refusal; no approval was used
            if returns_untrusted_text(run.plan, run.chain):
                services.tainted_callers.add(caller.reader)
            return await run.finish(redacted(unavailable(fault.reason), run.secrets or NO_SECRETS))
        secrets = run.secrets or NO_SECRETS
        if call.has_checkpoint or run.chain.tool.manifest.mutates_state:
            mode = owner_policy(call.space.user).checkpoint or caller.checkpoint
            run.checkpoint = await checkpoint.guard_of(  # 16 asked for and impossible: refused
                call.space, mode, run.chain, run.plan, run.id, is_asked=call.has_checkpoint
            )
        async with run.checkpoint or _NO_CHECKPOINT:
            # 20 A caller that is given text from outside may ask for later calls because of it, also if the tool fails.
            if returns_untrusted_text(run.plan, run.chain):
                services.tainted_callers.add(caller.reader)
            await run.begin()  # 17 what changes or sends something is stored as started; the tool's clock starts here
            # 18 A caller that declares nothing that it can be asked is asked by Kiwi alone.
            if not caller.capabilities and caller.ask is not no_answers:
                caller = replace(caller, ask=no_answers)
            outcome = await run.prepared.driver.drive(
                run.plan,
                run.chain,
                call.space,
                secrets=secrets,
                caller=without_secrets(caller, secrets) if secrets else caller,
                dispatch=partial(dispatch, context, run.id),
            )  # 19 sandbox, egress, addresses, redirects: the driver and the primitives enforce them again
        declared, spec = run.chain.tool.manifest.outputs, run.plan.spec
        if declared and outcome.is_success and not run.chain.server and isinstance(spec, ProcessSpec | HttpSpec):
            wrong = output_faults(declared, outcome.result, call.space.project)
            warnings = [f"The result is not what `outputs` declares: {one}." for one in wrong]
            outcome = replace(outcome, warnings=(*outcome.warnings, *warnings)) if wrong else outcome
        return await run.finish(redacted(outcome, secrets))  # 21 the only way an outcome leaves; 22 recorded


async def dispatch(context: Context, run_id: str, verb: str, request: JsonObject) -> Json:
    """Call a verb for the caller of an item that is driven; raise the error of a call that is refused."""
    caller, tools = context.caller, context.caller.origin.tools + (verb == "execute")
    # The journal of a thread notes the call of the item, and none that the item makes.
    caller = replace(caller, origin=replace(caller.origin, run=run_id, tools=tools), journal=None)
    answer = await context.services.dispatch(verb, request, caller)
    if answer.error is not None:
        raise answer.error
    return answer.content


def bind(run: Run, context: Context) -> None:
    """Give a run its prepared item, its exact plan and the plan's digest."""
    call, known = run.call, context.services.prepared
    prepared = known.get(call, context.caller.name, context.catalog, context.rights)
    if prepared is None:
        bind_anew(run, context)
        again = partial(prepare_again, run, context)
        known.put(call, context.caller.name, context.catalog, context.rights, run.prepared.chain, again)
        return
    tool = prepared.chain.tool
    bind_plan(run, prepared, accept(tool.id, tool.manifest.parameters, call.parameters), context)
    run.judged_inputs = run.plan.inputs


def bind_anew(run: Run, context: Context) -> None:
    """Give a run its plan from what is there now, without what was prepared before."""
    call = run.call
    chain = callable_chain(call, context)  # 1 exists, not yanked, definition accepted
    driver = context.services.drivers.of(chain, partial(offered_by, chain.tool, context.catalog, context.rights))  # 2
    # 3 arguments valid, before any message about permissions
    inputs = accept(chain.tool.id, chain.tool.manifest.parameters, call.parameters)
    bind_plan(run, prepare(chain, driver, call, context), inputs, context)
    run.judged_inputs = run.plan.inputs


def callable_chain(call: Call, context: Context) -> Chain:
    """Return the chain of the item that a call names; the name of an MCP server stands for its tool of that name."""
    chain = context.catalog.resolve(call.tool_id, item_type=call.item_type)
    offered = offered_by(chain.tool, context.catalog, context.rights)
    if offered and offered[0].rpartition("/")[2] == chain.tool.id:
        return context.catalog.resolve(offered[0])
    return chain


def prepare_again(run: Run, context: Context) -> Prepared:
    """Return the item of a run, prepared once more from what is there now."""
    chain = callable_chain(run.call, context)
    prepared = prepare(chain, run.prepared.driver, run.call, context)
    if isinstance(run.plan.spec, ProcessSpec) and not chain.server:
        prepared.isolated(run.plan, run.call.space)  # the profile of its sandbox is prepared, too
    return prepared


def bind_plan(run: Run, prepared: Prepared, inputs: JsonObject, context: Context) -> None:
    """Give a run the plan of a prepared item for some inputs, with granted hosts and its isolation written into it."""
    chain, space = prepared.chain, run.call.space
    plan = permit(prepared.driver.bind(chain, inputs, space), prepared.rights)  # 7 granted and denied hosts
    # 6 isolation level by origin and machine, needs granted, code outside of every digest
    if chain.server:
        judge = context.services.provenance.held
        plan = isolate(plan, chain, space, judge, prepared.rights, is_meant=prepared.is_accepted)
        plan = replace(plan, effect=hinted_effect(plan, chain, is_accepted=prepared.is_accepted))
    elif isinstance(plan.spec, ProcessSpec):
        plan = prepared.isolated(plan, space)
        if "file" in chain.tool.manifest.config:
            plan = with_file(plan, chain, space)
    if prepared.is_accepted:
        plan = with_client_requests(plan, chain.executor, context.catalog)
    run.prepared, run.chain, run.plan, run.digest = prepared, chain, plan, plan_digest(plan)


def prepare(chain: Chain, driver: Driver, call: Call, context: Context) -> Prepared:
    """Return all that does not depend on the arguments. A Prepared exists only for what may run."""
    changes, isolation = lock_changes(chain, call), context.services.provenance.held(chain)
    lost = lost_links(chain, call.space, lambda _: isolation)
    warnings = verify(chain, changes, lost, is_frozen=False)  # 4 changed after signing, tampered, unsound chain
    # What accepting a server granted to it; a rule that denies still wins.
    rights = reaching(context.rights, chain.server.tool, context.catalog) if chain.server else context.rights
    # 5 the item, and all it runs on
    refuse_denied(rights.item_verdict([link.identity for link in chain.links], chain.item_traits), chain.tool)
    is_accepted = chain.server is not None and context.catalog.is_meant(chain.server.tool)
    rates = rates_of(rights, chain.tool.identity)
    return Prepared(
        chain, driver, rights, changes, warnings, isolation, is_accepted, names_code(chain), chain.needs, rates
    )


def lockfile_matches(run: Run) -> None:
    """8 Under `frozen`: the chain is the one that was signed."""
    if run.call.is_frozen and (run.prepared.lock_changes or run.chain.drift):
        raise LockMismatch(run.chain.tool.id, [*run.prepared.lock_changes, *run.chain.drift])


def plan_is_permitted(run: Run) -> None:
    """9 Host, command and variables of the plan: a URL's host may come from an argument."""
    for _, _, verdict in use_verdicts(run.plan, run.prepared.rights):
        if isinstance(verdict, Deny):
            refuse_denied(verdict, run.chain.tool)


def conditions_hold(run: Run) -> None:
    """10 Bounds on parameters, hours and days, by the owner's clock."""
    project = run.call.space.project
    if refused := failed_condition(run.prepared.rights, run.plan.identity, run.judged_inputs, project):
        refuse_denied(refused, run.chain.tool)


async def rate_allows(run: Run, context: Context) -> None:
    """11 The rules allow one more call in this minute. It is counted before the owner is asked, in all processes."""
    registry = context.services.store.registry()
    rule, seconds = await to_thread(Rates(registry.database, registry.actor.name).take, run.prepared.rates)
    if rule:
        raise RateLimited(run.chain.tool.id, rule, seconds)


async def secrets_are_granted(run: Run, context: Context) -> None:
    """12 Every variable is set, granted to this recipient and bound to this target."""
    plan, is_accepted = run.plan, run.prepared.is_accepted
    run.secrets = secrets_of(plan, run.chain, context, is_accepted=is_accepted) if plan.variables else NO_SECRETS


async def server_is_unchanged(run: Run, context: Context) -> None:
    """13 The list of an MCP server is fresh, and this item in it is as it was accepted."""
    fault = await context.services.check_server(run.chain, context.catalog)
    if fault is not None:
        raise _Unreachable(fault)


async def sandbox_is_available(run: Run, _: Context) -> None:
    """15 This machine can isolate the process as the plan says. The driver enforces it again."""
    await run.prepared.driver.prepare(run.plan, run.chain, run.call.space)


async def owner_approves(run: Run, context: Context) -> None:
    """14 Continue by a rule, by an unused approval or by the owner's answer; else store the question and refuse."""
    gate = ApprovalGate(context)
    question = await gate.decide(run)  # sets `run.approved_by`, or returns what is to be asked
    if question is None:
        return
    always = await gate.ask(question, run)  # a no, silence or an absent owner is raised
    # The owner took their time: the call is judged once more, by the rules and grants of now.
    now = context.services.context(context.caller, context.catalog)
    again = context.services.recorder.sketch(run.call)
    bind_anew(again, now)
    for rule in RULES:
        rule(again)
    if again.digest != run.digest:
        raise Conflict(
            f"{run.chain.tool.id!r} changed while the owner was asked about it. Nothing was done.",
            suggestion="Call it again: the owner is asked about what it is now.",
        )
    run.secrets = secrets_of(again.plan, again.chain, now, is_accepted=again.prepared.is_accepted)
    run.approved_by = await gate.accept(question, run, always)


RULES: tuple[Rule, ...] = (lockfile_matches, plan_is_permitted, conditions_hold)
"""Also for `--dry-run`, `why` and completion, and again after the owner was asked."""
GATES: tuple[Gate, ...] = (secrets_are_granted, server_is_unchanged, sandbox_is_available, owner_approves)
"""11, the rate, is checked before them where a rule sets one. The budget is checked where a thread reserves the cost
of a model request; other calls have none."""


def plan_call(call: Call, context: Context) -> Run:
    """Return a call as it would run, bound and judged by every rule; nothing is started, asked or recorded."""
    planned = context.services.recorder.sketch(call)
    bind(planned, context)
    for rule in RULES:
        rule(planned)
    return planned


def judge_plan(plan: Plan, prepared: Prepared, call: Call, context: Context) -> Run:
    """Return the run of a plan that was made without a call, judged by every rule, and neither begun nor recorded."""
    run = context.services.recorder.sketch(call)
    run.prepared, run.chain, run.plan, run.digest = prepared, prepared.chain, plan, plan_digest(plan)
    for rule in RULES:
        rule(run)
    return run


class _Unreachable(Exception):
    """A server that cannot be listed: its item cannot be called, and that is a result."""

    def __init__(self, reason: Unavailable) -> None:
        super().__init__(reason.message)
        self.reason = reason


def permit_model_request(plan: Plan, chain: Chain, context: Context) -> tuple[Plan, Mapping[str, str]]:
    """Return a request to a model as it may be sent, and its secrets, by the gates 4, 5, 7, 9 and 12.

    The owner permits it by configuring the provider, so nobody is asked. A project's provider must be signed: it gets
    everything that a thread reads.
    """
    tool = chain.tool
    is_unsigned = tool.origin.is_in_project and tool.trust != "owner"
    if is_unsigned or context.services.provenance.of(tool) in {"model_written", "unknown"}:
        raise SignatureRefused(
            f"You have neither written nor signed the provider {tool.id!r}, and it gets all that a thread reads.",
            suggestion=f"Read it, then `kiwi sign {tool.id}`; or put your own into the `providers` folder of ~/.ai.",
        )
    verify(chain, (), (), is_frozen=False)
    refuse_denied(context.rights.item_verdict([link.identity for link in chain.links]), tool)
    plan = permit(plan, context.rights)
    for _, _, verdict in use_verdicts(plan, context.rights):
        refuse_denied(verdict, tool)
    return plan, secrets_of(plan, chain, context, is_accepted=False)


def secrets_of(plan: Plan, chain: Chain, context: Context, *, is_accepted: bool) -> Mapping[str, str]:
    """Return the values of the plan's variables; one that is set nowhere or not granted is an error before it runs.

    An item of a server gets variables only where the owner accepted the server as it is.
    """
    if not plan.variables:
        return NO_SECRETS
    space = context.space
    needed = [name for name in plan.variables if name not in plan.defaulted]
    is_accepted_server = is_accepted if chain.server else None
    recipient = secret_access.holder_of(
        chain, space, context.services.provenance.authored, is_accepted=is_accepted_server
    )
    secrets = secret_access.secrets_for(needed, recipient, space, optional=plan.defaulted, needed_by=chain.tool.id)
    # Each request is judged again as it is made; a connection that is kept open has been.
    if isinstance(plan.spec, HttpSpec):
        grants.refuse_target(plan.spec, secrets.bounds)
    return secrets


def with_client_requests(plan: Plan, server: Tool, catalog: Catalog) -> Plan:
    """Return a plan with what its server may ask of the client meanwhile, if the owner accepted the server as it is."""
    asked = server.manifest.needs.client
    if not asked or not catalog.is_meant(server):
        return plan
    return replace(plan, facts={**plan.facts, "mcp": {**as_object(plan.facts.get("mcp")), "client": list(asked)}})


def refuse_denied(verdict: Verdict, tool: Tool) -> None:
    """Refuse what no right covers, or what does not meet a condition."""
    if isinstance(verdict, Deny):
        raise PolicyDenied(
            f"{tool.id!r} may not run: {verdict.reason}.",
            suggestion="Ask the owner: the rule stands in policy.yaml or config.yaml of the user space.",
            tool_id=tool.id,
            rule=verdict.rule,
            grant=verdict.grant,
        )


def lock_changes(chain: Chain, call: Call) -> tuple[str, ...]:
    """Return how the chain differs from what was recorded when its tool was signed."""
    path = lock_path(call.space, chain.tool.origin.source)
    if path is None:
        return ()
    lock = lock_at(path)
    if lock.is_recorded(chain):
        return lock.changes(chain)
    return ("it was never signed, so the lockfile does not know it",) if call.is_frozen else ()


def lost_links(chain: Chain, space: Space, judge: Judge) -> Sequence[tuple[Tool, str]]:
    """Return the links that lost the signature that the lockfile names, each with its former signer.

    A link that a model overwrote through Kiwi is not among them: it needs the owner's approval before its first run.
    """
    lost = lost_signatures([*chain.links, *(one.tool for one in chain.references)], space)
    origins = {floor.identity: floor.provenance for floor in judge(chain).floors} if lost else {}
    return [(link, signer) for link, signer in lost if origins.get(link.identity) != "model_written"]


def offered_by(server: Tool, catalog: Catalog, rights: Rights) -> Sequence[str]:
    """Return a few items of an MCP server that the caller may run, first the one that has the server's name.

    Of what is no server, nothing: it would take opening every item to know what runs on it.
    """
    if not catalog.sheets.is_server(server.manifest.tool_type):
        return ()
    entries = catalog.all(["mcp"])
    offered = (entry for entry in entries if entry.namespace == server.id and is_accepted(entry))
    allowed = (one for one in offered if isinstance(rights.item_verdict([one.identity, server.identity]), Allow))
    best = nsmallest(_MOST_OFFERED, allowed, key=lambda entry: (entry.tool_id != server.id, entry.tool_id))
    return [entry.identity.partition("@")[0] for entry in best]
