"""The worker: takes threads from the queue and runs them, and serves schedules. Several may share one store."""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, Principal
from kiwi_mcp.domain.errors import InvalidManifest, KiwiError, Unavailable, install_line
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.threads import Occurrence, Schedule, Thread
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.engine.inline import Engine
from kiwi_mcp.engine.queue import QueueLimits
from kiwi_mcp.engine.schedule_times import due_time, due_times
from kiwi_mcp.kernel.context import Services
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest
from kiwi_mcp.kernel.threads.wake import ring, start_sleeper, worker_lock
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.primitives.process.sleeper import DUE
from kiwi_mcp.store.queue import LiveThread, WorkerRow
from kiwi_mcp.store.schedules import OccurrenceTaken, Schedules

QUEUES_FILE = "queues.yaml"
_BUSY, _IDLE, _BEAT = 0.3, 1.0, 3.0
"""How many seconds pass between looks for threads, while some run and while none does; and between signs of life."""
_ELSEWHERE_MS = 10_000


class WorkerOptions(Struct, frozen=True):
    """What a worker serves: some queues or all, how many threads at once, and when it ends by itself."""

    queues: tuple[str, ...] = ()
    concurrency: int = 8
    is_until_idle: bool = False
    """Whether it ends when no thread can continue now."""
    is_on_demand: bool = False
    """Whether it is the one of its home: it ends when no thread can continue, and sleeps while something is due."""
    engine: str = "inline"


def queue_limits(user: Path) -> QueueLimits:
    """Return the limits of the owner's `queues.yaml`."""
    path = user / QUEUES_FILE
    if not path.is_file():
        return QueueLimits()
    value = read_yaml(path.read_text(encoding="utf-8"), what=path.name).value
    try:
        return msgspec.convert(value or {}, QueueLimits)
    except msgspec.ValidationError as error:
        fix = "Write such as `queues: {nightly: {concurrency: 2, per_minute: 30}}`; `providers` and `actors` likewise."
        raise InvalidManifest(f"The owner's {QUEUES_FILE}", [Issue("", str(error), fix)]) from error


def open_engine(name: str, url: str, owner: str, process: str) -> Engine:
    """Start the engine that a worker names."""
    try:
        opened: Callable[[str, str, str], Engine] = import_module(f"kiwi_mcp.engine.{name}").open_engine
    except ImportError as error:
        raise Unavailable(
            f"The engine {name} needs packages that are not installed, such as {error.name}.",
            suggestion=f"Install them: {install_line(name)}.",
        ) from error
    return opened(url, owner, process)


