"""Answers of the owner's own tools as MCP results: what the tool gave, and nothing around it."""

from __future__ import annotations

import json

from mcp_types import CallToolResult, TextContent

from kiwi_mcp.domain.json import Json, JsonObject, text_of
from kiwi_mcp.domain.offers import Offer
from kiwi_mcp.kernel import Answer
from kiwi_mcp.manifest.schema import faults
from kiwi_mcp.surfaces.mcp.gist import beside
from kiwi_mcp.surfaces.mcp.listing import declares_result
from kiwi_mcp.surfaces.mcp.passed import passed_call
from kiwi_mcp.surfaces.mcp.port import KernelApi
from kiwi_mcp.surfaces.mcp.replies import as_result, safe_text
from kiwi_mcp.surfaces.mcp.whole import whole


async def tool_result(kernel: KernelApi, answer: Answer, offer: Offer, *, revision: str) -> CallToolResult:
    """Return what a tool gave: a server's answer word for word, else the result, else why there is none."""
    is_declared = declares_result(offer, revision)
    if (passed := _passed(answer, revision)) and not (is_declared and _lacks_structure(passed)):
        return passed
    if answer.is_error:
        return as_result(answer, revision=revision)
    if not is_declared:
        return _told(json.loads(safe_text(answer.content)))
    content: JsonObject = json.loads(safe_text(await whole(kernel, answer)))
    wrong = _differs(content, offer)
    if wrong is not None:
        return as_result(wrong, revision=revision)
    return _told(content).model_copy(update={"structured_content": content.get("result")})


def _passed(answer: Answer, revision: str) -> CallToolResult | None:
    # Where Kiwi and the server disagree on whether it went well, Kiwi says why.
    if answer.passed is None or (answer.passed.get("isError") is True) is not answer.is_error:
        return None
    return passed_call(answer.passed, revision=revision)


def _lacks_structure(result: CallToolResult) -> bool:
    return not result.is_error and result.structured_content is None


def _told(content: JsonObject) -> CallToolResult:
    notes = "\n".join(beside(content))
    texts = [text_of(content.get("result")), *([notes] if notes else [])]
    return CallToolResult(content=[TextContent(text=text) for text in texts])


def _differs(content: JsonObject, offer: Offer) -> Answer | None:
    """Return the answer that says how a result differs from what its author declares, if it does."""
    found = faults(offer.outputs, content.get("result"), place="result")
    if not found:
        return None
    told: dict[str, Json] = {
        "error": "Execution failed",
        "code": "execution_failed",
        "item_type": "tool",
        "message": f"The result is not what `outputs` declares: {found[0].place} {found[0].reason}.",
        "suggestion": "Mend the tool, or what its manifest declares.",
        "issues": [issue.to_json() for issue in found],
    }
    return Answer({**told, **content}, is_error=True)
