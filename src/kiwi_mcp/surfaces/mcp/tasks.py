"""Tasks: those that run here and those that are stored, with heartbeat and back-off; the methods of the protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Literal, TypeVar, cast

import anyio
import mcp_types as types
from mcp.server.context import HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.session import ServerSession
from mcp.server.subscriptions import SUBSCRIPTION_ID_META_KEY
from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS
from mcp_types.version import LATEST_MODERN_VERSION, MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace
from pydantic import BaseModel

from kiwi_mcp.domain.calls import Caller, unheard
from kiwi_mcp.domain.errors import KiwiError, NotFound, PolicyDenied
from kiwi_mcp.domain.json import Json, JsonObject, as_text, compact
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.domain.times import iso
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.store.tasks import KEPT_MS, Task, TaskCommand, Tasks, TaskStatus
from kiwi_mcp.surfaces.mcp.protocol import Context
from kiwi_mcp.surfaces.mcp.results import as_result
from kiwi_mcp.surfaces.mcp.running_call import TIDY_SECONDS, Result, RunningCall

_log = logging.getLogger("kiwi")

EXTENSION = "io.modelcontextprotocol/tasks"
POLL_MS = 1_000
"""How often a client is advised to ask."""
MOST_RUNNING = 64
"""How many tasks of one principal may be under way."""
LARGEST_RESULT = 1_000_000
"""The largest result that a task keeps, in characters of JSON."""
LOOK_SECONDS = 1.0
"""How often the store is asked what others want of the tasks under way."""
BEAT_SECONDS = 3.0
"""How often it is recorded that they still are."""
LONGEST_PAUSE = 10.0
"""The maximum pause after failures of the store, in seconds; a task counts as lost soon after."""

StoredT = TypeVar("StoredT")
_THREAD = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
"""The id of a thread; that of a stored task is hexadecimal."""
_OF_THREAD: Mapping[str, TaskStatus] = {
    "completed": "completed", "failed": "completed", "exhausted": "completed", "cancelled": "cancelled",
}  # fmt: skip
"""The status of a task by that of its thread. A thread that failed has a result that is an error."""
_DETAILS: Mapping[TaskStatus, str] = {"input_required": "inputRequests", "completed": "result", "failed": "error"}
_LISTEN = "subscriptions/listen"
_MOST_WATCHED = 64
"""How many tasks one stream may follow."""
_READ_SECONDS, _MOST_READ = 1.0, 8
"""How often one stream has tasks read that other processes make, which say nothing, and how many of them at a time."""


class RunningTask:
    """A task that this process runs: its call, and its reported state."""

    def __init__(self, task: Task, call: RunningCall) -> None:
        self.call = call
        self.id = task.id
        self.is_stored = bool(task.owner)
        """Whether it has a row of its own; one that runs a thread has none."""
        self._task = task

    def current(self) -> Task:
        """Return the task as it is now."""
        if self._task.is_over:
            return self._task
        asked: dict[str, Json] = {
            key: {"method": question.method, "params": question.params} for key, question in self.call.pending.items()
        }
        status: TaskStatus = "input_required" if asked else "working"
        now = replace(self._task, status=status, message=self.call.latest, detail=asked)
        if now != self._task:
            self._task = replace(now, updated_at=milliseconds())
        return replace(self._task, expires_at=milliseconds() + KEPT_MS)

    def end(self, *, is_shutdown: bool) -> Task:
        """Return the task with the outcome of its work, which is over."""
        work = self.call.work
        status: TaskStatus = "failed"
        if work.cancelled() and is_shutdown:
            message = "Kiwi was ended while it ran, and stopped it."
            detail: JsonObject = {"code": INTERNAL_ERROR, "message": message}
        elif work.cancelled():
            status, detail, message = "cancelled", {}, "It was cancelled."
        elif (fault := work.exception()) is None:
            status, detail, message = "completed", _as_stored(work.result()), ""
        elif isinstance(fault, MCPError):
            detail, message = fault.error.model_dump(mode="json", exclude_none=True), fault.error.message
        else:
            incident = token_hex(6)
            _log.error("incident %s in a task", incident, exc_info=fault)
            message = f"Something went wrong inside Kiwi (incident {incident})."
            detail = {"code": INTERNAL_ERROR, "message": message}
        now = milliseconds()
        self._task = replace(
            self._task, status=status, detail=detail, message=message, updated_at=now, expires_at=now + KEPT_MS
        )
        return self._task


class TaskManager:
    """The tasks under way in this process, and through the store those of others and those that have ended.

    A task that runs a thread has the id of that thread, and no row of its own: the owner of the thread reads it from
    there, in any process.
    Everything of the store is done in other threads.
    """

    def __init__(self, tasks: Callable[[], Tasks], kernel: Kernel | None = None) -> None:
        self._tasks = tasks
        self._kernel = kernel
        self._owner = token_hex(16)
        self._running: dict[str, RunningTask] = {}
        self._watch: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._news: asyncio.Future[None] | None = None
        self._failures = 0
        """How often in a row the store failed: the longer it fails, the less often it is asked."""

    async def open(self, call: RunningCall, method: str, identity: str) -> Task | None:
        """Keep a call as a task, durably; None where that cannot be, and the call is as it was before."""
        own = sum(running.call.principal == call.principal for running in self._running.values())
        if own >= MOST_RUNNING or self._is_closing:
            return None
        now = milliseconds()
        is_thread = bool(call.thread_id) and self._kernel is not None
        task_id, owner = (call.thread_id, "") if is_thread else (token_hex(16), self._owner)
        task = Task(task_id, call.principal, method, identity, owner, now, now, now + KEPT_MS, now)
        if not is_thread:
            try:
                # A cancellation of the call takes effect right after this: a row must not be left without its task.
                with anyio.CancelScope(shield=True):
                    is_stored = await asyncio.to_thread(lambda: self._tasks().add(task))
            except KiwiError as error:
                self._failed(error)
                return None
            self._worked()
            if not is_stored:
                return None
        self._running[task.id] = RunningTask(task, call)
        call.on_change = self._announce
        call.hear, call.log = silent, unheard  # a caller that asks about the task gets the latest progress
        return task

    def attend(self, task: Task) -> None:
        """See a task to its end, now that its work has begun."""
        running = self._running[task.id]
        running.call.work.add_done_callback(lambda _: self._end(running))
        if running.is_stored and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._watch_over())

    def running(self, task_id: str, principal: str) -> RunningTask | None:
        """Return the task of a principal if it runs in this process, so that looking at it costs nothing."""
        running = self._running.get(task_id)
        return running if running is not None and running.call.principal == principal else None

    async def get(self, task_id: str, principal: str) -> Task:
        """Return a task of a principal."""
        if (running := self.running(task_id, principal)) is not None:
            return running.current()
        if self._kernel is not None and _THREAD.fullmatch(task_id):
            task = await _task_of_thread(self._kernel, task_id, principal)
        else:
            task = await self._stored(lambda tasks: tasks.get(task_id, principal, milliseconds()))
        if task is None:
            raise MCPError(INVALID_PARAMS, "No such task is known here, or its time is over.")
        return task

    async def update(self, task_id: str, principal: str, answers: Mapping[str, Json]) -> None:
        """Send answers to the questions of a task; another process may be running it."""
        if (running := self.running(task_id, principal)) is not None:
            running.call.deliver(answers)
        elif not (await self.get(task_id, principal)).is_over:
            await self._stored(lambda tasks: tasks.answer(task_id, principal, answers))

    async def cancel(self, task_id: str, principal: str) -> None:
        """Stop a task, or have the process that makes it do so; nothing happens to one that is over."""
        if (running := self.running(task_id, principal)) is not None:
            running.call.work.cancel()
        elif not (await self.get(task_id, principal)).is_over:
            if self._kernel is not None and _THREAD.fullmatch(task_id):
                caller = Caller(is_owner=principal == STDIO)
                await self._kernel.call("thread", {"action": "cancel", "thread_id": task_id}, caller)
            else:
                await self._stored(lambda tasks: tasks.stop(task_id, principal))

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop the tasks of some principals."""
        for running in self._running.values():
            if not running.call.is_over and is_over(running.call.principal):
                running.call.work.cancel()

    def news(self) -> asyncio.Future[None]:
        """Return what is done when next something changes with a task under way here."""
        if self._news is None or self._news.done():
            self._news = asyncio.get_running_loop().create_future()
        return self._news

    async def aclose(self) -> None:
        """Stop every task under way, and keep how each ended."""
        self._is_closing = True
        if self._watch is not None:
            self._watch.cancel()
        works = {running.call.work for running in self._running.values()}
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works, timeout=TIDY_SECONDS)
        if self._ending:
            await asyncio.wait(self._ending, timeout=TIDY_SECONDS)

    def _announce(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _failed(self, error: KiwiError) -> None:
        if not self._failures:
            _log.warning("tasks cannot be kept for now: %s", error.message)
        self._failures += 1

    def _worked(self) -> None:
        if self._failures:
            _log.warning("tasks are kept again, after %d failures", self._failures)
        self._failures = 0

    async def _stored(self, work: Callable[[Tasks], StoredT]) -> StoredT:
        try:
            return await asyncio.to_thread(lambda: work(self._tasks()))
        except KiwiError as error:
            raise MCPError(INTERNAL_ERROR, error.message, {"suggestion": error.suggestion}) from error

    def _end(self, running: RunningTask) -> None:
        if running.is_stored:
            ending = asyncio.create_task(self._finish(running.end(is_shutdown=self._is_closing)))
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)
        else:
            self._running.pop(running.id, None)
        self._announce()

    async def _finish(self, ended: Task) -> None:
        try:
            await asyncio.to_thread(lambda: self._tasks().finish(ended))
        except KiwiError as error:
            self._failed(error)  # it is tried again with the next look
        else:
            self._running.pop(ended.id, None)

    async def _watch_over(self) -> None:
        """Tell the store of the stored tasks under way here, and do with them what others want."""
        beaten_at, stored = monotonic(), dict[str, TaskStatus]()
        while any(running.is_stored for running in self._running.values()):
            await asyncio.sleep(min(LOOK_SECONDS * 2.0 ** min(self._failures, 10), LONGEST_PAUSE))
            current = [running.current() for running in self._running.values() if running.is_stored]
            statuses = {task.id: task.status for task in current}
            is_due = statuses != stored or monotonic() - beaten_at >= BEAT_SECONDS
            try:
                wishes = await asyncio.to_thread(self._exchange, current if is_due else ())
            except KiwiError as error:
                self._failed(error)
                continue
            self._worked()
            if is_due:
                beaten_at, stored = monotonic(), statuses
                for task in current:
                    if task.is_over:  # its end could not be kept at once, and is now
                        self._running.pop(task.id, None)
            for wish in wishes:
                if (running := self._running.get(wish.id)) is not None:
                    running.call.deliver(wish.answers)
                    if wish.is_unwanted:
                        running.call.work.cancel()

    def _exchange(self, current: Sequence[Task]) -> Sequence[TaskCommand]:
        """Store the state of the tasks under way, and return what others want of them."""
        tasks = self._tasks()
        for ended in (task for task in current if task.is_over):
            tasks.finish(ended)
        if current:
            tasks.beat(self._owner, milliseconds(), [task for task in current if not task.is_over])
        return tasks.wishes(self._owner)


