"""Answering: what is done for each verb, with the parts of a kernel."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import import_module

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import PolicyDenied
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.approvals.verb import answer_approvals, items_meant
from kiwi_mcp.kernel.audit import audit
from kiwi_mcp.kernel.examining import advice, answer_doctor
from kiwi_mcp.kernel.help import explain
from kiwi_mcp.kernel.init import lay_out
from kiwi_mcp.kernel.load import load
from kiwi_mcp.kernel.migrating import migrate
from kiwi_mcp.kernel.naming import note_namespaces
from kiwi_mcp.kernel.parts import Parts
from kiwi_mcp.kernel.permitting import demand_rules
from kiwi_mcp.kernel.preferences import prefer, suggested
from kiwi_mcp.kernel.registry.exchange import exchange
from kiwi_mcp.kernel.requests import (
    ApprovalsRequest,
    AuditRequest,
    DoctorRequest,
    ExecuteRequest,
    HelpRequest,
    InitRequest,
    KeyRequest,
    LoadRequest,
    McpRequest,
    MemoryRequest,
    MigrateRequest,
    PreferRequest,
    RegistryRequest,
    RelaxRequest,
    Request,
    RunsRequest,
    SearchRequest,
    SecretsRequest,
    TasksRequest,
    UndoRequest,
)
from kiwi_mcp.kernel.running import answer_execute
from kiwi_mcp.kernel.runs import runs
from kiwi_mcp.kernel.searching.sources import asks_registry
from kiwi_mcp.kernel.tasks import tasks
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.store.runs import Runs


async def answer(request: Request, caller: Caller, parts: Parts, witness: Witness | None) -> Answer:
    """Answer a request; `witness` sees what is run for it."""
    if isinstance(request, ExecuteRequest):
        return await answer_execute(request, caller, parts, witness)
    return await _BY_REQUEST[type(request)](request, caller, parts)


async def _search(request: SearchRequest, caller: Caller, parts: Parts) -> Answer:
    aside = parts.catalogs.far if asks_registry(request) else parts.catalogs.near
    look = partial(parts.looking.found, request, caller, parts.rights(caller))
    return Answer(await aside.do(parts.catalogs.space_for(request), look))


async def _load(request: LoadRequest, caller: Caller, parts: Parts) -> Answer:
    rights = parts.rights(caller)
    demand_rules(caller, rights)
    # The owner's files are the owner's to read; whoever else calls sees what they made themselves.
    check = parts.runs(caller).get if caller.name and request.item_type == "output" else None
    catalog, authorship = parts.catalogs.answering(request), parts.authorship(caller)
    result_of = lambda run_id: parts.runs(caller).result(run_id)  # noqa: E731 - looked for when it is asked for
    told = load(request, catalog, result_of, check, authorship, rights)
    parts.remembering.used(as_text(told.get("identity")), catalog.space, caller, is_run=False)
    return Answer(told)


async def _help(request: HelpRequest, _: Caller, parts: Parts) -> Answer:
    notices = (await parts.offers(request.project_path)).notices
    return Answer(explain(request.topic, parts.catalogs.answering(request), notices))


async def _init(request: InitRequest, _: Caller, parts: Parts) -> Answer:
    return Answer(lay_out(parts.catalogs.space(request.project_path)))


async def _registry(request: RegistryRequest, caller: Caller, parts: Parts) -> Answer:
    catalog, is_owner = parts.catalogs.of(request.project_path), parts.is_own_hand(caller)
    try:
        return Answer(await exchange(request, catalog, parts.store, caller.report, is_owner=is_owner))
    finally:
        if request.action == "pull" and not request.dry_run:
            await asyncio.to_thread(note_namespaces, parts.user, parts.store)


async def _mcp(request: McpRequest, caller: Caller, parts: Parts) -> Answer:
    is_owner = parts.is_own_hand(caller)
    if request.action in {"list", "accept", "diff"}:
        look = partial(parts.desk().look, request, is_owner=is_owner)
        return Answer(await parts.catalogs.near.do(parts.catalogs.space_for(request), look))
    told = await parts.desk().act(request, parts.catalogs.answering(request), caller, is_owner=is_owner)
    return Answer(told, exit_code=1 if told.get("empty") else 0)  # a file that was named held nothing


async def _runs(request: RunsRequest, caller: Caller, parts: Parts) -> Answer:
    return Answer(await asyncio.to_thread(runs, request, _seen(request, caller, parts), now=datetime.now(UTC)))


def _seen(request: RunsRequest, caller: Caller, parts: Parts) -> Runs:
    """Return the runs that a request is about: its caller's own, or those that the owner asks for."""
    if not request.actor:
        return parts.runs(caller)
    if not parts.is_own_hand(caller):
        raise PolicyDenied("Whose runs are shown is the owner's to say.", suggestion="Leave out `actor`.")
    return parts.store.runs().named(request.actor)


