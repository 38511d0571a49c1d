"""One conversation with a server, owned from its opening to its end by one task.

The scopes of cancellation that the SDK opens belong to the task that opened them and must be left by it. So nobody
else opens or closes: callers only put requests in and wait for replies, each within their own limit, as many at a
time as they like. When the conversation ends, for whatever reason, everyone who waits is told at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass

import anyio
from mcp.client.session import ClientSession, IncomingMessage
from mcp.client.subscriptions import SubscriptionLost, listen
from mcp.shared.dispatcher import CallOptions, ProgressFnT
from mcp.shared.exceptions import MCPError
from mcp_types import (
    CONNECTION_CLOSED,
    Implementation,
    PromptListChangedNotification,
    ResourceListChangedNotification,
    ToolListChangedNotification,
)

from kiwi_mcp import __version__
from kiwi_mcp.domain.caller import NOBODY, Caller, unheard
from kiwi_mcp.domain.errors import KiwiError, LoginRequired
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.drivers.mcp.eras import Era, Eras
from kiwi_mcp.drivers.mcp.failures import failure_of
from kiwi_mcp.drivers.mcp.lacking import lacking
from kiwi_mcp.drivers.mcp.lane import Lane, is_traced
from kiwi_mcp.drivers.mcp.server import Server
from kiwi_mcp.drivers.mcp.sieve import Sieve
from kiwi_mcp.drivers.mcp.stamp import Stamp
from kiwi_mcp.drivers.mcp.switchboard import Switchboard, apart, capable
from kiwi_mcp.drivers.mcp.talk import NOTE_LEVEL, Talk
from kiwi_mcp.drivers.mcp.transports import Wire, opened
from kiwi_mcp.primitives.http_channel import is_login_wanted

# The SDK writes what is wrong with a server to the log, with a traceback; here that is an outcome.
for _name in ("client", "mcp.client", "mcp.shared.jsonrpc_dispatcher"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)

CLOSE = 5.0
"""How long a conversation may take to end in peace, in seconds."""
_LAST_WORDS = 3.0
"""How long a caller waits for the reason why a conversation ended, in seconds."""
_US = Implementation(name="kiwi", version=__version__)
_CHANGES = (ToolListChangedNotification, PromptListChangedNotification, ResourceListChangedNotification)


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a server said of itself when the conversation began."""

    era: Era
    protocol_version: str
    server_info: JsonObject
    capabilities: JsonObject
    instructions: str


