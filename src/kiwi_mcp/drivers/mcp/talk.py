"""One call under way: who waits for it, how long it may take, and what they are asked and told before its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from kiwi_mcp.domain.caller import Answers, Caller, Questions, unheard
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_text, compact
from kiwi_mcp.drivers.mcp.failures import harmless

THINKING = 600.0
"""How long a caller may think about a question, in seconds; the call's own time stands still meanwhile."""
MOST_NOTES = 1_000
"""The most lines of a server's log that one call passes on."""
LONGEST_NOTE = 4_000
"""The most of one such line, in characters."""
LONGEST_REPORT = 500
"""The most that one step of progress says, in characters."""
NOTE_LEVEL = "info"
"""The least important lines that servers are asked for."""
_LEVELS = frozenset({"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"})
_LOGGER = 200


@dataclass(eq=False, slots=True)
class Talk:
    """A call whose server may ask and tell its caller things."""

    caller: Caller
    limit: asyncio.Timeout
    unanswered: Unanswered | None = None
    """The first question to a person or a model that the caller could not be asked, or did not answer."""
    _over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _notes: int = 0
    _open: int = 0
    _left: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for the call any more."""
        return self._over.done() or self.limit.expired()

    def end(self) -> None:
        """Let go of the caller: a question that is still open is withdrawn."""
        if not self._over.done():
            self._over.set_result(None)

    async def ask(self, questions: Questions) -> Answers:
        """Return the caller's answer to each question; one that is not answered in time is refused."""
        try:
            return await self._thought(questions)
        except Unanswered as fault:
            # A server that learns of no folders goes on without them: how it fails then has other reasons.
            if any(question.method != "roots/list" for question in questions.values()):
                self.unanswered = self.unanswered or fault
            raise

    def note(self, params: JsonObject) -> None:
        """Pass on a line of the server's log, up to a number of them."""
        self._notes += 1
        if self._notes <= MOST_NOTES and self.caller.note is not unheard:
            self.caller.note(_line(params))

    async def _thought(self, questions: Questions) -> Answers:
        methods = sorted({question.method for question in questions.values()})
        if self.is_over:
            raise Unanswered(methods, message="The call that asks the question is over.")
        thinking, waits = asyncio.ensure_future(self.caller.ask(questions)), asyncio.FIRST_COMPLETED
        try:
            with self._standing_still():
                await asyncio.wait((thinking, self._over), timeout=THINKING, return_when=waits)
        finally:
            thinking.cancel()
        if not thinking.done() or thinking.cancelled():
            late = "The call ended" if self._over.done() else f"{THINKING:g} seconds passed"
            raise Unanswered(methods, message=f"{late} before the question was answered.")
        answers = thinking.result()
        if missing := sorted(questions.keys() - answers.keys()):
            raise Unanswered(methods, message=f"There is no answer to {', '.join(map(repr, missing))}.")
        return answers

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Let no time pass for the call."""
        now = asyncio.get_running_loop().time
        self._open += 1
        if self._open == 1:
            self._left = max(0.0, (self.limit.when() or now()) - now())
            self.limit.reschedule(None)
        try:
            yield
        finally:
            self._open -= 1
            if not self._open and not self.is_over:
                self.limit.reschedule(now() + self._left)


def _line(params: JsonObject) -> JsonObject:
    """Return a line of a log that steers no terminal and is not too long."""
    level, logger = as_text(params.get("level")), harmless(as_text(params.get("logger")))[:_LOGGER]
    shown: dict[str, Json] = {"level": level if level in _LEVELS else NOTE_LEVEL, "data": _bounded(params.get("data"))}
    return {**shown, "logger": logger} if logger else shown


def _bounded(data: Json) -> Json:
    if isinstance(data, str):
        return harmless(data)[:LONGEST_NOTE]
    try:
        text = compact(data)
    except (ValueError, RecursionError):
        return ""
    return _plain(data) if len(text) <= LONGEST_NOTE else harmless(text)[:LONGEST_NOTE]


def _plain(value: Json) -> Json:
    match value:
        case str():
            return harmless(value)
        case Mapping():
            return {harmless(name): _plain(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case _:
            return value
