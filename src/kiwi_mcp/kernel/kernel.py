"""The kernel: every verb, answered; where the parts are joined."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Protocol

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Call, Space
from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import (
    Internal,
    InvalidManifest,
    InvalidRequest,
    KiwiError,
    PolicyDenied,
    ToolNotFound,
    Unavailable,
    VerbNotFound,
)
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.identity import Identity
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import OfferKind
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.answers import Answer, planned, ran, refusal
from kiwi_mcp.kernel.approvals.gate import Gate
from kiwi_mcp.kernel.approvals.verb import answer_approvals, items_meant
from kiwi_mcp.kernel.aside import Aside, kept_for
from kiwi_mcp.kernel.audit import audit
from kiwi_mcp.kernel.authoring import Author
from kiwi_mcp.kernel.checkpoints.guard import guard_of
from kiwi_mcp.kernel.completing import complete
from kiwi_mcp.kernel.confining import Judge
from kiwi_mcp.kernel.context.advice import Advice
from kiwi_mcp.kernel.context.report import advice_for, tell
from kiwi_mcp.kernel.context.tally import Tally
from kiwi_mcp.kernel.help import explain
from kiwi_mcp.kernel.init import lay_out
from kiwi_mcp.kernel.keys.signer import Signer
from kiwi_mcp.kernel.ledger import Ledger
from kiwi_mcp.kernel.load import load
from kiwi_mcp.kernel.migrating import migrate
from kiwi_mcp.kernel.offered import kind_of, offer_of
from kiwi_mcp.kernel.offers import Offering
from kiwi_mcp.kernel.permitting import named_item, permit_verb, refuse_bringing, refuse_hidden
from kiwi_mcp.kernel.pipeline import close_drivers, execute, prepare
from kiwi_mcp.kernel.places import cache_folder, made_private, no_project_space, project_space, user_space
from kiwi_mcp.kernel.preferences import prefer, suggested
from kiwi_mcp.kernel.provenance import Authorship, Origins
from kiwi_mcp.kernel.reading import read
from kiwi_mcp.kernel.registry.actions import act
from kiwi_mcp.kernel.registry.exchange import exchange
from kiwi_mcp.kernel.registry.owner import refuse_strangers
from kiwi_mcp.kernel.remembering import Remembering
from kiwi_mcp.kernel.requests import (
    ACTIONS,
    REGISTRY_ACTIONS,
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
from kiwi_mcp.kernel.runs import runs
from kiwi_mcp.kernel.searching.sources import asks_registry
from kiwi_mcp.kernel.store import Store
from kiwi_mcp.kernel.tasks import tasks
from kiwi_mcp.kernel.trail import Recorder
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.policy.asking import is_from_outside
from kiwi_mcp.policy.authority import Authority, OwnerAuthority, ask, identify
from kiwi_mcp.policy.owner import owner_policy
from kiwi_mcp.policy.preferences import owner_preferences
from kiwi_mcp.store.definitions import Definitions
from kiwi_mcp.store.registry import Registry
from kiwi_mcp.store.runs import Runs
from kiwi_mcp.store.tasks import Tasks

_log = logging.getLogger("kiwi")
_WORD = 100
_LOOK = 0.25
"""For how many seconds whoever waits for the index does not hear how far it is."""
_OF_PROJECT = "project/"
"""How the full names of items begin that are of one project."""
_Anywhere = SearchRequest | LoadRequest | ExecuteRequest | HelpRequest | McpRequest | SecretsRequest
"""What can be asked without a project: it is answered from what is there in every one."""


class McpDesk(Protocol):
    """What is done about MCP servers; it is loaded when one is first used."""

    async def attend(self, chain: Chain, catalog: Catalog) -> Unavailable | None:
        """Look at the server of a chain before it is run, where it may have changed unseen; give why it cannot be."""

    def used(self, identity: str) -> None:
        """Note that a server was used."""

    def look(self, request: McpRequest, catalog: Catalog, *, is_owner: bool) -> JsonObject:
        """Do what a request says that asks no server: tell what is known of them, or accept it."""

    async def act(self, request: McpRequest, catalog: Catalog, caller: Caller, *, is_owner: bool) -> JsonObject:
        """Do what any other request says."""

    async def aclose(self) -> None:
        """Let go of everything."""


class LibraryPort(Protocol):
    """What searches have indexed; it is loaded at the first search."""

    def progress(self) -> tuple[int, int, int]:
        """Return how many items there are, and how many are found by words, and by meaning."""

    def settle(self, seconds: float) -> bool:
        """Wait, for so long at the most, until nothing is left to be indexed; return whether that is so."""

    def close(self) -> None:
        """End what is done in the background."""


class Kernel:
    """Answers every verb for one user: `await kernel.call("execute", {...})`.

    `project` is the project of requests that name none; without it they see what is there in every one. `is_owner`
    says whether requests come from the owner's own hand; a model's do not, and cannot choose where anything is sent.
    `surface` is the way they come, for the receipts. `authority` decides what anybody may do: by the owner's files,
    if no other is given.
    """

    def __init__(
        self,
        project: Path | None = None,
        *,
        user: Path | None = None,
        cache: Path | None = None,
        is_owner: bool = True,
        surface: str = "python",
        authority: Authority | None = None,
    ) -> None:
        self._project = project
        self._user = user or user_space()
        self._cache = cache or made_private(cache_folder())
        self._store = Store(self._user)
        self._origins = Origins(self._store)
        self._ledger = Ledger(self._user, self._store, surface)
        self._authority = authority or OwnerAuthority(self._user)
        self._is_owner = is_owner
        self._surface = surface
        self._tally = Tally(self._cache, surface)
        self._readers: set[str] = set()
        """Who was given words from outside since this kernel began, by name; the owner has none."""
        self._catalogs: dict[Space, Catalog] = {}
        # What is published may be far, and nobody who looks for what is here waits for it.
        self._near, self._far = Aside(self._made), Aside(self._made)
        self._offerings: dict[Space, Offering] = {}
        self._definitions: Definitions | None = None
        self._desk: McpDesk | None = None
        self._library: LibraryPort | None = None
        self._remembering = Remembering(self._store, self._cache / "searches.json" if surface == "cli" else None)
        self._opening = Lock()

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NOBODY) -> Answer:
        """Answer one verb. Refusals are answers too; only cancellation passes through."""
        self._store.look_again()
        witness = self._ledger.witness(verb, payload)
        if witness is None:
            return await self._told(verb, payload, caller, None)
        try:
            answer = await self._told(verb, payload, caller, witness)
        except asyncio.CancelledError:
            await self._ledger.enter_cancelled(witness, caller.name)
            raise
        return await self._ledger.enter(witness, answer, caller.name)

    async def _told(self, verb: str, payload: JsonObject, caller: Caller, witness: Witness | None) -> Answer:
        # What is said back is text that every surface can write, whatever was sent.
        about = {"action": payload["action"]} if verb == "execute" and payload.get("action") in ACTIONS else {}
        item_type = as_text(payload.get("item_type")).encode(errors="replace").decode()[:_WORD] or "tool"
        try:
            request = read_request(verb, payload)
            self.check(request, caller)
            self._permit(verb, request, caller)
            await self._ledger.demand(witness)
            return self._tally.counted(verb, await self._answer(request, caller, witness))
        except KiwiError as error:
            return refusal(self._pointed(error, payload), item_type=item_type, about=about)
        except Exception:  # noqa: BLE001 - the kernel's edge: a fault of ours is an incident, not a traceback
            incident = secrets.token_hex(6)
            _log.exception("incident %s in %s", incident, verb)
            return refusal(Internal(incident), item_type=item_type, about=about)

    def _is_own_hand(self, caller: Caller) -> bool:
        """Whether a caller is the owner's own hand: here, and in nobody else's name."""
        return self._is_owner and not caller.name

    def check(self, request: Request, caller: Caller) -> None:
        """Refuse a request that is not for whoever calls here."""
        if not self._is_own_hand(caller) and isinstance(request, RegistryRequest | ExecuteRequest):
            refuse_strangers(request, self._store.settings)

    def _permit(self, verb: str, request: Request, caller: Caller) -> None:
        """Refuse what is not for a caller to ask, or to know of."""
        permit_verb(self._authority, caller.identity, verb, request)
        refuse_bringing(request)
        if (name := named_item(request)) and isinstance(request, LoadRequest | ExecuteRequest):
            with suppress(InvalidManifest):  # a policy that cannot be read is told of by whatever needs it
                refuse_hidden(self.rights(caller)(), request, name, self._catalog_for(request))

    def authenticate(self, token: str) -> Identity:
        """Return who shows a token, as the authority knows them; refuse one that is nobody's."""
        return identify(self._authority, token)

    def acting(self) -> Caller:
        """Return in whose name is asked what no caller comes with."""
        return NOBODY

    def rights(self, caller: Caller) -> Callable[[], Rights]:
        """Return what gives the rules that hold for a caller, as they stand when it is asked."""
        return partial(ask, self._authority, caller.identity)

    async def offers(self, project_path: str | None = None) -> Offers:
        """Return what a client sees without searching; where no project is known, what it sees in every one."""
        return await asyncio.to_thread(self._offering(project_path).now)

    def offers_mark(self, project_path: str | None = None) -> str:
        """Return another text whenever the offers may have changed since they were last asked for, at little cost."""
        return self._offering(project_path).mark()

    def catalog(self) -> Catalog:
        """Return the items that are seen where a request names no project."""
        return kept_for(self._catalogs, self._space_if_any(None), self._made)

    def offered(self, name: str, kind: OfferKind) -> Offer | None:
        """Return an item as clients see it, whether or not it is listed for them; None where it is of another kind."""
        try:
            chain = self.catalog().resolve(name)
        except KiwiError:
            return None
        return offer_of(chain, name) if kind_of(chain) == kind else None

    def parameters_of(self, item_id: str) -> JsonObject:
        """Return the schema by which what is typed for an item is read: nobody has used or read the item by that.

        It is empty where there is no such item, which is told to whoever then uses it.
        """
        try:
            return self.catalog().find(item_id).manifest.parameters
        except KiwiError:
            return {}

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        """Return what an MCP server proposes for an argument of its prompt or template, of which a part is typed."""
        catalog = self._catalog_for(ExecuteRequest(item_id=item_id))
        rights = self.rights(self.acting())()
        return await complete(item_id, catalog, rights, self._origins.held, argument, value, known)

    def task_after(self) -> float:
        """Return for how many seconds a client that could take a task waits for a call instead."""
        return owner_preferences(self._user).task_after

    def tasks(self) -> Tasks:
        """Return the tasks in the store; opening it may take a while."""
        registry = self._store.registry()
        return Tasks(registry.database, registry.actor.name)

    async def index(self, report: Report, *, seconds: float) -> None:
        """Wait, for so long at the most, until what was searched is indexed; it goes on by itself, too."""
        until = time.monotonic() + seconds
        while self._library is not None and time.monotonic() < until:
            known, worded, encoded = self._library.progress()
            report(Progress("indexing", worded if worded < known else encoded, known))
            if await asyncio.to_thread(self._library.settle, _LOOK):
                return

    async def aclose(self) -> None:
        """Let go of everything the kernel holds open."""
        await self._near.aclose()
        await self._far.aclose()
        if self._desk is not None:
            await self._desk.aclose()
            self._desk = None
        await asyncio.to_thread(self._remembering.close)
        if self._library is not None:
            await asyncio.to_thread(self._library.close)
        self._catalogs.clear()
        self._offerings.clear()
        await self._ledger.aclose()
        self._store.close()
        self._origins.forget()
        await close_drivers()

    async def _answer(self, request: Request, caller: Caller, witness: Witness | None) -> Answer:  # noqa: PLR0912 - one case for each verb
        match request:
            case SearchRequest():
                aside = self._far if asks_registry(request) else self._near
                return Answer(await aside.do(self._space_for(request), partial(self._found, request, caller)))
            case LoadRequest():
                self._demand_rules(caller)
                # The owner's files are the owner's to read; whoever else calls sees what they made themselves.
                check = self._runs(caller).get if caller.name and request.item_type == "output" else None
                catalog, authorship = self._catalog_for(request), self._authorship(caller)
                result_of = lambda run_id: self._runs(caller).result(run_id)  # noqa: E731 - looked for when it is asked for
                told = load(request, catalog, result_of, check, authorship, self.rights(caller))
                self._remembering.used(as_text(told.get("identity")), catalog.space, caller, is_run=False)
                return Answer(told)
            case ExecuteRequest():
                return await self._execute(request, caller, witness)
            case HelpRequest():
                return Answer(await self._help(request))
            case InitRequest():
                return Answer(lay_out(self._space(request.project_path)))
            case DoctorRequest():
                return await self._examined(request, caller)
            case RegistryRequest():
                catalog, is_owner = self._catalog(request.project_path), self._is_own_hand(caller)
                return Answer(await exchange(request, catalog, self._store, caller.report, is_owner=is_owner))
            case McpRequest() if request.action in {"list", "accept", "diff"}:
                look = partial(self._mcp().look, request, is_owner=self._is_own_hand(caller))
                return Answer(await self._near.do(self._space_for(request), look))
            case McpRequest():
                catalog = self._catalog_for(request)
                told = await self._mcp().act(request, catalog, caller, is_owner=self._is_own_hand(caller))
                return Answer(told, exit_code=1 if told.get("empty") else 0)  # a file that was named held nothing
            case RunsRequest():
                seen = self._seen(request, caller)
                return Answer(await asyncio.to_thread(runs, request, seen, now=datetime.now(UTC)))
            case AuditRequest():
                return await asyncio.to_thread(self._audit, request, caller)
            case PreferRequest(action="suggest"):
                return Answer(suggested(await self._advice(request, caller)))
            case PreferRequest():
                offering, is_owner = self._offering(request.project_path), self._is_own_hand(caller)
                told = await asyncio.to_thread(prefer, request, self._user, offering, is_owner=is_owner)
                return Answer(told)
            case TasksRequest():
                now, is_owner = time.time_ns() // 1_000_000, self._is_own_hand(caller)
                told = await asyncio.to_thread(lambda: tasks(request, self.tasks(), now=now, is_owner=is_owner))
                return Answer(told)
            case SecretsRequest():
                # What opens the store of secrets is loaded by whoever asks about it.
                act_on = import_module("kiwi_mcp.kernel.secrets").act
                return Answer(await act_on(request, self._catalog_for(request), is_owner=self._is_own_hand(caller)))
            case KeyRequest():
                act_on = import_module("kiwi_mcp.kernel.keys.verb").act
                is_owner = self._is_own_hand(caller)
                return Answer(await asyncio.to_thread(act_on, request, self._user, is_owner=is_owner))
            case ApprovalsRequest():
                return Answer(await self._approvals(request, caller))
            case MemoryRequest():
                is_own = bool(caller.name) or self._is_own_hand(caller)
                return Answer(await asyncio.to_thread(self._remembering.tell, request, caller, is_own=is_own))
            case UndoRequest():
                undo = import_module("kiwi_mcp.kernel.checkpoints.undo").undo
                space, recorder = self._space(request.project_path), self._recorder(caller)
                return Answer(await undo(request, space, recorder, is_owner=self._is_own_hand(caller)))
            case RelaxRequest():
                change = import_module("kiwi_mcp.kernel.relaxing").relax
                catalog, is_owner = self._catalog(request.project_path), self._is_own_hand(caller)
                act_on = partial(change, request, catalog, self._store, self._origins, is_owner=is_owner)
                return Answer(await asyncio.to_thread(act_on))
            case MigrateRequest():
                catalog, authorship = self._catalog(request.project_path), self._authorship(caller)
                return Answer(await migrate(request, catalog, caller.report, authorship))
            case _:
                raise TypeError(type(request))

    def _found(self, request: SearchRequest, caller: Caller, catalog: Catalog) -> JsonObject:
        """Search, in a thread beside the loop: the first time, loading what searches need takes a moment."""
        self._demand_rules(caller)
        find = import_module("kiwi_mcp.kernel.find").find
        recall = self._remembering.recall(catalog.space, caller)
        told: JsonObject = find(request, catalog, self._searched(), rights=self.rights(caller), recall=recall)
        self._remembering.asked(request.query, told, catalog.space, caller)
        return told

    def _demand_rules(self, caller: Caller) -> None:
        """Refuse whoever is not the owner where the rules, which may hide things from them, cannot be read."""
        if caller.name:
            self.rights(caller)()

    def _told_of_search(self, catalog: Catalog) -> str:
        told: str = import_module("kiwi_mcp.kernel.searching.opening").told_of_search(
            catalog, self._searched(), self._store
        )
        return told

    def _searched(self) -> LibraryPort:
        with self._opening:
            if self._library is None:
                make: Callable[[Store], LibraryPort]
                make = import_module("kiwi_mcp.kernel.searching.opening").open_library
                self._library = make(self._store)
            return self._library

    def _audit(self, request: AuditRequest, caller: Caller) -> Answer:
        receipts, anchor = self._store.receipts(), self._ledger.anchor
        return audit(request, receipts, anchor, now=datetime.now(UTC), is_owner=self._is_own_hand(caller))

    async def _help(self, request: HelpRequest) -> JsonObject:
        notices = (await self.offers(request.project_path)).notices
        return explain(request.topic, self._catalog_for(request), notices)

    async def _execute(self, request: ExecuteRequest, caller: Caller, witness: Witness | None) -> Answer:
        catalog = self._catalog_for(request)
        if request.action in {"run", "why"}:
            call = self._call(request, catalog)
            policy = owner_policy(self._user)
            rights = self.rights(caller)()
            if request.action == "why":
                explain_call = import_module("kiwi_mcp.kernel.why").explain_call
                return Answer(explain_call(call, catalog, rights, self._origins.held, self._gate(call, caller).preview))
            if request.dry_run:
                bound = prepare(call, catalog, rights, self._origins.held)
                preview = self._gate(call, caller).preview
                return planned(bound, await asyncio.to_thread(preview, bound.plan, bound.chain))
            recorder = self._recorder(caller)
            # Whoever's settings cannot be read has no name, and no record either.
            actor = recorder.actor if isinstance(recorder, Runs) else ""
            attend = partial(self._attend, catalog)
            save = partial(guard_of, catalog.space, policy.checkpoint, is_asked=request.checkpoint)
            run = await execute(
                call, catalog, rights, caller, runs=recorder, actor=actor, witness=witness, attend=attend, save=save,
                judge=self._origins.held, admit=self._gate(call, caller).admit,
            )  # fmt: skip
            if is_from_outside(run.bound.plan):
                self._readers.add(caller.name)
            if self._desk is not None and run.outcome.is_success and run.bound.chain.driver == "mcp":
                self._desk.used(run.bound.chain.executor.identity)
            if run.outcome.is_success:
                self._remembering.used(run.bound.chain.tool.identity, catalog.space, caller, is_run=True)
            return ran(run, item_type=request.item_type)
        if request.action in REGISTRY_ACTIONS:
            authorship = self._authorship(caller)
            return await act(request, catalog, self._store, caller, authorship)
        authorship = self._authorship(caller)
        signer = Signer.of(self._user) if authorship.is_owner and request.action == "sign" else None
        author = Author(catalog, caller.report, is_owner=authorship.is_owner, authorship=authorship, signer=signer)
        return await author.act(request)

    def _gate(self, call: Call, caller: Caller) -> Gate:
        """Return where a call waits for the owner's word, if it has to."""
        return Gate(
            self._store.approvals,
            self._origins.held,
            call,
            actor=caller.name,
            how=self._surface,
            has_read_others=caller.name in self._readers,
            is_by_hand=self._is_own_hand(caller),
        )

    async def _approvals(self, request: ApprovalsRequest, caller: Caller) -> JsonObject:
        is_owner, meant = self._is_own_hand(caller), ("", "")
        if is_owner and request.action == "add_rule" and request.item:
            meant = await self._near.do(self._space_if_any(None), partial(items_meant, request.item))

        def answer() -> JsonObject:
            store = self._store.approvals()
            actor = caller.name or store.owner
            return answer_approvals(request, store, is_owner=is_owner, actor=actor, how=self._surface, meant=meant)

        return await asyncio.to_thread(answer)

    async def _examined(self, request: DoctorRequest, caller: Caller) -> Answer:
        # What holds processes is loaded by whoever starts one, or asks about it.
        standings = import_module("kiwi_mcp.drivers.held").standings
        examine: Callable[..., JsonObject] = import_module("kiwi_mcp.kernel.doctor").examine
        offers = await self.offers(request.project_path)
        servers = await self._servers(request, caller)
        await standings(self._space(request.project_path))  # tests the machine, unless that was done before
        is_owner = self._is_own_hand(caller)
        context = tell(offers, self._tally, await self._advice(request, caller) if is_owner else None)
        search = await self._far.do(self._space(request.project_path), self._told_of_search)
        health = examine(self._catalog(request.project_path), self._store, offers, servers, context, search)
        return Answer(health, exit_code=1 if health["status"] == "problem" else 0)

    async def _advice(self, request: DoctorRequest | PreferRequest, caller: Caller) -> Sequence[Advice]:
        """Return what the owner might send always, or send no longer, from how it was used."""
        if not self._is_own_hand(caller):
            message = "What was used, and how often, is the owner's to know."
            raise PolicyDenied(message, suggestion="Ask them to type `kiwi prefer suggest`.")
        offers = await self.offers(request.project_path)
        space = self._space_if_any(request.project_path)
        return await self._near.do(space, lambda catalog: advice_for(catalog, self._store, offers, self._tally))

    async def _servers(self, request: DoctorRequest, caller: Caller) -> Sequence[JsonObject]:
        """Return the MCP servers as a list tells of them; that a store cannot be read is told by itself."""
        look = partial(self._mcp().look, McpRequest(), is_owner=self._is_own_hand(caller))
        try:
            told = await self._near.do(self._space(request.project_path), look)
        except KiwiError:
            return ()
        return [as_object(server) for server in as_list(told.get("servers"))]

    def _mcp(self) -> McpDesk:
        if self._desk is None:
            make: Callable[[Path, Callable[[], Definitions], Callable[[], Iterable[Catalog]], Judge], McpDesk]
            make = import_module("kiwi_mcp.kernel.mcp.verbs").McpVerb
            self._desk = make(self._user, self._remembered, self._catalogs.values, self._origins.held)
        return self._desk

    async def _attend(self, catalog: Catalog, chain: Chain) -> Unavailable | None:
        """Before an item of an MCP server is run: hear what the server says of its list, and look at it if need be."""
        if chain.driver != "mcp" or (self._desk is None and not catalog.has_servers):
            return None
        return await self._mcp().attend(chain, catalog)

    def _remembered(self) -> Definitions:
        """Return what is remembered of MCP servers."""
        return self._remembered_in(self._store.registry())

    def _remembered_in(self, registry: Registry) -> Definitions:
        known = self._definitions
        if known is None or known.database is not registry.database:
            known = self._definitions = Definitions(registry.database, registry.actor.name)
        return known

    def _remembered_if_any(self) -> Definitions | None:
        """Return what is remembered of MCP servers; a store that was never used is not made to find out."""
        registry = self._store.registry_if_any()
        return self._remembered_in(registry) if registry else None

    def _authorship(self, caller: Caller) -> Authorship:
        """Return a caller as the author of what they write: the owner's own hand, or somebody else's."""
        return Authorship(self._origins, caller.name or self._surface, is_owner=self._is_own_hand(caller))

    def _runs(self, caller: Caller) -> Runs:
        """Return the runs of a caller, who sees no others: the owner's, unless it says who else it is."""
        runs = self._store.runs()
        return runs.of(caller.name) if caller.name else runs

    def _seen(self, request: RunsRequest, caller: Caller) -> Runs:
        """Return the runs that a request is about: its caller's own, or those that the owner asks for."""
        if not request.actor:
            return self._runs(caller)
        if not self._is_own_hand(caller):
            raise PolicyDenied("Whose runs are shown is the owner's to say.", suggestion="Leave out `actor`.")
        return self._store.runs().named(request.actor)

    def _recorder(self, caller: Caller) -> Recorder:
        """Return where runs are recorded, or why they cannot be: a tool runs all the same."""
        try:
            runs = self._runs(caller)
        except KiwiError as error:
            return error
        self._store.hold()
        return runs

    def _call(self, request: ExecuteRequest, catalog: Catalog) -> Call:
        if not request.item_id:
            issue = Issue("item_id", "is missing", "Name the item to run.")
            raise InvalidRequest("The request names no item.", suggestion=issue.fix, issues=[issue.to_json()])
        parameters: JsonObject = request.parameters  # type: ignore[assignment]  # JSON came in, so JSON it is
        return Call(request.item_id, catalog.space, parameters, is_frozen=request.frozen)

    def _space(self, project_path: str | None) -> Space:
        return project_space(project_path, self._project, user=self._user, cache=self._cache)

    def _catalog(self, project_path: str | None) -> Catalog:
        return kept_for(self._catalogs, self._space(project_path), self._made)

    def _catalog_for(self, request: _Anywhere) -> Catalog:
        """Return the catalog of a request's project, or of what belongs to none where no project is known."""
        return kept_for(self._catalogs, self._space_for(request), self._made)

    def _space_for(self, request: _Anywhere) -> Space:
        if _is_about_a_project(request):
            return self._space(request.project_path)
        return self._space_if_any(request.project_path)

    def _pointed(self, error: KiwiError, payload: JsonObject) -> KiwiError:
        """Return an error that says, where an item was not found, that no project was looked through."""
        if isinstance(error, ToolNotFound) and self._project is None and payload.get("project_path") is None:
            error.suggestion = f"{error.suggestion} What is in a project is found with its `project_path`."
        return error

    def _offering(self, project_path: str | None) -> Offering:
        return kept_for(self._offerings, self._space_if_any(project_path), lambda space: Offering(self._made(space)))

    def _space_if_any(self, project_path: str | None) -> Space:
        is_known = project_path is not None or self._project is not None
        return self._space(project_path) if is_known else no_project_space(self._user, self._cache)

    def _made(self, space: Space) -> Catalog:
        return Catalog(space, registry=self._store.registry, definitions=self._remembered_if_any)


def _is_about_a_project(request: _Anywhere) -> bool:
    """Whether a request names the project's own items, so that it has to say which project that is."""
    match request:
        case SearchRequest():
            return request.source == "project"
        case LoadRequest():
            return "project" in (request.source, request.destination) or request.item_id.startswith(_OF_PROJECT)
        case ExecuteRequest():
            return (request.item_id or "").startswith(_OF_PROJECT)
        case _:
            return False


def read_request(verb: str, payload: JsonObject) -> Request:
    """Return the request of a verb, or refuse it with every fault that its words have."""
    known = BY_NAME.get(verb)
    if known is None:
        raise VerbNotFound(verb, verbs=list(BY_NAME))
    return read(known.request, verb, payload)
