"""runs and tasks: the records of calls, and calls that continue in the background; list, show, prune, cancel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied, RunNotFound
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.records import RunRecord, RunStatus
from kiwi_mcp.domain.times import is_run_id, iso, milliseconds, moment_in, now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.paths import outputs_home, user_space
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    LongText,
    NameText,
    NoArguments,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, count_text, field_rows, rows
from kiwi_mcp.manifest.names import did_you_mean, short
from kiwi_mcp.store.outputs import preview, read_record
from kiwi_mcp.store.runs import RunFilter, Runs
from kiwi_mcp.store.tasks import Task, Tasks

Found = TypeVar("Found", RunRecord, Task)

_MOST_STEPS = 1_000
_ID_LENGTH = 26
_NAMED = 20
_NEAR_TASKS = 10
_LOOKED_AT = 1_000
_RESULT_FIELDS = frozenset({"result", "result_is_preview", "result_characters", "result_handle", "logs"})
_WHEN = "A time, or an age: 2h, 3d."

OnlyProject = Annotated[
    LongText | None, Option("Only runs in this project.", "--project", "-p", metavar="PATH", kind="path")
]


class RunsListRequest(Request, frozen=True, kw_only=True):
    """Which runs to list."""

    tool: Annotated[NameText | None, Option("Only of this tool.")] = None
    status: Annotated[RunStatus | None, Option("success, error, timeout, refused, cancelled, …")] = None
    since: Annotated[NameText | None, Option(_WHEN, metavar="WHEN")] = None
    until: Annotated[NameText | None, Option(_WHEN, metavar="WHEN")] = None
    before: Annotated[NameText | None, Option("Continue after this run of the last page.", metavar="RUN")] = None
    limit: Annotated[int, Meta(ge=1, le=1_000), Option("At most this many.")] = 20
    actor: Annotated[LongText | None, Option("Runs of a user of the gateway: the name of a token.")] = None
    project_path: OnlyProject = None


class RunLine(Response, frozen=True, kw_only=True):
    """A run as lists show it."""

    id: str
    tool_id: str
    identity: str | UnsetType = UNSET
    status: str
    started_at: str
    duration_ms: int
    cost_micros: int
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET


class RunsListResponse(Response, frozen=True, kw_only=True):
    """Runs, the newest first, and where the next page begins."""

    runs: list[RunLine]
    next: str | None
    suggestion: str | UnsetType = UNSET


def _list_view(response: RunsListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_row, response.runs), response.suggestion or "No runs to show.")
    if response.next:
        yield Hint(f"continue with --before {response.next}")


def _row(run: RunLine) -> str:
    line = f"{run.id}  {run.started_at[:19]}  {run.status:<11} {f'{run.duration_ms} ms':>9}  {run.tool_id}"
    return f"{line}  {(run.message or '').partition(chr(10))[0]}".rstrip()


@verb("list", group="runs", access=ANYONE, records=False, aliases=("runs",), shows=_list_view)
def list_runs(request: RunsListRequest, context: VerbContext) -> RunsListResponse:
    """List past runs."""
    return listed(request, _runs_of(request.actor, context), datetime.now(UTC))


def _runs_of(actor: str | None, context: VerbContext) -> Runs:
    """Return the runs that a request is about: those of its caller, or of the actor that the owner names."""
    services = context.services
    services.store.close_abandoned()
    if not actor:
        return services.runs(context.caller)
    if not context.is_owner:
        raise PolicyDenied("Only the owner may see the runs of others.", suggestion="Leave out `actor`.")
    return services.store.runs().named(actor)


def listed(request: RunsListRequest, store: Runs, now: datetime) -> RunsListResponse:
    """Return one page of runs."""
    if request.before is not None and not is_run_id(request.before):
        raise RunNotFound(request.before)
    wanted = RunFilter(
        tool_id=short(request.tool) if request.tool else None,
        status=request.status,
        project=_real(request.project_path) if request.project_path else None,
        since=moment_in("since", request.since, now),
        until=moment_in("until", request.until, now),
        before=request.before,
        limit=request.limit + 1,  # one more than is returned shows whether there are more
    )
    found = store.list(wanted)
    page, suggestion = found[: request.limit], ""
    if wanted.tool_id and not page:
        known = sorted({run.tool_id for run in store.list(RunFilter(limit=_LOOKED_AT))})
        names = ", ".join(f"`{name}`" for name in known[:_NAMED]) or "nothing yet"
        near = did_you_mean(wanted.tool_id, known)
        suggestion = f"No run of {wanted.tool_id!r} is recorded. {near}Recorded lately: {names}."
        if wanted.tool_id in known:
            suggestion = f"There are runs of {wanted.tool_id!r}, and none that fits the rest of what was asked."
    following = page[-1].id if len(found) > len(page) else None
    return RunsListResponse(runs=[filled(RunLine, run) for run in page], next=following, suggestion=suggestion or UNSET)


def _real(path: str) -> str:
    try:
        return os.path.realpath(path, strict=True)
    except (OSError, ValueError):
        return path  # runs stay when their project has gone


class RunShowRequest(Request, frozen=True, kw_only=True):
    """Which run to show."""

    run_id: Annotated[NameText, Argument("The run: its id, or the beginning of it.", "RUN")]
    actor: Annotated[LongText | None, Option("A run of a user of the gateway: the name of a token.")] = None


class RunResponse(Response, frozen=True, kw_only=True):
    """One whole run, with its result as far as that is stored."""

    id: str
    tool_id: str
    status: str
    started_at: str
    duration_ms: int
    actor: str | UnsetType = UNSET
    project: str | UnsetType = UNSET
    identity: str | UnsetType = UNSET
    digest: str | UnsetType = UNSET
    plan_digest: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    cost_micros: int
    output: str | UnsetType = UNSET
    result_sha256: str | UnsetType = UNSET
    result_size: int | UnsetType = UNSET
    result: AnyJson | UnsetType = UNSET
    logs: AnyJson | UnsetType = UNSET
    result_is_preview: bool | UnsetType = UNSET
    result_characters: int | UnsetType = UNSET
    result_handle: str | UnsetType = UNSET


def _show_view(response: RunResponse) -> Iterator[ViewItem]:
    content = response.to_json()
    yield from field_rows(response, 14, _RESULT_FIELDS)
    logs = as_object(content.get("logs"))
    for name in ("stdout", "stderr"):
        if printed := as_text(logs.get(name)).rstrip():
            yield Data(f"{name}:\n{indent(printed, '  ')}")
    if "result" in content:
        result = content["result"]
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, indent=2)
        yield Data(f"result:\n{indent(text, '  ')}")
    if response.result_is_preview:
        yield Notice(f"That is the beginning of {response.result_characters} characters.")
        place = f"{response.result_handle or ''} --offset {len(as_text(content.get('result')))}"
        yield Hint(f"kiwi load --type output {place} --project {response.project or ''}")


@verb("show", group="runs", access=ANYONE, records=False, aliases=("runs RUN",), shows=_show_view)
def show_run(request: RunShowRequest, context: VerbContext) -> RunResponse:
    """Show one whole run."""
    return shown(request, _runs_of(request.actor, context))


def shown(request: RunShowRequest, store: Runs) -> RunResponse:
    """Return one whole run."""
    run = _found(request.run_id, store)
    return msgspec.convert({**run.to_json(), **_result(run, store)}, RunResponse)


def _found(run_id: str, store: Runs) -> RunRecord:
    """Return the run with an id, or the only run with an id that begins so."""
    if not re.fullmatch(r"[0-9A-Za-z]{6,25}", run_id):
        return store.get(run_id)
    start = run_id.upper()
    # Ids are in the order of time, so ids with the same beginning are adjacent.
    near = store.list(RunFilter(before=start.ljust(_ID_LENGTH, "Z"), limit=_NAMED))
    if not (found := [run for run in near if run.id.startswith(start)]):
        raise RunNotFound(run_id)
    return _only(found, run_id, "runs")


def _only(found: Sequence[Found], start: str, what: str) -> Found:
    """Return the one that an id's beginning means; refuse a beginning that several have."""
    if len(found) > 1:
        raise InvalidRequest(
            f"{start!r} is the beginning of several {what}.",
            suggestion=f"Write more of it: {', '.join(one.id for one in found)}.",
        )
    return found[0]


