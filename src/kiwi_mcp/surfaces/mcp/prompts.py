"""Prompts: directives as programs for the client's own model, and prompts of MCP servers as they are."""

from __future__ import annotations

import json
from collections.abc import Mapping

import mcp_types as types
from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.offers import Offer
from kiwi_mcp.surfaces.mcp.calls import Asked, Calls, Reply
from kiwi_mcp.surfaces.mcp.listing import prompts_of
from kiwi_mcp.surfaces.mcp.marks import marked
from kiwi_mcp.surfaces.mcp.menu import Menu
from kiwi_mcp.surfaces.mcp.passed import passed_prompt
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi
from kiwi_mcp.surfaces.mcp.programs import program_text
from kiwi_mcp.surfaces.mcp.refusals import refused, unreadable
from kiwi_mcp.surfaces.mcp.whole import whole

_NAME = 100


class Prompts:
    """What `prompts/list` and `prompts/get` are answered with."""

    def __init__(self, kernel: KernelApi, menu: Menu, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = menu
        self._calls = calls

    async def list(self, _context: Context, _params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        """Return the prompts that clients see."""
        return types.ListPromptsResult(prompts=prompts_of(await self._menu.now()))

    async def get(self, context: Context, params: types.GetPromptRequestParams) -> Reply:
        """Return a prompt with its arguments filled in."""
        offer = await self.find(params.name)
        if offer is None:
            name = params.name[:_NAME]
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {name!r}", {"code": "tool_not_found", "name": name})
        given = typed(params.arguments or {}, offer.parameters)

        async def work(caller: Caller) -> types.GetPromptResult:
            return await self._get(offer, given, caller, context)

        asked = Asked("prompts/get", params.name, given, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def find(self, name: str) -> Offer | None:
        """Return the prompt of a name: one that is listed, or else any directive."""
        for offer in (await self._menu.now()).prompts:
            if offer.name == name:
                return offer
        return self._kernel.offered(name, "prompt")

    async def _get(self, offer: Offer, given: JsonObject, caller: Caller, context: Context) -> types.GetPromptResult:
        payload: JsonObject = {"item_type": "directive", "item_id": offer.identity, "parameters": given}
        answer = await self._kernel.call("execute", payload, caller)
        if answer.is_error:
            raise refused(answer, context)
        if answer.passed is not None:
            prompt = passed_prompt(answer.passed, revision=context.protocol_version)
            if prompt is None:
                raise unreadable(offer.name)
            return marked(prompt, answer, "instructions")
        program = as_object((await whole(self._kernel, answer)).get("result"))
        prompt = types.GetPromptResult(
            description=offer.description or None,
            messages=[types.PromptMessage(role="user", content=types.TextContent(text=program_text(program)))],
        )
        return marked(prompt, answer, "instructions")


def typed(arguments: Mapping[str, str], schema: JsonObject) -> JsonObject:
    """Return a prompt's arguments, which are always text, as the types that its schema asks for."""
    properties = as_object(schema.get("properties"))
    return {name: _typed(value, as_object(properties.get(name)).get("type")) for name, value in arguments.items()}


def _typed(value: str, kind: Json) -> Json:
    if kind in {None, "string"}:
        return value
    try:
        read: Json = json.loads(value)
    except ValueError:  # it is told to be no number where it is checked
        return value
    return read