class Connection:
    """A conversation that is opened when it is made; `greeted` waits until it can be used."""

    def __init__(
        self,
        server: Server,
        secrets: Mapping[str, str],
        eras: Eras,
        on_change: Callable[[str], None] | None = None,
    ) -> None:
        self.server = server
        self._secrets = secrets
        self._eras = eras
        self._on_change = on_change
        self._greeted: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()
        self._greeted.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._closing = asyncio.Event()
        self._fault: BaseException | None = None
        self._is_late = self._has_ended = False
        self._wire: Wire | None = None
        self._sieve: Sieve | None = None
        self._lane: Lane | None = None
        self._switchboard: Switchboard | None = None
        self._stamp = Stamp()
        self._is_heard = False
        self._parting: set[asyncio.Task[None]] = set()
        self._told: set[str] = set()
        self._task = asyncio.create_task(self._own(), name=f"mcp {server.name}", context=apart())

    @property
    def is_usable(self) -> bool:
        """Whether requests can be put in, now or when the greeting is over."""
        return not self._closing.is_set() and not self._task.done()

    @property
    def has_tasks(self) -> bool:
        """Whether the server was told that a call of it may go on as a task."""
        return self._stamp.has_tasks

    @property
    def asks_blindly(self) -> bool:
        """Whether the server has asked something without saying for which call."""
        return self._switchboard is not None and self._switchboard.asks_blindly

    @property
    def is_clear(self) -> bool:
        """Whether no call is under way, and the server has answered all that were."""
        return self._switchboard is None or self._switchboard.is_clear

    @property
    def is_lost(self) -> bool:
        """Whether it ended by itself."""
        return self._fault is not None or self._has_ended or self._is_late

    @property
    def heard_at(self) -> float:
        """When the server last said anything."""
        return self._sieve.last_heard if self._sieve else 0.0

    async def greeted(self) -> Greeting:
        """Wait for the greeting; a conversation that could not begin raises why."""
        return await asyncio.shield(self._greeted)

    async def ask(
        self,
        method: str,
        params: JsonObject,
        *,
        caller: Caller = NOBODY,
        progress: ProgressFnT | None = None,
        schema: Json = None,
    ) -> JsonObject:
        """Return the result of one request; what the server refuses is raised as the SDK's error.

        `schema` is the input schema of a tool, where a server wants parts of the arguments as headers too.
        """
        await self.greeted()
        if self._switchboard is None or self._lane is None or not self.is_usable:
            raise await self.lost()
        headers, stamped = self._stamp.headers(method, params, schema), self._stamp.params(params, caller)
        number = self._lane.number()
        try:
            with self._switchboard.waiting_for(number):
                if progress is None and not is_traced():
                    return await self._lane.ask(method, stamped, headers, number)
                options: CallOptions = {"headers": headers, "request_id": number}
                if progress is not None:
                    options["on_progress"] = progress
                return await self._switchboard.send_raw_request(method, stamped, options)
        except MCPError as refusal:
            if self._closing.is_set() or _is_closed(refusal):
                raise await self.lost() from refusal
            if is_login_wanted(refusal.error.data):
                raise LoginRequired(self.server.name, self.server.identity) from None
            raise

    def talking(self, talk: Talk) -> AbstractContextManager[None]:
        """Bring what the server asks and tells for a call to its caller, while the block lasts."""
        return self._switchboard.talking(talk) if self._switchboard is not None else nullcontext()

    async def listen(self, caller: Caller) -> None:
        """Have a server of the old era send the lines of its log, once somebody hears them."""
        greeting = await self.greeted()
        if (
            self._is_heard
            or caller.note is unheard
            or greeting.era != "legacy"
            or "logging" not in greeting.capabilities
        ):
            return
        self._is_heard = True
        with suppress(MCPError):
            await self.ask("logging/setLevel", {"level": NOTE_LEVEL})

    def call_off(self, task_id: str) -> None:
        """Tell the server that nobody waits for a task any more; nobody waits for its answer either."""
        if self._switchboard is not None:
            self._switchboard.leave(_left(task_id))
        task = asyncio.create_task(self._call_off(task_id))
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)

    async def _call_off(self, task_id: str) -> None:
        with suppress(MCPError, KiwiError, TimeoutError):
            async with asyncio.timeout(CLOSE):
                await self.ask("tasks/cancel", {"taskId": task_id})
                if self._switchboard is not None:
                    self._switchboard.answered(_left(task_id))

    async def lost(self) -> KiwiError:
        """Return why there is no conversation any more, with the server's last words."""
        await asyncio.wait({self._task}, timeout=_LAST_WORDS)
        return self.failure()

    def failure(self) -> KiwiError:
        """Return what went wrong, as far as it is known."""
        return failure_of(self.server, self._wire, self._fault, is_late=self._is_late, was_greeted=self._was_greeted)

    @property
    def _was_greeted(self) -> bool:
        return self._greeted.done() and not self._greeted.cancelled() and self._greeted.exception() is None

    def lacking(self, said: str) -> str:
        """Return what to type where the server fails for want of something that its jail does not give."""
        return lacking(self.server, said, self._wire.refused() if self._wire is not None else ())

    def left(self) -> JsonObject:
        """Return what the server's process sent and received since this was asked last."""
        return self._wire.left() if self._wire is not None else {}

    def notices(self) -> list[str]:
        """Return what the owner should know of the server's manners, each once."""
        found = {}
        if self._wire is not None and (noise := self._wire.noise()):
            found["noise"] = f"The server printed {noise} line(s) among its messages that are none."
        if self._sieve is not None and self._sieve.dropped:
            found["flood"] = f"The server sent {self._sieve.dropped} notification(s) too many; they were dropped."
        fresh = {word: text for word, text in found.items() if word not in self._told}
        self._told |= fresh.keys()
        return list(fresh.values())

    def close(self) -> None:
        """Let the conversation end."""
        self._closing.set()

    async def aclose(self) -> None:
        """End the conversation, and everything that was started for it."""
        if self._parting:
            await asyncio.wait(self._parting)
        self.close()
        if not self._was_greeted:
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=CLOSE)
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=CLOSE)

    async def _own(self) -> None:
        watchdog = asyncio.get_running_loop().call_later(self.server.startup_timeout, self._give_up)
        try:
            async with opened(self.server, self._secrets) as self._wire:
                lane = Lane(self._wire.outgoing)
                self._sieve = Sieve(self._wire.incoming, self._ended, lane)
                switchboard = Switchboard(self._sieve, self._wire.outgoing)
                async with ClientSession(
                    dispatcher=switchboard,
                    client_info=_US,
                    message_handler=self._notified,
                    elicitation_callback=capable,
                    sampling_callback=capable,
                    list_roots_callback=capable,
                ) as session:
                    greeting = _greeting(session, await self._eras.greet(session, self.server))
                    watchdog.cancel()
                    self._stamp = Stamp.of(greeting.era, greeting.protocol_version, _US, greeting.capabilities)
                    self._switchboard, self._lane = switchboard, lane
                    self._greeted.set_result(greeting)
                    await self._converse(session, greeting, lane)
        except asyncio.CancelledError:
            if not self._is_late:
                raise
        except Exception as fault:  # noqa: BLE001 - whatever it is, it is why the conversation ended
            self._fault = self._fault or fault
        finally:
            watchdog.cancel()
            self._closing.set()
            if not self._greeted.done():
                self._greeted.set_exception(self.failure())

    async def _converse(self, session: ClientSession, greeting: Greeting, lane: Lane) -> None:
        """Stay until somebody ends it; meanwhile hear of changes, which the new era tells only to who asks."""
        async with anyio.create_task_group() as group:
            if greeting.era == "modern" and self._on_change is not None:
                group.start_soon(_listen, session)
            try:
                await self._closing.wait()
            finally:
                self._closing.set()  # before anyone who waits is told, so that they know why
                lane.end()
                group.cancel_scope.cancel()

    def _give_up(self) -> None:
        self._is_late = True
        self._task.cancel()

    def _ended(self, fault: Exception | None) -> None:
        if not self._closing.is_set():
            self._has_ended = True  # why, the wire may tell when it is closed
            self._fault = self._fault or fault
            self._closing.set()

    async def _notified(self, message: IncomingMessage) -> None:
        if isinstance(message, _CHANGES) and self._on_change is not None:
            self._on_change(self.server.identity)