def _result(run: RunRecord, store: Runs) -> JsonObject:
    """Return the words that carry a result: from the store where it is large, else from the file in its project."""
    if run.result_sha256:
        shown = preview(store.result(run.id).decode(errors="surrogatepass"))
        return {**shown, "result_handle": run.output} if run.output else shown
    if not run.output:
        return {}
    try:
        record = read_record(outputs_home(Path(run.project) / ".ai", user_space()), run.output)
    except NotFound:
        return {}
    # Another machine, or another time, may have another file under that name.
    is_own = record.get("run_id") == run.id
    return {word: record[word] for word in ("result", "logs") if is_own and word in record}


class RunsPruneResponse(Response, frozen=True, kw_only=True):
    """How many runs and results were removed."""

    action: str = "prune"
    status: str = "success"
    message: str
    runs: int
    results: int


@verb("prune", group="runs", access=ANYONE, aliases=("runs --prune",))
def prune_runs(request: NoArguments, context: VerbContext) -> RunsPruneResponse:  # noqa: ARG001 - a verb
    """Remove runs that are older than the retention allows."""
    return pruned(_runs_of(None, context), datetime.now(UTC))


def pruned(store: Runs, now: datetime) -> RunsPruneResponse:
    """Remove runs that are older than the retention allows."""
    removed, results = 0, 0
    for _ in range(_MOST_STEPS):
        step = store.prune(milliseconds(now))
        if not step.runs and not step.results:
            break
        removed, results = removed + step.runs, results + step.results
    message = f"{count_text(removed, 'run')} and {count_text(results, 'large result')} removed"
    return RunsPruneResponse(message=message, runs=removed, results=results)


