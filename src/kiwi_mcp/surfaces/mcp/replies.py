"""Answers as MCP results, each told once.

A client whose revision has `structuredContent` gets the whole answer there, and in `content` its gist in words: some
clients give their model the one, some the other, and neither is the other written again. An older client gets the whole
answer as JSON text. Images and whatever else a server gave that is no text follow as blocks, once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from mcp_types import CallToolResult, TextContent

from kiwi_mcp.domain.json import Json, JsonObject, compact
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.blocks import blocks_of, in_words, noted
from kiwi_mcp.surfaces.mcp.gist import gist
from kiwi_mcp.surfaces.mcp.revisions import STRUCTURED_SINCE

_DEEPEST = 100
"""How deep an answer may be nested: parsers of other languages refuse more than a few hundred levels."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def as_result(answer: Answer, *, revision: str) -> CallToolResult:
    """Return an answer in the form that a client of that revision reads."""
    blocks = blocks_of(answer, revision=revision)
    text = safe_text(noted(answer) if blocks else answer.content)
    if revision < STRUCTURED_SINCE:
        return CallToolResult(content=[TextContent(text=text), *blocks], is_error=answer.is_error)
    content: JsonObject = json.loads(text)
    told = gist(in_words(content) if blocks else content)
    return CallToolResult(
        content=[TextContent(text=told), *blocks], structured_content=dict(content), is_error=answer.is_error
    )


def safe_text(content: JsonObject) -> str:
    """Return an answer as JSON that every parser takes, whatever a tool has put into it."""
    try:
        text = compact(content)
        is_deep = text.count("{") + text.count("[") > _DEEPEST and _depth(content) > _DEEPEST
    except (ValueError, TypeError, RecursionError):
        text, is_deep = "", True
    if is_deep:
        text = compact(_plain(content, _DEEPEST))
    return _LONE_SURROGATE.sub(lambda found: f"\\\\u{ord(found[0]):04x}", text)


def _depth(value: Json) -> int:
    if isinstance(value, str) or not isinstance(value, Mapping | Sequence):
        return 0
    parts = value.values() if isinstance(value, Mapping) else value
    return 1 + max(map(_depth, parts), default=0)


def _plain(value: object, levels: int) -> Json:
    """Return a value as JSON: what JSON cannot say is said as text, and what lies too deep is left out."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if not isinstance(value, Mapping | Sequence):
        return str(value)
    if levels == 0:
        return "…"
    if isinstance(value, Mapping):
        return {str(name): _plain(part, levels - 1) for name, part in value.items()}
    return [_plain(part, levels - 1) for part in value]
