"""The work of a call, its open questions, its listeners."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from secrets import token_hex
from typing import TypeAlias

import anyio
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR
from pydantic import BaseModel

from kiwi_mcp.domain.calls import Answers, Ask, Caller, Note, Question, Questions, no_answers, unheard
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.surfaces.mcp.client_requests import is_answer, refuse_unaskable

Result: TypeAlias = BaseModel | dict[str, object]
"""What a call gives, as the SDK puts it on the wire."""
Work: TypeAlias = Callable[[Caller], Awaitable[Result]]
"""Does a call, and gives what MCP answers to it."""

TIDY_SECONDS = 10.0
"""How long a cancelled call may take to end its processes."""
_PATIENCE = 3_600.0
"""The maximum time that a question waits for its answer, in seconds."""


_MOST_QUESTIONS = 1_000
"""How much one call may ask, from its beginning to its end."""


is_unhurried: ContextVar[bool] = ContextVar("is_unhurried", default=False)
"""Whether a request is cancelled once at most, then waited for: its work tidies up without a task of its own."""


class _Asked:
    """Questions that were asked together: the key of each by its sent name, and all answers, once they arrive."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = names
        self.all: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._answers: dict[str, JsonObject] = {}

    def take(self, name: str, answer: JsonObject) -> None:
        """Take one answer."""
        self._answers[self.names[name]] = answer
        if len(self._answers) == len(self.names) and not self.all.done():
            self.all.set_result(self._answers)

    def refuse(self, reason: Unanswered) -> None:
        """Tell the asker why there is no answer."""
        if not self.all.done():
            self.all.set_exception(reason)