def _left(task_id: str) -> str:
    """Return what a task that was left is known by among requests, whose numbers it must not be taken for."""
    return f"task {task_id}"


def _is_closed(refusal: MCPError) -> bool:
    # Servers use the same code for faults of their own, with words of their own.
    return refusal.code == CONNECTION_CLOSED and refusal.error.message == "Connection closed"


async def _listen(session: ClientSession) -> None:
    """Ask a server of the new era to tell of changes; what it tells comes in like every notification."""
    offered = session.server_capabilities
    try:
        async with listen(
            session,
            tools_list_changed=bool(offered and offered.tools and offered.tools.list_changed),
            prompts_list_changed=bool(offered and offered.prompts and offered.prompts.list_changed),
            resources_list_changed=bool(offered and offered.resources and offered.resources.list_changed),
        ) as subscription:
            async for _ in subscription:
                pass
    except (MCPError, SubscriptionLost, TimeoutError):
        return


def _greeting(session: ClientSession, era: Era) -> Greeting:
    info, offered = session.server_info, session.server_capabilities
    return Greeting(
        era=era,
        protocol_version=session.protocol_version or "",
        server_info=info.model_dump(by_alias=True, mode="json", exclude_none=True) if info else {},
        capabilities=offered.model_dump(by_alias=True, mode="json", exclude_none=True) if offered else {},
        instructions=session.instructions or "",
    )
