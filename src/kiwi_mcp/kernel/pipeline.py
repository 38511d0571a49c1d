"""The pipeline: one call, from a name to a record, through every gate in one order."""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache, partial
from heapq import nsmallest
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.catalog.lock import NAME as LOCK_NAME
from kiwi_mcp.catalog.lock import lock_at
from kiwi_mcp.catalog.mcp import is_accepted
from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.caller import NOBODY, Caller, nobody
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import DriverMissing, NotCallable, PolicyDenied, Unavailable
from kiwi_mcp.domain.grants import Allow, Deny, Rights
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.drivers.port import Driver
from kiwi_mcp.drivers.unavailable import unavailable
from kiwi_mcp.kernel.approvals.gate import Admit, Arrival, Passed, unasked
from kiwi_mcp.kernel.checkpoints.guard import UNGUARDED, Guard, Save, unguarded
from kiwi_mcp.kernel.confining import Judge, confine
from kiwi_mcp.kernel.delivery import delivered, holder_of
from kiwi_mcp.kernel.plan_digest import plan_digest
from kiwi_mcp.kernel.reach import reaching
from kiwi_mcp.kernel.redaction import careful, redacted
from kiwi_mcp.kernel.trail import Left, Recorder, Trail
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.manifest.parameters import accept
from kiwi_mcp.policy.authorize import authorize, permit, verify
from kiwi_mcp.policy.conditions import unmet
from kiwi_mcp.policy.floors import unproven
from kiwi_mcp.primitives.bounds import refuse_target
from kiwi_mcp.primitives.secrets import Revealed
from kiwi_mcp.store.outputs import Kept

_drivers: dict[str, Driver | None] = {}
_NO_SECRETS = Revealed({})
_NAMED = 3
"""How many items of a server are named to whoever would run the server."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A call that passed every gate: what it stands on, what it will do, and what the owner should know."""

    chain: Chain
    plan: Plan
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A call that was made: what came of it, and what it left behind."""

    bound: Bound
    outcome: Outcome
    left: Left
    guard: Guard = UNGUARDED
    passed: Passed | None = None
    """By what of the owner's it went on, where the owner had to be asked."""

    @property
    def duration_ms(self) -> int:
        """How long the tool took."""
        return self.left.duration_ms

    @property
    def kept(self) -> Kept | None:
        """The output file, if it could be written."""
        return self.left.kept


Attend: TypeAlias = Callable[[Chain], Awaitable[Unavailable | None]]
"""Looks at a chain that is about to run, and gives why it cannot be reached, if so."""


async def unattended(_: Chain) -> None:
    """Look at nothing."""


async def execute(
    call: Call,
    catalog: Catalog,
    rights: Rights,
    caller: Caller = NOBODY,
    *,
    runs: Recorder = None,
    actor: str = "",
    witness: Witness | None = None,
    attend: Attend = unattended,
    save: Save = unguarded,
    judge: Judge = unproven,
    admit: Admit = unasked,
) -> Run:
    """Resolve, verify, bind, authorize, drive, record: in this order, once per call.

    `attend` looks at the chain of a call that may go ahead, before it does, and gives why it cannot; `save` gives what
    stands around it; `judge` says how strictly it is held; `admit` lets it go on where it may not without the
    owner's word.
    """
    trail = Trail(call, runs, actor, witness)
    try:
        bound = prepare(call, catalog, rights, judge)
        digest = plan_digest(bound.plan)
        trail.set_out(bound.chain.tool.id, bound.plan, digest)
        trail.secrets = secrets = secrets_of(call, bound, judge)
        driver = driver_of(bound.chain)
        fault = await attend(bound.chain)
        if not fault:
            again = partial(_digest_again, call, catalog, rights, judge)
            arrival = Arrival(bound.chain, bound.plan, digest, trail.run_id, secrets, careful(caller, secrets), again)
            await _pass(admit, arrival, trail)
        guard = UNGUARDED if fault else await save(bound.chain, bound.plan, trail.run_id)
        async with guard:
            seen = careful(_for_tools(caller), secrets)
            outcome = (
                unavailable(fault)
                if fault
                else await driver.drive(bound.plan, bound.chain, call.space, secrets=secrets, caller=seen)
            )
    except (Exception, CancelledError) as error:
        await trail.leave(error)
        raise
    outcome = redacted(outcome, secrets)
    left = await trail.finish(outcome)
    found = (*guard.warnings, *left.warnings)
    bound = replace(bound, warnings=(*bound.warnings, *found)) if found else bound
    return Run(bound, outcome, left, guard, trail.passed)


async def _pass(admit: Admit, arrival: Arrival, trail: Trail) -> None:
    """Pass the gate where the owner is asked, and note by what."""
    if passed := await admit(arrival):
        trail.passed = passed
        # The owner's time is not the tool's.
        trail.set_out(arrival.chain.tool.id, arrival.plan, arrival.digest)


def _digest_again(call: Call, catalog: Catalog, rights: Rights, judge: Judge) -> str:
    return plan_digest(prepare(call, catalog, rights, judge).plan)


def _for_tools(caller: Caller) -> Caller:
    """Return a caller as tools see it: who says of nothing that it can be asked that, is asked by Kiwi alone."""
    return caller if caller.capabilities or caller.ask is nobody else replace(caller, ask=nobody)


