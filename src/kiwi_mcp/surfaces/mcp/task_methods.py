"""`tasks/get`, `tasks/update`, `tasks/cancel`, `notifications/tasks`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from time import monotonic
from typing import Literal, cast

import anyio
import mcp_types as types
from mcp.server.context import HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types.version import MODERN_PROTOCOL_VERSIONS

from kiwi_mcp.store.tasks import Task
from kiwi_mcp.surfaces.mcp.protocol import Context
from kiwi_mcp.surfaces.mcp.tasks import EXTENSION, TaskManager, task_to_json


class TaskParams(types.RequestParams):
    """Which task a request is about."""

    task_id: str


class UpdateParams(TaskParams):
    """What a task asked, answered."""

    input_responses: dict[str, dict[str, object]]


class TaskMethods:
    """What clients may ask about their tasks."""

    def __init__(self, manager: TaskManager, principal: Callable[[Context], str]) -> None:
        self._manager = manager
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Add the extension to a server."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)

    async def _get(self, context: Context, params: TaskParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        return task_to_json(await self._manager.get(params.task_id, self._principal(context)))

    async def _update(self, context: Context, params: UpdateParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        await self._manager.update(params.task_id, self._principal(context), params.input_responses)  # type: ignore[arg-type]  # JSON came in
        return {}

    async def _cancel(self, context: Context, params: TaskParams) -> dict[str, object]:
        refuse_stray(context, params.task_id)
        await self._manager.cancel(params.task_id, self._principal(context))
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
    """Refuse a request of a client without tasks, and a request with a header that names another task than its body."""
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
        raise MCPError(types.METHOD_NOT_FOUND, "Method not found", context.method)
    if not declares_tasks(context):
        raise missing_tasks("Tasks are for clients that have them")
    headers = getattr(context.request, "headers", None)
    if headers is not None and decode_header_value(headers.get(MCP_NAME_HEADER)) != task_id:
        raise MCPError(
            types.HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId' parameter"
        )


_LISTEN = "subscriptions/listen"
_MOST_HEARD = 64
"""To how many tasks one stream may listen."""
_LOOK_SECONDS, _MOST_READ = 1.0, 8
"""How often one stream has tasks read that other processes make, which say nothing, and how many of them at a time."""


class TaskNotification(types.Notification[dict[str, object], Literal["notifications/tasks"]]):
    """A task, as it is now."""

    method: Literal["notifications/tasks"] = "notifications/tasks"


class _Stream(ServerSession):
    """The session of one stream; its acknowledgement also names the tasks that it reports on."""

    def __init__(self, session: ServerSession, task_ids: Sequence[str]) -> None:
        self.__dict__.update(session.__dict__)
        self._task_ids = task_ids
        self.is_acknowledged = asyncio.Event()

    async def send_notification(
        self, notification: types.ServerNotification, related_request_id: types.RequestId | None = None
    ) -> None:
        """Send one notification."""
        if isinstance(notification, types.SubscriptionsAcknowledgedNotification):
            honored = notification.params.notifications.model_copy(update={"taskIds": [*self._task_ids]})
            params = notification.params.model_copy(update={"notifications": honored})
            await super().send_notification(notification.model_copy(update={"params": params}), related_request_id)
            self.is_acknowledged.set()
        else:
            await super().send_notification(notification, related_request_id)


class TaskSubscriptions:
    """Tells of tasks on the streams of those who listen, beside whatever else the server tells there."""

    def __init__(self, manager: TaskManager, principal: Callable[[Context], str]) -> None:
        self._manager = manager
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Let a server's streams bring news of tasks, if it has streams."""
        entry = server.get_request_handler(_LISTEN)
        if entry is None:
            return

        async def listen(context: Context, params: types.SubscriptionsListenRequestParams) -> HandlerResult:
            task_ids = (params.notifications.model_extra or {}).get("taskIds")
            if not task_ids:
                return await entry.handler(context, params)
            if not declares_tasks(context):
                raise missing_tasks("News of tasks are for clients that have them")
            principal = self._principal(context)
            known: list[str] = []
            wanted = [*dict.fromkeys(map(str, task_ids[:_MOST_HEARD]))] if isinstance(task_ids, list) else []
            for task_id in wanted:
                with suppress(MCPError):
                    known.append((await self._manager.get(task_id, principal)).id)
            stream = _Stream(context.session, known)
            telling = asyncio.create_task(self._tell(stream, context.request_id, known, self._principal(context)))
            try:
                return await entry.handler(replace(context, session=stream), params)
            finally:
                telling.cancel()

        server.add_request_handler(_LISTEN, types.SubscriptionsListenRequestParams, listen)

    async def _tell(
        self, stream: _Stream, number: types.RequestId | None, task_ids: Sequence[str], principal: str
    ) -> None:
        """Tell of each task as it is now, then whenever it is otherwise, until all of them are over."""
        waiting, told_at, read_at = deque(task_ids), dict[str, int](), -inf
        await stream.is_acknowledged.wait()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while waiting:
                news, may_read = self._manager.news(), monotonic() - read_at >= _LOOK_SECONDS
                read_at = monotonic() if may_read else read_at
                for task_id in self._due(waiting, principal, may_read=may_read):
                    waiting.remove(task_id)
                    try:
                        task = await self._manager.get(task_id, principal)
                    except MCPError as fault:
                        if fault.code != types.INVALID_PARAMS:  # the store fails, and may report it the next time
                            waiting.append(task_id)
                        continue
                    if task.updated_at != told_at.get(task_id):
                        told_at[task_id] = task.updated_at
                        await stream.send_notification(_notification(task, number), related_request_id=number)
                    if not task.is_over:
                        waiting.append(task_id)  # behind those that had no turn
                await asyncio.wait({news}, timeout=_LOOK_SECONDS)

    def _due(self, waiting: Iterable[str], principal: str, *, may_read: bool) -> Sequence[str]:
        """Return the tasks to look at: all that are made here, and of those in the store a few at a time."""
        here = {task_id: self._manager.is_here(task_id, principal) for task_id in waiting}
        stored = [task_id for task_id, is_here in here.items() if not is_here]
        return [task_id for task_id, is_here in here.items() if is_here] + (stored[:_MOST_READ] if may_read else [])


def _notification(task: Task, number: types.RequestId | None) -> types.ServerNotification:
    params = {**task_to_json(task), "_meta": {SUBSCRIPTION_ID_META_KEY: number}}
    return cast("types.ServerNotification", TaskNotification(params=params))
