"""Changes: clients that can hear are told when what they see without searching, or a resource they watch, changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final

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

from kiwi_mcp.domain.offers import Offers
from kiwi_mcp.surfaces.mcp.addresses import KNOWLEDGE, tail
from kiwi_mcp.surfaces.mcp.menu import ONLY_META_TOOLS, Menu, View, everything
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi, connection_of

_log = logging.getLogger("kiwi")

INTERVAL: Final = 2.0
"""How often the menu is looked at while somebody can hear, in seconds."""
SOON: Final = 0.5
"""How soon it is looked at after a call, which may have changed something."""
_WATCHED = 64
"""How many resources one client may watch."""
_SENDING = 5.0
"""How long a client may take to read that something changed, in seconds."""


@dataclass(slots=True)
class _Hearer:
    """A client that can be told of changes, and the resources it watches."""

    connection: Connection | None = None
    """How a client of the handshake era is told; others listen on streams of their own."""
    uris: set[str] = field(default_factory=set)


class Changes:
    """Looks at the menu while somebody can hear of it."""

    def __init__(
        self, kernel: KernelApi, *, interval: float = INTERVAL, soon: float = SOON, view: View = everything
    ) -> None:
        self.menu = Menu(kernel, view)
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
        """Let a server's clients hear of changes."""
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
        """End every stream, and look no more."""
        self._listen.close()
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})

    # --- who hears ---

    async def greeted(self, context: Context, _params: types.NotificationParams) -> None:
        """Take note of a client of the handshake era, which is told of changes from now on."""
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
            await self._begin()  # what is news is settled before the client is told that it will hear it
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
        if self._is_watching:
            return
        seen = self.menu.last or await self.menu.read()
        if not self._is_watching:
            self._seen = seen  # what changes after a client was last given its lists is news for it
            self._watch = asyncio.create_task(self._keep_watch())

    @property
    def _is_watching(self) -> bool:
        return self._watch is not None and not self._watch.done()

    # --- what is heard ---

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
            except Exception:  # noqa: BLE001 - nobody waits for a look: one that fails is told, and tried again
                _log.exception("what clients see could not be looked at")

    async def _look(self) -> None:
        before, self._seen = self._seen, await self.menu.read()
        for event in differences(before, self._seen):
            await self._announce(event)
        for uri in self._digests.keys() - self._watched:
            del self._digests[uri]
        for uri in sorted(self._watched):
            found = self._digest(uri)
            known, self._digests[uri] = self._digests.get(uri, found), found
            if found != known:
                await self._announce(ResourceUpdated(uri))

    @property
    def _watched(self) -> AbstractSet[str]:
        """The texts that somebody watches; of what servers offer, only they know when it changes."""
        return {uri for hearer in self._hearers.values() for uri in hearer.uris if uri.startswith(KNOWLEDGE)}

    def _note_watched(self) -> None:
        for uri in self._watched - self._digests.keys():
            self._digests[uri] = self._digest(uri)

    def _digest(self, uri: str) -> str:
        """Return what tells one content of knowledge from another; empty where there is none."""
        known = self._kernel.offered(tail(uri, KNOWLEDGE), "resource")
        return known.digest if known else ""

    async def _announce(self, event: ServerEvent) -> None:
        await self._bus.publish(event)
        told = [one.connection for one in self._hearers.values() if one.connection and _concerns(event, one)]
        await asyncio.gather(*(_tell(connection, event) for connection in told))


def differences(before: Offers, now: Offers) -> Iterator[ServerEvent]:
    """Give an event for each list that is another than before."""
    if _listed(before) != _listed(now):
        yield ToolsListChanged()
    if before.prompts != now.prompts:
        yield PromptsListChanged()
    if (before.resources, before.templates) != (now.resources, now.templates):
        yield ResourcesListChanged()


def _listed(offers: Offers) -> tuple[object, ...]:
    """Return what the list of tools is made from."""
    return offers.meta_tools, offers.tools, offers.servers, offers.namespaces


def _concerns(event: ServerEvent, hearer: _Hearer) -> bool:
    return not isinstance(event, ResourceUpdated) or event.uri in hearer.uris


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