_ASK_OWN = "Ask about a task of your own with `tasks/get`, by the id you were given."


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


def _tasks_view(response: TasksListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_task_row, response.tasks), "No tasks to show.")
    if response.tasks:
        yield Hint("`kiwi tasks show TASK` shows one, `kiwi tasks cancel TASK` stops it; 4 characters are enough.")


def _task_row(task: TaskResponse) -> str:
    principal = f"for {task.principal}" if task.principal else ""
    details = "  ".join(filter(None, (task.identity or "", principal, task.message or "")))
    return f"{task.task_id}  {task.created_at[:19]}  {task.status:<14}  {details}"


@verb("list", group="tasks", access=OWNER, hint=_ASK_OWN, records=False, aliases=("tasks",), shows=_tasks_view)
def list_tasks(request: TasksListRequest, context: VerbContext) -> TasksListResponse:
    """List the calls that continue as tasks."""
    found = context.services.tasks().list(now_ms(), limit=request.limit)
    return TasksListResponse(tasks=[_task_response(task) for task in found])


class TaskRequest(Request, frozen=True, kw_only=True):
    """Which task."""

    task_id: Annotated[NameText, Argument("The task: its id, or the beginning of it.", "TASK")]


@verb(
    "show", group="tasks", access=OWNER, hint=_ASK_OWN, records=False, aliases=("tasks TASK",),
    shows=partial(field_rows, width=12),
)  # fmt: skip
def show_task(request: TaskRequest, context: VerbContext) -> TaskResponse:
    """Show one whole task."""
    return _task_response(_found_task(request.task_id, context.services.tasks()), is_whole=True)


@verb("cancel", group="tasks", access=OWNER, hint=_ASK_OWN, aliases=("tasks --cancel",))
def cancel_task(request: TaskRequest, context: VerbContext) -> TaskResponse:
    """Stop a task."""
    store = context.services.tasks()
    task = _found_task(request.task_id, store)
    if task.is_over:
        message = f"It is over already: {task.status}."
    else:
        store.stop(task.id, None)
        message = "It was asked to stop, and does so within seconds."
    return replace(_task_response(task), action="cancel", message=message)


def _task_response(task: Task, *, is_whole: bool = False) -> TaskResponse:
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


def _found_task(task_id: str, store: Tasks) -> Task:
    """Return the task with an id, or the only task with an id that begins so."""
    if re.fullmatch(r"[0-9a-f]{1,3}", task_id):
        raise InvalidRequest(
            f"{task_id!r} is too short to mean one task.", suggestion="Write at least 4 characters of its id."
        )
    is_id = re.fullmatch(r"[0-9a-f]{4,32}", task_id)
    near = store.list(now_ms(), limit=_NEAR_TASKS, prefix=task_id) if is_id else ()
    if not near:
        raise NotFound(
            f"No task {task_id[:40]!r} is stored here.",
            suggestion="List tasks with `kiwi tasks`; they are removed an hour after their end. A task that runs a "
            "thread has the id of that thread: `kiwi thread list`.",
            task_id=task_id[:40],
        )
    return _only(near, task_id, "tasks")
