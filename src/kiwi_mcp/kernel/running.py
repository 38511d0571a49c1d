"""Running: the verb `execute`, by which an item is run, planned or explained, or made, changed and shared."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib import import_module

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import InvalidRequest, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.answers import Answer, planned, ran
from kiwi_mcp.kernel.approvals.gate import Gate
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.checkpoints.guard import guard_of
from kiwi_mcp.kernel.keys.signer import Signer
from kiwi_mcp.kernel.naming import note_namespaces
from kiwi_mcp.kernel.parts import Parts
from kiwi_mcp.kernel.pipeline import Run, execute, prepare
from kiwi_mcp.kernel.registry.actions import act
from kiwi_mcp.kernel.requests import REGISTRY_ACTIONS, ExecuteRequest
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.policy.asking import is_from_outside
from kiwi_mcp.policy.owner import owner_policy
from kiwi_mcp.store.runs import Runs

_CHANGING = frozenset({"publish", "pull", "yank", "rollback"})
"""The actions after which a registry may have other namespaces."""


async def answer_execute(request: ExecuteRequest, caller: Caller, parts: Parts, witness: Witness | None) -> Answer:
    """Do with an item what the action of a request says."""
    catalog = parts.catalogs.answering(request)
    match request.action:
        case "why":
            return _Running(request, caller, parts, catalog).explained()
        case "run" if request.dry_run:
            return await _Running(request, caller, parts, catalog).planned()
        case "run":
            return await _Running(request, caller, parts, catalog).done(witness)
    if request.action in REGISTRY_ACTIONS:
        return await _shared(request, caller, parts, catalog)
    authorship = parts.authorship(caller)
    signer = Signer.of(parts.user) if authorship.is_owner and request.action == "sign" else None
    author = Author(catalog, caller.report, is_owner=authorship.is_owner, authorship=authorship, signer=signer)
    return await author.act(request)


async def _shared(request: ExecuteRequest, caller: Caller, parts: Parts, catalog: Catalog) -> Answer:
    try:
        return await act(request, catalog, parts.store, caller, parts.authorship(caller))
    finally:
        if request.action in _CHANGING and not request.dry_run:
            await asyncio.to_thread(note_namespaces, parts.user, parts.store)


class _Running:
    """One call of an item, with the rights of whoever makes it."""

    def __init__(self, request: ExecuteRequest, caller: Caller, parts: Parts, catalog: Catalog) -> None:
        self._request = request
        self._caller = caller
        self._parts = parts
        self._catalog = catalog
        self._call = _call_of(request, catalog)
        self._policy = owner_policy(parts.user)
        self._rights = parts.rights(caller)()
        self._judge = parts.origins.held
        self._gate = Gate(
            parts.store.approvals,
            self._judge,
            self._call,
            actor=caller.name,
            how=parts.surface,
            has_read_others=caller.name in parts.readers,
            is_by_hand=parts.is_own_hand(caller),
        )

    def explained(self) -> Answer:
        """Return what the call stands on, and whether it would run."""
        explain_call = import_module("kiwi_mcp.kernel.why").explain_call
        return Answer(explain_call(self._call, self._catalog, self._rights, self._judge, self._gate.preview))

    async def planned(self) -> Answer:
        """Return what the call would do."""
        bound = prepare(self._call, self._catalog, self._rights, self._judge)
        return planned(bound, await asyncio.to_thread(self._gate.preview, bound.plan, bound.chain))

    async def done(self, witness: Witness | None) -> Answer:
        """Make the call."""
        recorder = self._parts.recorder(self._caller)
        run = await execute(
            self._call,
            self._catalog,
            self._rights,
            self._caller,
            runs=recorder,
            # Whoever's settings cannot be read has no name, and no record either.
            actor=recorder.actor if isinstance(recorder, Runs) else "",
            witness=witness,
            attend=self._attend,
            save=partial(guard_of, self._call.space, self._policy.checkpoint, is_asked=self._request.checkpoint),
            judge=self._judge,
            admit=self._gate.admit,
        )
        self._note(run)
        return ran(run, item_type=self._request.item_type)

    async def _attend(self, chain: Chain) -> Unavailable | None:
        """Before an item of an MCP server is run: hear what the server says of its list, and look at it if need be."""
        if chain.driver != "mcp" or (self._parts.desk_if_any is None and not self._catalog.has_servers):
            return None
        return await self._parts.desk().attend(chain, self._catalog)

    def _note(self, run: Run) -> None:
        """Note who has read words from outside by now, and what was of use."""
        chain, desk = run.bound.chain, self._parts.desk_if_any
        if is_from_outside(run.bound.plan):
            self._parts.readers.add(self._caller.name)
        if not run.outcome.is_success:
            return
        if desk is not None and chain.driver == "mcp":
            desk.used(chain.executor.identity)
        self._parts.remembering.used(chain.tool.identity, self._call.space, self._caller, is_run=True)


def _call_of(request: ExecuteRequest, catalog: Catalog) -> Call:
    if not request.item_id:
        issue = Issue("item_id", "is missing", "Name the item to run.")
        raise InvalidRequest("The request names no item.", suggestion=issue.fix, issues=[issue.to_json()])
    parameters: JsonObject = request.parameters  # type: ignore[assignment]  # JSON came in, so JSON it is
    return Call(request.item_id, catalog.space, parameters, is_frozen=request.frozen)
