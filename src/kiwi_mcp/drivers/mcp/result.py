"""What a server answered, as an outcome."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, MISSING_REQUIRED_CLIENT_CAPABILITY
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.errors import QUOTED
from kiwi_mcp.drivers.mcp.server import ServerRequest
from kiwi_mcp.drivers.output import NotJsonOutput, parse
from kiwi_mcp.manifest.json_schema import faults

MOST_BLOCKS = 10_000
"""The most parts that one answer may have."""
_ENVELOPE = {"_meta", "resultType", "ttlMs", "cacheScope"}
_AWAY = frozenset({502, 503, 504})
_SUGGESTION = "The message is that of the server. Fix the parameters, or load the tool to see what it takes."
_ASKED: Final[JsonObject] = {"input_required": True}
"""What tells that a call failed for want of an answer to a question."""


class CallFailed(Exception):
    """A request that ended without an answer to it, and how."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def outcome_of(wanted: ServerRequest, answer: JsonObject, outputs: JsonObject) -> Outcome:
    """Return what an answer means, and the answer itself for who speaks the same protocol.

    `outputs` is the schema that the tool declares for its result, if it has one.
    """
    try:
        compact(answer).encode()
    except UnicodeEncodeError:  # halves of characters, which no text can hold
        outcome = _meaning(wanted, as_object(json.loads(_shown(answer))), outputs)
        return replace(outcome, details={**outcome.details, "replaced_characters": True})
    except (ValueError, RecursionError):
        return failed("The answer holds numbers that JSON has not, or is nested too deeply.")
    return _meaning(wanted, answer, outputs)


def unanswered(fault: Unanswered) -> Outcome:
    """Return the outcome of a request that stopped at a question."""
    return Outcome("error", message=fault.message, suggestion=fault.suggestion, details={**fault.details, **_ASKED})


def for_want_of(fault: Unanswered | None, outcome: Outcome) -> Outcome:
    """Return an outcome that reports an unanswered question, if the call failed after it."""
    if fault is None or outcome.status != "error":
        return outcome
    return replace(outcome, suggestion=fault.suggestion, details={**outcome.details, **fault.details, **_ASKED})


def refused(name: str, refusal: MCPError) -> Outcome:
    """Return the outcome of a request that the server refused."""
    details: dict[str, Json] = {"mcp_code": refusal.code}
    data: Json = refusal.error.data
    if data is not None and len(shown := _shown(data)) <= QUOTED:
        details["mcp_data"] = json.loads(shown)
    message = strip_controls(refusal.error.message)[:QUOTED]
    if refusal.code == MISSING_REQUIRED_CLIENT_CAPABILITY and _asks(as_object(data)):
        details |= _ASKED
    return Outcome(
        "unavailable" if _is_away(refusal) else "error",
        message=f"The server refused {name!r} ({refusal.code}): {message}",
        suggestion=_SUGGESTION,
        details=details,
    )


def _is_away(refusal: MCPError) -> bool:
    """Whether the server was unreachable: an intermediary reports that, or an answer broke off after it began."""
    if refusal.code == CONNECTION_CLOSED and refusal.error.message.startswith("SSE stream"):
        return True
    return isinstance(refusal.error.data, dict) and refusal.error.data.get("http_status") in _AWAY


def _asks(data: JsonObject) -> bool:
    """Whether the client capability that a server requires is one for asking the client."""
    return bool(as_object(data.get("requiredCapabilities")).keys() & {"elicitation", "sampling", "roots"})


def _meaning(wanted: ServerRequest, answer: JsonObject, outputs: JsonObject) -> Outcome:
    match wanted.method:
        case "tools/call":
            return _called(answer, outputs)
        case "prompts/get":
            response = {word: value for word, value in answer.items() if word not in _ENVELOPE}
            return Outcome("success", result=response, passed=answer)
        case "resources/read":
            return Outcome("success", result=_read(answer), passed=answer)


def _called(answer: JsonObject, outputs: JsonObject) -> Outcome:
    blocks = as_list(answer.get("content"))
    if len(blocks) > MOST_BLOCKS:
        return failed(f"The answer has {len(blocks):,} parts, more than {MOST_BLOCKS:,}.")
    if answer.get("isError") is True:
        said = strip_controls("\n".join(_texts(blocks)))[:QUOTED].strip()
        return Outcome(
            "error",
            result=answer.get("structuredContent", _content(blocks, {}) if len(blocks) > 1 else None),
            message=said or "The tool failed and gave no reason.",
            suggestion=_SUGGESTION,
            passed=answer,
        )
    if "structuredContent" not in answer:
        return Outcome("success", result=_content(blocks, outputs), passed=answer)
    return _checked(answer, outputs)


def _checked(answer: JsonObject, outputs: JsonObject) -> Outcome:
    value = answer["structuredContent"]
    found: Sequence[Issue] = faults(outputs, value, place="result") if _is_schema(outputs) else ()
    if not found:
        return Outcome("success", result=value, passed=answer)
    return Outcome(
        "error",
        result=value,
        message=f"The result is not what the tool declares: {found[0].place} {found[0].reason}.",
        suggestion="The server is at fault, or its schema changed: refresh it.",
        details={"issues": [issue.to_json() for issue in found]},
    )


def _content(blocks: Sequence[Json], outputs: JsonObject) -> Json:
    """Return the parts of an answer: texts as text, one as JSON where the tool declares what it gives; else all."""
    if not blocks:
        return None
    texts = _texts(blocks)
    if len(texts) < len(blocks):
        return [dict(as_object(block)) for block in blocks]
    if len(texts) > 1:
        return "\n".join(texts)
    if outputs:
        try:
            return parse(texts[0].encode(errors="replace")).value
        except NotJsonOutput:
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


def failed(message: str) -> Outcome:
    """Return the outcome of an answer that cannot be taken."""
    return Outcome("error", message=message, suggestion="The server is at fault; ask it for less.")


def _is_schema(outputs: JsonObject) -> bool:
    return bool(outputs.keys() & {"type", "properties", "$ref", "anyOf", "oneOf", "allOf"})


def _shown(value: Json) -> str:
    try:
        return compact(value).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return "null"