class RunningCall:
    """One call in progress: its work, the open questions, and the current listener.

    `ask` is another way to put questions than to wait with them; `client` is what the client calls itself.
    """

    def __init__(self, principal: str, capabilities: JsonObject, ask: Ask | None = None, client: str = "") -> None:
        self.principal = principal
        self._client = client
        self.hear: Report = silent
        self.log: Note = unheard
        self.on_change: Callable[[], None] | None = None
        """What is called when it asks, is answered, or has ended."""
        self.thread_id = ""
        """The thread that it has started."""
        self.latest = ""
        """The last words of its progress."""
        self.pending: dict[str, Question] = {}
        """What is asked and not answered, by keys that are never used twice."""
        self._capabilities = capabilities
        self._ask = ask or self._wait_for
        self._asked: dict[str, _Asked] = {}
        self._in_hand: dict[str, JsonObject] = {}
        self._used: set[str] = set()
        self._news: asyncio.Future[None] | None = None
        self._work: asyncio.Task[Result] | None = None

    def start(self, work: Work, *, has_listener: bool, answers: Mapping[str, JsonObject]) -> None:
        """Begin; answers that came with the call itself are given when their questions are asked."""
        self._in_hand = dict(answers)
        self._work = asyncio.create_task(_done(work(self._caller(has_listener=has_listener))))
        self._work.add_done_callback(lambda _: self._wake())

    async def run(self, work: Work) -> Result:
        """Do work that asks nothing and never continues alone, here and now."""
        return await work(self._caller(has_listener=self.hear is not silent))

    @property
    def can_ask(self) -> bool:
        """Whether there is a client that can be asked."""
        return bool(self._capabilities)

    @property
    def is_begun(self) -> bool:
        """Whether the work was begun."""
        return self._work is not None

    @property
    def is_over(self) -> bool:
        """Whether the work has ended."""
        return self._work is not None and self._work.done()

    @property
    def work(self) -> asyncio.Task[Result]:
        """The work, once it was begun."""
        assert self._work is not None  # noqa: S101 - it is not used before
        return self._work

    def result(self) -> Result:
        """Return what the work gave, once it has ended."""
        if self.work.cancelled():
            raise MCPError(INTERNAL_ERROR, "The call was stopped.")
        return self.work.result()

    async def turn(self) -> None:
        """Wait until the work has ended or asks something."""
        while not (self.is_over or self.pending):
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def thread(self) -> None:
        """Wait until the work has started a thread, has ended or asks something."""
        while not (self.is_over or self.pending or self.thread_id):
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def deliver(self, answers: Mapping[str, object]) -> None:
        """Accept answers; ignore those to questions that were not asked, and those that are invalid."""
        for name, answer in answers.items():
            question = self.pending.get(name)
            if question is not None and isinstance(answer, Mapping) and is_answer(question, answer):
                del self.pending[name]
                self._asked.pop(name).take(name, answer)
                self._tell()

    def refuse(self, reason: Unanswered) -> None:
        """Answer nothing of what is asked, and say why."""
        for asked in self._asked.values():
            asked.refuse(reason)
        self.pending.clear()
        self._asked.clear()

    async def end(self) -> None:
        """Stop the work, which is cancelled once and may then clean up undisturbed.

        The SDK cancels again at every step until its request is over; that would interrupt a call that waits for its
        processes to end.
        """
        if self._work is not None and not self._work.done():
            self._work.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.wait({self._work}, timeout=TIDY_SECONDS)

    def _caller(self, *, has_listener: bool) -> Caller:
        # The absence of a listener must be visible: a server behind Kiwi is then not asked to report, nor allowed to
        # ask.
        return Caller(
            self._report if has_listener else silent,
            self._ask if self._capabilities else no_answers,
            unheard if self.log is unheard else self._note,
            capabilities=self._capabilities,
            # The client that a person has started shows its questions to that person.
            is_owner=self.principal == STDIO,
            client=self._client,
        )

    def _report(self, progress: Progress) -> None:
        self.latest = _in_words(progress) or self.latest
        self.hear(progress)
        if progress.thread_id:
            self.thread_id = progress.thread_id
            self._wake()

    def _note(self, line: JsonObject) -> None:
        self.log(line)

    async def _wait_for(self, questions: Questions) -> Answers:
        """Ask the client that follows this call, and wait until every question is answered."""
        if not questions:
            return {}
        refuse_unaskable(questions, self._capabilities)
        if len(self._used) + len(questions) > _MOST_QUESTIONS:
            raise _unanswered(questions, f"The tool asks more than {_MOST_QUESTIONS} questions in one call.")
        asked = _Asked({self._unused(key, question): key for key, question in questions.items()})
        self.pending |= {name: questions[key] for name, key in asked.names.items()}
        self._asked |= dict.fromkeys(asked.names, asked)
        self.deliver({name: self._in_hand.pop(name) for name in asked.names if name in self._in_hand})
        if self.pending:
            self._wake()
        try:
            async with asyncio.timeout(_PATIENCE):
                return await asked.all
        except TimeoutError:
            raise _unanswered(questions, "The tool asked a question, and it was not answered in time.") from None
        finally:
            for name in asked.names:
                self.pending.pop(name, None)
                self._asked.pop(name, None)

    def _unused(self, key: str, question: Question) -> str:
        """Return a key for a question: the asker's own, or a similar one if that was used before.

        The key of one of Kiwi's own questions is secret: neither data that came with the call, nor an answer to another
        question, can answer it.
        """
        if question.is_own:
            key = f"{key}-{token_hex(16)}"
        name, number = key, 1
        while name in self._used:
            number += 1
            name = f"{key}-{number}"
        self._used.add(name)
        return name

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)
        self._tell()

    def _tell(self) -> None:
        if self.on_change is not None:
            self.on_change()


def _unanswered(questions: Questions, message: str) -> Unanswered:
    return Unanswered(sorted({question.method for question in questions.values()}), message=message)


async def _done(work: Awaitable[Result]) -> Result:
    return await work


def _in_words(progress: Progress) -> str:
    """Return a step with how much of the whole is done, where that is known."""
    count = f"({progress.done:g}/{progress.total:g})" if progress.total else ""
    return " ".join(filter(None, (progress.message, count)))
