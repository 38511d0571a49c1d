"""The tasks verb: the calls that went on as tasks, listed, shown and stopped by the owner."""

from __future__ import annotations

import re

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.run import iso
from kiwi_mcp.kernel.requests import TasksRequest
from kiwi_mcp.store.tasks import Task, Tasks

_BEGINNING = re.compile(r"[0-9a-f]{4,32}")
"""A task's id, or the beginning of it, long enough to mean one."""
_SHORT = re.compile(r"[0-9a-f]{1,3}")
_DETAILS = {"input_required": "questions", "completed": "result", "failed": "error"}
_NAMED = 10


def tasks(request: TasksRequest, store: Tasks, *, now: int, is_owner: bool) -> JsonObject:
    """Answer one request about tasks, at a time in milliseconds since 1970."""
    if not is_owner:
        raise PolicyDenied(
            "Tasks of all clients are shown to the owner alone.",
            suggestion="Ask about a task of your own with `tasks/get`, by the id you were given.",
        )
    match request.action:
        case "list":
            return {"tasks": [_line(task) for task in store.list(now, limit=request.limit)]}
        case "show":
            task = _found(request.task_id, store, now)
            return {**_line(task), **({_DETAILS[task.status]: task.detail} if task.status in _DETAILS else {})}
        case "cancel":
            return _cancel(_found(request.task_id, store, now), store)


def _line(task: Task) -> JsonObject:
    told: dict[str, Json] = {
        "task_id": task.id,
        "identity": task.identity,
        "status": task.status,
        "message": task.message,
        "created_at": iso(task.created_at),
        "updated_at": iso(task.updated_at),
        "expires_at": iso(task.expires_at),
        "principal": task.principal,
    }
    return {word: value for word, value in told.items() if value != ""}


def _found(task_id: str | None, store: Tasks, now: int) -> Task:
    """Return the task of an id, or the only one whose id begins so."""
    if task_id is None:
        issue = Issue("task_id", "is missing", "Name the task, by the `task_id` that a list gives.")
        raise InvalidRequest("The request names no task.", suggestion=issue.fix, issues=[issue.to_json()])
    if _SHORT.fullmatch(task_id):
        raise InvalidRequest(
            f"{task_id!r} is too short to mean one task.", suggestion="Write at least 4 characters of its id."
        )
    near = store.list(now, limit=_NAMED, prefix=task_id) if _BEGINNING.fullmatch(task_id) else ()
    match near:
        case []:
            raise NotFound(
                f"No task {task_id[:40]!r} is kept here.",
                suggestion="List tasks with `kiwi tasks`; they go an hour after they have ended.",
                task_id=task_id[:40],
            )
        case [task]:
            return task
        case several:
            raise InvalidRequest(
                f"{task_id!r} is the beginning of several tasks.",
                suggestion=f"Write more of it: {', '.join(task.id for task in several)}.",
            )


def _cancel(task: Task, store: Tasks) -> JsonObject:
    if task.is_over:
        return {**_line(task), "action": "cancel", "message": f"It is over already: {task.status}."}
    store.stop(task.id, None)
    return {**_line(task), "action": "cancel", "message": "It was asked to stop, and does so within seconds."}
