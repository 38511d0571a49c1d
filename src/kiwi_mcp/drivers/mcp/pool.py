"""Connections that calls share and that end when idle, and the circuit breaker of a server that fails."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from time import monotonic

from msgspec import Struct, field

from kiwi_mcp.domain.errors import KiwiError, LoginRequired, Unavailable
from kiwi_mcp.domain.mcp import Era
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.drivers.environments.packages import Installer, have_package, install_level
from kiwi_mcp.drivers.mcp.connection import ServerConnection
from kiwi_mcp.drivers.mcp.server import ServerConfig

OPENS_AFTER = 5
"""Failures in a row after which a server is left alone for a while."""
REST, LONGEST_REST = 30.0, 300.0
"""How long it is left alone at first, and at most, in seconds."""
_LONGEST_WAIT = 15.0


class CircuitBreaker(Struct):
    """The failures of one server in a row, and when it may be tried again."""

    failures: int = 0
    until: float = 0.0
    last: str = ""

    def failed(self, server: ServerConfig, fault: KiwiError) -> None:
        """Count a failure; the first costs no wait, so that a server that died once is back at the next call."""
        self.failures += 1
        self.last = fault.message
        if self.failures >= OPENS_AFTER:
            wait = min(REST * 2.0 ** min(self.failures - OPENS_AFTER, 10), LONGEST_REST)
        else:
            wait = min(server.reconnect_delay * (2.0 ** (self.failures - 1) - 1), _LONGEST_WAIT)
        self.until = monotonic() + wait

    def worked(self) -> None:
        """Forget the failures: the server answered."""
        self.failures = 0

    def wait(self, server: ServerConfig) -> float:
        """Return how long to wait before the next start, or refuse it where that is not worth waiting for."""
        left = max(0.0, self.until - monotonic())
        if not left or (self.failures < OPENS_AFTER and server.reconnect):
            return left
        again = datetime.now(UTC) + timedelta(seconds=left)
        times = f"{self.failures} time{'s' if self.failures > 1 else ''}"
        raise Unavailable(
            f"The MCP server {server.name!r} failed {times} in a row and is not tried again before "
            f"{again:%H:%M:%S} UTC (in {left:.0f} s). Last: {self.last}",
            suggestion="Fix the cause of the last failure, or try again then.",
            server=server.identity,
            retry_in=round(left, 1),
        )


IDLE = 300.0
"""How many seconds an unused connection is kept, if its server does not say otherwise."""
MOST = 64
"""Connections that are kept at the same time."""
MOST_FURTHER = 4
"""Connections that one server gets beside its first."""
_REMEMBERED = 1_000
"""The number of servers for which failures are remembered."""


class _PooledConnection(Struct, eq=False):
    """The place of one connection: itself, and how many use it now."""

    connection: ServerConnection | None = None
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


class _ServerSlot(Struct, eq=False):
    """One server with its credentials: its connections, and how often they failed."""

    places: list[_PooledConnection] = field(default_factory=lambda: [_PooledConnection()])
    circuit: CircuitBreaker = field(default_factory=CircuitBreaker)
    asks_without_call: bool = False
    """Whether the server has asked something without saying for which call, over any connection."""

    def learn(self) -> None:
        """Note how the server asks."""
        if any(place.connection is not None and place.connection.events.asks_without_call for place in self.places):
            self.asks_without_call = True

    def place(self, *, is_askable: bool) -> _PooledConnection:
        """Return where a call is made: with the others, unless one that can be asked has to be alone."""
        if not self.asks_without_call:
            return self.places[0]
        for place in self.places:
            if not place.users if is_askable else not place.askable:
                return place
        if len(self.places) > MOST_FURTHER:
            return self.places[0]  # a shared connection, where the caller possibly cannot be asked
        self.places.append(_PooledConnection())
        return self.places[-1]


class Lease(Struct, frozen=True):
    """A connection in use, for as long as the block lasts."""

    connection: ServerConnection
    _slot: _ServerSlot
    _place: _PooledConnection
    _end: Callable[[ServerConnection], None]

    def worked(self) -> bool:
        """Note that the server answered, and say whether it did so over another connection before."""
        self._slot.circuit.worked()
        place = self._place
        is_back = 0 < place.answered < place.opened
        place.answered = place.opened
        return is_back

    def retire(self) -> None:
        """Let no other caller start to use the connection, and end it unless others use it now."""
        if self._place.connection is self.connection and self._place.users <= 1:
            self._place.connection = None
            self._end(self.connection)


class ConnectionPool:
    """The connections of one event loop."""

    def __init__(
        self,
        eras: dict[str, Era],
        on_change: Callable[[str], None] | None = None,
        *,
        idle: float = IDLE,
        most: int = MOST,
    ) -> None:
        self._eras = eras
        self._on_change = on_change
        self._idle = idle
        self._most = most
        self._slots: OrderedDict[str, _ServerSlot] = OrderedDict()
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def open_count(self) -> int:
        """How many connections there are."""
        return sum(place.is_open for place in self._places())

    @asynccontextmanager
    async def using(
        self, server: ServerConfig, secrets: Mapping[str, str], *, is_askable: bool = False
    ) -> AsyncIterator[Lease]:
        """Use a connection to a server, opened or shared; `is_askable`: the server may ask its caller something."""
        slot = self._slot(server.key(secrets))
        slot.learn()
        place = slot.place(is_askable=is_askable)
        is_alone = is_askable and slot.asks_without_call and not place.users
        # A question of the server may still belong to an abandoned call.
        if is_alone and place.connection is not None and not place.connection.events.is_quiet:
            self._let_go(place)
        place.users += 1
        place.askable += is_askable
        if place.reaper is not None:
            place.reaper.cancel()
        if place.users == 1 and place.connection is not None and place.connection.is_outdated:
            self._let_go(place)
            slot.circuit.worked()
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

    def _places(self) -> Iterator[_PooledConnection]:
        return (place for slot in self._slots.values() for place in slot.places)

    def _slot(self, key: str) -> _ServerSlot:
        slot = self._slots.setdefault(key, _ServerSlot())
        self._slots.move_to_end(key)
        if len(self._slots) > _REMEMBERED:
            # A server is forgotten when none of its connections is used or kept.
            for old, other in [*self._slots.items()]:
                if other is not slot and not any(place.users or place.connection for place in other.places):
                    del self._slots[old]
        return slot

    async def _connected(
        self, slot: _ServerSlot, place: _PooledConnection, server: ServerConfig, secrets: Mapping[str, str]
    ) -> ServerConnection:
        if not place.is_open:
            self._noticed(slot, place)
            await asyncio.sleep(slot.circuit.wait(server))
            if server.package is not None:
                # Not within the time that a server has to start: what is fetched for the first time may take longer.
                await have_package(server.package, Installer(server.space, install_level(server.profile.level), silent))
        if place.connection is None or not place.is_open:  # another caller may have been first meanwhile
            if self.open_count >= self._most:
                idle = next((one for one in self._places() if one.is_open and not one.users), None)
                if idle is None:
                    reason = f"{self._most} MCP servers are in use, and none of them is idle."
                    raise Unavailable(reason, suggestion="Try again later.")
                self._let_go(idle)
            place.connection = ServerConnection(server, secrets, self._eras, self._on_change)
            place.opened += 1
        connection = place.connection
        await connection.greeted()
        return connection

    def _noticed(self, slot: _ServerSlot, place: _PooledConnection) -> None:
        """Count the end of a connection that ended by itself, once, and release it."""
        connection = place.connection
        if connection is None or connection.is_usable:
            return
        self._let_go(place)
        # A server that requires a login works, and is asked again after the login.
        if connection.is_lost and not isinstance(failure := connection.failure(), LoginRequired):
            slot.circuit.failed(connection.server, failure)

    def _reap(self, place: _PooledConnection) -> None:
        if not place.users:
            self._let_go(place)

    def _let_go(self, place: _PooledConnection) -> None:
        connection, place.connection = place.connection, None
        if connection is not None:
            self._end(connection)

    def _end(self, connection: ServerConnection) -> None:
        task = asyncio.get_running_loop().create_task(connection.aclose())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
