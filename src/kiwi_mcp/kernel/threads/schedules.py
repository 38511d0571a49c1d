"""Serving schedules: the thread of each time that is due is started once, whichever workers look for it."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, Principal
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.schedules import Occurrence, Schedule
from kiwi_mcp.domain.threads import Thread
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.engine.schedule_times import due_time, due_times
from kiwi_mcp.kernel.context import Services
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest
from kiwi_mcp.store.schedules import OccurrenceTaken, Schedules


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
