"""The tools a client is told of: made from the verb table, in as few words as they can be said."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_types import Tool, ToolAnnotations

from kiwi_mcp.kernel.naming import description_of
from kiwi_mcp.kernel.schemas import input_schema
from kiwi_mcp.kernel.verbs import VERBS, Verb


def definitions(servers: Sequence[str] = (), namespaces: Sequence[str] = ()) -> list[Tool]:
    """Return the advertised tools, where some MCP servers are installed, and a registry has some namespaces."""
    return [_definition(verb, description_of(verb, servers, namespaces)) for verb in VERBS if verb.is_meta_tool]


def _definition(verb: Verb, description: str) -> Tool:
    return Tool(
        name=verb.name,
        title=f"Kiwi {verb.name}",
        description=description,
        input_schema=dict(input_schema(verb.request)),
        annotations=ToolAnnotations(
            read_only_hint=verb.is_read_only or None,
            destructive_hint=None if verb.is_read_only else verb.runs_items,
            open_world_hint=verb.runs_items,
        ),
    )
