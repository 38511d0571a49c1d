"""News of tasks, for clients that listen instead of asking: `notifications/tasks` on their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, cast

import anyio
import mcp_types as types
from mcp.server.context import HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp.shared.exceptions import MCPError

from kiwi_mcp.store.tasks import Task
from kiwi_mcp.surfaces.mcp.port import Context
from kiwi_mcp.surfaces.mcp.task_methods import declares_tasks, missing_tasks
from kiwi_mcp.surfaces.mcp.tasks import TaskDesk, told

_LISTEN = "subscriptions/listen"
_MOST_HEARD = 64
"""To how many tasks one stream may listen."""


class TaskNotification(types.Notification[dict[str, object], Literal["notifications/tasks"]]):
    """A task, as it is now."""

    method: Literal["notifications/tasks"] = "notifications/tasks"


class _Stream(ServerSession):
    """The session of one stream, whose acknowledgement names the tasks that it brings news of as well."""

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


class TaskNews:
    """Tells of tasks on the streams of those who listen, beside whatever else the server tells there."""

    def __init__(self, desk: TaskDesk, principal: Callable[[Context], str]) -> None:
        self._desk = desk
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
            known = await self._known(task_ids, self._principal(context))
            stream = _Stream(context.session, known)
            telling = asyncio.create_task(self._tell(stream, context.request_id, known, self._principal(context)))
            try:
                return await entry.handler(replace(context, session=stream), params)
            finally:
                telling.cancel()

        server.add_request_handler(_LISTEN, types.SubscriptionsListenRequestParams, listen)

    async def _known(self, task_ids: object, principal: str) -> Sequence[str]:
        """Return those of the tasks that there are."""
        known: list[str] = []
        for task_id in task_ids[:_MOST_HEARD] if isinstance(task_ids, list) else ():
            with suppress(MCPError):
                known.append((await self._desk.get(str(task_id), principal)).id)
        return known

    async def _tell(
        self, stream: _Stream, number: types.RequestId | None, task_ids: Sequence[str], principal: str
    ) -> None:
        """Tell of each task as it is now, then whenever it is otherwise, until all of them are over."""
        seen: dict[str, Task] = {}
        await stream.is_acknowledged.wait()
        with suppress(MCPError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while any(task_id not in seen or not seen[task_id].is_over for task_id in task_ids):
                news = self._desk.news()
                for task_id in task_ids:
                    task = await self._desk.get(task_id, principal)
                    if task_id not in seen or task.updated_at != seen[task_id].updated_at:
                        await stream.send_notification(_notification(task, number), related_request_id=number)
                    seen[task_id] = task
                # Other processes say nothing: what they make is looked at from time to time.
                await asyncio.wait({news}, timeout=1.0)


def _notification(task: Task, number: types.RequestId | None) -> types.ServerNotification:
    params = {**told(task), "_meta": {SUBSCRIPTION_ID_META_KEY: number}}
    return cast("types.ServerNotification", TaskNotification(params=params))
