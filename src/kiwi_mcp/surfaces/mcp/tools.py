"""Tools: the list of them, and calls to the meta-tools, to the owner's always-send tools and to every other verb."""

from __future__ import annotations

import mcp_types as types
from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.offers import Offer, TaskUse
from kiwi_mcp.kernel.verbs import BY_NAME
from kiwi_mcp.surfaces.mcp.calls import Asked, Calls, Reply
from kiwi_mcp.surfaces.mcp.changes import Changes
from kiwi_mcp.surfaces.mcp.listing import tools_of
from kiwi_mcp.surfaces.mcp.marks import kind_of, marked
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi
from kiwi_mcp.surfaces.mcp.refusals import passed_refusal
from kiwi_mcp.surfaces.mcp.replies import as_result
from kiwi_mcp.surfaces.mcp.results import tool_result

_NAME = 100


class Tools:
    """What `tools/list` and `tools/call` are answered with."""

    def __init__(self, kernel: KernelApi, changes: Changes, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = changes.menu
        self._changes = changes
        self._calls = calls

    async def list(self, context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """Return the meta-tools and the owner's always-send tools."""
        offers = await self._menu.now()
        tools = tools_of(offers, revision=context.protocol_version)
        return types.ListToolsResult(tools=tools)

    async def call(self, context: Context, params: types.CallToolRequestParams) -> Reply:
        """Answer a call."""
        # The names of the meta-tools are never those of other tools, so their calls wait for nothing.
        verb = BY_NAME.get(params.name)
        offer = None if verb is not None and verb.is_meta_tool else await self._menu.tool(params.name)
        if offer is not None:
            return await self._call_offer(context, params, offer)
        if verb is None:
            raise unknown_tool(params.name)
        return await self._call_verb(context, params, "auto" if verb.runs_items else "never")

    def schema_of(self, name: str) -> JsonObject | None:
        """Return what one of the owner's tools takes, as it was last read; headers of requests are held against it."""
        offer = self._menu.known_tool(name)
        return offer.parameters if offer is not None else None

    async def _call_verb(self, context: Context, params: types.CallToolRequestParams, task: TaskUse) -> Reply:
        async def work(caller: Caller) -> types.CallToolResult:
            answer = await self._kernel.call(params.name, params.arguments or {}, caller)
            self._changes.expect()
            result = as_result(answer, revision=context.protocol_version)
            return marked(result, answer, kind_of(params.name, params.arguments or {}))

        return await self._calls.answer(context, _asked(params), work, task=task)

    async def _call_offer(self, context: Context, params: types.CallToolRequestParams, offer: Offer) -> Reply:
        async def work(caller: Caller) -> types.CallToolResult:
            payload: JsonObject = {"item_id": offer.identity, "parameters": params.arguments or {}}
            answer = await self._kernel.call("execute", payload, caller)
            self._changes.expect()
            if refusal := passed_refusal(answer, context):
                raise refusal
            result = await tool_result(self._kernel, answer, offer, revision=context.protocol_version)
            return marked(result, answer)

        return await self._calls.answer(context, _asked(params), work, task=offer.task)


def _asked(params: types.CallToolRequestParams) -> Asked:
    return Asked("tools/call", params.name, params.arguments or {}, params.input_responses, params.request_state)


def unknown_tool(name: str) -> MCPError:
    """Return the refusal of a call to a tool that no client is told of."""
    return MCPError(
        types.INVALID_PARAMS,
        f"Unknown tool: {name[:_NAME]!r}. Find it with `search`, then run it with `execute`.",
        {"code": "tool_not_found", "tool_id": name[:_NAME]},
    )
