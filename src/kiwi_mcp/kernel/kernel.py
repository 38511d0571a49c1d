"""The kernel: every verb, answered."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.caller import NOBODY, Caller
from kiwi_mcp.domain.errors import Internal, InvalidManifest, KiwiError, ToolNotFound, VerbNotFound
from kiwi_mcp.domain.grants import Rights
from kiwi_mcp.domain.identity import Identity
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import OfferKind
from kiwi_mcp.domain.offers import Offer, Offers
from kiwi_mcp.domain.outcome import Report
from kiwi_mcp.kernel.answering import answer
from kiwi_mcp.kernel.answers import Answer, refusal
from kiwi_mcp.kernel.completing import complete
from kiwi_mcp.kernel.offered import kind_of, offer_of
from kiwi_mcp.kernel.parts import Parts
from kiwi_mcp.kernel.permitting import named_item, permit_verb, refuse_bringing, refuse_hidden
from kiwi_mcp.kernel.pipeline import close_drivers
from kiwi_mcp.kernel.places import cache_folder, made_private, user_space
from kiwi_mcp.kernel.reading import read
from kiwi_mcp.kernel.registry.owner import refuse_strangers
from kiwi_mcp.kernel.requests import ACTIONS, ExecuteRequest, LoadRequest, RegistryRequest, Request
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.kernel.witness import Witness
from kiwi_mcp.policy.authority import Authority, OwnerAuthority, identify
from kiwi_mcp.policy.preferences import owner_preferences
from kiwi_mcp.store.tasks import Tasks

_log = logging.getLogger("kiwi")
_WORD = 100


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
        self._user = user or user_space()
        own = authority or OwnerAuthority(self._user)
        folder = cache or made_private(cache_folder())
        self._parts = Parts(project, self._user, folder, own, is_owner=is_owner, surface=surface)

    async def call(self, verb: str, payload: JsonObject, caller: Caller = NOBODY) -> Answer:
        """Answer one verb. Refusals are answers too; only cancellation passes through."""
        self._parts.store.look_again()
        ledger = self._parts.ledger
        witness = ledger.witness(verb, payload)
        if witness is None:
            return await self._told(verb, payload, caller, None)
        try:
            told = await self._told(verb, payload, caller, witness)
        except asyncio.CancelledError:
            await ledger.enter_cancelled(witness, caller.name)
            raise
        return await ledger.enter(witness, told, caller.name)

    async def _told(self, verb: str, payload: JsonObject, caller: Caller, witness: Witness | None) -> Answer:
        # What is said back is text that every surface can write, whatever was sent.
        about = {"action": payload["action"]} if verb == "execute" and payload.get("action") in ACTIONS else {}
        item_type = as_text(payload.get("item_type")).encode(errors="replace").decode()[:_WORD] or "tool"
        try:
            request = read_request(verb, payload)
            self.check(request, caller)
            self._permit(verb, request, caller)
            await self._parts.ledger.demand(witness)
            return self._parts.tally.counted(verb, await answer(request, caller, self._parts, witness))
        except KiwiError as error:
            return refusal(self._pointed(error, payload), item_type=item_type, about=about)
        except Exception:  # noqa: BLE001 - the kernel's edge: a fault of ours is an incident, not a traceback
            incident = secrets.token_hex(6)
            _log.exception("incident %s in %s", incident, verb)
            return refusal(Internal(incident), item_type=item_type, about=about)

    def check(self, request: Request, caller: Caller) -> None:
        """Refuse a request that is not for whoever calls here."""
        if not self._parts.is_own_hand(caller) and isinstance(request, RegistryRequest | ExecuteRequest):
            refuse_strangers(request, self._parts.store.settings)

    def _permit(self, verb: str, request: Request, caller: Caller) -> None:
        """Refuse what is not for a caller to ask, or to know of."""
        permit_verb(self._parts.authority, caller.identity, verb, request)
        refuse_bringing(request)
        if (name := named_item(request)) and isinstance(request, LoadRequest | ExecuteRequest):
            with suppress(InvalidManifest):  # a policy that cannot be read is told of by whatever needs it
                refuse_hidden(self.rights(caller)(), request, name, self._parts.catalogs.answering(request))

    def authenticate(self, token: str) -> Identity:
        """Return who shows a token, as the authority knows them; refuse one that is nobody's."""
        return identify(self._parts.authority, token)

    def acting(self) -> Caller:
        """Return in whose name is asked what no caller comes with."""
        return NOBODY

    def rights(self, caller: Caller) -> Callable[[], Rights]:
        """Return what gives the rules that hold for a caller, as they stand when it is asked."""
        return self._parts.rights(caller)

    async def offers(self, project_path: str | None = None) -> Offers:
        """Return what a client sees without searching; where no project is known, what it sees in every one."""
        return await self._parts.offers(project_path)

    def offers_mark(self, project_path: str | None = None) -> str:
        """Return another text whenever the offers may have changed since they were last asked for, at little cost."""
        return self._parts.catalogs.offering(project_path).mark()

    def catalog(self) -> Catalog:
        """Return the items that are seen where a request names no project."""
        return self._parts.catalogs.unnamed()

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
        catalog = self._parts.catalogs.answering(ExecuteRequest(item_id=item_id))
        rights = self.rights(self.acting())()
        return await complete(item_id, catalog, rights, self._parts.origins.held, argument, value, known)

    def task_after(self) -> float:
        """Return for how many seconds a client that could take a task waits for a call instead."""
        return owner_preferences(self._user).task_after

    def tasks(self) -> Tasks:
        """Return the tasks in the store; opening it may take a while."""
        return self._parts.tasks()

    async def index(self, report: Report, *, seconds: float) -> None:
        """Wait, for so long at the most, until what was searched is indexed; it goes on by itself, too."""
        await self._parts.looking.index(report, seconds=seconds)

    async def aclose(self) -> None:
        """Let go of everything the kernel holds open."""
        await self._parts.aclose()
        await close_drivers()

    def _pointed(self, error: KiwiError, payload: JsonObject) -> KiwiError:
        """Return an error that says, where an item was not found, that no project was looked through."""
        if isinstance(error, ToolNotFound) and not self._parts.catalogs.project and payload.get("project_path") is None:
            error.suggestion = f"{error.suggestion} What is in a project is found with its `project_path`."
        return error


def read_request(verb: str, payload: JsonObject) -> Request:
    """Return the request of a verb, or refuse it with every fault that its words have."""
    known = BY_NAME.get(verb)
    if known is None:
        raise VerbNotFound(verb, verbs=list(BY_NAME))
    return read(known.request, verb, payload)
