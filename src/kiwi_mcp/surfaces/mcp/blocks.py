"""What an MCP server gave beside text: passed on as blocks, with a short note where the answer would repeat them."""

from __future__ import annotations

from collections.abc import Sequence

from mcp_types import ContentBlock

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.kernel import Answer
from kiwi_mcp.store.outputs import INLINE_LIMIT
from kiwi_mcp.surfaces.mcp.passed import passed_call

_PREVIEWED = ("result_is_preview", "result_characters", "result_handle")
_TOLD = ("type", "name", "uri", "mimeType")
_BASE64 = 3, 4


def blocks_of(answer: Answer, *, revision: str) -> Sequence[ContentBlock]:
    """Return the parts of a server's answer that are no text, as a client of that revision can read them."""
    given = _given(answer.passed or {})
    others = [block for block in given if not _is_text(block)]
    passed = passed_call({"content": others}, revision=revision) if others else None
    return passed.content if passed else ()


def noted(answer: Answer) -> JsonObject:
    """Return what an answer holds, with a note in the place of each part that is passed on as a block."""
    given = _given(answer.passed or {})
    if all(map(_is_text, given)) or "result" not in answer.content or "structuredContent" in (answer.passed or {}):
        return answer.content
    result: Json = [block if _is_text(block) else _note(as_object(block)) for block in given]
    if len(compact(result)) > INLINE_LIMIT:  # texts as long as these are read from the output, as ever
        return answer.content
    rest = {word: value for word, value in answer.content.items() if word not in _PREVIEWED}
    return {**rest, "result": result}


def in_words(content: JsonObject) -> JsonObject:
    """Return an answer whose result is what its texts say, where it is a list of blocks."""
    result = content.get("result")
    blocks = [as_object(block) for block in as_list(result)]
    if not blocks or not any(map(_is_text, blocks)) or not all(block.get("type") for block in blocks):
        return content
    return {**content, "result": "\n".join(as_text(block.get("text")) for block in blocks if _is_text(block))}


def _given(passed: JsonObject) -> Sequence[Json]:
    """Return the parts of an answer as blocks; those of a resource are embedded ones unless they are text."""
    if "contents" not in passed:
        return as_list(passed.get("content"))
    return [
        {"type": "resource", "resource": part} if "blob" in as_object(part) else {**as_object(part), "type": "text"}
        for part in as_list(passed["contents"])
    ]


def _is_text(block: Json) -> bool:
    return as_object(block).get("type") == "text"


def _note(block: JsonObject) -> JsonObject:
    """Return what a block is, without what it holds."""
    held = {**block, **as_object(block.get("resource")), "type": block.get("type")}
    told: dict[str, Json] = {word: held[word] for word in _TOLD if as_text(held.get(word))}
    if encoded := as_text(held.get("data")) or as_text(held.get("blob")):
        told["bytes"] = len(encoded.rstrip("=")) * _BASE64[0] // _BASE64[1]
    elif text := as_text(held.get("text")):
        told["bytes"] = len(text.encode(errors="replace"))
    return told
