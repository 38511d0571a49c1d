"""Connections that are kept: one for each server and its credentials, made at first use, ended when nobody uses it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.drivers.mcp.circuit import Circuit
from kiwi_mcp.drivers.mcp.connection import Connection
from kiwi_mcp.drivers.mcp.eras import Eras
from kiwi_mcp.drivers.mcp.server import Server

IDLE = 300.0
"""How long a connection that nobody uses is kept, in seconds, where its server says nothing else."""
MOST = 64
"""Connections that are kept at the same time."""
_REMEMBERED = 1_000
"""Servers whose failures are remembered."""


@dataclass(slots=True)
class _Slot:
    """The place of one connection: itself, how many use it now, and how often it failed."""

    connection: Connection | None = None
    users: int = 0
    circuit: Circuit = field(default_factory=Circuit)
    opened: int = 0
    """How many connections there were, this one included."""
    answered: int = 0
    """Over which of them the server answered last."""
    reaper: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that can be used."""
        return self.connection is not None and self.connection.is_usable


@dataclass(frozen=True, slots=True)
class Lease:
    """A connection in use, for as long as the block lasts."""

    connection: Connection
    _slot: _Slot
    _end: Callable[[Connection], None]

    def worked(self) -> bool:
        """Note that the server answered, and say whether it did so over another connection before."""
        slot = self._slot
        slot.circuit.worked()
        is_back = 0 < slot.answered < slot.opened
        slot.answered = slot.opened
        return is_back

    def retire(self) -> None:
        """Let nobody else begin to use the connection, and end it, unless others use it now."""
        if self._slot.connection is self.connection and self._slot.users <= 1:
            self._slot.connection = None
            self._end(self.connection)


class Pool:
    """The connections of one event loop."""

    def __init__(
        self, eras: Eras, on_change: Callable[[str], None] | None = None, *, idle: float = IDLE, most: int = MOST
    ) -> None:
        self._eras = eras
        self._on_change = on_change
        self._idle = idle
        self._most = most
        self._slots: OrderedDict[str, _Slot] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def open_count(self) -> int:
        """How many connections there are."""
        return sum(slot.is_open for slot in self._slots.values())

    @asynccontextmanager
    async def using(self, server: Server, secrets: Mapping[str, str]) -> AsyncIterator[Lease]:
        """Use the connection to a server; it is opened if need be, by whoever comes first, and shared by all."""
        slot = self._slot(server.key(secrets))
        slot.users += 1
        if slot.reaper is not None:
            slot.reaper.cancel()
        try:
            yield Lease(await self._connected(slot, server, secrets), slot, self._end)
        finally:
            slot.users -= 1
            self._noticed(slot)
            if not slot.users and slot.is_open:
                idle = self._idle if server.idle_timeout is None else server.idle_timeout
                slot.reaper = asyncio.get_running_loop().call_later(idle, self._reap, slot)

    async def end(self, identity: str) -> None:
        """End the connections to one server, and wait until nothing of them is left."""
        for slot in self._slots.values():
            if slot.connection is not None and slot.connection.server.identity == identity:
                connection, slot.connection = slot.connection, None
                self._end(connection)
        if self._ending:
            await asyncio.wait(self._ending)

    async def aclose(self) -> None:
        """End every connection, and wait until nothing of them is left."""
        for slot in self._slots.values():
            if slot.reaper is not None:
                slot.reaper.cancel()
            if slot.connection is not None:
                self._end(slot.connection)
        self._slots.clear()
        while self._ending:
            await asyncio.wait(self._ending)

    def _slot(self, key: str) -> _Slot:
        slot = self._slots.setdefault(key, _Slot())
        self._slots.move_to_end(key)
        if len(self._slots) > _REMEMBERED:
            for old in [old for old, kept in self._slots.items() if not kept.users and kept.connection is None]:
                del self._slots[old]
        return slot

    async def _connected(self, slot: _Slot, server: Server, secrets: Mapping[str, str]) -> Connection:
        if not slot.is_open:
            self._noticed(slot)
            await asyncio.sleep(slot.circuit.wait(server))
        if slot.connection is None or not slot.is_open:  # another caller may have been first meanwhile
            self._make_room()
            slot.connection = Connection(server, secrets, self._eras, self._on_change)
            slot.opened += 1
        connection = slot.connection
        await connection.greeted()
        return connection

    def _noticed(self, slot: _Slot) -> None:
        """Count the end of a connection that ended by itself, once, and let go of it."""
        connection = slot.connection
        if connection is None or connection.is_usable:
            return
        slot.connection = None
        self._end(connection)
        # A server that wants a login is well, and is asked again as soon as somebody has logged in.
        if connection.is_lost and not isinstance(failure := connection.failure(), LoginRequired):
            slot.circuit.failed(connection.server, failure)

    def _make_room(self) -> None:
        if self.open_count < self._most:
            return
        idle = next((slot for slot in self._slots.values() if slot.is_open and not slot.users), None)
        if idle is None:
            raise Unavailable(
                f"{self._most} MCP servers are in use, and none of them is idle.", suggestion="Try again later."
            )
        self._reap(idle)

    def _reap(self, slot: _Slot) -> None:
        if slot.connection is not None and not slot.users:
            connection, slot.connection = slot.connection, None
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(connection.aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
