"""`ThreadRunner`: runs threads and their children in this process, keeps their leases, and obeys commands."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from msgspec import to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, PERSON, Caller
from kiwi_mcp.domain.errors import (
    ApprovalNotFound,
    KiwiError,
    LeaseLost,
    PolicyDenied,
    RecoveryLimit,
    ThreadEnded,
    ThreadTaken,
)
from kiwi_mcp.domain.json import Json, as_list, as_object, as_text
from kiwi_mcp.domain.messages import ToolCallPart
from kiwi_mcp.domain.threads import (
    NewEvent,
    Thread,
    ThreadChanges,
    ThreadEvent,
    ThreadObserver,
    ThreadQuestion,
    unobserved,
)
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.engine.inline import Engine, InlineEngine
from kiwi_mcp.engine.queue import QueueLimits, choose
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.threads import wake
from kiwi_mcp.kernel.threads.loop import advance, stop_turn
from kiwi_mcp.kernel.threads.recordings import RecordedReplies
from kiwi_mcp.kernel.threads.start import (
    StartRequest,
    code_thread,
    narrowed_by,
    new_thread,
    start_message,
    unsigned_items,
)
from kiwi_mcp.kernel.threads.state import PromptStart, rebuild
from kiwi_mcp.kernel.threads.work import (
    CHOICE,
    START,
    Step,
    ThreadStores,
    ThreadWork,
    asked_event,
    end,
    new_question,
    pause,
    store_question,
)
from kiwi_mcp.store.database import Transaction
from kiwi_mcp.store.queue import LiveThread, OpenQuestions
from kiwi_mcp.store.threads import STALE_MS, ThreadFilter

_log = logging.getLogger("kiwi")
_BEAT = 3.0
"""How many seconds pass between two signs of life, which also bring commands of other processes."""
_MOST_CHILDREN = 1_000
_MOST_RECOVERIES = 10
"""How often a thread is taken over from processes that died before it fails: it may be what kills them."""
_ATTEMPTS = 5


class ThreadRunner:
    """The threads that this process runs. One service of a kernel."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.stores = ThreadStores(services)
        self._tasks: dict[str, asyncio.Task[Step]] = {}
        self._beating: asyncio.Task[None] | None = None
        self._is_worker_needed = False
        """Whether a thread was stopped because this process ends."""
        self._spawning = asyncio.Lock()
        self._replies: dict[str, RecordedReplies] = {}
        self._unanswered: dict[str, tuple[int, object]] = {}
        """The last event of each waiting thread that could not continue, and what it waited for then."""
        self.is_background = False
        """Whether other processes show what the threads of this one write."""
        self.engine: Engine = InlineEngine()

    async def create(
        self,
        wanted: StartRequest,
        context: Context,
        *,
        is_tainted: bool = False,
        is_own: bool = False,
        claim: Callable[[Transaction, str], None] | None = None,
    ) -> tuple[Thread, ThreadQuestion | None]:
        """Store a new root thread, and the question before the first start of a program that is not signed.

        `claim` writes in the same transaction; it is given the id of the thread. One that `is_own` is run by this
        process next, so no worker takes it.
        """
        thread, first = _new_thread(wanted, context)
        thread = replace(thread, is_tainted=is_tainted)
        if is_own:
            thread = replace(thread, lease_owner=self._services.store.kernel_lock.name(), beat_at=now_ms())
        events = [
            NewEvent("created", {"item": thread.item, "inputs": thread.inputs, "starter": thread.starter}),
            NewEvent("prompt", to_builtins(first)),
        ]
        question = None
        items = unsigned_items(context.catalog.resolve(thread.item), self._services.provenance)
        if items and not await self.stores.was_started(thread):
            question = new_question(thread, START, "start", start_message(thread, first, items), CHOICE)
            thread = replace(thread, status="waiting", waits_for="start", lease_owner="")
            events.append(asked_event(question))
        elif wanted.is_conversation:
            events.append(NewEvent("asked", {"waits_for": "message"}))

        def also(transaction: Transaction) -> None:
            if claim is not None:
                claim(transaction, thread.id)
            if question is not None:
                store_question(question, transaction)

        return await self.stores.do(partial(self.stores.threads.create, thread, events, also)), question

    def start(
        self, thread_id: str, starter: Caller, observe: ThreadObserver = unobserved, taken: Thread | None = None
    ) -> asyncio.Task[Step]:
        """Run a thread in the background until it waits or has ended; `taken` has the lease of this process."""
        task = self._tasks.get(thread_id)
        if task is None or task.done():
            task = self._tasks[thread_id] = asyncio.create_task(self._run(thread_id, starter, observe, taken))
            task.add_done_callback(partial(self._forget, thread_id))
        if self._beating is None or self._beating.done():
            self._beating = asyncio.create_task(self._beat())
        return task

    async def run(
        self, thread_id: str, starter: Caller, observe: ThreadObserver = unobserved, taken: Thread | None = None
    ) -> Step:
        """Run a thread until it waits or has ended; a caller that is cancelled cancels the thread."""
        task = self.start(thread_id, starter, observe, taken)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if task.cancelled() and own is not None and not own.cancelling():
                return Step(status="cancelled")  # a command cancelled the thread, not this caller
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise

    def _forget(self, thread_id: str, task: asyncio.Task[Step]) -> None:
        if self._tasks.get(thread_id) is task:
            del self._tasks[thread_id]
        if not task.cancelled():
            task.exception()  # marks it as read: the caller gets it from the task, others see the status in the row

    def start_child(self, child: Thread, parent_starter: Caller) -> asyncio.Task[Step]:
        """Run a child thread in this process."""
        return self.start(child.id, replace(parent_starter, origin=PERSON, grants=(), journal=None, checkpoint=""))

    async def run_hook(self, parent: Thread, child: Thread, start: PromptStart, starter: Caller, key: str) -> Thread:
        """Store the child of a hook, run it until it ends or waits, and return it; one that waits is cancelled.

        Where a process died in the hook, the child that it made continues.
        """
        threads = self.stores.threads
        known = await self.stores.do(lambda: self._spawned(threads.events(parent.id), key))
        events = first_events(child, start, key)
        made = known or (await self.stores.do(lambda: threads.spawn(parent, child, *events, is_counted=False)))[1]
        if made.is_ended:
            return made
        task = self.start_child(made, starter)
        try:
            await asyncio.wait({task})
        finally:
            ended = await self.stores.do(lambda: threads.get(made.id))
            if not ended.is_ended and not self._services.is_ending:
                await self.cancel(ended)
        return ended

    async def replay(self, thread_id: str, starter: Caller, replies: RecordedReplies) -> Step:
        """Run a thread against recorded replies, with its children; it never reaches a model."""
        self._replies[thread_id] = replies
        return await self.run(thread_id, starter)

    async def spawn(self, wanted: StartRequest, caller: Caller) -> Thread:
        """Start a child of the thread that calls, in this process; the same call made again returns the same child."""
        async with self._spawning:  # each takes its limits from what the one before has left
            return await self._spawn(wanted, caller)

    async def _spawn(self, wanted: StartRequest, caller: Caller) -> Thread:
        threads, key = self.stores.threads, caller.origin.key
        found = await self.stores.do(lambda: threads.get(caller.origin.thread))
        parent = replace(found, lease=caller.origin.lease)  # not that of a process that took it since
        events = await self.stores.do(lambda: threads.events(parent.id))
        if (known := await self.stores.do(partial(self._spawned, events, key))) is not None:
            return known
        catalog = self._services.catalogs.at(parent.project or None)
        state = rebuild(events)
        above = narrowed_by(parent, state.skills)
        # Its `before_step` hooks are also those of the child, so that no step escapes them by being a child's.
        hooks = [one for one in state.start.hooks if "before_step" in one.events] if state.start else []
        inherited = tuple(replace(one, events=("before_step",)) for one in hooks)
        own = replace(wanted, parent=above, hooks=inherited)
        child, start = _new_thread(own, self._services.context(caller, catalog))
        items = unsigned_items(catalog.resolve(child.item), self._services.provenance)
        if items and not await self.stores.was_started(child):
            raise PolicyDenied(
                f"{', '.join(items)} was not written or signed by the owner, so no thread may start it.",
                suggestion="The owner signs it, or starts it once and lets it continue.",
            )
        if (recorded := self._replies.get(parent.id)) is not None and start.has_model:
            self._replies[child.id] = recorded.child(child.item)
            child = replace(child, status="paused")  # so that no other process takes it
        first, spawned = first_events(child, start, key)
        _, made = await self.stores.do(lambda: threads.spawn(parent, child, first, spawned, is_counted=start.has_model))
        if made.is_detached and recorded is None:
            wake.start_worker(self._services.user)  # this process may end before it does
        else:
            self.start_child(made, caller)
        return made

    def _spawned(self, events: Sequence[ThreadEvent], key: str) -> Thread | None:
        """Return the child that a call or a hook has started before; a call that is retried starts a new one."""
        made, call_id = "", key.rpartition("/")[2]
        for event in events:
            if event.kind == "spawned" and event.body.get("key") == key:
                made = as_text(event.body.get("thread_id"))
            elif event.kind == "result" and as_object(event.body.get("part")).get("id") == call_id:
                made = ""
        return self.stores.threads.get(made) if made else None

    async def wake(
        self,
        thread: Thread,
        message: str,
        switched: NewEvent | None = None,
        *,
        skills: Sequence[NewEvent] = (),
        is_tainted: bool = False,
    ) -> None:
        """Let a thread that waits or was paused continue, perhaps with a message, another model or loaded skills."""
        threads = self.stores.threads
        if thread.is_ended:
            raise ThreadEnded(thread.id, thread.status)
        await self.stores.do(partial(threads.command, thread.id, ""))
        events = [*([switched] if switched else []), *skills]
        changes = ThreadChanges(model=as_text(switched.body.get("name"))) if switched else None
        if message:
            events.append(NewEvent("injected", {"text": message}))
            changes = replace(changes or ThreadChanges(), is_tainted=True) if is_tainted else changes
        if thread.status == "paused":
            events.append(NewEvent("resumed", {}))
            changes = replace(changes or ThreadChanges(), status="queued")
        if events:
            taken = await self._take(thread.id)
            await self.stores.do(partial(threads.append, taken, events, changes))
            await self.stores.do(partial(threads.release, taken))

    async def inject(self, thread: Thread, message: str, *, is_tainted: bool) -> None:
        """Append a message to the journal of a thread, whichever process runs it."""
        if thread.is_ended:
            raise ThreadEnded(thread.id, thread.status)
        changes = ThreadChanges(is_tainted=True) if is_tainted else None
        await self._append(thread, NewEvent("injected", {"text": message}), changes)

    async def _append(self, thread: Thread, event: NewEvent, changes: ThreadChanges | None = None) -> None:
        """Append an event to the journal of a thread that another process may run."""
        threads = self.stores.threads
        for attempt in range(_ATTEMPTS):
            try:
                await self.stores.do(lambda: threads.append(threads.get(thread.id), [event], changes))
            except LeaseLost:  # another process took the thread since it was read
                if attempt + 1 == _ATTEMPTS:
                    raise
            else:
                return

    async def pause(self, thread: Thread, by: str) -> None:
        """Pause a thread: at once where no process runs it, else before its next step; `by` may resume it."""
        await self._append(thread, NewEvent("limit", {"pause": True, "by": by}))
        await self.stores.do(partial(self.stores.threads.command, thread.id, "pause"))
        with suppress(ThreadTaken):
            taken = await self._take(thread.id)
            await pause(ThreadWork(self._services, self.stores, self, taken, NO_CALLER, unobserved))
            await self.stores.do(partial(self.stores.threads.release, taken))

    async def due(self) -> tuple[list[LiveThread], list[LiveThread]]:
        """Return the threads that no process runs and that can continue, and those that a process runs."""
        return await self.stores.do(self._due)

    def _due(self) -> tuple[list[LiveThread], list[LiveThread]]:
        stores, now = self.stores, now_ms()
        stores.questions.expire(now)
        found, is_gone = stores.queue.live(), self._services.store.kernel_lock.is_gone
        leased = [one for one in found if one.beat_at >= now - STALE_MS and one.lease_owner]
        leased = [one for one in leased if not is_gone(one.lease_owner)]
        taken = {one.id for one in leased}
        free = [one for one in found if one.id not in taken]
        if not any(one.status == "waiting" for one in free):
            return free, leased
        asked, children = stores.queue.questions(now), dict[str, list[str]]()
        for one in found:
            children.setdefault(one.parent_id or "", []).append(one.id)
        due = [one for one in free if one.status != "waiting" or self._can_continue(one, asked, children, now)]
        return due, leased

    def _can_continue(
        self, one: LiveThread, asked: OpenQuestions, children: Mapping[str, Sequence[str]], now: int
    ) -> bool:
        """Whether a waiting thread can continue. Its journal is read only if what it waits for has changed since."""
        if one.command == "cancel" or 0 < one.wake_at <= now:
            return True
        match one.waits_for:
            case "approval":
                known: object = asked.approvals
            case "child":
                known = children.get(one.id, [])
            case "message":
                known = None
            case _:
                return one.id not in asked.threads
        last = self._unanswered.get(one.id)
        if last is not None and last[0] == one.seq and (last[1] is known or last[1] == known):
            return False
        try:
            is_answered = self.is_answered(self.stores.threads.get(one.id))
        except KiwiError as error:
            _log.warning("the thread %s cannot be read: %s", one.id, error.message)
            is_answered = False
        self._unanswered[one.id] = (one.seq, known)
        if is_answered:
            del self._unanswered[one.id]
        return is_answered

    async def claim(self, due: Sequence[LiveThread], limits: QueueLimits, most: int) -> list[Thread]:
        """Take the leases of threads that can continue, within the limits of their queues; at most `most`."""
        lock = self._services.store.kernel_lock
        chooser = partial(choose, due, limits, most)
        return await self.stores.do(lambda: self.stores.queue.claim(chooser, lock.name(), now_ms(), lock.is_gone))

    def is_running(self, thread_id: str) -> bool:
        """Whether this process runs a thread."""
        return thread_id in self._tasks

    def lease_seconds(self, thread: Thread) -> float:
        """Return for how many seconds another process still has a thread; 0 if it can be taken now."""
        if not thread.lease_owner or self._services.store.kernel_lock.is_gone(thread.lease_owner):
            return 0.0
        return max(0.0, (thread.beat_at + STALE_MS - now_ms()) / 1_000)

    def is_answered(self, thread: Thread) -> bool:
        """Whether what a thread waits for has happened."""
        stores = self.stores
        match thread.waits_for:
            case "approval":
                waiting = waiting_approvals(stores.threads.events(thread.id))
                return not any(map(self._is_pending, waiting))
            case "child":
                state = rebuild(stores.threads.events(thread.id))
                children = stores.threads.list(_children_of(thread))
                named = waited_children(state.pending.values())
                return 0 < state.wake_at <= now_ms() or all(one.is_ended for one in awaited(children, named))
            case "message":
                last = stores.threads.events(thread.id, thread.seq - 1)
                return bool(last) and last[-1].kind == "injected"
            case _:
                return not stores.questions.open(now_ms(), thread_id=thread.id)

    def _is_pending(self, approval: str) -> bool:
        with suppress(ApprovalNotFound):  # one that is long over was pruned
            return self._services.store.approvals().get(approval, now_ms()).status == "pending"
        return False

    async def cancel(self, thread: Thread) -> None:
        """Cancel a thread and its children; one that no process runs ends at once."""
        with suppress(ThreadEnded):
            await self.stores.do(partial(self.stores.threads.command, thread.id, "cancel"))
        await self._cancel_children(thread)
        task = self._tasks.get(thread.id)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        with suppress(ThreadTaken, ThreadEnded):  # no process runs it, so it ends here
            taken = await self._take(thread.id)
            await _end_cancelled(ThreadWork(self._services, self.stores, self, taken, NO_CALLER, unobserved))

    async def _cancel_children(self, thread: Thread) -> None:
        """Cancel the children of a thread that has ended or is to end; those that are detached continue."""
        for child in await self.stores.do(lambda: self.stores.threads.list(_children_of(thread))):
            if not child.is_ended and not child.is_detached:
                await self.cancel(child)

    async def _take(self, thread_id: str, *, is_own: bool = False) -> Thread:
        """Take the lease of a thread; that of a process which was killed counts as free, and so may our own."""
        threads, lock = self.stores.threads, self._services.store.kernel_lock

        def take() -> Thread:
            owner = threads.get(thread_id).lease_owner
            is_free = lock.is_gone(owner) or (is_own and owner == lock.name())
            return threads.take(thread_id, lock.name(), now_ms(), owner if is_free else "")

        return await self.stores.do(take)

    async def _run(self, thread_id: str, starter: Caller, observe: ThreadObserver, taken: Thread | None) -> Step:
        stores = self.stores
        thread = taken or await self._take(thread_id, is_own=True)
        work = ThreadWork(self._services, stores, self, thread, starter, observe)
        work.replies = self._replies.get(thread_id)
        try:
            return await self._work(work)
        except asyncio.CancelledError:
            if self._services.is_ending:
                self._is_worker_needed = True
                raise
            # The caller of a thread that was cancelled was not cancelled itself: it gets the end of the thread.
            return await asyncio.shield(_end_cancelled(work))
        except KiwiError:
            raise
        except Exception:  # noqa: BLE001 - a fault of ours ends the thread, or a worker would meet it again and again
            incident = secrets.token_hex(6)
            _log.exception("incident %s in thread %s", incident, thread_id)
            return await end(work, "failed", "error", code="internal", message=f"Internal error, incident {incident}.")
        finally:
            closing = asyncio.ensure_future(work.resources.aclose())
            await asyncio.wait({closing})
            await asyncio.shield(stores.do(partial(stores.threads.release, work.thread)))
            if work.thread.is_ended:
                await asyncio.shield(self._cancel_children(work.thread))
            elif work.thread.wake_at and not self.is_background:
                wake.start_worker(self._services.user)  # it continues at that time, and this process may not be there

    async def _work(self, work: ThreadWork) -> Step:
        try:
            await work.open()
            if work.thread.recoveries > _MOST_RECOVERIES:
                raise RecoveryLimit(work.thread.id, _MOST_RECOVERIES)
        except KiwiError as error:
            message = f"{error.message} {error.suggestion}".strip()
            return await end(work, "failed", "error", code=error.code, message=message)
        await work.append(NewEvent("resumed", {}), changes=ThreadChanges(status="running"))
        ended = 0
        while True:
            step = await self.engine.run_to_wait(partial(advance, work), work.thread.id, work.thread.lease)
            if step.waits_for != "child":
                return step
            before, ended = ended, await self._ended_children(work, ended)
            if ended == before and not 0 < work.state.wake_at <= now_ms():
                return step

    async def _ended_children(self, work: ThreadWork, known: int) -> int:
        """Return how many children have ended; where none did since, wait for those that run here."""
        children = await self.stores.do(lambda: self.stores.threads.list(_children_of(work.thread)))
        if (ended := sum(child.is_ended for child in children)) > known:
            return ended
        left = max(0.0, (work.state.wake_at - now_ms()) / 1_000) if work.state.wake_at else None
        running = [task for child in children if (task := self._tasks.get(child.id)) is not None and not task.done()]
        if running:
            done, _ = await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            is_early = now_ms() < work.state.wake_at
            return await self._ended_children(work, known) if done or is_early else known
        return known

    async def _beat(self) -> None:
        """Renew the leases, and cancel threads that another process asked to cancel."""
        process = self._services.store.kernel_lock.name()
        while running := {thread_id: task for thread_id, task in self._tasks.items() if not task.done()}:
            commands: Mapping[str, str] = {}
            with suppress(KiwiError):  # a store that is busy now is asked again
                commands = await self.stores.do(partial(self.stores.threads.beat, [*running], process, now_ms()))
            for thread_id, task in running.items():  # some of them may have ended meanwhile
                if commands.get(thread_id) == "cancel":
                    task.cancel()
            await asyncio.wait({*running.values()}, timeout=_BEAT)

    async def aclose(self) -> None:
        """Stop what still runs: its lease is released, and a worker continues it."""
        self._services.is_ending = True
        for task in (*self._tasks.values(), *([self._beating] if self._beating else [])):
            task.cancel()
            with suppress(asyncio.CancelledError, KiwiError):
                await task
        await self.engine.aclose()
        if self._is_worker_needed:
            wake.start_worker(self._services.user)


