"""What the handlers share: the context of a request, the kernel as they see it, and the protocol revisions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

from mcp.server.connection import Connection
from mcp.server.context import ServerRequestContext

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.items import ItemType
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.mcp import Offer, OfferKind, Offers
from kiwi_mcp.kernel import Answer

Context: TypeAlias = ServerRequestContext[dict[str, object]]


LEFT = "kiwi.left"
"""Under which a request over HTTP holds the event of its end: of its answer, or of its client."""
STRUCTURED_SINCE = "2025-06-18"
"""The first revision in which results have structured content."""
ANY_STRUCTURE_SINCE = "2026-07-28"
"""The first in which that may be something else than an object."""
NOT_FOUND_IS_INVALID_SINCE = "2026-07-28"
"""The first in which an unknown resource has no error code of its own."""
BLOCKS_SINCE: Mapping[str, str] = {"audio": "2025-03-26", "resource_link": "2025-06-18"}
"""The first revision of each kind of content that was not there from the beginning."""


class KernelApi(Protocol):
    """What the server needs of a kernel."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Answer one verb."""

    async def offers(self) -> Offers:
        """Return what a client sees without searching."""

    def offers_mark(self) -> str:
        """Return another text whenever the offers may have changed."""

    def offered(self, name: str, kind: OfferKind, item_type: ItemType | None = None) -> Offer | None:
        """Return an item as clients see it, listed or not, if it is of a kind, and of a type where one is asked for."""

    async def complete(self, item_id: str, argument: str, value: str, known: Mapping[str, str]) -> Sequence[str]:
        """Return what an MCP server proposes for an argument of its prompt or template."""

    async def aclose(self) -> None:
        """Release all resources."""


def connection_of(context: Context) -> Connection:
    """Return the connection that a request came by, which lasts longer than the request in the handshake era."""
    return context.session._connection  # noqa: SLF001 - the SDK gives handlers no other way to what a connection keeps


def left(context: Context) -> asyncio.Event | None:
    """Return the event that the client of a request waits no longer; None where that ends the request itself."""
    found: asyncio.Event | None = getattr(context.request, "scope", {}).get(LEFT)
    return found
