"""What a server answered, as an outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.drivers.heard import NotJson, parse
from kiwi_mcp.drivers.mcp.bind import Wanted
from kiwi_mcp.drivers.mcp.failures import QUOTED, harmless
from kiwi_mcp.manifest.schema import faults

MOST_BLOCKS = 10_000
"""The most parts that one answer may have."""
_ENVELOPE = {"_meta", "resultType", "ttlMs", "cacheScope"}
_AWAY = frozenset({502, 503, 504})
_SUGGESTION = "The message is the server's own; mend the parameters, or load the tool to see what it takes."


def outcome_of(wanted: Wanted, answer: JsonObject, outputs: JsonObject) -> Outcome:
    """Return what an answer means; `outputs` is the schema that the tool declares for its result, if it has one."""
    if answer.get("resultType") == "input_required":
        return _asked_back(answer)
    match wanted.method:
        case "tools/call":
            return _passable(_called(answer, outputs))
        case "prompts/get":
            return _passable(Outcome("success", result={k: v for k, v in answer.items() if k not in _ENVELOPE}))
        case "resources/read":
            return _passable(Outcome("success", result=_read(answer)))


def refused(name: str, refusal: MCPError) -> Outcome:
    """Return the outcome of a request that the server refused."""
    details: dict[str, Json] = {"mcp_code": refusal.code}
    data: Json = refusal.error.data
    if data is not None and len(shown := _shown(data)) <= QUOTED:
        details["mcp_data"] = json.loads(shown)
    message = harmless(refusal.error.message)[:QUOTED]
    return Outcome(
        "unavailable" if _is_away(refusal) else "error",
        message=f"The server refused {name!r} ({refusal.code}): {message}",
        suggestion=_SUGGESTION,
        details=details,
    )


def _is_away(refusal: MCPError) -> bool:
    """Whether there was nobody to answer: something in between says so, or an answer that had begun broke off."""
    if refusal.code == CONNECTION_CLOSED and refusal.error.message.startswith("SSE stream"):
        return True
    return isinstance(refusal.error.data, dict) and refusal.error.data.get("http_status") in _AWAY


def _called(answer: JsonObject, outputs: JsonObject) -> Outcome:
    blocks = as_list(answer.get("content"))
    if len(blocks) > MOST_BLOCKS:
        return _failed(f"The answer has {len(blocks):,} parts, more than {MOST_BLOCKS:,}.")
    if answer.get("isError") is True:
        said = harmless("\n".join(_texts(blocks)))[:QUOTED].strip()
        return Outcome(
            "error",
            result=answer.get("structuredContent", _content(blocks, {}) if len(blocks) > 1 else None),
            message=said or "The tool failed and gave no reason.",
            suggestion=_SUGGESTION,
        )
    if "structuredContent" not in answer:
        return Outcome("success", result=_content(blocks, outputs))
    return _checked(answer["structuredContent"], outputs)


def _checked(value: Json, outputs: JsonObject) -> Outcome:
    found: Sequence[Issue] = faults(outputs, value, place="result") if _is_schema(outputs) else ()
    if not found:
        return Outcome("success", result=value)
    return Outcome(
        "error",
        result=value,
        message=f"The result is not what the tool declares: {found[0].place} {found[0].reason}.",
        suggestion="The server is at fault, or its schema changed: refresh it.",
        details={"issues": [issue.to_json() for issue in found]},
    )


def _content(blocks: Sequence[Json], outputs: JsonObject) -> Json:
    """Return the parts of an answer: one text as text, or as JSON where the tool declares what it gives; else all."""
    if not blocks:
        return None
    texts = _texts(blocks)
    if len(blocks) > 1 or not texts:
        return [dict(as_object(block)) for block in blocks]
    if outputs:
        try:
            return parse(texts[0].encode(errors="replace")).value
        except NotJson:
            return texts[0]
    return texts[0]


def _texts(blocks: Sequence[Json]) -> list[str]:
    return [as_text(as_object(block).get("text")) for block in blocks if as_object(block).get("type") == "text"]


def _read(answer: JsonObject) -> Json:
    """Return a resource: one text as text, else every part with its type and address."""
    contents = [as_object(part) for part in as_list(answer.get("contents"))[:MOST_BLOCKS]]
    if len(contents) == 1 and isinstance(text := contents[0].get("text"), str):
        return text
    return [dict(part) for part in contents]


def _asked_back(answer: JsonObject) -> Outcome:
    return Outcome(
        "error",
        result=answer.get("inputRequests"),
        message="The tool wants an answer to a question before it goes on, and nobody is there to give one.",
        suggestion="Call it with parameters that leave no question open.",
        details={"input_required": True},
    )


def _passable(outcome: Outcome) -> Outcome:
    """Return the outcome, if its result can be written as JSON; some numbers and halves of characters cannot."""
    try:
        compact(outcome.result).encode()
    except UnicodeEncodeError:
        return Outcome(
            outcome.status,
            result=json.loads(_shown(outcome.result)),
            message=outcome.message,
            suggestion=outcome.suggestion,
            details={**outcome.details, "replaced_characters": True},
        )
    except (ValueError, RecursionError):
        return _failed("The answer holds numbers that JSON has not, or is nested too deeply.")
    return outcome


def _failed(message: str) -> Outcome:
    return Outcome("error", message=message, suggestion="The server is at fault; ask it for less.")


def _is_schema(outputs: JsonObject) -> bool:
    return bool(outputs.keys() & {"type", "properties", "$ref", "anyOf", "oneOf", "allOf"})


def _shown(value: Json) -> str:
    try:
        return compact(value).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return "null"
