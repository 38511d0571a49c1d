"""Completions: what an argument of a prompt, or a part of an address, may be."""

from __future__ import annotations

from collections.abc import Sequence

import mcp_types as types

from kiwi_mcp.domain.caller import NOBODY
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.offers import Offer
from kiwi_mcp.surfaces.mcp.addresses import HELP, KNOWLEDGE, tail
from kiwi_mcp.surfaces.mcp.menu import Menu
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi
from kiwi_mcp.surfaces.mcp.prompts import Prompts

_MOST = 100
"""How many values the protocol allows in one answer."""


class Completions:
    """What `completion/complete` is answered with; nothing where nothing is known."""

    def __init__(self, kernel: KernelApi, menu: Menu, prompts: Prompts) -> None:
        self._kernel = kernel
        self._menu = menu
        self._prompts = prompts

    async def complete(self, _context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        """Return what may follow on what was typed: our own values that begin like it, else what a server proposes."""
        offer, known = await self._about(params)
        typed = params.argument.value.casefold()
        found = [value for value in known if value.casefold().startswith(typed)]
        if not known and offer is not None and offer.identity:
            given = (params.context.arguments if params.context else None) or {}
            argument = params.argument
            found = [*await self._kernel.complete(offer.identity, argument.name, argument.value, given)]
        completion = types.Completion(values=found[:_MOST], total=len(found), has_more=len(found) > _MOST)
        return types.CompleteResult(completion=completion)

    async def _about(self, params: types.CompleteRequestParams) -> tuple[Offer | None, Sequence[str]]:
        """Return what a completion is for, and the values for it that are known here."""
        if isinstance(params.ref, types.PromptReference):
            prompt = await self._prompts.find(params.ref.name)
            return prompt, values_of(_property(prompt.parameters, params.argument.name)) if prompt else ()
        uri = params.ref.uri
        if uri.startswith(HELP):
            told = await self._kernel.call("help", {}, NOBODY)
            return None, [text_of(topic) for topic in as_list(told.content.get("topics"))]
        if uri.startswith(KNOWLEDGE):
            return None, sorted({*await self._listed(), *await self._found(params.argument.value)})
        return next((one for one in (await self._menu.now()).templates if one.name == uri), None), ()

    async def _listed(self) -> Sequence[str]:
        named = (tail(offer.name, KNOWLEDGE) for offer in (await self._menu.now()).resources)
        return [name for name in named if name]

    async def _found(self, typed: str) -> Sequence[str]:
        query: JsonObject = {"query": typed, "item_type": "knowledge", "limit": _MOST}
        found = await self._kernel.call("search", query, NOBODY)
        return [as_text(as_object(one).get("name")) for one in as_list(found.content.get("results"))]


def values_of(schema: JsonObject) -> Sequence[str]:
    """Return the values that a schema allows by name."""
    if schema.get("type") == "boolean":
        return ("true", "false")
    named = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    return [text_of(value) for value in named]


def _property(schema: JsonObject, name: str) -> JsonObject:
    return as_object(as_object(schema.get("properties")).get(name))
