"""One client call: answered, waiting behind a question (sealed state), or a task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from secrets import token_bytes, token_hex
from time import monotonic

import anyio.lowlevel
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.server.request_state import AESGCMRequestStateCodec, InvalidRequestState
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec import Struct, field
from pydantic import BaseModel

from kiwi_mcp.domain.calls import unheard
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.mcp import TaskUse
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.kernel import Kernel
from kiwi_mcp.store.tasks import Task, Tasks
from kiwi_mcp.surfaces.mcp import running_call
from kiwi_mcp.surfaces.mcp.protocol import Context
from kiwi_mcp.surfaces.mcp.running_call import Result, RunningCall, Work
from kiwi_mcp.surfaces.mcp.tasks import TaskManager, TaskMethods, declares_tasks, missing_tasks, task_to_json

_LONGEST_STATE = 4_096
"""The longest state that is looked at, in characters; ours are far shorter."""
PARKED_SECONDS = 600.0
"""How long a call waits for its client to come back."""
_THREAD_SECONDS = 10.0
"""How long a call that starts a thread may take to do so before it becomes a task like any other."""
MOST_PARKED = 64
"""How many calls of one principal may wait."""
_MOST_IN_ALL = 1_024


def bind(principal: str, method: str, name: str, arguments: JsonObject) -> str:
    """Return the digest of what a state is good for: one principal's call of one name with the same arguments."""
    # As ASCII with sorted names: the same call gives the same text, whatever it holds.
    text = json.dumps([principal, method, name, arguments], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode()).hexdigest()


class StateCodec:
    """Seals tickets into states and opens them, by a key that no other process has."""

    def __init__(self) -> None:
        # The call of a ticket is in this process's memory, so the key may end with the process.
        self._codec = AESGCMRequestStateCodec([token_bytes(32)])

    def close(self, ticket: str, binding: str, *, seconds: float) -> str:
        """Return a state that gives the ticket back to the same call, valid for `seconds`."""
        return self._codec.seal(json.dumps([ticket, binding, monotonic() + seconds]).encode())

    def open(self, state: str, binding: str) -> str | None:
        """Return the ticket in a state; None where it is not ours, not this call's, or too old."""
        try:
            ticket, bound, until = json.loads(self._codec.unseal(state[:_LONGEST_STATE]))
        except InvalidRequestState:
            return None
        return str(ticket) if bound == binding and monotonic() < until else None


class WaitingCalls:
    """The calls that wait, each by a ticket that is good once."""

    def __init__(self, *, seconds: float = PARKED_SECONDS) -> None:
        self._seconds = seconds
        self._codec = StateCodec()
        self._places: dict[str, tuple[RunningCall, asyncio.TimerHandle]] = {}
        """Each call with the timer that stops it if no client returns, by its ticket."""
        self._ending: set[asyncio.Task[None]] = set()

    def park(self, call: RunningCall, binding: str) -> str | None:
        """Let a call wait, and return the state by which its client comes back; None where too many wait already."""
        own = sum(waiting.principal == call.principal for waiting, _ in self._places.values())
        if own >= MOST_PARKED or len(self._places) >= _MOST_IN_ALL:
            return None
        ticket = token_hex(16)
        self._places[ticket] = call, asyncio.get_running_loop().call_later(self._seconds, self._drop, ticket)
        return self._codec.close(ticket, binding, seconds=self._seconds)

    def take(self, state: str, binding: str) -> RunningCall | None:
        """Return the call that a state is for; None where it is not for this one, or the call waits no longer."""
        ticket = self._codec.open(state, binding)
        if ticket is None or ticket not in self._places:
            return None
        call, timer = self._places.pop(ticket)
        timer.cancel()
        return call

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop the calls of some principals."""
        for ticket, (call, timer) in list(self._places.items()):
            if is_over(call.principal):
                timer.cancel()
                self._drop(ticket)

    async def aclose(self) -> None:
        """Stop every call that waits."""
        self.end_where(lambda _: True)
        if self._ending:
            await asyncio.wait(self._ending)

    def _drop(self, ticket: str) -> None:
        ending = asyncio.create_task(self._places.pop(ticket)[0].end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)


class ClientCall(Struct, frozen=True):
    """One request, as far as it tells which call it is about."""

    method: str
    name: str
    params: JsonObject = field(default_factory=dict)
    """The arguments."""
    input_responses: Mapping[str, BaseModel] | None = None
    request_state: str | None = None

    @property
    def answers(self) -> Mapping[str, JsonObject]:
        """Answers to questions, in MCP's words."""
        given = self.input_responses or {}
        return {key: one.model_dump(by_alias=True, mode="json", exclude_none=True) for key, one in given.items()}


