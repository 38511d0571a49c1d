"""Tasks: those that run here and those that are stored, with heartbeat and back-off; the methods of the protocol."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Literal, Protocol, TypeVar, cast

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
from kiwi_mcp.kernel.verb import Answer
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.store.tasks import KEPT_MS, Task, TaskCommand, Tasks, TaskStatus
from kiwi_mcp.surfaces.mcp.protocol import Context
from kiwi_mcp.surfaces.mcp.results import as_result
from kiwi_mcp.surfaces.mcp.running_call import TIDY_SECONDS, Result, RunningCall

_log = logging.getLogger("kiwi")

LONGEST_PAUSE = 10.0
"""The maximum pause after failures of the store, in seconds; a task counts as lost soon after."""


class ThreadKernel(Protocol):
    """What tasks that run threads need of a kernel."""

    async def call(self, verb: str, payload: JsonObject, caller: Caller) -> Answer:
        """Answer one verb."""

    def leave(self) -> None:
        """Prepare for the end of the process: threads continue without it."""


class StoreBackoff:
    """How it is with the store, which is asked the less often the longer it fails."""

    def __init__(self) -> None:
        self._failures = 0

    def failed(self, error: KiwiError) -> None:
        """Note that it failed."""
        if not self._failures:
            _log.warning("tasks cannot be kept for now: %s", error.message)
        self._failures += 1

    def worked(self) -> None:
        """Note that it works."""
        if self._failures:
            _log.warning("tasks are kept again, after %d failures", self._failures)
        self._failures = 0

    def pause(self, seconds: float) -> float:
        """Return how long to wait before the next request, instead of `seconds`."""
        return min(seconds * 2.0 ** min(self._failures, 10), LONGEST_PAUSE)


EXTENSION = "io.modelcontextprotocol/tasks"
POLL_MS = 1_000
"""How often a client is advised to ask."""
MOST_RUNNING = 64
"""How many tasks of one principal may be under way."""
LARGEST_RESULT = 1_000_000
"""The largest result that a task keeps, in characters of JSON."""
LOOK_SECONDS = 1.0
"""How often it is looked what others want of the tasks under way."""
BEAT_SECONDS = 3.0
"""How often it is recorded that they still are."""

KeptT = TypeVar("KeptT")
_THREAD = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
"""The id of a thread; that of a stored task is hexadecimal."""
_OF_THREAD: Mapping[str, TaskStatus] = {
    "completed": "completed", "failed": "completed", "exhausted": "completed", "cancelled": "cancelled",
}  # fmt: skip
"""The status of a task by that of its thread. A thread that failed has a result that is an error."""
_DETAILS: Mapping[TaskStatus, str] = {"input_required": "inputRequests", "completed": "result", "failed": "error"}
_ENDED: JsonObject = {"code": INTERNAL_ERROR, "message": "Kiwi was ended while it ran, and stopped it."}


class RunningTask:
    """A task that this process runs: its call, and its reported state."""

    def __init__(self, task: Task, errand: RunningCall) -> None:
        self.errand = errand
        self.id = task.id
        self.is_stored = bool(task.owner)
        """Whether it has a row of its own; one that runs a thread has none."""
        self._task = task

    def seen(self) -> Task:
        """Return the task as it is now."""
        if self._task.is_over:
            return self._task
        asked: dict[str, Json] = {
            key: {"method": question.method, "params": question.params} for key, question in self.errand.pending.items()
        }
        status: TaskStatus = "input_required" if asked else "working"
        now = replace(self._task, status=status, message=self.errand.latest, detail=asked)
        if now != self._task:
            self._task = replace(now, updated_at=milliseconds())
        return replace(self._task, expires_at=milliseconds() + KEPT_MS)

    def end(self, *, is_shutdown: bool) -> Task:
        """Return the task with the outcome of its work, which is over."""
        status, detail, message = _ending(self.errand.work, is_shutdown=is_shutdown)
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

    def __init__(
        self,
        tasks: Callable[[], Tasks],
        kernel: ThreadKernel | None = None,
        *,
        look: float = LOOK_SECONDS,
        beat: float = BEAT_SECONDS,
    ) -> None:
        self._tasks = tasks
        self._kernel = kernel
        self._look = look
        self._beat = beat
        self._owner = token_hex(16)
        self._running: dict[str, RunningTask] = {}
        self._watch: asyncio.Task[None] | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._news: asyncio.Future[None] | None = None
        self._trouble = StoreBackoff()

    async def open(self, errand: RunningCall, method: str, identity: str) -> Task | None:
        """Keep a call as a task, durably; None where that cannot be, and the call is as it was before."""
        own = sum(running.errand.principal == errand.principal for running in self._running.values())
        if own >= MOST_RUNNING or self._is_closing:
            return None
        now = milliseconds()
        if errand.thread_id and self._kernel is not None:
            task = Task(errand.thread_id, errand.principal, method, identity, "", now, now, now + KEPT_MS, now)
            return self._opened(task, errand)
        task = Task(token_hex(16), errand.principal, method, identity, self._owner, now, now, now + KEPT_MS, now)
        try:
            # A cancellation of the call takes effect right after this: a row must not be left without its task.
            with anyio.CancelScope(shield=True):
                is_kept = await asyncio.to_thread(lambda: self._tasks().add(task))
        except KiwiError as error:
            self._trouble.failed(error)
            return None
        self._trouble.worked()
        return self._opened(task, errand) if is_kept else None

    def _opened(self, task: Task, errand: RunningCall) -> Task:
        self._running[task.id] = RunningTask(task, errand)
        errand.on_change = self._announce
        errand.hear, errand.log = silent, unheard  # a caller that asks about the task gets the latest progress
        return task

    def attend(self, task: Task) -> None:
        """See a task to its end, now that its work has begun."""
        running = self._running[task.id]
        running.errand.work.add_done_callback(lambda _: self._end(running))
        if running.is_stored and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._watch_over())

    def is_here(self, task_id: str, principal: str) -> bool:
        """Whether this process makes a task, so that looking at it costs nothing."""
        return self._own(task_id, principal) is not None

    async def get(self, task_id: str, principal: str) -> Task:
        """Return a task of a principal."""
        if (running := self._own(task_id, principal)) is not None:
            return running.seen()
        if self._kernel is not None and _THREAD.fullmatch(task_id):
            task = await self._of_thread(self._kernel, task_id, principal)
        else:
            task = await self._stored(lambda tasks: tasks.get(task_id, principal, milliseconds()))
        if task is None:
            raise MCPError(INVALID_PARAMS, "No such task is known here, or its time is over.")
        return task

    async def _of_thread(self, kernel: ThreadKernel, thread_id: str, principal: str) -> Task | None:
        """Return the task that a thread is to its starter; None where there is no such thread, or it is another's."""
        asked: JsonObject = {"action": "watch", "thread_id": thread_id, "seconds": 0}
        answer = await kernel.call("thread", asked, _caller(principal))
        content, now, detail = answer.content, milliseconds(), cast("JsonObject", {})
        if isinstance(answer.error, NotFound | PolicyDenied):
            return None
        if answer.is_error:
            raise MCPError(INTERNAL_ERROR, as_text(content.get("message")))
        ended, waits_for = as_text(content.get("status")), as_text(content.get("waits_for"))
        status = _OF_THREAD.get(ended, "working")
        if status == "completed":
            is_error = ended != "completed"
            detail = _kept(as_result(replace(answer, is_error=is_error), revision=LATEST_MODERN_VERSION))
        return Task(
            thread_id,
            principal,
            "tools/call",
            as_text(content.get("item")),
            "",
            _milliseconds_of(content, "started_at"),
            _milliseconds_of(content, "updated_at"),
            now + KEPT_MS,
            now,
            status,
            as_text(content.get("message")) or (f"waits for {waits_for}" if waits_for else ended),
            detail,
        )

    async def update(self, task_id: str, principal: str, answers: Mapping[str, Json]) -> None:
        """Send answers to the questions of a task; another process may be running it."""
        if (running := self._own(task_id, principal)) is not None:
            running.errand.deliver(answers)
        elif not (await self.get(task_id, principal)).is_over:
            await self._stored(lambda tasks: tasks.answer(task_id, principal, answers))

    async def cancel(self, task_id: str, principal: str) -> None:
        """Stop a task, or have the process that makes it do so; nothing happens to one that is over."""
        if (running := self._own(task_id, principal)) is not None:
            running.errand.work.cancel()
        elif not (await self.get(task_id, principal)).is_over:
            if self._kernel is not None and _THREAD.fullmatch(task_id):
                await self._kernel.call("thread", {"action": "cancel", "thread_id": task_id}, _caller(principal))
            else:
                await self._stored(lambda tasks: tasks.stop(task_id, principal))

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop the tasks of some principals."""
        for running in self._running.values():
            if not running.errand.is_over and is_over(running.errand.principal):
                running.errand.work.cancel()

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
        works = {running.errand.work for running in self._running.values()}
        for work in works:
            work.cancel()
        if works:
            await asyncio.wait(works, timeout=TIDY_SECONDS)
        if self._ending:
            await asyncio.wait(self._ending, timeout=TIDY_SECONDS)

    def _announce(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _own(self, task_id: str, principal: str) -> RunningTask | None:
        running = self._running.get(task_id)
        return running if running is not None and running.errand.principal == principal else None

    async def _stored(self, work: Callable[[Tasks], KeptT]) -> KeptT:
        try:
            return await asyncio.to_thread(lambda: work(self._tasks()))
        except KiwiError as error:
            raise MCPError(INTERNAL_ERROR, error.message, {"suggestion": error.suggestion}) from error

    def _end(self, running: RunningTask) -> None:
        if not running.is_stored:
            self._running.pop(running.id, None)
            self._announce()
            return
        ended = running.end(is_shutdown=self._is_closing)
        self._announce()
        ending = asyncio.create_task(self._keep(ended))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def _keep(self, ended: Task) -> None:
        try:
            await asyncio.to_thread(lambda: self._tasks().finish(ended))
        except KiwiError as error:
            self._trouble.failed(error)  # it is tried again with the next look
        else:
            self._running.pop(ended.id, None)

    async def _watch_over(self) -> None:
        beaten_at, response = time.monotonic(), dict[str, TaskStatus]()
        while any(running.is_stored for running in self._running.values()):
            await asyncio.sleep(self._trouble.pause(self._look))
            seen = [running.seen() for running in self._running.values() if running.is_stored]
            statuses = {task.id: task.status for task in seen}
            is_due = statuses != response or time.monotonic() - beaten_at >= self._beat
            try:
                wishes = await asyncio.to_thread(self._exchange, seen if is_due else ())
            except KiwiError as error:
                self._trouble.failed(error)
                continue
            self._trouble.worked()
            if is_due:
                beaten_at, response = time.monotonic(), statuses
                for task in seen:
                    if task.is_over:  # its end could not be kept at once, and is now
                        self._running.pop(task.id, None)
            for wish in wishes:
                if (running := self._running.get(wish.id)) is not None:
                    running.errand.deliver(wish.answers)
                    if wish.is_unwanted:
                        running.errand.work.cancel()

    def _exchange(self, seen: Sequence[Task]) -> Sequence[TaskCommand]:
        """Tell the store of the tasks under way, and return what others want of them."""
        tasks = self._tasks()
        for ended in (task for task in seen if task.is_over):
            tasks.finish(ended)
        if seen:
            tasks.beat(self._owner, milliseconds(), [task for task in seen if not task.is_over])
        return tasks.wishes(self._owner)


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


def dumped(result: Result) -> dict[str, object]:
    """Return a result as it is sent."""
    return result.model_dump(by_alias=True, mode="json", exclude_none=True) if isinstance(result, BaseModel) else result


def _caller(principal: str) -> Caller:
    return Caller(is_owner=principal == STDIO)


def _milliseconds_of(content: JsonObject, name: str) -> int:
    return round(datetime.fromisoformat(as_text(content.get(name))).timestamp() * 1_000)


def milliseconds() -> int:
    """Return the time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


def _ending(work: asyncio.Task[Result], *, is_shutdown: bool) -> tuple[TaskStatus, JsonObject, str]:
    if work.cancelled():
        return ("failed", _ENDED, str(_ENDED["message"])) if is_shutdown else ("cancelled", {}, "It was cancelled.")
    match work.exception():
        case None:
            return "completed", _kept(work.result()), ""
        case MCPError(error=error):
            return "failed", error.model_dump(mode="json", exclude_none=True), error.message
        case fault:
            incident = token_hex(6)
            _log.error("incident %s in a task", incident, exc_info=fault)
            message = f"Something went wrong inside Kiwi (incident {incident})."
            return "failed", {"code": INTERNAL_ERROR, "message": message}, message


def _kept(result: Result) -> JsonObject:
    """Return a result as it is kept; of one that is too large, only how large it was."""
    shown = cast("JsonObject", dumped(result))
    size = len(compact(shown))
    if size <= LARGEST_RESULT:
        return shown
    text = (
        f"The call gave {size:,} characters, more than the {LARGEST_RESULT:,} that a task keeps. "
        "Its run is recorded: see `kiwi runs`, or call again for less."
    )
    return {
        "content": [{"type": "text", "text": text}],
        "isError": bool(shown.get("isError")),
        "resultType": "complete",
    }


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
_READ_SECONDS, _MOST_READ = 1.0, 8
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
                return await entry.handler(dataclasses.replace(context, session=stream), params)
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
                news, may_read = self._manager.news(), monotonic() - read_at >= _READ_SECONDS
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
                await asyncio.wait({news}, timeout=_READ_SECONDS)

    def _due(self, waiting: Iterable[str], principal: str, *, may_read: bool) -> Sequence[str]:
        """Return the tasks to look at: all that are made here, and of those in the store a few at a time."""
        here = {task_id: self._manager.is_here(task_id, principal) for task_id in waiting}
        stored = [task_id for task_id, is_here in here.items() if not is_here]
        return [task_id for task_id, is_here in here.items() if is_here] + (stored[:_MOST_READ] if may_read else [])


def _notification(task: Task, number: types.RequestId | None) -> types.ServerNotification:
    params = {**task_to_json(task), "_meta": {SUBSCRIPTION_ID_META_KEY: number}}
    return cast("types.ServerNotification", TaskNotification(params=params))
