"""What an MCP server answered, passed on to a client word for word, as far as the client's revision has the words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import mcp_types as types
from mcp_types import SERVER_INFO_META_KEY
from pydantic import ValidationError

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.surfaces.mcp.revisions import ANY_STRUCTURE_SINCE, BLOCKS_SINCE, STRUCTURED_SINCE

_OURS = {"resultType", "cacheScope"}
"""What every server says for itself: who may share an answer of Kiwi's is not for the server behind it to say."""

ResultT = TypeVar("ResultT", bound=types.Result)


def passed_call(passed: JsonObject, *, revision: str) -> types.CallToolResult | None:
    """Return the answer to a call; None where it is not one that a client of that revision could read."""
    result = _read(types.CallToolResult, {**passed, "content": _blocks(passed.get("content"), revision)})
    if result is None or _has_structure(result, revision):
        return result
    return result.model_copy(update={"structured_content": None})


def passed_prompt(passed: JsonObject, *, revision: str) -> types.GetPromptResult | None:
    """Return a prompt's messages; None where they are not such that a client of that revision could read."""
    messages = [
        {**message, "content": _block(message.get("content"), revision)}
        for message in map(as_object, as_list(passed.get("messages")))
    ]
    return _read(types.GetPromptResult, {**passed, "messages": messages})


def passed_resource(passed: JsonObject) -> types.ReadResourceResult | None:
    """Return what a resource holds; None where it is nothing that a client could read."""
    result = _read(types.ReadResourceResult, passed)
    return result if result is not None and result.contents else None


def _read(kind: type[ResultT], passed: JsonObject) -> ResultT | None:
    plain = {word: value for word, value in passed.items() if word not in _OURS}
    meta = {word: value for word, value in as_object(passed.get("_meta")).items() if word != SERVER_INFO_META_KEY}
    try:
        return kind.model_validate({**plain, "_meta": meta or None}, by_name=False)
    except ValidationError:
        return None


def _has_structure(result: types.CallToolResult, revision: str) -> bool:
    is_object = isinstance(result.structured_content, Mapping)
    return revision >= (STRUCTURED_SINCE if is_object else ANY_STRUCTURE_SINCE)


def _blocks(blocks: Json, revision: str) -> list[Json]:
    return [_block(block, revision) for block in as_list(blocks)]


def _block(block: Json, revision: str) -> Json:
    """Return a block of content, told in words where the client's revision has no such blocks."""
    kind = as_text(as_object(block).get("type"))
    if revision >= BLOCKS_SINCE.get(kind, ""):
        return block
    said = [as_text(as_object(block).get(word)) for word in ("name", "description", "mimeType", "uri")]
    return {"type": "text", "text": f"[{kind}: {' '.join(filter(None, said))}]"}
