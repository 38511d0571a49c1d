"""Offers as the lists of MCP."""

from __future__ import annotations

import mcp_types as types
from mcp_types.methods import serialize_server_result
from pydantic import ValidationError

from kiwi_mcp.domain.json import as_list, as_object, as_text
from kiwi_mcp.domain.offers import Hints, Offer, Offers
from kiwi_mcp.surfaces.mcp.definitions import definitions
from kiwi_mcp.surfaces.mcp.revisions import ANY_STRUCTURE_SINCE, STRUCTURED_SINCE


def tools_of(offers: Offers, *, revision: str) -> list[types.Tool]:
    """Return the meta-tools that are offered, then the owner's tools, as a client of a revision reads them."""
    meta = {tool.name: tool for tool in definitions(offers.servers, offers.namespaces)}
    chosen = [meta[name] for name in offers.meta_tools if name in meta]
    # One tool whose schema the protocol does not know would cost the client its whole list.
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


def declares_result(offer: Offer, revision: str) -> bool:
    """Whether a client of a revision is told what the result of a tool looks like."""
    since = STRUCTURED_SINCE if offer.outputs.get("type") == "object" else ANY_STRUCTURE_SINCE
    return bool(offer.outputs) and revision >= since


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


def resources_of(offers: Offers) -> list[types.Resource]:
    """Return the resources that are offered."""
    return [
        types.Resource(
            uri=offer.name,
            name=offer.title or offer.name,
            description=offer.description or None,
            mime_type=offer.mime_type or None,
        )
        for offer in offers.resources
    ]


def templates_of(offers: Offers) -> list[types.ResourceTemplate]:
    """Return the templates of addresses that are offered."""
    return [
        types.ResourceTemplate(
            uri_template=offer.name,
            name=offer.title or offer.name,
            description=offer.description or None,
            mime_type=offer.mime_type or None,
        )
        for offer in offers.templates
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