async def _audit(request: AuditRequest, caller: Caller, parts: Parts) -> Answer:
    def told() -> Answer:
        receipts, is_owner = parts.store.receipts(), parts.is_own_hand(caller)
        return audit(request, receipts, parts.ledger.anchor, now=datetime.now(UTC), is_owner=is_owner)

    return await asyncio.to_thread(told)


async def _prefer(request: PreferRequest, caller: Caller, parts: Parts) -> Answer:
    if request.action == "suggest":
        return Answer(suggested(await advice(request, caller, parts)))
    offering, is_owner = parts.catalogs.offering(request.project_path), parts.is_own_hand(caller)
    return Answer(await asyncio.to_thread(prefer, request, parts.user, offering, is_owner=is_owner))


async def _tasks(request: TasksRequest, caller: Caller, parts: Parts) -> Answer:
    now, is_owner = time.time_ns() // 1_000_000, parts.is_own_hand(caller)
    return Answer(await asyncio.to_thread(lambda: tasks(request, parts.tasks(), now=now, is_owner=is_owner)))


async def _secrets(request: SecretsRequest, caller: Caller, parts: Parts) -> Answer:
    # What opens the store of secrets is loaded by whoever asks about it.
    act_on = import_module("kiwi_mcp.kernel.secrets").act
    return Answer(await act_on(request, parts.catalogs.answering(request), is_owner=parts.is_own_hand(caller)))


async def _key(request: KeyRequest, caller: Caller, parts: Parts) -> Answer:
    act_on = import_module("kiwi_mcp.kernel.keys.verb").act
    return Answer(await asyncio.to_thread(act_on, request, parts.user, is_owner=parts.is_own_hand(caller)))


async def _approvals(request: ApprovalsRequest, caller: Caller, parts: Parts) -> Answer:
    is_owner, meant, catalogs = parts.is_own_hand(caller), ("", ""), parts.catalogs
    if is_owner and request.action == "add_rule" and request.item:
        meant = await catalogs.near.do(catalogs.space_if_any(None), partial(items_meant, request.item))

    def told() -> JsonObject:
        store = parts.store.approvals()
        actor = caller.name or store.owner
        return answer_approvals(request, store, is_owner=is_owner, actor=actor, how=parts.surface, meant=meant)

    return Answer(await asyncio.to_thread(told))


async def _memory(request: MemoryRequest, caller: Caller, parts: Parts) -> Answer:
    is_own = bool(caller.name) or parts.is_own_hand(caller)
    return Answer(await asyncio.to_thread(parts.remembering.tell, request, caller, is_own=is_own))


async def _undo(request: UndoRequest, caller: Caller, parts: Parts) -> Answer:
    undo = import_module("kiwi_mcp.kernel.checkpoints.undo").undo
    space, recorder = parts.catalogs.space(request.project_path), parts.recorder(caller)
    return Answer(await undo(request, space, recorder, is_owner=parts.is_own_hand(caller)))


async def _relax(request: RelaxRequest, caller: Caller, parts: Parts) -> Answer:
    relax = import_module("kiwi_mcp.kernel.relaxing").relax
    catalog, is_owner = parts.catalogs.of(request.project_path), parts.is_own_hand(caller)
    return Answer(await asyncio.to_thread(relax, request, catalog, parts.store, parts.origins, is_owner=is_owner))


async def _migrate(request: MigrateRequest, caller: Caller, parts: Parts) -> Answer:
    catalog, authorship = parts.catalogs.of(request.project_path), parts.authorship(caller)
    return Answer(await migrate(request, catalog, caller.report, authorship))


_BY_REQUEST: Mapping[type[Request], Callable[..., Awaitable[Answer]]] = {
    SearchRequest: _search,
    LoadRequest: _load,
    HelpRequest: _help,
    InitRequest: _init,
    DoctorRequest: answer_doctor,
    RegistryRequest: _registry,
    McpRequest: _mcp,
    RunsRequest: _runs,
    AuditRequest: _audit,
    PreferRequest: _prefer,
    TasksRequest: _tasks,
    SecretsRequest: _secrets,
    KeyRequest: _key,
    ApprovalsRequest: _approvals,
    MemoryRequest: _memory,
    UndoRequest: _undo,
    RelaxRequest: _relax,
    MigrateRequest: _migrate,
}
