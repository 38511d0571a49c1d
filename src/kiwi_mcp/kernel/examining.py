"""Examining: the verb `doctor`, and the advice it gives from what was used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import KiwiError, PolicyDenied
from kiwi_mcp.domain.json import JsonObject, as_list, as_object
from kiwi_mcp.kernel.answers import Answer
from kiwi_mcp.kernel.context.advice import Advice
from kiwi_mcp.kernel.context.report import advice_for, tell
from kiwi_mcp.kernel.parts import Parts
from kiwi_mcp.kernel.requests import DoctorRequest, McpRequest, PreferRequest


async def answer_doctor(request: DoctorRequest, caller: Caller, parts: Parts) -> Answer:
    """Tell what works here, what is missing, and how to get it."""
    # What holds processes is loaded by whoever starts one, or asks about it.
    standings = import_module("kiwi_mcp.drivers.held").standings
    examine: Callable[..., JsonObject] = import_module("kiwi_mcp.kernel.doctor").examine
    catalogs, project = parts.catalogs, request.project_path
    offers = await parts.offers(project)
    servers = await _servers(request, caller, parts)
    await standings(catalogs.space(project))  # tests the machine, unless that was done before
    context = tell(offers, parts.tally, await advice(request, caller, parts) if parts.is_own_hand(caller) else None)
    search = await catalogs.far.do(catalogs.space(project), parts.looking.told)
    health = examine(catalogs.of(project), parts.store, offers, servers, context, search)
    return Answer(health, exit_code=1 if health["status"] == "problem" else 0)


async def advice(request: DoctorRequest | PreferRequest, caller: Caller, parts: Parts) -> Sequence[Advice]:
    """Return what the owner might send always, or send no longer, from how it was used."""
    if not parts.is_own_hand(caller):
        message = "What was used, and how often, is the owner's to know."
        raise PolicyDenied(message, suggestion="Ask them to type `kiwi prefer suggest`.")
    offers = await parts.offers(request.project_path)
    space = parts.catalogs.space_if_any(request.project_path)
    return await parts.catalogs.near.do(space, lambda catalog: advice_for(catalog, parts.store, offers, parts.tally))


async def _servers(request: DoctorRequest, caller: Caller, parts: Parts) -> Sequence[JsonObject]:
    """Return the MCP servers as a list tells of them; that a store cannot be read is told by itself."""
    look = partial(parts.desk().look, McpRequest(), is_owner=parts.is_own_hand(caller))
    try:
        told = await parts.catalogs.near.do(parts.catalogs.space(request.project_path), look)
    except KiwiError:
        return ()
    return [as_object(server) for server in as_list(told.get("servers"))]
