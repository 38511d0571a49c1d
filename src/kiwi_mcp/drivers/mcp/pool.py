"""Connections that are kept: one for each server and its credentials, made at first use, ended when nobody uses it.

A server that asks its callers things without saying which call it is about gets further ones: whoever can be asked has
a connection alone then, so that what comes on it can only be about their call.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.drivers.mcp.circuit import Circuit
from kiwi_mcp.drivers.mcp.connection import Connection
from kiwi_mcp.drivers.mcp.eras import Eras
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.packages import have_package
from kiwi_mcp.drivers.process.environments.install import Installer, install_level

IDLE = 300.0
"""How long a connection that nobody uses is kept, in seconds, where its server says nothing else."""
MOST = 64
"""Connections that are kept at the same time."""
MOST_FURTHER = 4
"""Connections that one server gets beside its first."""
_REMEMBERED = 1_000
"""Servers whose failures are remembered."""


@dataclass(eq=False, slots=True)
class _Place:
    """The place of one connection: itself, and how many use it now."""

    connection: Connection | None = None
    users: int = 0
    askable: int = 0
    """How many of them can be asked."""
    opened: int = 0
    """How many connections there were, this one included."""
    answered: int = 0
    """Over which of them the server answered last."""
    reaper: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a connection that can be used."""
        return self.connection is not None and self.connection.is_usable


@dataclass(eq=False, slots=True)
class _Slot:
    """One server with its credentials: its connections, and how often they failed."""

    places: list[_Place] = field(default_factory=lambda: [_Place()])
    circuit: Circuit = field(default_factory=Circuit)
    asks_blindly: bool = False
    """Whether the server has asked something without saying for which call, over any connection."""

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses any of it, and nothing of it is kept."""
        return all(not place.users and place.connection is None for place in self.places)

    def learn(self) -> None:
        """Note how the server asks."""
        if any(place.connection is not None and place.connection.asks_blindly for place in self.places):
            self.asks_blindly = True

    def place(self, *, is_askable: bool) -> _Place:
        """Return where a call is made: with the others, unless one that can be asked has to be alone."""
        if not self.asks_blindly:
            return self.places[0]
        for place in self.places:
            if not place.users if is_askable else not place.askable:
                return place
        if len(self.places) > MOST_FURTHER:
            return self.places[0]  # where it may be that nobody can be asked
        self.places.append(_Place())
        return self.places[-1]


@dataclass(frozen=True, slots=True)
class Lease:
    """A connection in use, for as long as the block lasts."""

    connection: Connection
    _slot: _Slot
    _place: _Place
    _end: Callable[[Connection], None]

    def worked(self) -> bool:
        """Note that the server answered, and say whether it did so over another connection before."""
        self._slot.circuit.worked()
        place = self._place
        is_back = 0 < place.answered < place.opened
        place.answered = place.opened
        return is_back

    def retire(self) -> None:
        """Let nobody else begin to use the connection, and end it, unless others use it now."""
        if self._place.connection is self.connection and self._place.users <= 1:
            self._place.connection = None
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
        return sum(place.is_open for place in self._places())

    @asynccontextmanager
    async def using(
        self, server: Server, secrets: Mapping[str, str], *, is_askable: bool = False
    ) -> AsyncIterator[Lease]:
        """Use a connection to a server; it is opened if need be, by whoever comes first, and shared where it can be.

        `is_askable` says whether the server may ask something of whoever uses it.
        """
        slot = self._slot(server.key(secrets))
        slot.learn()
        place = slot.place(is_askable=is_askable)
        if is_askable and slot.asks_blindly:
            self._clear(place)
        place.users += 1
        place.askable += is_askable
        if place.reaper is not None:
            place.reaper.cancel()
        try:
            yield Lease(await self._connected(slot, place, server, secrets), slot, place, self._end)
        finally:
            place.users -= 1
            place.askable -= is_askable
            slot.learn()
            self._noticed(slot, place)
            if not place.users and place.is_open:
                idle = self._idle if server.idle_timeout is None else server.idle_timeout
                place.reaper = asyncio.get_running_loop().call_later(idle, self._reap, place)

    async def end(self, identity: str) -> None:
        """End the connections to one server, and wait until nothing of them is left."""
        for place in self._places():
            if place.connection is not None and place.connection.server.identity == identity:
                self._let_go(place)
        if self._ending:
            await asyncio.wait(self._ending)

    async def aclose(self) -> None:
        """End every connection, and wait until nothing of them is left."""
        for place in self._places():
            if place.reaper is not None:
                place.reaper.cancel()
            self._let_go(place)
        self._slots.clear()
        while self._ending:
            await asyncio.wait(self._ending)

    def _places(self) -> Iterator[_Place]:
        return (place for slot in self._slots.values() for place in slot.places)

    def _slot(self, key: str) -> _Slot:
        slot = self._slots.setdefault(key, _Slot())
        self._slots.move_to_end(key)
        if len(self._slots) > _REMEMBERED:
            for old in [old for old, kept in self._slots.items() if kept.is_idle and kept is not slot]:
                del self._slots[old]
        return slot

    def _clear(self, place: _Place) -> None:
        """Let go of a connection on which a call that was left may still be what the server asks about."""
        if not place.users and place.connection is not None and not place.connection.is_clear:
            self._let_go(place)

    async def _connected(self, slot: _Slot, place: _Place, server: Server, secrets: Mapping[str, str]) -> Connection:
        if not place.is_open:
            self._noticed(slot, place)
            await asyncio.sleep(slot.circuit.wait(server))
            if server.package is not None:
                # Not within the time that a server has to start: what is fetched for the first time may take longer.
                await have_package(server.package, Installer(server.space, install_level(server.jail.level), silent))
        if place.connection is None or not place.is_open:  # another caller may have been first meanwhile
            self._make_room()
            place.connection = Connection(server, secrets, self._eras, self._on_change)
            place.opened += 1
        connection = place.connection
        await connection.greeted()
        return connection

    def _noticed(self, slot: _Slot, place: _Place) -> None:
        """Count the end of a connection that ended by itself, once, and let go of it."""
        connection = place.connection
        if connection is None or connection.is_usable:
            return
        self._let_go(place)
        # A server that wants a login is well, and is asked again as soon as somebody has logged in.
        if connection.is_lost and not isinstance(failure := connection.failure(), LoginRequired):
            slot.circuit.failed(connection.server, failure)

    def _make_room(self) -> None:
        if self.open_count < self._most:
            return
        idle = next((place for place in self._places() if place.is_open and not place.users), None)
        if idle is None:
            raise Unavailable(
                f"{self._most} MCP servers are in use, and none of them is idle.", suggestion="Try again later."
            )
        self._reap(idle)

    def _reap(self, place: _Place) -> None:
        if not place.users:
            self._let_go(place)

    def _let_go(self, place: _Place) -> None:
        connection, place.connection = place.connection, None
        if connection is not None:
            self._end(connection)

    def _end(self, connection: Connection) -> None:
        task = asyncio.get_running_loop().create_task(connection.aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
