"""What clients see without searching (over `kernel/tool_list`): per client, watched, list-changed events."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from time import monotonic
from typing import Final, TypeAlias
from urllib.parse import unquote

import anyio
import mcp_types as types
from mcp.server.connection import Connection
from mcp.server.lowlevel import Server
from mcp.server.subscriptions import (
    InMemorySubscriptionBus,
    ListenHandler,
    PromptsListChanged,
    ResourcesListChanged,
    ResourceUpdated,
    ServerEvent,
    ToolsListChanged,
)
from mcp.shared.exceptions import MCPError
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.mcp import Offer, Offers
from kiwi_mcp.kernel.verbs import VERBS
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi, connection_of

_log = logging.getLogger("kiwi")

ONLY_META_TOOLS = Offers(meta_tools=tuple(verb.name for verb in VERBS if verb.is_meta_tool))
"""What is always there, also where nothing else can be found out."""

View: TypeAlias = Callable[[Offers], Offers]
"""Removes from the offers what the caller may not know about."""
_FRESH = 1.0
"""For how many seconds the tool of a name is the one that it was."""
_PATIENCE, _FIRST_PATIENCE = 0.5, 10.0
"""For how many seconds a client waits for new offers where there are older ones, and where there are none yet."""
HELP = "kiwi://help/"
KNOWLEDGE = "kiwi://knowledge/"
SKILL = "kiwi://skill/"
INTERVAL: Final = 2.0
"""How often the list is checked while a client listens, in seconds."""
SOON: Final = 0.5
"""How soon it is looked at after a call, which may have changed something."""
_WATCHED = 64
"""How many resources one client may watch."""
_SENDING = 5.0
"""How long a client may take to read that something changed, in seconds."""


def everything(offers: Offers) -> Offers:
    """Leave nothing out."""
    return offers


class ClientToolList:
    """The offers of one kernel, kept for as long as their mark stays the same."""

    def __init__(self, kernel: KernelApi, view: View = everything) -> None:
        self._kernel = kernel
        self._view = view
        self._mark: str | None = None
        self._offers = ONLY_META_TOOLS
        self._is_read = False
        self._looked_at = 0.0
        self._tools: dict[str, Offer] = {}
        self._reading: asyncio.Task[None] | None = None

    async def now(self) -> Offers:
        """Return the offers for the caller."""
        return self._view(await self.read())

    async def read(self) -> Offers:
        """Return all offers; the same object as long as nothing changes, the older ones while new ones take long."""
        if self._reading is not None:  # begun before this was asked, so it may have missed what is asked for
            await self._wait_for(self._reading)
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        await self._wait_for(self._reading)
        return self._offers

    async def _wait_for(self, reading: asyncio.Task[None]) -> None:
        await asyncio.wait({reading}, timeout=_PATIENCE if self._is_read else _FIRST_PATIENCE)
        if reading.done():
            reading.result()

    async def _read(self) -> None:
        offers = self._offers
        try:
            mark, self._looked_at = self._kernel.offers_mark(), monotonic()
            if mark != self._mark:
                offers = await self._kernel.offers()
                self._mark = mark
        except KiwiError as error:  # a project that is not there: each call says so, and the meta-tools stay
            _log.warning("what clients see cannot be found out: %s", error.message)
            offers = ONLY_META_TOOLS
            self._mark = None
        finally:
            self._reading = None
        self._is_read = True
        if offers != self._offers:
            self._offers = offers
            self._tools = {offer.name: offer for offer in offers.tools}

    @property
    def last(self) -> Offers | None:
        """The offers as they were last read, if they ever were."""
        return self._offers if self._is_read else None

    async def tool(self, name: str) -> Offer | None:
        """Return the tool that clients call by a name, if one is offered."""
        # Every check runs again at the call, so for a moment a name may still mean what its caller saw.
        if name not in self._tools or monotonic() - self._looked_at > _FRESH:
            await self.read()
        return self.known_tool(name)

    def known_tool(self, name: str) -> Offer | None:
        """Return the tool with a name among the offers that were read last, if the caller may know about it."""
        offer = self._tools.get(name)
        return offer if offer is None or self._view(Offers((), (offer,))).tools else None


def tail(uri: str, head: str) -> str:
    """Return what an address names below one of Kiwi's own; nothing where it does not begin like that."""
    return unquote(uri.removeprefix(head)) if uri.startswith(head) else ""


class _Hearer(Struct):
    """A client that can be notified of changes, and the resources it watches."""

    connection: Connection | None = None
    """The connection for notifications to a client of the handshake era; others listen on streams of their own."""
    uris: set[str] = field(default_factory=set)


