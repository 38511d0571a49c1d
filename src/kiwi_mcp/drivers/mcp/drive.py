"""From one request to an outcome, over a connection that is kept for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final
from weakref import WeakKeyDictionary

from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Ask, Caller, nobody
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import LoginRequired, Unavailable
from kiwi_mcp.domain.grants import Rules
from kiwi_mcp.domain.isolation import Jail
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.plan import HttpSpec, Plan, ProcessSpec
from kiwi_mcp.drivers.mcp.asking import Request, asked
from kiwi_mcp.drivers.mcp.bind import bind_mcp, planned
from kiwi_mcp.drivers.mcp.completing import completions
from kiwi_mcp.drivers.mcp.eras import Eras
from kiwi_mcp.drivers.mcp.listing import ServerListing, listed
from kiwi_mcp.drivers.mcp.oauth.account import forget
from kiwi_mcp.drivers.mcp.oauth.bearer import settled
from kiwi_mcp.drivers.mcp.oauth.login import account_for, log_in
from kiwi_mcp.drivers.mcp.pool import Lease, Pool
from kiwi_mcp.drivers.mcp.result import for_want_of, refused
from kiwi_mcp.drivers.mcp.server import Server, server_of
from kiwi_mcp.drivers.unavailable import unavailable
from kiwi_mcp.primitives import http_client
from kiwi_mcp.primitives.http_channel import is_session_lost

_OTHER_ERA: Final = -32022
_CHANGED: Final = frozenset({_OTHER_ERA, -32600, -32601})
"""What a server may say that was replaced by one of the other era."""
_COMPLETING = 5.0
"""How long a server may take to complete what is being typed, in seconds."""


class Mcp:
    """Asks MCP servers.

    `on_change` is told the identity of a server whose list has changed, or may have. `eras` remembers how each one is
    spoken to.
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
        await settled()
        await http_client.aclose()

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller
    ) -> Outcome:
        """Ask the server, and give its answer as a result."""
        assert isinstance(plan.spec, ProcessSpec | HttpSpec)  # noqa: S101 - bind above makes no other
        server = _held(replace(server_of(chain.executor, space), spec=plan.spec), plan.jail)
        request = Request(
            planned(plan),
            plan.inputs,
            plan.spec.timeout,
            chain.tool.manifest.parameters,
            chain.tool.manifest.outputs,
            caller,
            is_repeatable=plan.effect in ("pure", "idempotent"),
        )
        try:
            return await self._ask(server, secrets, request)
        except Unavailable as fault:
            return unavailable(fault)

    def spec_of(self, chain: Chain, space: Space) -> ProcessSpec | HttpSpec:
        """Return how a server is reached; `chain` is the server's own."""
        return server_of(chain.tool, space).spec

    async def list_items(
        self,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        *,
        hosts: Rules | None = None,
        jail: Jail | None = None,
    ) -> ServerListing:
        """Return everything that a server offers; `chain` is the server's own.

        `hosts` are those that the owner grants and denies, and `jail` is how a process of the server is held.
        """
        server = _held(_granted(server_of(chain.tool, space), hosts), jail)
        async with self._pool().using(server, secrets) as lease:
            try:
                async with asyncio.timeout(server.spec.timeout):
                    found = await listed(lease.connection)
            except TimeoutError:
                lease.retire()
                raise _slow(server) from None
            lease.worked()
            return found

    async def log_in(
        self,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        ask: Ask,
        *,
        hosts: Rules | None = None,
        scopes: Sequence[str] = (),
    ) -> str:
        """Have a person log in to a server, whose own chain it is, and return the rights that they gave."""
        server = _granted(server_of(chain.tool, space), hosts)
        account = account_for(server, secrets)
        if account.mended().challenge is None:
            try:  # what the server wants, it says when it is asked without
                await self.list_items(chain, space, secrets, hosts=hosts)
            except Unavailable as fault:
                if not isinstance(fault, LoginRequired):
                    raise
        tokens = await log_in(account, ask, server=server.name, scopes=scopes)
        await self._pool().end(server.identity)  # what was begun as somebody else is not gone on with
        return tokens.scope

    async def log_out(self, chain: Chain, space: Space) -> bool:
        """Forget the tokens of a server, and say whether there were any."""
        server = server_of(chain.tool, space)
        await self._pool().end(server.identity)
        return server.oauth is not None and forget(server.oauth)

    async def complete(
        self,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        argument: str,
        value: str,
        context: Mapping[str, str],
        *,
        hosts: Rules | None = None,
        jail: Jail | None = None,
    ) -> list[str]:
        """Return what a server proposes for an argument of a prompt or a template, of which `value` is typed so far.

        `context` are the arguments that are known already. A server that proposes nothing, or not in time, gives an
        empty list.
        """
        server = _held(_granted(server_of(chain.executor, space), hosts), jail)
        async with self._pool().using(server, secrets) as lease:
            try:
                async with asyncio.timeout(min(server.spec.timeout, _COMPLETING)):
                    return await completions(lease.connection, chain, argument, value, context)
            except (MCPError, TimeoutError):
                return []

    def _pool(self) -> Pool:
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            pool = self._pools[loop] = Pool(self.eras, self.on_change)
        return pool

    async def _ask(self, server: Server, secrets: Mapping[str, str], request: Request) -> Outcome:
        pool, is_askable = self._pool(), request.caller.ask is not nobody
        for is_last in (False, True):
            async with pool.using(server, secrets, is_askable=is_askable) as lease:
                try:
                    outcome = await asked(lease.connection, request)
                except MCPError as refusal:
                    if server.transport == "http" and _is_changed(refusal):
                        lease.retire()
                        if not is_last and (request.is_repeatable or _was_not_heard(refusal)):
                            continue
                    outcome = for_want_of(request.unanswered, refused(request.wanted.name, refusal))
                except TimeoutError:
                    return replace(_late(lease, request), sent=lease.connection.left())
                if lease.worked() and self.on_change is not None:
                    self.on_change(server.identity)  # a server that came back may be another version of itself
                if outcome.status == "error" and (remedy := lease.connection.lacking(outcome.message)):
                    outcome = replace(outcome, suggestion=remedy)
                outcome = replace(outcome, sent=lease.connection.left())
                notices: list[Json] = [*lease.connection.notices()]
                return replace(outcome, details={**outcome.details, "notices": notices}) if notices else outcome
        raise AssertionError("the last attempt has an outcome")


