"""Logging in to servers that want it: the owner allows in a browser what no model and no tool could."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.call import Space
from kiwi_mcp.domain.caller import Ask
from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.errors import DriverMissing, KiwiError, LoginRequired
from kiwi_mcp.domain.grants import Rules
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.kernel.mcp.acceptance import named
from kiwi_mcp.kernel.mcp.servers import Refreshed, Servers, permitted, revealed, server_named
from kiwi_mcp.kernel.mcp.told import counted, items_told, waiting, warned
from kiwi_mcp.kernel.pipeline import load_driver
from kiwi_mcp.kernel.requests import McpRequest

_ROUNDS = 3
"""How often one login may send the owner to the browser, where a server asks for more each time."""


class Door(Protocol):
    """The driver that speaks to servers, as far as it is needed here."""

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
        """Have a person log in to a server, and return the rights that they gave."""

    async def log_out(self, chain: Chain, space: Space) -> bool:
        """Forget the tokens of a server, and say whether there were any."""


class Logins:
    """The logins of one user."""

    def __init__(self, user: Path, servers: Servers) -> None:
        self._user = user
        self._servers = servers

    async def log_in(self, request: McpRequest, catalog: Catalog, ask: Ask) -> JsonObject:
        """Have the owner log in to a server, and ask it then what it offers."""
        server = server_named(named(request), catalog)
        chain, rights = permitted(server, catalog, self._user)
        secrets, offered, fault = revealed(chain, catalog.space, self._servers.judge), None, None
        for _ in range(_ROUNDS):
            scope = await _door().log_in(chain, catalog.space, secrets, ask, hosts=rights.hosts, scopes=request.scopes)
            offered, fault = await self._asked(server, catalog)
            if not isinstance(fault, LoginRequired):
                break
        else:
            assert fault is not None  # noqa: S101 - each round left one
            raise fault
        said = f": {counted(offered.definitions)}{waiting(offered.definitions)}" if offered else ""
        return {
            "action": "login",
            "server": server.id,
            "status": "logged in",
            "message": f"You are logged in to {server.id}{said}",
            "scope": scope,
            "items": items_told(offered.definitions) if offered else [],
            **warned([_unanswered(server, fault).to_json()] if fault else []),
        }

    async def log_out(self, request: McpRequest, catalog: Catalog) -> JsonObject:
        """Forget what the owner allowed."""
        server = server_named(named(request), catalog)
        had = await self.forget(server, catalog)
        message = f"You are logged out of {server.id}" if had else f"You were not logged in to {server.id}"
        return {"action": "logout", "server": server.id, "status": "logged out", "message": message}

    async def forget(self, server: Tool, catalog: Catalog) -> bool:
        """Remove the tokens of a server, and say whether there were any."""
        return await _door().log_out(Chain((server,), ""), catalog.space)

    async def _asked(self, server: Tool, catalog: Catalog) -> tuple[Refreshed | None, KiwiError | None]:
        try:
            return await self._servers.refresh(server, catalog), None
        except KiwiError as fault:
            return None, fault


def _door() -> Door:
    driver = load_driver("mcp")
    if driver is None:
        raise DriverMissing("an MCP server", "mcp")
    return cast("Door", driver)


def _unanswered(server: Tool, fault: KiwiError) -> Issue:
    return Issue(server.id, f"could not be asked: {fault.message}", fault.suggestion, "warning")
