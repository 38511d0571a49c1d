"""schedule: start directives as threads at the times of a cron expression; worker: run the threads in the queue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field
from msgspec.structs import asdict, replace

from kiwi_mcp.domain.threads import Misfire, Occurrence, Overlap, Schedule
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.engine.schedule_times import GRACE_MS, due_time, next_time
from kiwi_mcp.kernel.context import Services, VerbContext
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread
from kiwi_mcp.kernel.threads.wake import is_worker_running, start_worker
from kiwi_mcp.kernel.threads.worker import ScheduleServer, Worker, WorkerOptions, queue_limits
from kiwi_mcp.kernel.verb import (
    OWNER,
    AnyJson,
    Argument,
    Item,
    LongText,
    NameText,
    NoArguments,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.verbs.thread import Inputs, Limits, Priority, Queue
from kiwi_mcp.kernel.view import Data, Hint, Notice, ViewItem, rows, warning_rows

ScheduleName = Annotated[
    NameText, Meta(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$"), Argument("The name of the schedule.", "NAME")
]
_NO_WORKER = "work is due, and no worker runs here: start one with `kiwi worker`."
_SHOWN = 5


class ScheduleLine(Response, frozen=True, kw_only=True):
    """A schedule, and what came of its last times."""

    name: str
    item: str
    cron: str
    zone: str
    overlap: str
    misfire: str
    jitter: int
    queue: str
    priority: int
    paused: bool
    next_at: str
    inputs: AnyJson | UnsetType = UNSET
    project: str | UnsetType = UNSET
    last: list[AnyJson] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


class ScheduleListResponse(Response, frozen=True, kw_only=True):
    """All schedules, by name."""

    schedules: list[ScheduleLine]
    warnings: list[str] | UnsetType = UNSET


def _list_view(response: ScheduleListResponse) -> Iterator[ViewItem]:
    yield from rows(map(_row, response.schedules), "There are no schedules.")
    yield from warning_rows(response.warnings)
    if not response.schedules:
        yield Hint("`kiwi schedule add NAME DIRECTIVE '30 7 * * 1-5'` starts a directive on working days at 7:30.")


def _row(one: ScheduleLine) -> str:
    following = "paused" if one.paused else f"next {one.next_at[:19]}Z"
    last = f"  last {one.last[0]['at'][:19]}Z {one.last[0]['status']}" if one.last else ""
    return f"{one.name}  {one.cron} ({one.zone})  {following}{last}  {one.item}"


def _one_view(response: ScheduleLine) -> Iterator[ViewItem]:
    yield Data(_row(response))
    yield from warning_rows(response.warnings)


@verb("list", group="schedule", access=OWNER, records=False, aliases=("schedule",), shows=_list_view)
async def list_schedules(request: NoArguments, context: VerbContext) -> ScheduleListResponse:  # noqa: ARG001 - a verb
    """List the schedules, their next times, and what came of the last ones."""
    server = context.services.one(ScheduleServer)
    found = await server.stores.do(server.schedules.list)
    lines = [_line(one, await server.stores.do(partial(server.schedules.occurrences, one, _SHOWN))) for one in found]
    return ScheduleListResponse(schedules=lines, warnings=await due_warnings(context.services) or UNSET)


async def due_warnings(services: Services) -> list[str]:
    """Return a warning if a thread or a schedule is due and no worker runs."""
    server, now = services.one(ScheduleServer), now_ms()
    schedules = await server.stores.do(partial(server.schedules.due, now - GRACE_MS))
    is_due = bool(schedules or (await services.one(ThreadRunner).due())[0])
    if not is_due or is_worker_running(services.user):
        return []
    workers = await server.stores.do(partial(server.stores.queue.workers, now))
    return [] if workers else [_NO_WORKER]


class ScheduleAddRequest(Request, frozen=True, kw_only=True):
    """What starts when."""

    name: ScheduleName
    item_id: Item
    cron: Annotated[NameText, Argument("Minute, hour, day of month, month, day of week: '30 7 * * 1-5'.", "CRON")]
    zone: Annotated[NameText | None, Option("The time zone, such as Europe/Zurich; UTC otherwise.")] = None
    inputs: Inputs = field(default_factory=dict)
    limits: Limits = field(default_factory=dict)
    model: Annotated[NameText | None, Option("The model, as provider/model; the directive's choice otherwise.")] = None
    overlap: Annotated[
        Overlap, Option("If the last thread has not ended: skip, queue, replace or allow.", metavar="RULE")
    ] = "skip"
    misfire: Annotated[
        Misfire, Option("Of times that were missed, make up for: skip (none), latest or all.", metavar="RULE")
    ] = "latest"
    jitter: Annotated[int, Meta(ge=0, le=3_600), Option("Delay each start by up to this many seconds.")] = 0
    queue: Queue = "default"
    priority: Priority = 0
    project_path: LongText | None = None

    def named_item(self) -> str:
        """Return the item to start."""
        return self.item_id


@verb("add", group="schedule", access=OWNER, needs_receipt=True, shows=_one_view)
async def add_schedule(request: ScheduleAddRequest, context: VerbContext) -> ScheduleLine:
    """Start a directive by itself at the times of a cron expression."""
    services = context.services
    own = services.context(context.caller, services.catalogs.at(request.project_path))
    wanted = StartRequest(request.item_id, request.inputs, request.limits, request.model or "")
    thread, _ = new_thread(wanted, own)  # what could not start is refused now
    queue_limits(services.user)
    now, zone = now_ms(), request.zone or "UTC"
    schedule = Schedule(
        request.name,
        thread.item,
        request.cron,
        zone,
        now,
        inputs=thread.inputs,
        limits=dict(request.limits),
        model=request.model or "",
        project=thread.project,
        queue=request.queue,
        priority=request.priority,
        overlap=request.overlap,
        misfire=request.misfire,
        jitter=request.jitter,
        next_at=(at := next_time(request.cron, zone, now)),
    )
    schedule = replace(schedule, due_at=due_time(schedule, at))
    server = services.one(ScheduleServer)
    await server.stores.do(partial(server.schedules.add, schedule))
    start_worker(services.user)
    return _line(schedule)


class ScheduleNameRequest(Request, frozen=True, kw_only=True):
    """Which schedule."""

    name: ScheduleName


class SchedulePauseRequest(ScheduleNameRequest, frozen=True, kw_only=True):
    """Which schedule to pause, or to let continue."""

    resume: Annotated[bool, Option("Let it continue; times that passed while it was paused are not made up for.")] = (
        False
    )


@verb("pause", group="schedule", access=OWNER, needs_receipt=True, shows=_one_view)
async def pause_schedule(request: SchedulePauseRequest, context: VerbContext) -> ScheduleLine:
    """Pause a schedule: it starts nothing until it continues."""
    server = context.services.one(ScheduleServer)
    known = await server.stores.do(partial(server.schedules.get, request.name))
    at = next_time(known.cron, known.zone, now_ms())
    changed = replace(known, is_paused=not request.resume, next_at=at, due_at=due_time(known, at))
    await server.stores.do(partial(server.schedules.put_times, changed))
    start_worker(context.services.user)
    return _line(changed)


class ScheduleRunResponse(Response, frozen=True, kw_only=True):
    """The thread that was started."""

    name: str
    thread_id: str
    status: str


def _run_view(response: ScheduleRunResponse) -> Iterator[ViewItem]:
    yield Notice(f"thread {response.thread_id}: {response.status}")
    yield Hint(f"`kiwi thread watch {response.thread_id}` follows it.")


@verb("run", group="schedule", access=OWNER, needs_receipt=True, shows=_run_view)
async def run_schedule(request: ScheduleNameRequest, context: VerbContext) -> ScheduleRunResponse:
    """Start the thread of a schedule now, beside its times; threads that overlap are not looked at."""
    server = context.services.one(ScheduleServer)
    schedule = await server.stores.do(partial(server.schedules.get, request.name))
    made = await server.start(schedule, now_ms())
    start_worker(context.services.user)
    return ScheduleRunResponse(name=schedule.name, thread_id=made.id, status=made.status)


class ScheduleRemoveResponse(Response, frozen=True, kw_only=True):
    """That the schedule is gone."""

    name: str
    removed: bool = True


def _remove_view(response: ScheduleRemoveResponse) -> Iterator[ViewItem]:
    yield Data(f"The schedule {response.name} is removed; the threads that it started stay.")


@verb("remove", group="schedule", access=OWNER, needs_receipt=True, shows=_remove_view)
async def remove_schedule(request: ScheduleNameRequest, context: VerbContext) -> ScheduleRemoveResponse:
    """Remove a schedule; the threads that it started stay."""
    server = context.services.one(ScheduleServer)
    await server.stores.do(partial(server.schedules.remove, request.name))
    start_worker(context.services.user)  # which sleeps no longer than it needs to
    return ScheduleRemoveResponse(name=request.name)


def _line(schedule: Schedule, last: Sequence[Occurrence] = ()) -> ScheduleLine:
    shown = [{**{name: value for name, value in asdict(one).items() if value}, "at": iso(one.at)} for one in last]
    return filled(
        ScheduleLine,
        schedule,
        paused=schedule.is_paused,
        next_at=iso(schedule.next_at),
        inputs=schedule.inputs or UNSET,
        last=shown or UNSET,
    )


class WorkerRequest(Request, frozen=True, kw_only=True):
    """What a worker serves, and when it ends."""

    queues: Annotated[list[NameText] | None, Option("Only these queues, with commas.", kind="commas")] = None
    concurrency: Annotated[int, Meta(ge=1, le=1_000), Option("Run at most this many threads at once.")] = 8
    engine: Annotated[
        Literal["inline", "dbos"],
        Option("Run segments of threads inline, or as workflows of DBOS."),
    ] = "inline"
    until_idle: Annotated[bool, Option("End when no thread can continue.")] = False
    while_pending: Annotated[
        bool, Option("End when nothing is due, now or later. Kiwi starts such a worker by itself, one for each home.")
    ] = False


class WorkerResponse(Response, frozen=True, kw_only=True):
    """How many threads were run."""

    threads: int


def _worker_view(response: WorkerResponse) -> Iterator[ViewItem]:
    yield Data(f"Threads that this worker ran: {response.threads}")


@verb("worker", access=OWNER, wire=("worker",), records=False, is_local=True, shows=_worker_view)
async def worker(request: WorkerRequest, context: VerbContext) -> WorkerResponse:
    """Run the threads in the queue and serve schedules, until it is stopped."""
    options = WorkerOptions(
        tuple(request.queues or ()),
        request.concurrency,
        is_until_idle=request.until_idle,
        is_on_demand=request.while_pending,
        engine=request.engine,
    )
    return WorkerResponse(threads=await Worker(context.services, options).run())
