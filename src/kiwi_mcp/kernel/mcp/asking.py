"""Asking: the servers that are known here, and several of them asked for what they offer, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Tool
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.mcp import ServerKey
from kiwi_mcp.domain.outcome import Progress, Report
from kiwi_mcp.kernel.mcp.servers import Refreshed, Servers, key_of, names_of_servers, server_named
from kiwi_mcp.store.definitions import Definitions

_AT_ONCE = 4


def known_servers(catalog: Catalog, remembered: Definitions) -> list[tuple[Tool, ServerKey]]:
    """Return the servers of the project, of the user, and of those that are published the ones that were asked."""
    names = {*names_of_servers(catalog), *(one.key.server for one in remembered.servers() if not one.path)}
    found: list[tuple[Tool, ServerKey]] = []
    for name in sorted(names):
        try:
            server = server_named(name, catalog)
        except KiwiError:
            continue
        found.append((server, key_of(server, catalog.space)))
    return found


async def asked(servers: Servers, server: Tool, catalog: Catalog, warnings: list[Json]) -> Refreshed | None:
    """Ask one server for what it offers; why it cannot be asked becomes a warning."""
    try:
        return await servers.refresh(server, catalog)
    except KiwiError as fault:
        fix = f"{fault.suggestion} Then `kiwi mcp refresh {server.id}`."
        warnings.append(Issue(server.id, f"could not be asked: {fault.message}", fix, "warning").to_json())
        return None


async def asked_all(
    servers: Servers, wanted: Sequence[Tool], catalog: Catalog, warnings: list[Json], report: Report
) -> list[Refreshed]:
    """Ask several servers, each for what it offers."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def ask(number: int, server: Tool) -> Refreshed | None:
        async with gate:
            report(Progress(f"asking {server.id}", done=number, total=len(wanted)))
            return await asked(servers, server, catalog, warnings)

    answers = await asyncio.gather(*(ask(number, server) for number, server in enumerate(wanted)))
    return [one for one in answers if one is not None]
