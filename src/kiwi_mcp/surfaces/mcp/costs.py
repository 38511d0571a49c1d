"""What a result costs the model that a client gives it to.

Of an answer that is told twice, as a structure and in words, a client shows its model the one or the other: the dearer
of the two counts. Images and sounds are paid for otherwise, and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import mcp_types as types

from kiwi_mcp.domain.json import compact
from kiwi_mcp.kernel.context.cost import Cost, cost_of


def cost_of_result(result: types.Result) -> Cost:
    """Return what the words of a result cost."""
    match result:
        case types.CallToolResult():
            told = "\n".join(_texts(result.content))
            return cost_of(max(told, _structure(result), key=len))
        case types.GetPromptResult():
            return cost_of("\n".join(_texts(message.content for message in result.messages)))
        case types.ReadResourceResult():
            return cost_of("\n".join(_contents(result.contents)))
        case _:
            return Cost()


def _structure(result: types.CallToolResult) -> str:
    if result.structured_content is None:
        return ""
    try:
        return compact(result.structured_content)
    except (ValueError, TypeError, RecursionError):  # a server gave what is no JSON; what it says in words is counted
        return ""


def _texts(blocks: Iterable[object]) -> Iterator[str]:
    for block in blocks:
        match block:
            case types.TextContent(text=text):
                yield text
            case types.EmbeddedResource(resource=resource):
                yield from _contents([resource])


def _contents(contents: Iterable[object]) -> Iterator[str]:
    yield from (part.text for part in contents if isinstance(part, types.TextResourceContents))