def _new_thread(wanted: StartRequest, context: Context) -> tuple[Thread, PromptStart]:
    if context.caller.origin.tools:  # neither depth nor budget would be counted
        raise PolicyDenied("A tool cannot start a thread or a program.", suggestion="Let a thread call the tool.")
    return code_thread(wanted, wanted.program, context) if wanted.program else new_thread(wanted, context)


async def _end_cancelled(work: ThreadWork) -> Step:
    """End a thread that was cancelled, or the turn of a conversation."""
    with suppress(KiwiError):
        await work.sync()
        if not work.thread.is_ended:
            if work.thread.kind == "conversation" and work.thread.command != "cancel":
                return await stop_turn(work)
            return await end(work, "cancelled", "cancelled", message="It was cancelled.")
    return Step(status=work.thread.status)


def waiting_approvals(events: Sequence[ThreadEvent]) -> list[str]:
    """Return the approvals that calls of a thread without a result wait for, since its last reply."""
    found: dict[str, str] = {}
    for event in events:
        if event.kind == "model":
            found.clear()
        elif event.kind == "result":
            found.pop(as_text(as_object(event.body.get("part")).get("id")), None)
        elif event.kind == "asked" and (approval := as_text(event.body.get("approval_id"))):
            found[as_text(event.body.get("call_id"))] = approval
    return [*found.values()]


