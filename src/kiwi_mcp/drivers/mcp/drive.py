"""From one request to an outcome, over a connection that is kept for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import Unavailable
from kiwi_mcp.domain.grants import Rules
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.outcome import Logs, Outcome, Progress, Report, silent
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.drivers.mcp.bind import Wanted, bind_mcp, planned
from kiwi_mcp.drivers.mcp.connection import Connection
from kiwi_mcp.drivers.mcp.eras import Eras
from kiwi_mcp.drivers.mcp.failures import harmless
from kiwi_mcp.drivers.mcp.listing import ServerListing, listed
from kiwi_mcp.drivers.mcp.pool import Lease, Pool
from kiwi_mcp.drivers.mcp.result import outcome_of, refused
from kiwi_mcp.drivers.mcp.server import Server, server_of
from kiwi_mcp.primitives import http_client
from kiwi_mcp.primitives.http_channel import is_session_lost

_HEADER_MISMATCH: Final = -32020
_OTHER_ERA: Final = -32022
_CHANGED: Final = frozenset({_OTHER_ERA, -32600, -32601})
"""What a server may say that was replaced by one of the other era."""
_TOLD = 500
_PAGES = 100


class Mcp:
    """Asks MCP servers.

    `on_change` is told the identity of a server that says its list has changed. `eras` remembers how each is spoken to.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] | None = None
        self.eras = Eras()
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, Pool] = WeakKeyDictionary()

    async def check(self, chain: Chain, space: Space) -> tuple[Issue, ...]:
        """Judge nothing: what a server offers is known only when it is asked."""
        return ()

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Plan the request."""
        return bind_mcp(chain, inputs, space)

    async def aclose(self) -> None:
        """End every connection of this event loop."""
        if (pool := self._pools.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.aclose()
        await http_client.aclose()

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller
    ) -> Outcome:
        """Ask the server, and give its answer as a result."""
        assert isinstance(plan.spec, ProcessSpec | HttpSpec)  # noqa: S101 - bind above makes no other
        server = replace(server_of(chain.executor, space), spec=plan.spec)
        question = _Question(
            planned(plan),
            plan.inputs,
            plan.spec.timeout,
            chain.tool.manifest.outputs,
            caller.report,
            is_repeatable=plan.effect in ("pure", "idempotent"),
        )
        try:
            outcome = await self._ask(server, secrets, question)
        except Unavailable as fault:
            details = {name: value for name, value in fault.details.items() if name != "stderr"}
            return Outcome(
                "unavailable",
                message=fault.message,
                suggestion=fault.suggestion,
                logs=Logs(stderr=as_text(fault.details.get("stderr"))),
                details=details,
            )
        return outcome

    async def list_items(
        self, chain: Chain, space: Space, secrets: Mapping[str, str], *, hosts: Rules | None = None
    ) -> ServerListing:
        """Return everything that a server offers; `chain` is the server's own.

        `hosts` are those that the owner grants and denies.
        """
        server = server_of(chain.tool, space)
        if hosts is not None and isinstance(server.spec, HttpSpec):
            server = replace(server, spec=replace(server.spec, granted=hosts.allow, denied=hosts.deny))
        async with self._pool().using(server, secrets) as lease:
            try:
                async with asyncio.timeout(server.spec.timeout):
                    found = await listed(lease.connection)
            except TimeoutError:
                lease.retire()
                raise _slow(server) from None
            lease.worked()
            return found

    def _pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            pool = self._pools[loop] = Pool(self.eras, self.on_change)
        return pool

    async def _ask(self, server: Server, secrets: Mapping[str, str], question: _Question) -> Outcome:
        pool = self._pool()
        for is_last in (False, True):
            async with pool.using(server, secrets) as lease:
                try:
                    outcome = await _answered(lease.connection, question)
                except MCPError as refusal:
                    if server.transport == "http" and _is_changed(refusal):
                        lease.retire()
                        if not is_last and (question.is_repeatable or _was_not_heard(refusal)):
                            continue
                    outcome = refused(question.wanted.name, refusal)
                except TimeoutError:
                    return _late(lease, question)
                lease.worked()
                notices: list[Json] = [*lease.connection.notices()]
                return replace(outcome, details={**outcome.details, "notices": notices}) if notices else outcome
        raise AssertionError("the last attempt has an outcome")


@dataclass(slots=True)
class _Question:
    """One request on its way: what is asked, with what, for how long, and where its progress is told."""

    wanted: Wanted
    inputs: JsonObject
    timeout: float
    outputs: JsonObject
    report: Report
    is_repeatable: bool
    asked_at: float = 0.0

    @property
    def progress(self) -> ProgressFnT | None:
        """What is told of the server's progress, if anybody listens."""
        if self.report is silent:
            return None

        async def told(progress: float, total: float | None, message: str | None) -> None:
            self.report(Progress(harmless(message or "")[:_TOLD], done=progress, total=total))

        return told


async def _answered(connection: Connection, question: _Question) -> Outcome:
    params, question.asked_at = question.wanted.params(question.inputs), monotonic()
    async with asyncio.timeout(question.timeout):
        try:
            answer = await connection.ask(question.wanted.method, params, progress=question.progress)
        except MCPError as refusal:
            if refusal.code != _HEADER_MISMATCH:
                raise
            # The server wants parts of the arguments as headers too; which ones, its own list says.
            schema = await _schema(connection, question.wanted.name)
            answer = await connection.ask(question.wanted.method, params, progress=question.progress, schema=schema)
    return outcome_of(question.wanted, answer, question.outputs)


def _is_changed(refusal: MCPError) -> bool:
    return refusal.code in _CHANGED or _was_not_heard(refusal)


def _was_not_heard(refusal: MCPError) -> bool:
    """Whether the server surely did nothing: it speaks another era, or has forgotten the session."""
    return refusal.code == _OTHER_ERA or is_session_lost(refusal.error.data)


def _late(lease: Lease, question: _Question) -> Outcome:
    # A server that said nothing at all meanwhile hangs: it is started anew for the next call. One that did say
    # something is only slow with this one, and was told to stop.
    if lease.connection.heard_at < question.asked_at:
        lease.retire()
    return Outcome(
        "timeout",
        message=f"The MCP server {lease.connection.server.name!r} did not answer {question.wanted.name!r} within "
        f"{question.timeout:g} seconds; it was told to stop.",
        suggestion="Ask for less, or give the tool a longer `config.timeout`.",
    )


async def _schema(connection: Connection, name: str) -> Json:
    cursor = ""
    for _ in range(_PAGES):
        page = await connection.ask("tools/list", {"cursor": cursor} if cursor else {})
        for tool in map(as_object, as_list(page.get("tools"))):
            if tool.get("name") == name:
                return tool.get("inputSchema")
        if not (cursor := as_text(page.get("nextCursor"))):
            break
    return None


def _slow(server: Server) -> Unavailable:
    return Unavailable(
        f"The MCP server {server.name!r} did not list what it offers within {server.spec.timeout:g} seconds.",
        suggestion="Give it a longer `timeout`, or ask whoever made it.",
        server=server.identity,
    )
