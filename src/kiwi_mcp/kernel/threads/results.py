"""What a model gets for a call: the recorded output byte for byte, or why there is none, and a label beside it."""

from __future__ import annotations

import json
from typing import Literal, TypeAlias

from kiwi_mcp.domain.errors import Denied, Invalid, KiwiError, NotFound, PolicyDenied, Unavailable, Untrusted
from kiwi_mcp.domain.json import JsonObject, as_object, as_text, compact, text_of
from kiwi_mcp.domain.messages import ToolCallPart, ToolResultPart
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.kernel.verb import Answer

ResultStatus: TypeAlias = Literal[
    "ok", "denied", "not_permitted", "not_found", "unavailable", "timeout", "invalid_input", "unknown", "error"
]
_STATUSES: tuple[tuple[type[KiwiError], ResultStatus], ...] = (
    (PolicyDenied, "not_permitted"),
    (Denied, "denied"),
    (NotFound, "not_found"),
    (Unavailable, "unavailable"),
    (Invalid, "invalid_input"),
    (Untrusted, "not_permitted"),
)
_BY_CODE: dict[str, ResultStatus] = {"timeout": "timeout", "unavailable": "unavailable"}
_SHOWN = ("error", "code", "message", "suggestion", "retry_after", "issues", "result", "logs", "exit_code")
"""What a model reads of a failure."""
_LARGEST_VALUE = 1_000_000
_VALUE = "[JSON]"


def result_of_answer(call: ToolCallPart, answer: Answer) -> tuple[ResultStatus, ToolResultPart]:
    """Return the result of a call from the answer of a verb."""
    content = answer.content
    if answer.is_error:
        error = answer.error
        found = next((status for kind, status in _STATUSES if error is not None and isinstance(error, kind)), None)
        status = found or _BY_CODE.get(as_text(content.get("code")), "error")
        return status, _part(call, compact({key: content[key] for key in _SHOWN if key in content}), is_error=True)
    kind = "instructions" if answer.is_instructions else "data"
    text = text_of(content["result"]) if "result" in content else compact(content)
    return "ok", _part(call, text, label=_label(call.name, kind, content))


def result_of_run(call: ToolCallPart, outcome: Outcome, response: JsonObject) -> tuple[ResultStatus, ToolResultPart]:
    """Return the result of a call from what was recorded of its run; `response` has the result as it is shown."""
    if outcome.is_success:
        kind = "instructions" if outcome.details.get("is_instructions") else "data"
        return "ok", _part(call, text_of(response.get("result")), label=_label(call.name, kind, response))
    failure: JsonObject = {
        "code": outcome.status,
        "message": outcome.message,
        "suggestion": outcome.suggestion,
        "result": outcome.result,
        "logs": outcome.logs.to_json(),
    }
    content = compact({key: value for key, value in failure.items() if value})
    return _BY_CODE.get(outcome.status, "error"), _part(call, content, is_error=True)


def value_of_run(call: ToolCallPart, outcome: Outcome) -> tuple[ResultStatus, ToolResultPart] | None:
    """Return the whole value of a call that a program made; None if the call failed."""
    if not outcome.is_success:
        return None
    text = compact(outcome.result)
    if len(text) > _LARGEST_VALUE:
        size = f"it has {len(text):,} characters, and a program takes {_LARGEST_VALUE:,}"
        return "error", failed_result(call, f"too_large: the call was made, but {size}. Ask for less.")
    return "ok", _part(call, text, label=_VALUE)


def value_of(part: ToolResultPart) -> JsonObject:
    """Return the result of a call as a program gets it: a value, or the message of an exception."""
    if not part.is_error:
        return {"value": json.loads(part.content) if part.label == _VALUE else part.content}
    try:
        found = as_object(json.loads(part.content))
    except ValueError:
        found = {}
    words = (as_text(found.get(name)) for name in ("message", "suggestion"))
    return {"error": f"{found['code']}: {' '.join(filter(None, words))}" if found.get("code") else part.content}


def failed_result(call: ToolCallPart, message: str) -> ToolResultPart:
    """Return the result of a call that could not be made."""
    return _part(call, message, is_error=True)


def _label(name: str, kind: str, response: JsonObject) -> str:
    """Return where a result comes from; text of tools is data and no instruction."""
    if not response.get("result_handle"):
        return f"[{kind} from {name}]"
    more = f"the beginning of {response['result_characters']} characters, read on with load item_type output"
    return f"[{kind} from {name}; {more}, item_id {as_text(response['result_handle'])}]"


def _part(call: ToolCallPart, content: str, *, is_error: bool = False, label: str = "") -> ToolResultPart:
    return ToolResultPart(call.id, call.name, content, is_error=is_error, label=label)