def secrets_of(call: Call, bound: Bound, judge: Judge) -> Mapping[str, str]:
    """Return the values of the plan's variables; one that is set nowhere or not granted is an error before it runs."""
    plan, chain = bound.plan, bound.chain
    if not plan.variables:
        return _NO_SECRETS
    needed = [name for name in plan.variables if name not in plan.defaulted]
    holder = holder_of(chain, call.space, judge)
    secrets = delivered(needed, holder, call.space, optional=plan.defaulted, needed_by=chain.tool.id)
    # Each request is judged again as it is made; a connection that is kept open has been.
    if isinstance(plan.spec, HttpSpec):
        refuse_target(plan.spec, secrets.bounds)
    return secrets


def prepare(call: Call, catalog: Catalog, rights: Rights, judge: Judge = unproven, *, is_sketch: bool = False) -> Bound:
    """Take a call through every gate before the world is touched; `dry_run` stops here.

    A sketch is never run: its parameters only hold the places of real ones, and are not judged.
    """
    chain = catalog.resolve(call.tool_id)
    driver = driver_of(chain, partial(offered_by, chain.tool, catalog, rights))
    given = call.parameters
    inputs = given if is_sketch else accept(chain.tool.id, chain.tool.manifest.parameters, given)
    warnings = verify(chain, lock_changes(chain, call), is_frozen=call.is_frozen)
    rights = reaching(rights, chain.executor, catalog) if chain.driver == "mcp" else rights
    plan = permit(driver.bind(chain, inputs, call.space), rights)
    refuse_denied(plan, chain, rights, call.space, None if is_sketch else plan.inputs)
    is_meant = chain.driver == "mcp" and catalog.is_meant(chain.executor)
    plan = confine(plan, chain, call.space, judge, rights, is_meant=is_meant)
    return Bound(chain, plan, (*warnings, *plan.warnings))


def refuse_denied(plan: Plan, chain: Chain, rights: Rights, space: Space, inputs: JsonObject | None) -> None:
    """Refuse a plan that no right covers, or that does not meet a condition."""
    verdict = authorize(plan, rights)
    if isinstance(verdict, Allow):
        now = datetime.now().astimezone()  # the hours of a condition are those of the owner's own clock
        verdict = unmet(rights, plan.identity, inputs, space.project, now) or verdict
    match verdict:
        case Deny(reason=reason, rule=rule, grant=grant):
            raise PolicyDenied(
                f"{chain.tool.id!r} may not run: {reason}.",
                suggestion="Ask the owner: the rule stands in the policy.yaml of the user space.",
                tool_id=chain.tool.id,
                rule=rule,
                grant=grant,
            )


def lock_changes(chain: Chain, call: Call) -> tuple[str, ...]:
    """Return how the chain differs from what was recorded when its tool was signed."""
    path = _lock_path(call.space, chain.tool.origin.source)
    if path is None:
        return ()
    lock = lock_at(path)
    if lock.is_recorded(chain):
        return lock.changes(chain)
    return ("it was never signed, so the lockfile does not know it",) if call.is_frozen else ()


@lru_cache(maxsize=64)
def _lock_path(space: Space, source: str) -> Path | None:
    base = {"project": space.project_ai, "user": space.user}.get(source)
    return base / LOCK_NAME if base else None


def offered_by(server: Tool, catalog: Catalog, rights: Rights) -> Sequence[str]:
    """Return a few items of an MCP server that whoever asks may run, first the one that the server hides by its name.

    Of what is no server, nothing: it would take opening every item to know what stands on it.
    """
    if not catalog.sheets.carries(server.manifest.tool_type, "mcp"):
        return ()
    entries = catalog.all(["mcp"])
    offered = (entry for entry in entries if entry.namespace == server.id and is_accepted(entry))
    allowed = (one for one in offered if isinstance(rights.item_verdict([one.identity, server.identity]), Allow))
    best = nsmallest(_NAMED, allowed, key=lambda entry: (entry.tool_id != server.id, entry.tool_id))
    return [entry.identity.partition("@")[0] for entry in best]


def driver_of(chain: Chain, instead: Callable[[], Sequence[str]] = tuple) -> Driver:
    """Return the driver that the type of the chain's tool names; where it names none, `instead` is what has one."""
    tool = chain.tool
    if not chain.driver:
        raise NotCallable(tool.id, tool.manifest.tool_type, "other items run on it", instead=instead())
    driver = load_driver(chain.driver)
    if driver is None:
        raise DriverMissing(tool.id, chain.driver)
    return driver


def load_driver(word: str) -> Driver | None:
    """Return the driver of that name, or None where this version has none."""
    if word not in _drivers:
        _drivers[word] = _import_driver(word)
    return _drivers[word]


def _import_driver(word: str) -> Driver | None:
    # A word in data is a file name in code: `driver: process` is the package drivers/process.
    name = f"kiwi_mcp.drivers.{word}"
    if not word.isidentifier():
        return None
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None
    # Not every module of the package is a driver.
    driver: Driver | None = getattr(module, "driver", None)
    return driver


async def close_drivers() -> None:
    """Let every driver that was used let go of what it keeps open."""
    for driver in filter(None, _drivers.values()):
        await driver.aclose()
