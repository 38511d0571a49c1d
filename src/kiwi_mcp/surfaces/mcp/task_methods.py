"""The methods of MCP's tasks extension: `tasks/get`, `tasks/update` and `tasks/cancel`."""

from __future__ import annotations

from collections.abc import Callable

import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from kiwi_mcp.surfaces.mcp.port import Context
from kiwi_mcp.surfaces.mcp.tasks import EXTENSION, TaskDesk, told


class TaskParams(types.RequestParams):
    """Which task a request is about."""

    task_id: str


class UpdateParams(TaskParams):
    """What a task asked, answered."""

    input_responses: dict[str, dict[str, object]]


class TaskMethods:
    """What clients may ask about their tasks."""

    def __init__(self, desk: TaskDesk, principal: Callable[[Context], str]) -> None:
        self._desk = desk
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Give a server the extension."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)

    async def _get(self, context: Context, params: TaskParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        return told(await self._desk.get(params.task_id, self._principal(context)))

    async def _update(self, context: Context, params: UpdateParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        await self._desk.update(params.task_id, self._principal(context), params.input_responses)  # type: ignore[arg-type]  # JSON came in
        return {}

    async def _cancel(self, context: Context, params: TaskParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        await self._desk.cancel(params.task_id, self._principal(context))
        return {}


def declares_tasks(context: Context) -> bool:
    """Whether a client says with this request that it has tasks."""
    declared = context.session.client_capabilities
    return (
        context.protocol_version in MODERN_PROTOCOL_VERSIONS
        and declared is not None
        and EXTENSION in (declared.extensions or {})
    )


def missing_tasks(what: str) -> MCPError:
    """Return the refusal of what only a client with tasks can have."""
    return MCPError(
        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"{what}, and this client does not declare `{EXTENSION}`.",
        {"requiredCapabilities": {"extensions": {EXTENSION: {}}}},
    )


def refuse_stray(context: Context, task_id: str) -> None:
    """Refuse a request of a client without tasks, and one whose header leads to another task than its body."""
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        raise MCPError(types.METHOD_NOT_FOUND, "Method not found", context.method)
    if not declares_tasks(context):
        raise missing_tasks("Tasks are for clients that have them")
    headers = getattr(context.request, "headers", None)
    if headers is not None and decode_header_value(headers.get(MCP_NAME_HEADER)) != task_id:
        raise MCPError(
            types.HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId' parameter"
        )