class ScheduleServer:
    """Starts the threads of schedules. One service of a kernel."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._runner = services.one(ThreadRunner)
        self.stores = self._runner.stores
        registry = services.store.registry()
        self.schedules = Schedules(registry.database, registry.actor.name)

    async def serve(self) -> int:
        """Start every thread that is due, and return how many were started here."""
        now, do = now_ms(), self.stores.do
        started = 0
        for schedule in await do(partial(self.schedules.due, now)):
            if not self._is_here(schedule):
                continue
            times, following = due_times(schedule, now)
            for at in times:
                started += await self._serve_time(schedule, at)
            await do(partial(self.schedules.set_next, schedule, following, due_time(schedule, following)))
        for schedule, at in await do(self.schedules.waiting):
            if self._is_here(schedule) and not await do(partial(self.schedules.live, schedule)):
                started += await self._start_due(schedule, at)
        return started

    def _is_here(self, schedule: Schedule) -> bool:
        """Whether this machine serves a schedule: where machines share the store, one that has its project."""
        return self.stores.is_embedded or not schedule.project or Path(schedule.project).is_dir()

    async def _serve_time(self, schedule: Schedule, at: int) -> bool:
        """Serve one time as the schedule says for threads that overlap; return whether a thread was started here."""
        do = self.stores.do
        live = await do(partial(self.schedules.live, schedule))
        if live and schedule.overlap == "skip":
            skipped = Occurrence(at, "skipped", message=f"The thread {live[-1]} has not ended.")
            await do(partial(self.schedules.settle, schedule, skipped))
            return False
        if live and schedule.overlap == "queue":
            await do(partial(self.schedules.settle, schedule, Occurrence(at, "pending")))
            return False
        if not await self._start_due(schedule, at):
            return False
        for thread_id in live if schedule.overlap == "replace" else ():
            with suppress(KiwiError):  # it ended meanwhile
                await self._runner.cancel(await do(partial(self.stores.threads.get, thread_id)))
        return True

    async def _start_due(self, schedule: Schedule, at: int) -> bool:
        """Create the thread of a time; False where another worker did, or where it cannot start."""
        try:
            await self.start(schedule, at)
        except OccurrenceTaken:
            return False
        except KiwiError as error:
            failed = Occurrence(at, "failed", message=f"{error.message} {error.suggestion}".strip())
            await self.stores.do(partial(self.schedules.settle, schedule, failed))
            return False
        return True

    async def start(self, schedule: Schedule, at: int) -> Thread:
        """Create the thread of a time, in the name of the schedule."""
        services = self._services
        caller = replace(NO_CALLER, name=schedule.starter, identity=Principal("service", schedule.starter))
        wanted = StartRequest(
            schedule.item,
            schedule.inputs,
            schedule.limits,
            schedule.model,
            queue=schedule.queue,
            priority=schedule.priority,
        )
        context = services.context(caller, services.catalogs.at(schedule.project or None))
        claim = partial(self.schedules.claim, schedule, at)
        return (await self._runner.create(wanted, context, claim=claim))[0]

    async def aclose(self) -> None:
        """Release nothing: the store belongs to the kernel."""


class Worker:
    """One worker of a kernel."""

    def __init__(self, services: Services, options: WorkerOptions) -> None:
        self._user = services.user
        self._store = services.store
        self._runner = services.one(ThreadRunner)
        self._schedules = services.one(ScheduleServer)
        self._options = options
        self._queue = self._runner.stores.queue
        self._limits = queue_limits(self._user)
        queues = ",".join(options.queues)
        process = services.store.kernel_lock.name()
        self._row = WorkerRow(process, platform.node(), os.getpid(), queues, now_ms(), now_ms())
        self._beat_at = 0.0
        self._stopping = asyncio.Event()
        self._ran: set[str] = set()

    async def run(self) -> int:
        """Run threads until there are none, or until the process is asked to end; return how many ran."""
        self._runner.is_background = True
        settings = self._store.settings
        self._runner.engine = open_engine(self._options.engine, settings.url, settings.actor.name, self._row.process)
        with suppress(ValueError, RuntimeError):  # only the main thread of a process gets signals
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._stopping.set)
        if self._options.is_on_demand:
            await self._run_on_demand()
            return len(self._ran)
        # A worker that serves every queue is the worker of its home, too, unless another one is.
        lock = None if self._options.queues else worker_lock(self._user)
        try:
            await self._serve()
        finally:
            if lock is not None:
                os.close(lock)
        return len(self._ran)

    async def _run_on_demand(self) -> None:
        # What another process wrote while this one gave the lock back is looked for once more.
        while (lock := worker_lock(self._user)) is not None:
            try:
                await self._serve()
            finally:
                os.close(lock)
            if self._stopping.is_set():
                return
            if self._served((await self._runner.due())[0]):
                continue
            due_at = await self._runner.stores.do(lambda: self._queue.next_due(now_ms()))
            if due_at:
                # One that is due and was not served belongs to another machine.
                start_sleeper(self._user, due_at if due_at > now_ms() else now_ms() + _ELSEWHERE_MS)
            else:
                (self._user / DUE).unlink(missing_ok=True)
            return
        ring(self._user)  # a process that sleeps becomes the worker

    async def _serve(self) -> None:
        try:
            await self._serve_all()
        finally:
            with suppress(KiwiError):
                await self._runner.stores.do(lambda: self._queue.leave(self._row.process))

    async def _serve_all(self) -> None:
        running: set[asyncio.Task[None]] = set()
        stopping = asyncio.create_task(self._stopping.wait())
        beats: dict[str, int] = {}
        is_staying = not (self._options.is_until_idle or self._options.is_on_demand)
        while not stopping.done():
            await self._beat()
            await self._schedules.serve()
            found, leased = await self._runner.due()
            due = self._served(found)
            free = self._options.concurrency - len(running)
            for thread in await self._runner.claim(due, self._limits, free) if due and free > 0 else ():
                self._ran.add(thread.id)
                running.add(asyncio.create_task(self._run_one(thread)))
            is_lease_old = any(beats.setdefault(one.id, one.beat_at) == one.beat_at for one in leased)
            # The process of a lease that is not renewed may have died: then it ends soon.
            if not (running or due or is_lease_old or is_staying):
                break
            pause = _BUSY if running or due or is_lease_old else _IDLE
            await asyncio.wait({*running, stopping}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            running = {task for task in running if not task.done()}
        stopping.cancel()

    def _served(self, threads: Sequence[LiveThread]) -> list[LiveThread]:
        """Return the threads of the queues of this worker; on a shared store, those whose project this machine has."""
        queues, is_shared = self._options.queues, not self._runner.stores.is_embedded
        return [
            one
            for one in threads
            if (not queues or one.queue in queues)
            and not (is_shared and one.project and not Path(one.project).is_dir())
        ]

    async def _beat(self) -> None:
        if time.monotonic() - self._beat_at >= _BEAT:
            self._beat_at = time.monotonic()
            row = replace(self._row, beat_at=now_ms())
            await self._runner.stores.do(lambda: self._queue.beat(row))
            await self._runner.engine.sweep(self._live)

    async def _live(self) -> set[str]:
        workers = await self._runner.stores.do(lambda: self._queue.workers(now_ms()))
        return {one.process for one in workers if not self._store.kernel_lock.is_gone(one.process)}

    async def _run_one(self, thread: Thread) -> None:
        with suppress(KiwiError):  # another process took it, or it has ended
            await self._runner.run(thread.id, NO_CALLER, taken=thread)
