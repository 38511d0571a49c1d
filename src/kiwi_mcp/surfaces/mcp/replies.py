"""Answers as MCP results, each told once.

The whole answer goes out as JSON text: every client, old and new, shows `content` to its model, and many show nothing
else. `structuredContent` would say the same again, and some clients pass both on, so the model would pay twice. It is
sent only to a caller that asks for it with `"kiwi/structured": true` in the request's `_meta`, as a program does; that
caller gets one line of text beside it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence

from mcp_types import CallToolResult, TextContent

from kiwi_mcp.domain.json import Json, JsonObject, as_text, compact
from kiwi_mcp.kernel import Answer

STRUCTURED_KEY = "kiwi/structured"

_DEEPEST = 100
"""How deep an answer may be nested: parsers of other languages refuse more than a few hundred levels."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def as_result(answer: Answer, *, is_structured: bool) -> CallToolResult:
    """Return an answer in the one form that its caller reads."""
    text = safe_text(answer.content)
    if not is_structured:
        return CallToolResult(content=[TextContent(text=text)], is_error=answer.is_error)
    content: JsonObject = json.loads(text)
    return CallToolResult(
        content=[TextContent(text=_summary(content))], structured_content=dict(content), is_error=answer.is_error
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


def _summary(content: JsonObject) -> str:
    message = as_text(content.get("message")) or as_text(content.get("status")) or "done"
    return f"{message} (the answer is in structuredContent)"


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
