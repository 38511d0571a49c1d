"""`ThreadWork`: one thread that this process works on, and what a step of it leads to: the next, a wait or the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial, reduce
from hashlib import sha256
from typing import TYPE_CHECKING, Literal, TypeVar, cast

import msgspec
from msgspec import Struct, to_builtins
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import NO_CALLER, Caller, CallOrigin
from kiwi_mcp.domain.errors import KiwiError, Unavailable
from kiwi_mcp.domain.grants import denials, narrow
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.messages import Prompt, ReplyDelta, ToolCallPart
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.threads import (
    FinishReason,
    NewEvent,
    Thread,
    ThreadChanges,
    ThreadEvent,
    ThreadObserver,
    ThreadQuestion,
    ThreadStatus,
    WaitReason,
    unobserved,
)
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.drivers.code.process import ProgramProcess
from kiwi_mcp.drivers.llm.model import Conversation
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model, context_window
from kiwi_mcp.kernel.context import Context, Services
from kiwi_mcp.kernel.threads.recordings import RecordedReplies, TranscriptMirror, redactor_for
from kiwi_mcp.kernel.threads.results import result_of_run, value_of_run
from kiwi_mcp.kernel.threads.start import grants_of, narrowed_by, starter_of
from kiwi_mcp.kernel.threads.state import PromptStart, ThreadState
from kiwi_mcp.kernel.threads.wake import file_lock
from kiwi_mcp.store.budget import Budget, Reservation
from kiwi_mcp.store.database import Transaction
from kiwi_mcp.store.queue import ThreadQueue
from kiwi_mcp.store.rates import Rates
from kiwi_mcp.store.runs import new_run
from kiwi_mcp.store.threads import JournalGrew, Questions, ThreadFilter, Threads, append_in, ask

if TYPE_CHECKING:  # it runs the threads of this process, and imports this module
    from kiwi_mcp.kernel.threads.runner import ThreadRunner

T = TypeVar("T")
CONTINUE, STOP, START = "continue", "stop", "start"
CHOICE: JsonObject = {"type": "string", "enum": [CONTINUE, STOP]}
_MOST_THREADS = 1_000
_TURN_SECONDS, _TURN_POLL = 600.0, 0.02
"""How long a call waits for others that change the same project, and how often it looks."""
_STOPPED_SECONDS = 1.0
"""After how many seconds between the beginning of a call and its effect the lease is looked at again."""
_DELTA_SECONDS = 0.1
"""For how long pieces of a reply are collected before they are stored for those who watch."""


class ThreadStores:
    """What the store has of threads: rows and journals, budgets, questions."""

    def __init__(self, services: Services) -> None:
        registry = services.store.registry()
        database, owner = registry.database, registry.actor.name
        self.is_embedded = database.is_embedded
        self.threads = Threads(database, owner)
        self.budget = Budget(database)
        self.questions = Questions(database, owner)
        self.rates = Rates(database, owner)
        self.queue = ThreadQueue(database, owner)

    async def question_of(self, thread_id: str, call_id: str) -> ThreadQuestion | None:
        """Return the question that a call of a thread asked, with its answer if there is one."""
        found = await self.do(partial(self.questions.of_thread, thread_id))
        return next((one for one in found if one.call_id == call_id), None)

    def path_of(self, thread: Thread) -> str:
        """Return the names of the threads from the root to this one."""
        names = [thread.directive]
        while thread.parent_id:
            thread = self.threads.get(thread.parent_id)
            names.append(thread.directive)
        return " / ".join(reversed(names))

    async def was_started(self, thread: Thread) -> bool:
        """Whether the owner let exactly this program start before."""
        same = await self.do(lambda: self.threads.list(ThreadFilter(directive=thread.directive, limit=_MOST_THREADS)))
        for one in same:
            if one.digest == thread.digest and (asked := await self.question_of(one.id, START)) is not None:
                return asked.answer == CONTINUE
        return False

    async def do(self, work: Callable[[], T]) -> T:
        """Return the result of a small read or write."""
        # An embedded database answers sooner than a switch to another thread and back takes.
        return work() if self.is_embedded else await asyncio.to_thread(work)


class ThreadWork:
    """A thread that this process has the lease of. Everything it knows of the thread comes from the journal."""

    provider: Chain
    choice: ModelChoice
    conversation: Conversation
    window: int
    """The context window of the model in tokens; 0 where it is not known."""

    def __init__(
        self,
        services: Services,
        stores: ThreadStores,
        host: ThreadRunner,
        thread: Thread,
        starter: Caller,
        observe: ThreadObserver,
    ) -> None:
        self.services = services
        self.host = host
        self.stores = stores
        self.thread = thread
        self.starter = starter_of(thread, starter)
        """The caller that started the root thread; the rights of the thread are never wider."""
        self.state = ThreadState()
        self.observe = observe
        self.streamed: list[str] = []
        """The text of a reply that is not whole yet."""
        self._is_background = host.is_background
        """Whether only other processes can show the text, so that it is stored while it streams."""
        self._stored = 0
        self._deltas = 0
        self._timer: asyncio.TimerHandle | None = None
        self._storing: asyncio.Task[None] | None = None
        self.path = ""
        """The names of the threads from the root to this one."""
        self._seq = 0
        self.noted: list[ThreadEvent] = []
        """Events of a transaction that may not be committed yet; `sync` finds out whether it was."""
        self._mirror: TranscriptMirror | None = None
        self.replies: RecordedReplies | None = None
        """What answers in place of the model, where a recorded thread is replayed."""
        self.program: ProgramProcess | None = None
        """The process that runs the program of code mode, where there is one."""
        self.resources = AsyncExitStack()
        """What is open while this process works on the thread, such as the process of a program."""

    async def open(self) -> None:
        """Read the journal, and resolve the provider and the model as they are now."""
        if self.thread.project:
            with suppress(KiwiError):  # without the values of secrets nothing is written beside the journal
                redactor = await asyncio.to_thread(redactor_for, self.catalog.space)
                self._mirror = TranscriptMirror(self.thread, redactor)
        await self.sync()
        if self.thread.is_tainted:
            self.services.tainted_callers.add(self.thread.id)
        self.path = await self.stores.do(partial(self.stores.path_of, self.thread))
        if not self.start.has_model:
            return
        self.provider = self.catalog.resolve(self.start.provider)
        self.choice = choose_model(self.provider, tier=self.start.tier, model=self.start.model)
        self.conversation = Conversation(self.choice)
        self.window = context_window(self.choice) or 0

    @property
    def start(self) -> PromptStart:
        """What every request of the thread begins with."""
        assert self.state.start is not None  # noqa: S101 - the first append of a thread has it
        return self.state.start

    @property
    def targets(self) -> dict[str, str]:
        """The identity of the item that each tool name means; a meta-tool has none."""
        return {**self.start.targets, **self.state.loaded_targets}

    @property
    def catalog(self) -> Catalog:
        """The items that the thread sees."""
        return self.services.catalogs.at(self.thread.project or None)

    def caller(self, call: ToolCallPart) -> Caller:
        """Return the caller of one call of this thread."""
        own, begun = self.own_caller(), self.state.began.get(call.id)
        key = f"{self.thread.id}/{self.state.key_of(call.id)}"
        origin = replace(own.origin, key=key, repeats=begun.run_id if begun else "")
        return replace(own, origin=origin, journal=_CallNotes(self, call))

    def own_caller(self) -> Caller:
        """Return the thread as a caller, for what it does beside the calls of its model."""
        thread, mode = self.thread, self.start.checkpoint
        return replace(
            self.starter,
            origin=CallOrigin(
                thread.id,
                "",
                thread.depth + 1,
                path=self.path,
                directive=thread.digest,
                lease=thread.lease,
                run=as_text(thread.rights.get("run")),
            ),
            answer_ms=thread.limits.answer_seconds * 1_000,
            grants=grants_of(narrowed_by(thread, self.state.skills)),
            journal=None,
            observe=unobserved,
            checkpoint="" if mode == "explicit" else mode,
        )

    def model_context(self) -> Context:
        """Return what a request to the model is judged by: the owner's rules, and what the starter is denied."""
        services = self.services
        starter = replace(self.own_caller(), grants=())
        services.check_starter(starter)
        denied = map(denials, services.rights(starter)().grants)
        context = services.context(NO_CALLER, self.catalog)
        return replace(context, rights=reduce(narrow, denied, context.rights))

    def seconds(self) -> float:
        """Return for how many seconds the thread has worked; the time that it waited does not count."""
        state = self.state
        since = 0 if state.is_idle else now_ms() - state.last_at
        return (state.active_ms + max(0, since)) / 1_000

    def prompt(self, max_output: int) -> Prompt:
        """Return the next request to the model."""
        start = self.start
        return Prompt(
            start.system,
            (*start.tools, *self.state.loaded),
            self.state.request_messages(),
            max_output,
            self.choice.temperature,
            self.thread.id,
        )

    def input_bound(self) -> int:
        """Return a number of tokens that the next request cannot exceed: a token is at least a byte."""
        state, start = self.state, self.start
        if state.last_input:
            return state.last_input + state.new_bytes
        tools = len(msgspec.json.encode((*start.tools, *state.loaded)))
        return state.new_bytes + len(start.system.encode()) + tools

    async def take_turn(self, payload: JsonObject) -> int | None:
        """Wait until a call that changes files of the project may run, and return its lock, for the caller to close.

        Those of all threads, in every process, take turns. A call that starts a thread takes none, so that the calls of
        that thread can.
        """
        try:
            manifest = self.catalog.find(as_text(payload.get("item_id"))).manifest
        except KiwiError:  # the call itself says why
            return None
        if not manifest.mutates_state or manifest.config.get("directive") or payload.get("mode") == "thread":
            return None
        name = sha256(str(self.catalog.space.project).encode()).hexdigest()[:32]
        path = self.services.user / "state" / "projects" / f"{name}.lock"
        until = time.monotonic() + _TURN_SECONDS
        while (lock := file_lock(path)) is None:
            if time.monotonic() > until:
                raise Unavailable("Another thread is changing this project.", suggestion="Try it again later.")
            await asyncio.sleep(_TURN_POLL)
        return lock

    async def sync(self) -> None:
        """Read what was appended since, and add it to the state."""
        self._take(*await self.stores.do(self._read))

    def _take(self, thread: Thread, events: Sequence[ThreadEvent]) -> None:
        if thread.seq >= self.thread.seq:
            self.thread = thread
        if thread.is_tainted:
            self.services.tainted_callers.add(thread.id)
        # Two calls may read at once: what one of them took is not taken again.
        events = [event for event in events if event.seq > self._seq]
        for event in events:
            self._seq = event.seq
            self.state.fold(event)
            if event.kind in {"model", "model_failed"}:
                self.streamed, self._stored, self._deltas = [], 0, 0
            self.observe(event)
        if self._mirror is not None and events:
            self._mirror.add(events)

    def stream(self, delta: ReplyDelta) -> None:
        """Take a piece of a reply."""
        self.observe(delta)
        if delta.kind == "text":
            self.streamed.append(delta.text)
            if self._is_background and self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(_DELTA_SECONDS, self._store_deltas)

    def _store_deltas(self) -> None:
        text, number = "".join(self.streamed[self._stored :]), self._deltas
        self._timer, self._stored, self._deltas = None, len(self.streamed), number + 1
        add = partial(self.stores.threads.add_deltas, self.thread, number, [text])
        self._storing = asyncio.create_task(self.stores.do(add))

    async def finish_stream(self) -> None:
        """Store no further piece: the whole reply is stored next, and removes them."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._storing is not None:
            await asyncio.wait({self._storing})
            self._storing = None

    def _read(self) -> tuple[Thread, tuple[ThreadEvent, ...]]:
        threads, thread = self.stores.threads, self.thread
        events, self.noted = tuple(self.noted), []
        now = threads.current(thread)
        numbers = range(self._seq + 1, now.seq + 1)
        if [one.seq for one in events] == [*numbers] and (not events or events[-1].sha256 == now.head):
            return now, events  # this process wrote them all
        # The lease stays the one that this process took: with another process's it could write in its place.
        return replace(threads.get(thread.id), lease=thread.lease), threads.events(thread.id, self._seq)

    async def append(
        self,
        *events: NewEvent,
        changes: ThreadChanges | None = None,
        also: Callable[[Transaction], None] | None = None,
        is_next: bool = False,
    ) -> None:
        """Append events under the lease, and add them to the state.

        Those that must come next raise `JournalGrew` where something was appended that this state does not have.
        """
        changes, after = self.with_taint(changes), self._seq if is_next else None
        add = partial(self.stores.threads.append_events, self.thread, events, changes, also=also, after=after)
        made = await self.stores.do(add)
        if made.events[0].seq == self._seq + 1:
            self._take(made.thread, made.events)
        else:  # calls that run at the same time appended before it
            await self.sync()

    def with_taint(self, changes: ThreadChanges | None) -> ThreadChanges | None:
        """Return changes that also store that the thread has read text from outside, if that is new."""
        if self.thread.is_tainted or self.thread.id not in self.services.tainted_callers:
            return changes
        return replace(changes or ThreadChanges(), is_tainted=True)

    async def close_reservation(self, reservation: Reservation, *, is_used: bool) -> None:
        """Close a reservation without a reply: charge all of it where the request may have been answered."""
        budget = self.stores.budget
        close = budget.charge_maximum if is_used else budget.release
        await self.stores.do(partial(close, reservation))
        await self.sync()

    async def confirm(
        self, key: str, kind: Literal["ask", "budget", "loop"], message: str
    ) -> Literal["continue", "stop", "asked"]:
        """Return what the owner answered; until then the question is in the store, and the thread waits."""
        known = await self.stores.question_of(self.thread.id, key)
        if known is not None and known.status != "open":
            return "continue" if known.status == "answered" and known.answer == CONTINUE else "stop"
        question = known or new_question(self.thread, key, kind, message, CHOICE)
        waits = ThreadChanges(status="waiting", waits_for="budget" if kind == "budget" else "question")
        await self.ask(question, changes=waits)
        return "asked"

    async def ask(self, question: ThreadQuestion, changes: ThreadChanges | None = None, **more: Json) -> None:
        """Store a question in the transaction of its event."""
        also = partial(store_question, question)
        await self.append(asked_event(question, **more), changes=changes, also=also)


def asked_event(question: ThreadQuestion, **more: Json) -> NewEvent:
    """Return the event that a thread asked a question."""
    body = {"waits_for": question.kind, "question_id": question.id, "message": question.message}
    return NewEvent("asked", {**body, **more})


def store_question(question: ThreadQuestion, transaction: Transaction) -> None:
    """Store a question in the transaction of its event."""
    ask(transaction, question)


def new_question(
    thread: Thread, call_id: str, kind: Literal["ask", "budget", "start", "loop"], message: str, schema: JsonObject
) -> ThreadQuestion:
    """Return a question that was not stored yet."""
    now = now_ms()
    until = now + thread.limits.answer_seconds * 1_000
    return ThreadQuestion(new_run(now)[0], thread.id, call_id, kind, message, schema, now, until)


class _CallNotes:
    """Notes how one call begins and ends, in the transaction of its run."""

    def __init__(self, work: ThreadWork, call: ToolCallPart) -> None:
        self._work = work
        self._call = call
        self._began_at = 0.0

    def began(self, transaction: object, run_id: str, effect: str) -> None:
        """Append `began`; raises where another process has taken the thread."""
        body: JsonObject = {"call_id": self._call.id, "run_id": run_id, "effect": effect}
        self._append(transaction, NewEvent("began", body))
        self._began_at = time.monotonic()

    def confirm(self) -> None:
        """Raise if this process was stopped since the call began, and another one has taken the thread."""
        work = self._work
        if time.monotonic() - self._began_at > _STOPPED_SECONDS:
            work.stores.threads.confirm(work.thread)

    def ended(self, transaction: object, run_id: str, outcome: Outcome, response: JsonObject) -> None:
        """Append the result of the call."""
        found = value_of_run(self._call, outcome) if self._work.start.is_program else None
        status, part = found or result_of_run(self._call, outcome, response)
        body: JsonObject = {"status": status, "run_id": run_id, "part": to_builtins(part)}
        if self._work.state.progress is not None and outcome.is_success:
            body = {**body, "value": outcome.result}  # whole, and of its own type
        self._append(transaction, NewEvent("result", body), ThreadChanges(tool_calls=1))

    def _append(self, transaction: object, event: NewEvent, changes: ThreadChanges | None = None) -> None:
        work = self._work
        made = append_in(cast("Transaction", transaction), work.thread, [event], work.with_taint(changes))
        work.noted += made.events


class Step(Struct, frozen=True):
    """What a step of a thread leads to: the next one, a wait until something happens, or the end with a status."""

    is_next: bool = False
    waits_for: WaitReason | None = None
    status: ThreadStatus | None = None


NEXT = Step(is_next=True)
_NO_CHANGES = ThreadChanges()


async def end(
    work: ThreadWork,
    status: ThreadStatus,
    reason: FinishReason,
    *,
    result: Json = None,
    code: str = "",
    message: str = "",
    is_next: bool = False,
) -> Step:
    """Append the end of a thread. One that stops early keeps the text of its last reply as a partial result."""
    given = result if result is not None else (work.state.text or None)
    body: JsonObject = {"status": status, "finish_reason": reason, "code": code, "message": message, "result": given}
    changes = ThreadChanges(status=status, result=given, finish_reason=reason, code=code, message=message)
    await work.append(NewEvent("ended", body), changes=changes, is_next=is_next)
    return Step(status=status)


async def complete(work: ThreadWork, result: Json) -> Step:
    """End a thread with its result, unless a message came at the last moment: then there is a next step."""
    try:
        return await end(work, "completed", "stop", result=result, is_next=True)
    except JournalGrew:
        await work.sync()
        return NEXT


async def pause(work: ThreadWork) -> Step:
    """Pause a thread until the owner resumes it."""
    await work.append(NewEvent("limit", {"paused": True}), changes=ThreadChanges(status="paused"))
    return Step(waits_for="")


async def wait_for(
    work: ThreadWork, reason: WaitReason, *events: NewEvent, made: ThreadChanges = _NO_CHANGES, is_next: bool = False
) -> Step:
    """Let a thread wait for something that was asked or started before, or for a message."""
    wake_at = work.state.wake_at if reason == "child" else 0
    changes = replace(made, status="waiting", waits_for=reason, wake_at=wake_at)
    await work.append(*events, NewEvent("asked", {"waits_for": reason}), changes=changes, is_next=is_next)
    return Step(waits_for=reason)


async def wait_for_message(work: ThreadWork) -> Step:
    """Let a conversation wait for its next message, unless one has come."""
    try:
        return await wait_for(work, "message", is_next=True)
    except JournalGrew:
        await work.sync()
        return NEXT


async def unless_continued(
    work: ThreadWork, key: str, kind: Literal["ask", "budget", "loop"], message: str, *, limit: str
) -> Step | None:
    """Ask the owner whether to continue; return None if they said so, else the wait or the end of the thread."""
    match await work.confirm(key, kind, message):
        case "continue":
            return None
        case "asked":
            return Step(waits_for="budget" if kind == "budget" else "question")
        case "stop":
            return await stop_at(work, limit, "The owner did not let it continue.")


async def stop_at(work: ThreadWork, limit: str, message: str = "") -> Step:
    """End a thread at a limit with what it has so far."""
    await work.append(NewEvent("limit", {"limit": limit}))
    text = message or f"The limit `{limit}` is reached."
    return await end(work, "exhausted", "limit", code=f"{limit}_exceeded", message=text)
