"""`ThreadRunner`: runs threads and their children in this process, keeps their leases, and obeys commands."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, PERSON, Caller, Principal
from kiwi_mcp.domain.errors import KiwiError, ThreadEnded, ThreadTaken
from kiwi_mcp.domain.json import as_text
from kiwi_mcp.domain.threads import NewEvent, Thread, ThreadChanges, ThreadEvent
from kiwi_mcp.engine.inline import run_to_wait
from kiwi_mcp.kernel.context import Services
from kiwi_mcp.kernel.threads.loop import Step, Wait, advance, end
from kiwi_mcp.kernel.threads.work import Observer, ThreadStores, ThreadWork
from kiwi_mcp.store.threads import ThreadFilter

_BEAT = 3.0
"""How many seconds pass between two signs of life, which also bring commands of other processes."""
_MOST_CHILDREN, _MOST = 1_000, 1_000


def unobserved(_: object) -> None:
    """Observe nothing."""


class ThreadRunner:
    """The threads that this process runs. One service of a kernel."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._stores = ThreadStores(services)
        self._tasks: dict[str, asyncio.Task[Step]] = {}
        self._beating: asyncio.Task[None] | None = None

    @property
    def stores(self) -> ThreadStores:
        """What the store has of threads."""
        return self._stores

    def start(self, thread_id: str, starter: Caller, observe: Observer = unobserved) -> asyncio.Task[Step]:
        """Run a thread in the background until it waits or has ended."""
        task = self._tasks.get(thread_id)
        if task is None or task.done():
            task = self._tasks[thread_id] = asyncio.create_task(self._run(thread_id, starter, observe))
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        return task

    async def run(self, thread_id: str, starter: Caller, observe: Observer = unobserved) -> Step:
        """Run a thread until it waits or has ended; a caller that is cancelled cancels the thread."""
        task = self.start(thread_id, starter, observe)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise

    def start_child(self, child: Thread, parent_starter: Caller) -> None:
        """Run a child thread in this process."""
        self.start(child.id, replace(parent_starter, origin=PERSON, grants=(), journal=None))

    async def wake(self, thread: Thread, message: str) -> None:
        """Let a thread that waits or was paused continue, perhaps with a message to the model."""
        threads, now = self._stores.threads, _now()
        if thread.is_ended:
            raise ThreadEnded(thread.id, thread.status)
        await self._stores.do(partial(threads.command, thread.id, ""))
        if message:
            taken = await self._stores.do(lambda: threads.take(thread.id, self._process(), now))
            await self._stores.do(partial(threads.append, taken, [NewEvent("injected", {"text": message})]))
            await self._stores.do(partial(threads.release, taken))

    async def due(self) -> list[Thread]:
        """Return the threads that no process runs and that can continue."""
        return await self._stores.do(self._due)

    def _due(self) -> list[Thread]:
        threads = self._stores.threads
        self._stores.questions.expire(_now())
        queued, waiting = ThreadFilter(status="queued", limit=_MOST), ThreadFilter(status="waiting", limit=_MOST)
        found = (*threads.list(queued), *threads.list(waiting))
        return [one for one in found if not one.lease_owner and (one.status == "queued" or self._is_answered(one))]

    def _is_answered(self, thread: Thread) -> bool:
        """Whether what a thread waits for has happened."""
        stores = self._stores
        match thread.waits_for:
            case "approval":
                waiting = waiting_approvals(stores.threads.events(thread.id))
                known = self._services.store.approvals()
                return not any(known.get(one, _now()).status == "pending" for one in waiting)
            case "child":
                children = stores.threads.list(_children_of(thread))
                return all(child.is_ended for child in children)
            case "message":
                last = stores.threads.events(thread.id, thread.seq - 1)
                return bool(last) and last[-1].kind == "injected"
            case _:
                return not stores.questions.open(_now(), thread_id=thread.id)

    async def cancel(self, thread: Thread) -> None:
        """Cancel a thread and its children; one that no process runs ends at once."""
        threads = self._stores.threads
        for child in await self._stores.do(lambda: threads.list(_children_of(thread))):
            if not child.is_ended:
                await self.cancel(child)
        await self._stores.do(partial(threads.command, thread.id, "cancel"))
        with suppress(ThreadTaken):
            await self.run(thread.id, NO_CALLER)

    def _process(self) -> str:
        return self._services.store.kernel_lock.name()

    async def _run(self, thread_id: str, starter: Caller, observe: Observer) -> Step:
        stores = self._stores
        thread = await stores.do(lambda: stores.threads.take(thread_id, self._process(), _now()))
        work = ThreadWork(self._services, stores, thread, starter, observe)
        try:
            return await self._work(work)
        except asyncio.CancelledError:
            await asyncio.shield(_end_cancelled(work))
            raise
        finally:
            await asyncio.shield(stores.do(partial(stores.threads.release, work.thread)))

    async def _work(self, work: ThreadWork) -> Step:
        try:
            await work.open()
        except KiwiError as error:
            message = f"{error.message} {error.suggestion}".strip()
            return await end(work, "failed", "error", code=error.code, message=message)
        await work.append(NewEvent("resumed", {}), changes=ThreadChanges(status="running"))
        while True:
            step = await run_to_wait(partial(advance, work))
            if step != Wait("child") or not await self._children_ended(work.thread):
                return step

    async def _children_ended(self, parent: Thread) -> bool:
        """Wait for the children that run here; return whether one has ended, so that the parent can continue."""
        children = await self._stores.do(lambda: self._stores.threads.list(_children_of(parent)))
        running = [task for child in children if (task := self._tasks.get(child.id)) is not None and not task.done()]
        if running:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            return True
        return False

    async def _beat(self) -> None:
        """Renew the leases, and cancel threads that another process asked to cancel."""
        process = self._process()
        while running := [thread_id for thread_id, task in self._tasks.items() if not task.done()]:
            commands = await self._stores.do(partial(self._stores.threads.beat, running, process, _now()))
            for thread_id in running:
                if commands.get(thread_id) == "cancel":
                    self._tasks[thread_id].cancel()
            await asyncio.wait({self._tasks[thread_id] for thread_id in running}, timeout=_BEAT)

    async def aclose(self) -> None:
        """Cancel what still runs: its lease is released, and a worker can continue it."""
        for task in (*self._tasks.values(), *([self._beating] if self._beating else [])):
            task.cancel()
            with suppress(asyncio.CancelledError, KiwiError):
                await task


async def _end_cancelled(work: ThreadWork) -> None:
    with suppress(KiwiError):
        await work.sync()
        if not work.thread.is_ended:
            await end(work, "cancelled", "cancelled", message="It was cancelled.")


def waiting_approvals(events: Sequence[ThreadEvent]) -> list[str]:
    """Return the approvals that calls of a thread wait for, since its last reply."""
    found: dict[str, None] = {}
    for event in events:
        if event.kind == "model":
            found.clear()
        elif event.kind == "asked" and (approval := as_text(event.body.get("approval_id"))):
            found[approval] = None
    return [*found]


def starter_of(thread: Thread, owner: Caller = NO_CALLER) -> Caller:
    """Return the caller that started a thread, for a process that continues it; `owner` where that was the owner."""
    if not thread.starter:
        return owner
    return Caller(name=thread.starter, identity=Principal("agent", thread.starter))


def _children_of(parent: Thread) -> ThreadFilter:
    return ThreadFilter(parent_id=parent.id, limit=_MOST_CHILDREN)


def _now() -> int:
    return time.time_ns() // 1_000_000
