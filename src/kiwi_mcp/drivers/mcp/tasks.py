"""Calls that go on as tasks at their server: asked for again and again until they have ended."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Final

from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.drivers.mcp.connection import Connection
from kiwi_mcp.drivers.mcp.failures import QUOTED, harmless
from kiwi_mcp.drivers.mcp.questions import answered
from kiwi_mcp.drivers.mcp.result import Ended, failed, refused
from kiwi_mcp.drivers.mcp.talk import LONGEST_REPORT, Talk

SOONEST, USUAL, LATEST = 0.1, 1.0, 30.0
"""How long to wait before a task is asked for again: at least, where the server does not say, and at most."""
MOST_ROUNDS = 10
"""How often one task may ask questions."""
_TERMINAL: Final = frozenset({"completed", "failed", "cancelled"})
_INTERNAL: Final = -32603


class Followed:
    """One task at a server, for as long as its caller waits."""

    def __init__(self, connection: Connection, name: str, created: JsonObject, talk: Talk) -> None:
        self._connection = connection
        self._name = name
        self._id = as_text(created.get("taskId"))
        self._task = created
        self._talk = talk
        self._answered: set[str] = set()
        self._rounds = self._steps = 0
        self._told = ""

    async def result(self) -> JsonObject:
        """Return what the call gives in the end; a caller who leaves before calls the task off."""
        if not self._id:
            raise Ended(failed("The server made a task of the call and did not name it."))
        try:
            while True:
                self._report()
                if self._task.get("status") == "input_required":
                    await self._answer()
                await asyncio.sleep(poll_after(self._task))
                self._task = await self._asked("tasks/get")
                if self._task.get("status") in _TERMINAL:
                    return self._finished()
        except (asyncio.CancelledError, Unanswered):
            self._connection.call_off(self._id)
            raise

    async def _asked(self, method: str, **more: Json) -> JsonObject:
        try:
            return await self._connection.ask(method, {"taskId": self._id, **more}, caller=self._talk.caller)
        except MCPError as refusal:
            raise Ended(self._gone(refusal)) from refusal

    async def _answer(self) -> None:
        asked = as_object(self._task.get("inputRequests"))
        if fresh := {key: one for key, one in asked.items() if key not in self._answered}:
            self._rounds += 1
            if self._rounds > MOST_ROUNDS:
                raise Unanswered([], message=f"The task asked questions more than {MOST_ROUNDS} times.")
            answers = await answered(fresh, self._talk)
            self._answered |= fresh.keys()
            await self._asked("tasks/update", inputResponses=answers)

    def _report(self) -> None:
        said = harmless(as_text(self._task.get("statusMessage")))[:LONGEST_REPORT]
        if said and said != self._told and self._talk.caller.report is not silent:
            self._told = said
            self._steps += 1
            self._talk.caller.report(Progress(said, done=self._steps))

    def _finished(self) -> JsonObject:
        said = harmless(as_text(self._task.get("statusMessage")))[:QUOTED]
        match self._task.get("status"):
            case "completed":
                return as_object(self._task.get("result"))
            case "cancelled":
                raise Ended(
                    Outcome(
                        "cancelled",
                        message=f"The server called off the task that {self._name!r} had become. {said}".rstrip(),
                        suggestion="Call it again if it is still wanted.",
                        details={"task": "cancelled"},
                    )
                )
            case _:
                outcome = refused(self._name, _error_of(as_object(self._task.get("error")), said))
                raise Ended(replace(outcome, details={**outcome.details, "task": "failed"}))

    def _gone(self, refusal: MCPError) -> Outcome:
        said = harmless(refusal.error.message)[:QUOTED]
        return Outcome(
            "unavailable",
            message=f"The server does not know the task any more that {self._name!r} had become "
            f"({refusal.code}: {said}).",
            suggestion="Whether it was done is not known: look before you call it again.",
            details={"task": "gone", "mcp_code": refusal.code},
        )


def poll_after(task: JsonObject) -> float:
    """Return how long to wait before a task is asked for again, in seconds."""
    wanted = task.get("pollIntervalMs")
    if task.get("status") in _TERMINAL:  # as it was made: what it gave has still to be asked for
        return 0.0
    if not isinstance(wanted, int | float) or isinstance(wanted, bool):
        return USUAL
    return max(SOONEST, min(LATEST * 1_000, wanted) / 1_000)  # in this order: it may be no number at all


def _error_of(error: JsonObject, said: str) -> MCPError:
    code = error.get("code")
    return MCPError(
        code if isinstance(code, int) else _INTERNAL,
        as_text(error.get("message")) or said or "The server gave no reason.",
        error.get("data"),
    )
