"""`tools/list`, `tools/call`."""

from __future__ import annotations

from collections.abc import Sequence

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import Tool, ToolAnnotations
from mcp_types.methods import serialize_server_result
from pydantic import ValidationError

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.mcp import Hints, Offer, Offers, TaskUse
from kiwi_mcp.kernel.tool_names import description_of
from kiwi_mcp.kernel.verbs import BY_NAME, VERBS, VerbFamily
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall, Reply
from kiwi_mcp.surfaces.mcp.errors import passed_refusal
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi
from kiwi_mcp.surfaces.mcp.results import as_result, declares_result, tool_result, with_label
from kiwi_mcp.surfaces.mcp.tool_list import ToolListWatcher


def definitions(servers: Sequence[str] = (), namespaces: Sequence[str] = ()) -> list[Tool]:
    """Return the advertised tools, where some MCP servers are installed, and a registry has some namespaces."""
    return [_definition(verb, description_of(verb, servers, namespaces)) for verb in VERBS if verb.is_meta_tool]


def _definition(verb: VerbFamily, description: str) -> Tool:
    return Tool(
        name=verb.name,
        title=f"Kiwi {verb.name}",
        description=description,
        input_schema=dict(verb.input_schema()),
        annotations=ToolAnnotations(
            read_only_hint=verb.is_read_only or None,
            destructive_hint=None if verb.is_read_only else verb.runs_items,
            open_world_hint=verb.runs_items,
        ),
    )


def tools_of(offers: Offers, *, revision: str) -> list[types.Tool]:
    """Return the meta-tools that are offered, then the owner's tools, as a client of a revision reads them."""
    meta = {tool.name: tool for tool in definitions(offers.servers, offers.namespaces)}
    chosen = [meta[name] for name in offers.meta_tools if name in meta]
    # One tool with a schema that the protocol does not know would cost the client its whole list.
    offered = (tool_of(offer, revision=revision) for offer in offers.tools)
    return [*chosen, *(tool for tool in offered if _is_sound(tool, revision))]


def tool_of(offer: Offer, *, revision: str) -> types.Tool:
    """Return one of the owner's tools."""
    return types.Tool(
        name=offer.name,
        title=offer.title or None,
        description=offer.description or offer.title or offer.name,
        input_schema={**offer.parameters, "type": "object"},
        output_schema=dict(offer.outputs) if declares_result(offer, revision) else None,
        annotations=_annotations(offer.hints),
    )


def prompts_of(offers: Offers) -> list[types.Prompt]:
    """Return the prompts that are offered."""
    return [
        types.Prompt(
            name=offer.name,
            title=offer.title or None,
            description=offer.description or None,
            arguments=_arguments(offer) or None,
        )
        for offer in offers.prompts
    ]


def _arguments(offer: Offer) -> list[types.PromptArgument]:
    required = as_list(offer.parameters.get("required"))
    return [
        types.PromptArgument(
            name=name, description=as_text(as_object(schema).get("description")) or None, required=name in required
        )
        for name, schema in as_object(offer.parameters.get("properties")).items()
    ]


def _annotations(hints: Hints) -> types.ToolAnnotations | None:
    if hints == Hints():
        return None
    return types.ToolAnnotations(
        read_only_hint=hints.is_read_only,
        destructive_hint=hints.is_destructive,
        idempotent_hint=hints.is_idempotent,
        open_world_hint=hints.is_open_world,
    )


def _is_sound(tool: types.Tool, revision: str) -> bool:
    listed = types.ListToolsResult(tools=[tool]).model_dump(by_alias=True, mode="json", exclude_none=True)
    try:
        serialize_server_result("tools/list", revision, listed)
    except (ValidationError, ValueError):
        return False
    return True


_NAME = 100


class Tools:
    """What `tools/list` and `tools/call` are answered with."""

    def __init__(self, kernel: KernelApi, changes: ToolListWatcher, calls: Calls) -> None:
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
            return with_label(result, answer)

        return await self._calls.answer(context, _asked(params), work, task=task)

    async def _call_offer(self, context: Context, params: types.CallToolRequestParams, offer: Offer) -> Reply:
        async def work(caller: Caller) -> types.CallToolResult:
            parameters = params.arguments or {}
            payload: JsonObject = {"item_type": offer.item_type, "item_id": offer.identity, "parameters": parameters}
            answer = await self._kernel.call("execute", payload, caller)
            self._changes.expect()
            if refusal := passed_refusal(answer, context):
                raise refusal
            result = await tool_result(self._kernel, answer, offer, revision=context.protocol_version)
            return with_label(result, answer)

        return await self._calls.answer(context, _asked(params), work, task=offer.task)


def _asked(params: types.CallToolRequestParams) -> ClientCall:
    return ClientCall("tools/call", params.name, params.arguments or {}, params.input_responses, params.request_state)


def unknown_tool(name: str) -> MCPError:
    """Return the refusal of a call to a tool that no client sees."""
    return MCPError(
        types.INVALID_PARAMS,
        f"Unknown tool: {name[:_NAME]!r}. Find it with `search`, then run it with `execute`.",
        {"code": "tool_not_found", "tool_id": name[:_NAME]},
    )