class ToolListWatcher:
    """Checks the list for changes while a client listens."""

    def __init__(
        self, kernel: KernelApi, *, interval: float = INTERVAL, soon: float = SOON, view: View = everything
    ) -> None:
        self.menu = ClientToolList(kernel, view)
        self._kernel = kernel
        self._bus = InMemorySubscriptionBus()
        self._listen = ListenHandler(self._bus)
        self._hearers: dict[int, _Hearer] = {}
        self._seen = ONLY_META_TOOLS
        self._digests: dict[str, str] = {}
        self._is_outdated = False
        self._is_due = False
        self._watch: asyncio.Task[None] | None = None
        self._ticks, self._tick = max(round(interval / soon), 1), soon

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Let a server's clients subscribe to changes."""
        server.add_request_handler("subscriptions/listen", types.SubscriptionsListenRequestParams, self._listened)
        server.add_request_handler("resources/subscribe", types.SubscribeRequestParams, self._subscribed)
        server.add_request_handler("resources/unsubscribe", types.UnsubscribeRequestParams, self._unsubscribed)

    def outdate_tools(self) -> None:
        """Take note that a client was given a list of tools that is no longer right."""
        self._is_outdated = True

    def expect(self) -> None:
        """Look soon: a call was made, and may have changed something."""
        self._is_due = True

    async def aclose(self) -> None:
        """End every stream, and stop checking."""
        self._listen.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    async def greeted(self, context: Context, _params: types.NotificationParams) -> None:
        """Record a client of the handshake era, which is notified of changes from now on."""
        connection = connection_of(context)
        key = id(connection)
        if key not in self._hearers:
            self._hearers[key] = _Hearer(connection)
            connection.exit_stack.callback(self._hearers.pop, key, None)
        await self._begin()

    async def _listened(
        self, context: Context, params: types.SubscriptionsListenRequestParams
    ) -> types.SubscriptionsListenResult:
        hearer = _Hearer(uris={*(params.notifications.resource_subscriptions or [])[:_WATCHED]})
        self._hearers[id(hearer)] = hearer
        try:
            await self._begin()  # the baseline is fixed before the client is promised notifications
            return await self._listen(context, params)
        finally:
            self._hearers.pop(id(hearer), None)

    async def _subscribed(self, context: Context, params: types.SubscribeRequestParams) -> types.EmptyResult:
        await self.greeted(context, types.NotificationParams())  # a client may leave the greeting out
        hearer = self._hearers[id(connection_of(context))]
        if len(hearer.uris) >= _WATCHED and params.uri not in hearer.uris:
            raise MCPError(types.INVALID_PARAMS, f"At most {_WATCHED} resources are watched at a time")
        hearer.uris.add(params.uri)
        self._note_watched()
        return types.EmptyResult()

    async def _unsubscribed(self, context: Context, params: types.UnsubscribeRequestParams) -> types.EmptyResult:
        if (hearer := self._hearers.get(id(connection_of(context)))) is not None:
            hearer.uris.discard(params.uri)
        return types.EmptyResult()

    async def _begin(self) -> None:
        self._note_watched()
        if self._watch is not None and not self._watch.done():
            return
        seen = self.menu.last or await self.menu.read()
        if self._watch is None or self._watch.done():  # another client may have begun it meanwhile
            self._seen = seen  # what changes after a client was last given its lists is news for it
            self._watch = asyncio.create_task(self._keep_watch())

    async def _keep_watch(self) -> None:
        while self._hearers:
            if self._is_outdated:
                self._is_outdated = False
                await self._announce(ToolsListChanged())
            for _ in range(self._ticks):
                await asyncio.sleep(self._tick)
                if self._is_due or self._is_outdated:
                    break
            self._is_due = False
            try:
                await self._look()
            except Exception:  # noqa: BLE001 - no caller waits for a check: a failure is logged, and it is repeated
                _log.exception("what clients see could not be looked at")

    async def _look(self) -> None:
        before, self._seen = self._seen, await self.menu.read()
        for event in differences(before, self._seen):
            await self._announce(event)
        watched = self._watched
        self._digests = {uri: digest for uri, digest in self._digests.items() if uri in watched}
        for uri in sorted(watched):
            found = self._digest(uri)
            known, self._digests[uri] = self._digests.get(uri, found), found
            if found != known:
                await self._announce(ResourceUpdated(uri))

    @property
    def _watched(self) -> AbstractSet[str]:
        """The texts that clients watch; only servers know when their own items change."""
        return {uri for hearer in self._hearers.values() for uri in hearer.uris if uri.startswith(KNOWLEDGE)}

    def _note_watched(self) -> None:
        for uri in self._watched - self._digests.keys():
            self._digests[uri] = self._digest(uri)

    def _digest(self, uri: str) -> str:
        """Return the digest of a text of knowledge; empty if there is none."""
        known = self._kernel.offered(tail(uri, KNOWLEDGE), "resource")
        return known.digest if known else ""

    async def _announce(self, event: ServerEvent) -> None:
        await self._bus.publish(event)
        response = [
            one.connection
            for one in self._hearers.values()
            if one.connection and (not isinstance(event, ResourceUpdated) or event.uri in one.uris)
        ]
        await asyncio.gather(*(_tell(connection, event) for connection in response))


def differences(before: Offers, now: Offers) -> Iterator[ServerEvent]:
    """Yield an event for each list that has changed."""

    def visible(offers: Offers) -> Sequence[object]:
        # A client does not see the digest of the content of an item.
        parts = (offers.tools, offers.prompts, offers.resources + offers.templates)
        tools, prompts, resources = ([replace(offer, digest="") for offer in part] for part in parts)
        return (offers.meta_tools, tools, offers.servers, offers.namespaces), prompts, resources

    events: Sequence[ServerEvent] = ToolsListChanged(), PromptsListChanged(), ResourcesListChanged()
    for old, new, event in zip(visible(before), visible(now), events, strict=True):
        if old != new:
            yield event


async def _tell(connection: Connection, event: ServerEvent) -> None:
    with anyio.move_on_after(_SENDING):  # a client that does not read does not keep the others from hearing
        match event:
            case ToolsListChanged():
                await connection.send_tool_list_changed()
            case PromptsListChanged():
                await connection.send_prompt_list_changed()
            case ResourcesListChanged():
                await connection.send_resource_list_changed()
            case ResourceUpdated(uri=uri):
                await connection.send_resource_updated(uri)
