"""Responses as protocol errors."""

from __future__ import annotations

from collections.abc import Mapping

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from kiwi_mcp.domain.errors import Invalid, NotFound
from kiwi_mcp.domain.json import JsonObject, as_list, as_text, text_of
from kiwi_mcp.kernel import Answer
from kiwi_mcp.surfaces.mcp.client_requests import askable
from kiwi_mcp.surfaces.mcp.protocol import NOT_FOUND_IS_INVALID_SINCE, Context

RESOURCE_NOT_FOUND = -32002
"""The code of an unknown resource in the revisions that have one of its own."""

_CALLERS_FAULT = {NotFound.exit_code, Invalid.exit_code}
_OUR_END = {types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT}
"""Codes that no server sends: they mean that the connection is closed."""
_ASKED_OF: Mapping[str, str] = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
_NAME = 500


def passed_refusal(answer: Answer, context: Context) -> MCPError | None:
    """Return the error that a client gets instead of a result: the server's own, or that it could not be asked."""
    return _of_server(answer.content) or _for_want_of_capability(answer.content, context)


def refused(answer: Answer, context: Context) -> MCPError:
    """Return the error of an answer that the protocol has no result for, with its whole content."""
    content = answer.content
    code = types.INVALID_PARAMS if answer.exit_code in _CALLERS_FAULT else types.INTERNAL_ERROR
    said = f"{as_text(content.get('error'))}: {as_text(content.get('message'))}"
    return passed_refusal(answer, context) or MCPError(code, said, dict(content))


def not_found(uri: str, *, revision: str) -> MCPError:
    """Return the error for an address that leads to nothing."""
    code = types.INVALID_PARAMS if revision >= NOT_FOUND_IS_INVALID_SINCE else RESOURCE_NOT_FOUND
    return MCPError(code, "Resource not found", {"uri": uri[:_NAME]})


def unreadable(name: str) -> MCPError:
    """Return the error for an invalid answer of an MCP server."""
    return MCPError(types.INTERNAL_ERROR, f"The server's answer for {name[:_NAME]!r} is not one that MCP has")


def _of_server(content: JsonObject) -> MCPError | None:
    code = content.get("mcp_code")
    if content.get("status") != "error" or not isinstance(code, int) or code in _OUR_END:
        return None
    return MCPError(code, as_text(content.get("message")), content.get("mcp_data"))


def _for_want_of_capability(content: JsonObject, context: Context) -> MCPError | None:
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS or content.get("input_required") is not True:
        return None
    wanted = {_ASKED_OF.get(text_of(method), "") for method in as_list(content.get("asked"))} - {""}
    missing = sorted(wanted - askable(context.session.client_capabilities).keys())
    if not missing:
        return None
    data: JsonObject = {"requiredCapabilities": {name: {} for name in missing}}
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, as_text(content.get("message")), data)