async def _task_of_thread(kernel: Kernel, thread_id: str, principal: str) -> Task | None:
    """Return the task that a thread is to its starter; None where there is no such thread, or it is another's."""
    asked: JsonObject = {"action": "watch", "thread_id": thread_id, "seconds": 0}
    answer = await kernel.call("thread", asked, Caller(is_owner=principal == STDIO))
    if isinstance(answer.error, NotFound | PolicyDenied):
        return None
    if answer.is_error:
        raise MCPError(INTERNAL_ERROR, as_text(answer.content.get("message")))
    names = "status", "waits_for", "item", "message", "started_at", "updated_at"
    ended, waits_for, item, message, started_at, updated_at = (as_text(answer.content.get(name)) for name in names)
    started, updated = (
        round(datetime.fromisoformat(moment).timestamp() * 1_000) for moment in (started_at, updated_at)
    )
    status = _OF_THREAD.get(ended, "working")
    detail = cast("JsonObject", {})
    if status == "completed":
        is_error = ended != "completed"
        detail = _as_stored(as_result(replace(answer, is_error=is_error), revision=LATEST_MODERN_VERSION))
    message = message or (f"waits for {waits_for}" if waits_for else ended)
    now = milliseconds()
    expires = now + KEPT_MS
    return Task(thread_id, principal, "tools/call", item, "", started, updated, expires, now, status, message, detail)


