"""News of tasks, for clients that listen instead of asking: `notifications/tasks` on their streams."""

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

from kiwi_mcp.store.tasks import Task
from kiwi_mcp.surfaces.mcp.port import Context
from kiwi_mcp.surfaces.mcp.task_methods import declares_tasks, missing_tasks
from kiwi_mcp.surfaces.mcp.tasks import TaskDesk, told

_LISTEN = "subscriptions/listen"
_MOST_HEARD = 64
"""To how many tasks one stream may listen."""
_LOOK_SECONDS, _MOST_READ = 1.0, 8
"""How often one stream has tasks read that other processes make, which say nothing, and how many of them at a time."""


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
        wanted = [*dict.fromkeys(map(str, task_ids[:_MOST_HEARD]))] if isinstance(task_ids, list) else []
        for task_id in wanted:
            with suppress(MCPError):
                known.append((await self._desk.get(task_id, principal)).id)
        return known

    async def _tell(
        self, stream: _Stream, number: types.RequestId | None, task_ids: Sequence[str], principal: str
    ) -> None:
        """Tell of each task as it is now, then whenever it is otherwise, until all of them are over."""
        waiting, told_at, read_at = deque(task_ids), dict[str, int](), -inf
        await stream.is_acknowledged.wait()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while waiting:
                news, may_read = self._desk.news(), monotonic() - read_at >= _LOOK_SECONDS
                read_at = monotonic() if may_read else read_at
                for task_id in self._due(waiting, principal, may_read=may_read):
                    waiting.remove(task_id)
                    try:
                        task = await self._desk.get(task_id, principal)
                    except MCPError as fault:
                        if fault.code != types.INVALID_PARAMS:  # the store fails, and may tell of it the next time
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
        here = {task_id: self._desk.is_here(task_id, principal) for task_id in waiting}
        stored = [task_id for task_id, is_here in here.items() if not is_here]
        return [task_id for task_id, is_here in here.items() if is_here] + (stored[:_MOST_READ] if may_read else [])


def _notification(task: Task, number: types.RequestId | None) -> types.ServerNotification:
    params = {**told(task), "_meta": {SUBSCRIPTION_ID_META_KEY: number}}
    return cast("types.ServerNotification", TaskNotification(params=params))
