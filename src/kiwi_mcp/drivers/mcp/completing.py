"""What a server proposes while an argument of one of its prompts or templates is typed."""

from __future__ import annotations

from collections.abc import Mapping

from kiwi_mcp.domain.chain import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.drivers.mcp.connection import Connection

MOST_PROPOSALS = 100
"""The most proposals that are taken: as many as the protocol allows."""


async def completions(
    connection: Connection, chain: Chain, argument: str, value: str, context: Mapping[str, str]
) -> list[str]:
    """Ask a server for its proposals; one that has none for anything is not asked."""
    about = _reference(chain)
    if about is None or "completions" not in (await connection.greeted()).capabilities:
        return []
    params: dict[str, Json] = {"ref": about, "argument": {"name": argument, "value": value}}
    if context:
        params["context"] = {"arguments": dict(context)}
    answer = await connection.ask("completion/complete", params)
    proposed = as_list(as_object(answer.get("completion")).get("values"))
    return [one for one in proposed if isinstance(one, str)][:MOST_PROPOSALS]


def _reference(chain: Chain) -> JsonObject | None:
    config = chain.tool.manifest.config
    if uri := as_text(config.get("mcp_resource_uri")):
        return {"type": "ref/resource", "uri": uri}
    if prompt := as_text(config.get("mcp_prompt_name")):
        return {"type": "ref/prompt", "name": prompt}
    return None
