"""Why: what a call stands on, where each variable comes from, and whether it would run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import AddressDenied, InvalidArguments, IsolationUnavailable, KiwiError, PolicyDenied
from kiwi_mcp.domain.grants import ALL, Rights
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_text, text_of
from kiwi_mcp.domain.needs import Needs
from kiwi_mcp.domain.plan import HttpSpec, Plan
from kiwi_mcp.drivers.held import check_level
from kiwi_mcp.kernel.confining import Judge, of_server
from kiwi_mcp.kernel.delivery import STORE, held, holder_of
from kiwi_mcp.kernel.pipeline import Bound as Planned
from kiwi_mcp.kernel.pipeline import driver_of, lock_changes, offered_by, prepare
from kiwi_mcp.kernel.reach import reaching
from kiwi_mcp.kernel.verdicts import explain_rights
from kiwi_mcp.manifest.check import HELD, STARTS
from kiwi_mcp.manifest.render import defaulted, variables
from kiwi_mcp.policy.authorize import verify
from kiwi_mcp.policy.floors import Holding, change_of, unproven, with_remedy
from kiwi_mcp.primitives.addresses import is_address, refusal
from kiwi_mcp.primitives.bounds import PORTS, refuse_holder, refuse_target
from kiwi_mcp.primitives.secrets import Bound, Variables

_FIX = "The owner's rules stand in policy.yaml of the user space; `kiwi help policy` tells of them."
_COMMANDS = (
    "rules for `commands` hold for the program that is started, and for those that `needs.commands` declares; what a "
    "program starts by itself is bounded by its sandbox"
)
Preview: TypeAlias = Callable[[Plan, Chain], JsonObject]
"""Says whether a plan would wait for the owner."""


def explain_call(
    call: Call, catalog: Catalog, rights: Rights, judge: Judge = unproven, preview: Preview | None = None
) -> JsonObject:
    """Return the chain, its versions and digests, the origin of every variable, and each reason not to run."""
    told: dict[str, Json] = {"tool_id": call.tool_id, "action": "why"}
    try:
        chain = catalog.resolve(call.tool_id)
    except KiwiError as error:
        return {**told, "would_run": False, "reasons": [_reason(error)], **error.details}
    return {**told, **_Question(call, chain, catalog, rights, judge).answered(preview)}


class _Question:
    """One call that is asked about, and what of it several gates look at."""

    def __init__(self, call: Call, chain: Chain, catalog: Catalog, rights: Rights, judge: Judge) -> None:
        self._call = call
        self._chain = chain
        self._offered = partial(offered_by, chain.tool, catalog, rights)
        names, self._spare = _variables(chain)
        self._holder, self._stored = holder_of(chain, call.space, judge), held(names, call.space.user)
        self._found = self._located(names)
        self._process = _process_of(chain)
        self._rights = reaching(rights, chain.executor, catalog) if _is_served(chain) else rights
        self._plan = partial(_planned, call, chain, catalog, rights, judge)
        self._changes, self._holding = lock_changes(chain, call), judge(self._process or chain)

    def answered(self, preview: Preview | None) -> JsonObject:
        """Return all that is known of the call."""
        chain, process = self._chain, self._process
        reasons = self._refusals()
        needs = process.needs if process else Needs()
        rows = explain_rights(chain, needs, self._rights, self._call.space, lambda: self._plan().plan)
        reasons = self._counting([*reasons, *_untold(rows, reasons)])
        return {
            "tool_id": chain.tool.id,
            "identity": chain.tool.identity,
            "driver": chain.driver,
            **({"isolation": explain_holding(process.tool, self._holding)} if process else {}),
            "chain": chain.to_json(),
            "variables": {name: place or None for name, place in self._found.items()},
            "needs": chain.needs.to_json(),
            "rights": rows,
            "lockfile": list(self._changes),
            "shadowed": list(chain.shadowed),
            "notes": [*chain.drift, *chain.notes, *_bounds(self._rights, process)],
            **_given(self._plan),
            **(_approval(preview, self._plan) if preview else {}),
            "would_run": not reasons,
            "reasons": _distinct(reasons),
        }

    def _located(self, names: Sequence[str]) -> Mapping[str, str | None]:
        """Return where each variable is set, if it is."""
        space = self._call.space
        found = Variables().locate(names, project=space.project, user=space.user)
        stored = {
            name: f"{STORE}, {'' if one.is_granted(self._holder) else 'not '}granted"
            for name, one in self._stored.items()
        }
        return {**found, **stored}

    def _refusals(self) -> list[JsonObject]:
        """Return why each gate refuses the call, those that do."""
        call, chain = self._call, self._chain
        bounds = {name: one.bound for name, one in self._stored.items()}
        gates: list[Callable[[], object]] = [
            lambda: verify(chain, self._changes, is_frozen=call.is_frozen),
            lambda: driver_of(chain, self._offered),
            lambda: _check_level(self._process, self._holding, call.space),
            lambda: check_target(self._plan().plan, bounds),
            *(partial(refuse_holder, one, self._holder) for one in self._stored.values()),
        ]
        missing = [name for name, place in self._found.items() if place is None and name not in self._spare]
        return [*(reason for gate in gates for reason in _refusals(gate)), *map(_missing, missing)]

    def _counting(self, reasons: list[JsonObject]) -> list[JsonObject]:
        # Without parameters the question is about the tool, and missing ones are no reason.
        if self._call.parameters:
            return reasons
        return [reason for reason in reasons if reason["code"] != InvalidArguments.code]


def _variables(chain: Chain) -> tuple[Sequence[str], Sequence[str]]:
    """Return the variables that a chain names, and those of them that it can do without."""
    # What a tool says itself, and what the links below it put into a process.
    below = [link.manifest.config if _is_served(chain) else link.manifest.config.get("env") for link in chain.links[1:]]
    named = [f"${{{text_of(name)}}}" for name in as_list(chain.tool.manifest.config.get("variables"))]
    templates: Json = [chain.tool.manifest.config, named, *below]
    return variables(templates), defaulted(templates)


def _is_served(chain: Chain) -> bool:
    """Whether an item is what a server offers, whose every word may name a variable."""
    return chain.driver == "mcp"


def _missing(name: str) -> JsonObject:
    return {
        "code": "variable_missing",
        "message": f"${{{name}}} is set nowhere.",
        "suggestion": f"Set {name}, or add it to .env.",
    }


def _planned(call: Call, chain: Chain, catalog: Catalog, rights: Rights, judge: Judge) -> Planned:
    """Return the plan of a call or, where no parameters are given, what does not depend on them."""
    try:
        return prepare(call, catalog, rights, judge)
    except InvalidArguments:
        schema, url = chain.tool.manifest.parameters, as_text(chain.tool.manifest.config.get("url"))
        # Where it goes must not be made up.
        if call.parameters or (url and (not (host := urlsplit(url).netloc) or "{" in host)):
            raise
        places = {text_of(name): text_of(name) for name in as_list(schema.get("required"))}
        return prepare(replace(call, parameters=places), catalog, rights, judge, is_sketch=True)


def _untold(rows: Sequence[JsonObject], reasons: Sequence[JsonObject]) -> list[JsonObject]:
    """Return a reason for each thing that may not be used, where none speaks of it."""
    told = " ".join(text_of(reason["message"]) for reason in reasons)
    refused = [text_of(row["reason"]) for row in rows if "reason" in row]
    return [
        {"code": PolicyDenied.code, "message": f"{reason.rstrip('.')}.", "suggestion": _FIX}
        for reason in refused
        if reason not in told
    ]


def _bounds(rights: Rights, process: Chain | None) -> list[str]:
    """Return how far rules for programs reach, where there are any."""
    is_ruled = process is not None and any(grant.commands != ALL for grant in rights.grants)
    return [_COMMANDS] if is_ruled else []


def _given(bind: Callable[[], Planned]) -> JsonObject:
    """Return what of the owner's the process is given, by its needs and by its command; nothing where there is none."""
    try:
        jail = bind().plan.jail
    except KiwiError:
        return {}
    told = jail.to_json() if jail else {}
    given = {word: told[word] for word in ("readable", "writable", "hidden", "hosts") if told.get(word)}
    return {"given": given} if given else {}


