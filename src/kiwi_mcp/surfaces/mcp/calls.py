"""Calls of one server on their way: answered at once, waiting behind a question, or gone on as tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import anyio.lowlevel
import mcp_types as types
from mcp.server.lowlevel import Server
from mcp.shared.exceptions import MCPError
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel

from kiwi_mcp.domain.caller import unheard
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import JsonObject, as_text
from kiwi_mcp.domain.offers import TaskUse
from kiwi_mcp.domain.outcome import silent
from kiwi_mcp.store.tasks import Task, Tasks
from kiwi_mcp.surfaces.mcp.errands import Errand, Result, Work, is_unhurried
from kiwi_mcp.surfaces.mcp.hearing import hearing
from kiwi_mcp.surfaces.mcp.parked import MOST_PARKED, Parked
from kiwi_mcp.surfaces.mcp.port import Context
from kiwi_mcp.surfaces.mcp.questions import as_request, ask_client, askable
from kiwi_mcp.surfaces.mcp.sealed import bind
from kiwi_mcp.surfaces.mcp.task_methods import TaskMethods, declares_tasks, missing_tasks
from kiwi_mcp.surfaces.mcp.task_news import TaskNews
from kiwi_mcp.surfaces.mcp.tasks import TaskDesk, told

Reply: TypeAlias = Result
"""What a request is answered with: its result, the questions that come first, or the task that it has become."""


@dataclass(frozen=True, slots=True)
class Asked:
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

    @property
    def identity(self) -> str:
        """What is called, in a word."""
        return (as_text(self.params.get("item_id")) if self.name == "execute" else "") or self.name


class Calls:
    """The calls of one server.

    `tasks` gives the store of tasks, if there is one; `task_after` the seconds after which a long call becomes one, for
    a client that has tasks; `principal` says who makes a request: nobody can answer for another, or see their tasks.
    """

    def __init__(
        self,
        tasks: Callable[[], Tasks] | None,
        *,
        task_after: Callable[[], float],
        principal: Callable[[Context], str],
    ) -> None:
        self._desk = TaskDesk(tasks) if tasks is not None else None
        self._parked = Parked()
        self._task_after = task_after
        self._principal = principal

    def serve(self, server: Server[dict[str, object]]) -> None:
        """Let a server's clients ask about tasks, and hear of them on the streams that it has by now."""
        if self._desk is not None:
            TaskMethods(self._desk, self._principal).serve(server)
            TaskNews(self._desk, self._principal).serve(server)

    async def aclose(self) -> None:
        """Stop everything that is under way."""
        await self._parked.aclose()
        if self._desk is not None:
            await self._desk.aclose()

    def end_where(self, is_over: Callable[[str], bool]) -> None:
        """Stop what waits behind questions, and what has become tasks, of principals who may do nothing more."""
        self._parked.end_where(is_over)
        if self._desk is not None:
            self._desk.end_where(is_over)

    async def answer(self, context: Context, asked: Asked, work: Work, *, task: TaskUse = "never") -> Reply:
        """Answer a request with what its work gives, with what the work asks first, or with the task it has become."""
        use = self._use(context, asked, task)
        if asked.request_state is not None and is_modern(context):
            errand = self._resumed(context, asked, asked.request_state)
        else:
            errand = self._errand(context)
            if use in {"always", "required"} and (kept := await self._kept(errand, asked)) is not None:
                errand.start(work, has_listener=True, answers=asked.answers)
                return await self._gone_on(errand, kept)
            if use == "required":
                raise MCPError(types.INTERNAL_ERROR, "It runs as a task only, and none can be kept now. Nothing ran.")
        async with hearing(context) as (errand.hear, errand.log):
            if not errand.is_begun:
                if use == "never" and not errand.can_ask and is_unhurried.get():
                    return await errand.run(work)
                is_heard = errand.hear is not silent or use != "never"
                errand.start(work, has_listener=is_heard, answers=asked.answers)
            return await self._followed(context, asked, errand, None if use == "never" else self._task_after())

    def _use(self, context: Context, asked: Asked, task: TaskUse) -> TaskUse:
        """Return when a call becomes a task, as far as its client has tasks at all."""
        if task == "never" or asked.method != "tools/call" or (self._desk is None and task != "required"):
            return "never"
        if declares_tasks(context):
            return task
        if task == "required":
            raise missing_tasks("This tool runs as a task only")
        return "never"

    def _errand(self, context: Context) -> Errand:
        session = context.session
        # A client of the new era comes back with the answers; one of the old era is asked while it waits, if it can be.
        is_askable = is_modern(context) or session.can_send_request
        capabilities = askable(session.client_capabilities) if is_askable else {}
        ask = None if is_modern(context) else partial(ask_client, context)
        told = session.client_params
        return Errand(self._principal(context), capabilities, ask, told.client_info.name if told else "")

    def _binding(self, context: Context, asked: Asked) -> str:
        return bind(self._principal(context), asked.method, asked.name, asked.params)

    def _resumed(self, context: Context, asked: Asked, state: str) -> Errand:
        """Return the call that a client comes back to, with its answers delivered."""
        errand = self._parked.take(state, self._binding(context, asked))
        if errand is None:
            raise MCPError(
                types.INVALID_PARAMS,
                "The question that this `requestState` belongs to is gone: it was answered already, waited too long, "
                "was not asked of this call, or Kiwi was started anew. Nothing ran. Call again without it.",
                {"reason": "invalid_request_state"},
            )
        errand.deliver(asked.answers)
        return errand

    async def _followed(self, context: Context, asked: Asked, errand: Errand, limit: float | None) -> Reply:
        """Wait until a call has ended, asks something, or has taken so long that it becomes a task."""
        try:
            while True:
                try:
                    async with asyncio.timeout(limit):
                        await errand.turn()
                except TimeoutError:
                    limit = None  # where no task can be kept, the client goes on waiting
                    # It may have ended, or asked, in the same moment.
                    is_slow = not (errand.is_over or errand.pending)
                    if is_slow and (kept := await self._kept(errand, asked)) is not None:
                        return await self._gone_on(errand, kept)
                    continue
                if errand.is_over:
                    return errand.result()
                if (state := self._parked.park(errand, self._binding(context, asked))) is not None:
                    return _questions(errand, state)
                errand.refuse(_too_many(errand))
        except asyncio.CancelledError:
            await errand.end()
            raise

    async def _kept(self, errand: Errand, asked: Asked) -> Task | None:
        return await self._desk.open(errand, asked.method, asked.identity) if self._desk is not None else None

    async def _gone_on(self, errand: Errand, task: Task) -> Reply:
        """Answer with the task that a call has become, and see to its end."""
        assert self._desk is not None  # noqa: S101 - it has kept the task
        self._desk.attend(task)
        try:
            await anyio.lowlevel.checkpoint()  # here a client that has cancelled meanwhile is heard
        except asyncio.CancelledError:
            await errand.end()
            raise
        return {"resultType": "task", **told(task)}


def is_modern(context: Context) -> bool:
    """Whether a client comes back with answers, instead of being asked."""
    return context.protocol_version in MODERN_PROTOCOL_VERSIONS


def _questions(errand: Errand, state: str) -> types.InputRequiredResult:
    errand.hear, errand.log = silent, unheard
    asked = {name: as_request(question) for name, question in errand.pending.items()}
    return types.InputRequiredResult(input_requests=asked, request_state=state)


def _too_many(errand: Errand) -> Unanswered:
    return Unanswered(
        sorted({question.method for question in errand.pending.values()}),
        message=f"The tool asks a question, and {MOST_PARKED} calls wait for answers already.",
        suggestion="Answer those first, or let ten minutes pass.",
    )
