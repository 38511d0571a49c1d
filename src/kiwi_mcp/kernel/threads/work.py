"""`ThreadWork`: one thread that this process works on, with its row, its state and its journal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from kiwi_mcp.catalog.catalog import Catalog
from kiwi_mcp.domain.calls import Caller, CallOrigin
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.items import Chain
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.messages import Prompt, ReplyDelta, ToolCallPart
from kiwi_mcp.domain.outcome import Outcome
from kiwi_mcp.domain.threads import NewEvent, Thread, ThreadChanges, ThreadEvent, ThreadQuestion
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model
from kiwi_mcp.kernel.context import Services
from kiwi_mcp.kernel.threads.results import result_of_run
from kiwi_mcp.kernel.threads.start import grants_of
from kiwi_mcp.kernel.threads.state import PromptStart, ThreadState
from kiwi_mcp.policy.policy_files import owner_policy
from kiwi_mcp.store.budget import Budget, Refusal, Reservation
from kiwi_mcp.store.database import Transaction
from kiwi_mcp.store.questions import Questions, ask
from kiwi_mcp.store.runs import new_run
from kiwi_mcp.store.threads import ThreadFilter, Threads, append_in

T = TypeVar("T")
Observer: TypeAlias = Callable[[ThreadEvent | ReplyDelta], None]
"""Is given every event that was stored, and pieces of replies while they stream. It must not block."""
CONTINUE, STOP, START = "continue", "stop", "start"
QUESTION_LIFETIME_MS = 7 * 86_400_000
_LOOKED_AT = 1_000
_REASONS = {
    "loop": "The thread makes the same calls again and again. May it continue?",
    "price": "The price of the model is not known, so its limit for money cannot be kept. May it continue?",
}


class ThreadStores:
    """What the store has of threads: rows and journals, budgets, questions."""

    def __init__(self, services: Services) -> None:
        registry = services.store.registry()
        database, owner = registry.database, registry.actor.name
        self.is_embedded = database.is_embedded
        self.threads = Threads(database, owner)
        self.budget = Budget(database)
        self.questions = Questions(database, owner)

    async def question_of(self, thread_id: str, call_id: str) -> ThreadQuestion | None:
        """Return the question that a call of a thread asked, with its answer if there is one."""
        found = await self.do(partial(self.questions.of_thread, thread_id))
        return next((one for one in found if one.call_id == call_id), None)

    async def was_started(self, thread: Thread) -> bool:
        """Whether the owner let exactly this program start before."""
        same = await self.do(lambda: self.threads.list(ThreadFilter(directive=thread.directive, limit=_LOOKED_AT)))
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
    max_output: int

    def __init__(
        self, services: Services, stores: ThreadStores, thread: Thread, starter: Caller, observe: Observer
    ) -> None:
        self.services = services
        self.stores = stores
        self.thread = thread
        self.starter = starter
        """The caller that started the root thread; the rights of the thread are never wider."""
        self.state = ThreadState()
        self.observe = observe
        self._seq = 0

    async def open(self) -> None:
        """Read the journal, and resolve the provider and the model as they are now."""
        await self.sync()
        self.provider = self.catalog.resolve(self.start.provider)
        self.choice = choose_model(self.provider, tier=self.start.tier, model=self.start.model)
        own = self.start.max_output
        self.max_output = min(own, self.choice.max_output) if own else self.choice.default_max_tokens
        if self.thread.is_tainted:
            self.services.tainted_callers.add(self.thread.id)

    @property
    def start(self) -> PromptStart:
        """What every request of the thread begins with."""
        assert self.state.start is not None  # noqa: S101 - the first append of a thread has it
        return self.state.start

    @property
    def targets(self) -> dict[str, str]:
        """The identity of the item that each tool name means; a meta-tool has none."""
        return self.start.targets

    @property
    def catalog(self) -> Catalog:
        """The items that the thread sees."""
        return self.services.catalogs.at(self.thread.project or None)

    def caller(self, call: ToolCallPart) -> Caller:
        """Return the caller of one call of this thread."""
        thread = self.thread
        return replace(
            self.starter,
            origin=CallOrigin(thread.id, f"{thread.id}/{self.state.model_seq}.{call.id}", thread.depth + 1),
            grants=grants_of(thread),
            journal=_CallNotes(self, call),
        )

    def seconds(self) -> float:
        """Return for how many seconds the thread has worked; the time that it waited does not count."""
        state = self.state
        since = 0 if state.is_idle else time.time_ns() // 1_000_000 - state.last_at
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
        return state.new_bytes + len(start.system.encode()) + len(msgspec.json.encode(start.tools))

    def changes_files(self, payload: JsonObject) -> bool:
        """Whether a call says of itself that it changes files of the project, so that it runs alone."""
        try:
            return self.catalog.find(as_text(payload.get("item_id"))).manifest.mutates_state
        except KiwiError:
            return False

    async def sync(self) -> None:
        """Read what was appended since, and add it to the state."""
        self.thread, events = await self.stores.do(self._read)
        for event in events:
            self._seq = event.seq
            self.state.fold(event)
            self.observe(event)

    def _read(self) -> tuple[Thread, tuple[ThreadEvent, ...]]:
        threads = self.stores.threads
        return threads.get(self.thread.id), threads.events(self.thread.id, self._seq)

    async def append(
        self,
        *events: NewEvent,
        changes: ThreadChanges | None = None,
        also: Callable[[Transaction], None] | None = None,
    ) -> None:
        """Append events under the lease, and add them to the state."""
        if self.thread.id in self.services.tainted_callers and not self.thread.is_tainted:
            changes = replace(changes or ThreadChanges(), is_tainted=True)
        await self.stores.do(partial(self.stores.threads.append, self.thread, events, changes, also=also))
        await self.sync()

    async def reserve(self, micros: int, tokens: int) -> Reservation | Refusal:
        """Reserve money and tokens for one request to the model."""
        limits = owner_policy(self.services.user).day_limits
        thread = self.thread
        return await self.stores.do(
            lambda: self.stores.budget.reserve(thread, thread.seq, micros, tokens, day_limits=limits)
        )

    async def close_reservation(self, reservation: Reservation, *, is_used: bool) -> None:
        """Close a reservation without a reply: charge all of it where the request may have been answered."""
        budget = self.stores.budget
        close = budget.charge_maximum if is_used else budget.release
        await self.stores.do(partial(close, reservation))
        await self.sync()

    async def is_confirmed(self, kind: Literal["loop", "price"]) -> bool:
        """Whether the owner said to continue; where they were not asked yet, they are, and the thread waits."""
        key = f"{kind}:{self.state.model_seq}" if kind == "loop" else kind
        known = await self.stores.question_of(self.thread.id, key)
        if known is not None:
            return known.status == "answered" and known.answer == CONTINUE
        schema: JsonObject = {"type": "string", "enum": [CONTINUE, STOP]}
        question_kind: Literal["loop", "budget"] = "loop" if kind == "loop" else "budget"
        question = new_question(self.thread.id, key, question_kind, _REASONS[kind], schema)
        body: JsonObject = {"waits_for": question.kind, "question_id": question.id, "message": question.message}
        waits = ThreadChanges(status="waiting", waits_for="budget" if kind == "price" else "question")
        await self.append(NewEvent("asked", body), changes=waits, also=partial(store_question, question))
        return False


def store_question(question: ThreadQuestion, transaction: Transaction) -> None:
    """Store a question in the transaction of its event."""
    ask(transaction, question)


def new_question(
    thread_id: str, call_id: str, kind: Literal["ask", "budget", "start", "loop"], message: str, schema: JsonObject
) -> ThreadQuestion:
    """Return a question that was not stored yet."""
    now = time.time_ns() // 1_000_000
    return ThreadQuestion(new_run(now)[0], thread_id, call_id, kind, message, schema, now, now + QUESTION_LIFETIME_MS)


class _CallNotes:
    """Notes how one call begins and ends, in the transaction of its run."""

    def __init__(self, work: ThreadWork, call: ToolCallPart) -> None:
        self._work = work
        self._call = call

    def began(self, transaction: object, run_id: str) -> None:
        """Append `began`; raises where another process has taken the thread."""
        self._append(transaction, NewEvent("began", {"call_id": self._call.id, "run_id": run_id}))

    def ended(self, transaction: object, run_id: str, outcome: Outcome, response: JsonObject) -> None:
        """Append the result of the call."""
        status, part = result_of_run(self._call, outcome, response)
        body: JsonObject = {"status": status, "run_id": run_id, "part": to_builtins(part)}
        self._append(transaction, NewEvent("result", body), ThreadChanges(tool_calls=1))

    def _append(self, transaction: object, event: NewEvent, changes: ThreadChanges | None = None) -> None:
        append_in(cast("Transaction", transaction), self._work.thread, [event], changes)