def waited_children(calls: Iterable[ToolCallPart]) -> set[str]:
    """Return the children that calls of `wait` name; none where one of them waits for all."""
    waits: list[Json] = []
    for call in calls:
        with suppress(ValueError, RecursionError):
            waits += [json.loads(call.arguments or "{}")] if call.name == "wait" else []
    named = [as_list(as_object(one).get("threads")) for one in waits]
    return {as_text(one) for names in named for one in names} if all(named) else set()


def awaited(children: Sequence[Thread], named: Collection[str]) -> list[Thread]:
    """Return the children that a call of `wait` waits for: those it names, else all that are not detached."""
    return [one for one in children if (one.id in named if named else not one.is_detached)]


def first_events(child: Thread, start: PromptStart, key: str = "") -> tuple[list[NewEvent], list[NewEvent]]:
    """Return the first events of a child, and the event of its parent; `key` is that of the call that started it."""
    created = NewEvent("created", {"item": child.item, "inputs": child.inputs})
    spawned = NewEvent("spawned", {"thread_id": child.id, "item": child.item, "key": key})
    return [created, NewEvent("prompt", to_builtins(start))], [spawned]


def _children_of(parent: Thread) -> ThreadFilter:
    return ThreadFilter(parent_id=parent.id, limit=_MOST_CHILDREN)