def _approval(preview: Preview, bind: Callable[[], Planned]) -> JsonObject:
    """Return whether the owner would be asked first; nothing where there is no plan to ask about."""
    try:
        bound = bind()
        return {"approval": preview(bound.plan, bound.chain)}
    except KiwiError:
        return {}


def explain_holding(tool: Tool, holding: Holding) -> JsonObject:
    """Return how strictly a tool's process is held, what decided that, and what would change it."""
    told = holding.to_json()
    change = change_of(tool, holding)
    return {**told, "change": change} if change else told


def _process_of(chain: Chain) -> Chain | None:
    """Return the links that run as a process, and are held: a server's own, for what it offers; None where none do."""
    if chain.driver == "mcp" and chain.primitive.id == STARTS:
        return of_server(chain)
    return chain if chain.driver == HELD else None


def _check_level(process: Chain | None, holding: Holding, space: Space) -> None:
    if process is None:
        return
    try:
        check_level(holding.level, space)
    except IsolationUnavailable as refused:
        raise with_remedy(refused, holding.provenance, process.tool) from None


def check_target(plan: Plan, bounds: Mapping[str, Bound]) -> None:
    """Refuse a plan whose address can be seen, without asking anybody, to be one that may not be called.

    `bounds` hold the stored secrets among its variables.
    """
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


def _distinct(reasons: list[JsonObject]) -> list[JsonObject]:
    return [reason for place, reason in enumerate(reasons) if reason not in reasons[:place]]