def task_to_json(task: Task) -> dict[str, object]:
    """Return a task as a client reads it."""
    shown: dict[str, object] = {
        "taskId": task.id,
        "status": task.status,
        "createdAt": iso(task.created_at),
        "lastUpdatedAt": iso(task.updated_at),
        "ttlMs": task.expires_at - task.created_at,
        "pollIntervalMs": POLL_MS,
    }
    if task.message:
        shown["statusMessage"] = task.message
    if task.status in _DETAILS:
        shown[_DETAILS[task.status]] = dict(task.detail)
    return shown


def milliseconds() -> int:
    """Return the time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _as_stored(result: Result) -> JsonObject:
    """Return a result as it is sent; of one that is too large, only how large it was."""
    if isinstance(result, BaseModel):
        result = result.model_dump(by_alias=True, mode="json", exclude_none=True)
    shown = cast("JsonObject", result)
    size = len(compact(shown))
    if size <= LARGEST_RESULT:
        return shown
    text = (
        f"The call gave {size:,} characters, more than the {LARGEST_RESULT:,} that a task keeps. "
        "Its run is recorded: see `kiwi runs`, or call again for less."
    )
    is_error = bool(shown.get("isError"))
    return {"content": [{"type": "text", "text": text}], "isError": is_error, "resultType": "complete"}


class TaskParams(types.RequestParams):
    """Which task a request is about."""

    task_id: str


class UpdateParams(TaskParams):
    """Answers to the questions of a task."""

    input_responses: dict[str, dict[str, object]]


class TaskNotification(types.Notification[dict[str, object], Literal["notifications/tasks"]]):
    """A task, as it is now."""

    method: Literal["notifications/tasks"] = "notifications/tasks"


def _notification(task: Task, number: types.RequestId | None) -> types.ServerNotification:
    params = {**task_to_json(task), "_meta": {SUBSCRIPTION_ID_META_KEY: number}}
    return cast("types.ServerNotification", TaskNotification(params=params))


def declares_tasks(context: Context) -> bool:
    """Whether a client says with this request that it has tasks."""
    declared = context.session.client_capabilities
    is_modern = context.protocol_version in MODERN_PROTOCOL_VERSIONS
    return is_modern and declared is not None and EXTENSION in (declared.extensions or {})


def missing_tasks(what: str) -> MCPError:
    """Return the refusal of what only a client with tasks can have."""
    return MCPError(
        types.MISSING_REQUIRED_CLIENT_CAPABILITY,
        f"{what}, and this client does not declare `{EXTENSION}`.",
        {"requiredCapabilities": {"extensions": {EXTENSION: {}}}},
    )


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
        is_acknowledgement = isinstance(notification, types.SubscriptionsAcknowledgedNotification)
        if isinstance(notification, types.SubscriptionsAcknowledgedNotification):
            honored = notification.params.notifications.model_copy(update={"taskIds": [*self._task_ids]})
            params = notification.params.model_copy(update={"notifications": honored})
            notification = notification.model_copy(update={"params": params})
        await super().send_notification(notification, related_request_id)
        if is_acknowledgement:
            self.is_acknowledged.set()


class TaskMethods:
    """What clients may ask about their tasks, and news of tasks on the streams that clients listen to."""

    def __init__(self, manager: TaskManager, principal: Callable[[Context], str]) -> None:
        self._manager = manager
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Add the extension to a server; its streams bring news of tasks, if it has streams."""
        server.extensions[EXTENSION] = {}
        server.add_request_handler("tasks/get", TaskParams, self._get)
        server.add_request_handler("tasks/update", UpdateParams, self._update)
        server.add_request_handler("tasks/cancel", TaskParams, self._cancel)
        if (entry := server.get_request_handler(_LISTEN)) is None:
            return

        async def listen(context: Context, params: types.SubscriptionsListenRequestParams) -> HandlerResult:
            task_ids = (params.notifications.model_extra or {}).get("taskIds")
            if not task_ids:
                return await entry.handler(context, params)
            if not declares_tasks(context):
                raise missing_tasks("News of tasks are for clients that have them")
            principal = self._principal(context)
            known: list[str] = []
            wanted = [*dict.fromkeys(map(str, task_ids[:_MOST_WATCHED]))] if isinstance(task_ids, list) else []
            for task_id in wanted:
                with suppress(MCPError):
                    known.append((await self._manager.get(task_id, principal)).id)
            stream = _Stream(context.session, known)
            reporting = asyncio.create_task(self._report(stream, context.request_id, known, principal))
            try:
                return await entry.handler(dataclasses.replace(context, session=stream), params)
            finally:
                reporting.cancel()

        server.add_request_handler(_LISTEN, types.SubscriptionsListenRequestParams, listen)

    async def _get(self, context: Context, params: TaskParams) -> dict[str, object]:
        return task_to_json(await self._manager.get(params.task_id, self._admit(context, params)))

    async def _update(self, context: Context, params: UpdateParams) -> dict[str, object]:
        principal = self._admit(context, params)
        await self._manager.update(params.task_id, principal, params.input_responses)  # type: ignore[arg-type]  # JSON came in
        return {}

    async def _cancel(self, context: Context, params: TaskParams) -> dict[str, object]:
        await self._manager.cancel(params.task_id, self._admit(context, params))
        return {}

    def _admit(self, context: Context, params: TaskParams) -> str:
        """Return who makes a request; refuse a client without tasks, and a header that names another task."""
        if context.protocol_version not in MODERN_PROTOCOL_VERSIONS:
            raise MCPError(types.METHOD_NOT_FOUND, "Method not found", context.method)
        if not declares_tasks(context):
            raise missing_tasks("Tasks are for clients that have them")
        headers = getattr(context.request, "headers", None)
        if headers is not None and decode_header_value(headers.get(MCP_NAME_HEADER)) != params.task_id:
            raise MCPError(
                types.HEADER_MISMATCH, f"{MCP_NAME_HEADER} header does not match the request body's 'taskId' parameter"
            )
        return self._principal(context)

    async def _report(
        self, stream: _Stream, number: types.RequestId | None, task_ids: Sequence[str], principal: str
    ) -> None:
        """Send each task as it is now, then whenever it has changed, until all of them are over."""
        waiting = deque(task_ids)
        sent_at = dict[str, int]()
        read_at = -inf
        await stream.is_acknowledged.wait()
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            while waiting:
                news = self._manager.news()
                # All that run here, and of those in the store a few at a time.
                due = [task_id for task_id in waiting if self._manager.running(task_id, principal) is not None]
                if monotonic() - read_at >= _READ_SECONDS:
                    read_at = monotonic()
                    due += [task_id for task_id in waiting if task_id not in due][:_MOST_READ]
                for task_id in due:
                    waiting.remove(task_id)
                    try:
                        task = await self._manager.get(task_id, principal)
                    except MCPError as fault:
                        if fault.code != types.INVALID_PARAMS:  # the store fails, and may report it the next time
                            waiting.append(task_id)
                        continue
                    if task.updated_at != sent_at.get(task_id):
                        sent_at[task_id] = task.updated_at
                        await stream.send_notification(_notification(task, number), related_request_id=number)
                    if not task.is_over:
                        waiting.append(task_id)  # behind those that had no turn
                await asyncio.wait({news}, timeout=_READ_SECONDS)