class Calls:
    """The calls of one server.

    `tasks` gives the store of tasks, if there is one; `task_after` the seconds after which a long call becomes a task,
    for a client that supports tasks; `principal` says who makes a request: a principal cannot answer for another, or
    see their tasks. A task that runs a thread is read from that thread, with `kernel`.
    """

    def __init__(
        self,
        tasks: Callable[[], Tasks] | None,
        *,
        task_after: Callable[[], float],
        principal: Callable[[Context], str],
        kernel: Kernel | None = None,
    ) -> None:
        self._manager = TaskManager(tasks, kernel) if tasks is not None else None
        self._kernel = kernel
        self._parked = WaitingCalls()
        self._task_after = task_after
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Let a server's clients ask about tasks, and follow them on the streams that the server already has."""
        if self._manager is not None:
            TaskMethods(self._manager, self._principal).serve(server)

    def leave(self) -> None:
        """Prepare for the end of the process: threads that calls have started continue without it."""
        if self._kernel is not None:
            self._kernel.leave()

    async def aclose(self) -> None:
        """Stop everything that is under way."""
        await self._parked.aclose()
        if self._manager is not None:
            await self._manager.aclose()

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop what waits behind questions, and what has become tasks, of principals who may do nothing more."""
        self._parked.end_where(is_over)
        if self._manager is not None:
            self._manager.end_where(is_over)

    async def answer(self, context: Context, asked: ClientCall, work: Work, *, task: TaskUse = "never") -> Result:
        """Answer a request with its result, with the questions that come first, or with the task it has become."""
        # When it becomes a task, as far as its client has tasks at all.
        use = task if asked.method == "tools/call" and (self._manager is not None or task == "required") else "never"
        if use != "never" and not declares_tasks(context):
            if use == "required":
                raise missing_tasks("This tool runs as a task only")
            use = "never"
        if asked.request_state is not None and is_modern(context):
            call = self._resumed(context, asked, asked.request_state)
        else:
            call = self._opened(context)
            if use in {"always", "required"} and (stored := await self._stored(call, asked)) is not None:
                call.start(work, has_listener=True, answers=asked.answers)
                return await self._as_task(call, stored)
            if use == "required":
                raise MCPError(types.INTERNAL_ERROR, "It runs as a task only, and none can be kept now. Nothing ran.")
        async with running_call.listening(context) as (call.hear, call.log):
            if not call.is_begun:
                if use == "never" and not call.capabilities and running_call.is_unhurried.get():
                    return await call.run(work)
                has_listener = call.hear is not silent or use != "never"
                call.start(work, has_listener=has_listener, answers=asked.answers)
            return await self._followed(context, asked, call, None if use == "never" else self._task_after())

    def _opened(self, context: Context) -> RunningCall:
        session = context.session
        # A client of the new era comes back with the answers; one of the old era is asked while it waits, if it can be.
        is_askable = is_modern(context) or session.can_send_request
        capabilities = running_call.askable(session.client_capabilities) if is_askable else {}
        ask = None if is_modern(context) else partial(running_call.ask_client, context)
        client = session.client_params
        return RunningCall(self._principal(context), capabilities, ask, client.client_info.name if client else "")

    def _binding(self, context: Context, asked: ClientCall) -> str:
        return bind(self._principal(context), asked.method, asked.name, asked.params)

    def _resumed(self, context: Context, asked: ClientCall, state: str) -> RunningCall:
        """Return the call that a client comes back to, with its answers delivered."""
        call = self._parked.take(state, self._binding(context, asked))
        if call is None:
            raise MCPError(
                types.INVALID_PARAMS,
                "The question that this `requestState` belongs to is gone: it was answered already, waited too long, "
                "was not asked of this call, or Kiwi was started anew. Nothing ran. Call again without it.",
                {"reason": "invalid_request_state"},
            )
        call.deliver(asked.answers)
        return call

    async def _followed(self, context: Context, asked: ClientCall, call: RunningCall, limit: float | None) -> Result:
        """Wait until a call has ended, asks something, or has run past the limit and becomes a task."""
        try:
            while True:
                try:
                    async with asyncio.timeout(limit):
                        await call.turn()
                except TimeoutError:
                    limit = None  # if no task can be stored, the client continues to wait
                    if (stored := await self._stored_if_slow(call, asked)) is not None:
                        return await self._as_task(call, stored)
                    continue
                if call.is_over:
                    return call.result()
                if (state := self._parked.park(call, self._binding(context, asked))) is not None:
                    call.hear, call.log = silent, unheard
                    requests = {name: running_call.as_request(question) for name, question in call.pending.items()}
                    return types.InputRequiredResult(input_requests=requests, request_state=state)
                call.refuse(
                    f"The tool asks a question, and {MOST_PARKED} calls wait for answers already.",
                    suggestion="Answer those first, or let ten minutes pass.",
                )
        except asyncio.CancelledError:
            await call.end()
            raise

    async def _stored_if_slow(self, call: RunningCall, asked: ClientCall) -> Task | None:
        """Return a task for a call that ran past the limit, unless it ended or asked in the same moment."""
        if asked.params.get("mode") == "thread":  # its task is a view of the thread, which has to exist
            with suppress(TimeoutError):
                async with asyncio.timeout(_THREAD_SECONDS):
                    await call.turn(or_thread=True)
        return None if call.is_over or call.pending else await self._stored(call, asked)

    async def _stored(self, call: RunningCall, asked: ClientCall) -> Task | None:
        if self._manager is None:
            return None
        identity = (as_text(asked.params.get("item_id")) if asked.name == "execute" else "") or asked.name
        return await self._manager.open(call, asked.method, identity)

    async def _as_task(self, call: RunningCall, task: Task) -> Result:
        """Answer with the task that a call has become, and see to its end."""
        assert self._manager is not None  # noqa: S101 - it has stored the task
        self._manager.attend(task)
        try:
            await anyio.lowlevel.checkpoint()  # a cancellation by the client takes effect here
        except asyncio.CancelledError:
            await call.end()
            raise
        return {"resultType": "task", **task_to_json(task)}


def is_modern(context: Context) -> bool:
    """Whether a client comes back with answers, instead of being asked."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS
