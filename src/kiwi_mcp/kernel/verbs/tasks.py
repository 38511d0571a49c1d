"""tasks: calls that continue in the background; list, show, cancel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.verb import OWNER, AnyJson, Argument, NameText, Option, Request, Response, filled, verb
from kiwi_mcp.kernel.view import Hint, ViewItem, field_rows, rows
from kiwi_mcp.store.tasks import Task, Tasks

_BEGINNING = re.compile(r"[0-9a-f]{4,32}")
"""A task's id, or the beginning of it, long enough to mean one."""
_SHORT = re.compile(r"[0-9a-f]{1,3}")
_LISTED = 10
_ASK = "Ask about a task of your own with `tasks/get`, by the id you were given."

TaskId = Annotated[NameText, Argument("The task: its id, or the beginning of it.", "TASK")]


class TasksListRequest(Request, frozen=True, kw_only=True):
    """How many tasks to list."""

    limit: Annotated[int, Meta(ge=1, le=1_000), Option("At most this many.")] = 20


class TaskResponse(Response, frozen=True, kw_only=True):
    """One task; `questions`, `result` or `error` where it is shown whole."""

    task_id: str
    identity: str | UnsetType = UNSET
    status: str
    message: str | UnsetType = UNSET
    created_at: str
    updated_at: str
    expires_at: str
    principal: str | UnsetType = UNSET
    questions: AnyJson | UnsetType = UNSET
    result: AnyJson | UnsetType = UNSET
    error: AnyJson | UnsetType = UNSET
    action: str | UnsetType = UNSET


class TasksListResponse(Response, frozen=True, kw_only=True):
    """Tasks, the newest first."""

    tasks: list[TaskResponse]


def _list_view(response: TasksListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_row, response.tasks), "No tasks to show.")
    if response.tasks:
        yield Hint("`kiwi tasks show TASK` shows one, `kiwi tasks cancel TASK` stops it; 4 characters are enough.")


def _row(task: TaskResponse) -> str:
    principal = f"for {task.principal}" if task.principal else ""
    details = "  ".join(filter(None, (task.identity or "", principal, task.message or "")))
    return f"{task.task_id}  {task.created_at[:19]}  {task.status:<14}  {details}"


@verb("list", group="tasks", access=OWNER, hint=_ASK, records=False, aliases=("tasks",), shows=_list_view)
def list_tasks(request: TasksListRequest, context: VerbContext) -> TasksListResponse:
    """List the calls that continue as tasks."""
    found = context.services.tasks().list(now_ms(), limit=request.limit)
    return TasksListResponse(tasks=[_response(task) for task in found])


class TaskRequest(Request, frozen=True, kw_only=True):
    """Which task."""

    task_id: TaskId


@verb(
    "show", group="tasks", access=OWNER, hint=_ASK, records=False, aliases=("tasks TASK",),
    shows=partial(field_rows, width=12),
)  # fmt: skip
def show_task(request: TaskRequest, context: VerbContext) -> TaskResponse:
    """Show one whole task."""
    return _response(_found(request.task_id, context.services.tasks(), now_ms()), is_whole=True)


@verb("cancel", group="tasks", access=OWNER, hint=_ASK, aliases=("tasks --cancel",))
def cancel_task(request: TaskRequest, context: VerbContext) -> TaskResponse:
    """Stop a task."""
    store = context.services.tasks()
    task = _found(request.task_id, store, now_ms())
    if task.is_over:
        message = f"It is over already: {task.status}."
    else:
        store.stop(task.id, None)
        message = "It was asked to stop, and does so within seconds."
    return msgspec.structs.replace(_response(task), action="cancel", message=message)


def _response(task: Task, *, is_whole: bool = False) -> TaskResponse:
    detail = task.detail if is_whole else UNSET
    return filled(
        TaskResponse,
        task,
        task_id=task.id,
        created_at=iso(task.created_at),
        updated_at=iso(task.updated_at),
        expires_at=iso(task.expires_at),
        questions=detail if task.status == "input_required" else UNSET,
        result=detail if task.status == "completed" else UNSET,
        error=detail if task.status == "failed" else UNSET,
    )


def _found(task_id: str, store: Tasks, now: int) -> Task:
    """Return the task with an id, or the only task with an id that begins so."""
    if _SHORT.fullmatch(task_id):
        raise InvalidRequest(
            f"{task_id!r} is too short to mean one task.", suggestion="Write at least 4 characters of its id."
        )
    near = store.list(now, limit=_LISTED, prefix=task_id) if _BEGINNING.fullmatch(task_id) else ()
    match near:
        case []:
            raise NotFound(
                f"No task {task_id[:40]!r} is stored here.",
                suggestion="List tasks with `kiwi tasks`; they are removed an hour after their end. A task that runs a "
                "thread has the id of that thread: `kiwi thread list`.",
                task_id=task_id[:40],
            )
        case [task]:
            return task
        case several:
            raise InvalidRequest(
                f"{task_id!r} is the beginning of several tasks.",
                suggestion=f"Write more of it: {', '.join(task.id for task in several)}.",
            )
