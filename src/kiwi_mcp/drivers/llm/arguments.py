"""Arguments of calls and their schemas, as all dialects send them."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import JsonObject, compact
from kiwi_mcp.domain.messages import ToolCallPart


def input_schema(parameters: JsonObject) -> JsonObject:
    """Return the schema of a tool's arguments, which providers want to be an object's."""
    return parameters if parameters.get("type") == "object" else {"type": "object", "properties": {}, **parameters}


def arguments_text(call: ToolCallPart) -> str:
    """Return a call's arguments as the text of an object: exactly the model's own, or below a key if it is no object.

    Many servers parse the arguments of earlier calls, and refuse the whole conversation for ever if they cannot.
    """
    if is_object(call.arguments):
        return call.arguments
    return compact({"unreadable_arguments": call.arguments} if call.arguments.strip() else {})


def arguments_of(call: ToolCallPart) -> Raw:
    """Return a call's arguments as an object that is written as `arguments_text` has it."""
    return Raw(arguments_text(call).encode())


def is_object(text: str) -> bool:
    """Whether a text is one whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
