"""What comes from a server on any transport, watched: its end is noticed, and its notifications cannot flood."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context
from time import monotonic
from typing import Self

import anyio
from mcp.shared.dispatcher import coerce_request_id
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCMessage, JSONRPCNotification, JSONRPCResponse, RequestId

from kiwi_mcp.domain.closing import Block
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.drivers.mcp.lane import Lane
from kiwi_mcp.drivers.mcp.messages import Incoming

RATE = 200.0
"""Notifications that a server may send for each second, in the long run."""
BURST = 1_000.0
"""Notifications that it may send at once."""
_HEARD = frozenset(
    {"notifications/progress", "notifications/cancelled", "notifications/message"}
    | {"notifications/subscriptions/acknowledged"}
    | {f"notifications/{kind}/list_changed" for kind in ("tools", "prompts", "resources")}
)
"""Notifications that anybody here wants to hear."""
FLOOD = 10_000
"""Notifications too many after which a server is no longer listened to."""


class Sieve(Block):
    """A stream of messages without what the lane takes, and notifications that are too many, or that nobody wants."""

    def __init__(self, stream: Incoming, ended: Callable[[Exception | None], None], lane: Lane) -> None:
        self.answered: Callable[[RequestId], None] | None = None
        """What is told the number of each request that is answered."""
        self._stream = stream
        self._ended = ended
        self._lane = lane
        self._left, self._at = BURST, monotonic()
        self.dropped = 0
        self.last_heard = monotonic()

    @property
    def last_context(self) -> Context | None:
        """The context of whoever asked for what was received last, where the transport tells."""
        found: Context | None = getattr(self._stream, "last_context", None)
        return found

    async def receive(self) -> SessionMessage | Exception:
        """Return the next message; the end, however it comes, is told."""
        try:
            while not self._passes(item := await self._stream.receive()):
                pass
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._ended(None)
            raise anyio.EndOfStream from None
        except Exception as fault:  # noqa: BLE001 - whatever the wire raises is why the connection ended
            self._ended(fault)
            raise anyio.EndOfStream from None
        return item

    def _passes(self, item: SessionMessage | Exception) -> bool:
        now = monotonic()
        self.last_heard = now
        if isinstance(item, Exception) or not isinstance(item.message, JSONRPCNotification):
            return isinstance(item, Exception) or not self._is_taken(item.message)
        self._left = min(BURST, self._left + (now - self._at) * RATE) - 1
        self._at = now
        if self._left >= 0:
            return item.message.method in _HEARD
        self._left = 0
        self.dropped += 1
        if self.dropped > FLOOD:
            raise Unavailable(
                f"it sent more than {FLOOD:,} notifications too many.", suggestion="The server is at fault: report it."
            )
        return False

    def _is_taken(self, message: JSONRPCMessage) -> bool:
        if isinstance(message, JSONRPCResponse | JSONRPCError) and message.id is not None and self.answered is not None:
            self.answered(coerce_request_id(message.id))
        return self._lane.takes(message)

    async def aclose(self) -> None:
        """Read no more."""
        await self._stream.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None