def _is_changed(refusal: MCPError) -> bool:
    return refusal.code in _CHANGED or _was_not_heard(refusal)


def _was_not_heard(refusal: MCPError) -> bool:
    """Whether the server surely did nothing: it speaks another era, or has forgotten the session."""
    return refusal.code == _OTHER_ERA or is_session_lost(refusal.error.data)


def _late(lease: Lease, request: Request) -> Outcome:
    # A server that said nothing at all meanwhile hangs: it is started anew for the next call. One that did say
    # something is only slow with this one, and was told to stop.
    if lease.connection.heard_at < request.asked_at:
        lease.retire()
    return Outcome(
        "timeout",
        message=f"The MCP server {lease.connection.server.name!r} did not answer {request.wanted.name!r} within "
        f"{request.timeout:g} seconds; it was told to stop.",
        suggestion="Ask for less, or give the tool a longer `config.timeout`.",
    )


def _granted(server: Server, hosts: Rules | None) -> Server:
    """Return a server that is reached under the rules of its owner."""
    if hosts is None or not isinstance(server.spec, HttpSpec):
        return server
    return replace(server, spec=replace(server.spec, granted=hosts.allow, denied=hosts.deny))


def _held(server: Server, jail: Jail | None) -> Server:
    """Return a server whose process is held in a jail; as strictly as can be where nobody says how."""
    return server if jail is None else replace(server, jail=jail)


def _slow(server: Server) -> Unavailable:
    return Unavailable(
        f"The MCP server {server.name!r} did not list what it offers within {server.spec.timeout:g} seconds.",
        suggestion="Give it a longer `timeout`, or ask whoever made it.",
        server=server.identity,
    )
