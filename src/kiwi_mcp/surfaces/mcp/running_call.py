"""A running call: its work, the questions that its client is asked, and the progress and log lines sent meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from secrets import token_hex
from typing import Final, NamedTuple, TypeAlias, cast, get_args

import anyio
import mcp_types as types
from mcp.server.connection import allowed_log_levels
from mcp.shared.exceptions import MCPError
from mcp.shared.message import ServerMessageMetadata
from mcp_types import INTERNAL_ERROR
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from kiwi_mcp.domain.calls import Answers, Ask, Caller, Note, Question, QuestionMethod, Questions, no_answers, unheard
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.outcome import Progress, Report, silent
from kiwi_mcp.store.principals import STDIO
from kiwi_mcp.surfaces.mcp.protocol import Context, connection_of, left

Result: TypeAlias = BaseModel | dict[str, object]
"""What a call gives, as the SDK puts it on the wire."""
Work: TypeAlias = Callable[[Caller], Awaitable[Result]]
"""Does a call, and gives what MCP answers to it."""

TIDY_SECONDS = 10.0
"""How long a cancelled call may take to end its processes."""
_QUESTION_SECONDS = 3_600.0
"""The maximum time that a question waits for its answer, in seconds."""
_MOST_QUESTIONS = 1_000
"""How much one call may ask, from its beginning to its end."""

is_unhurried: ContextVar[bool] = ContextVar("is_unhurried", default=False)
"""Whether a request is cancelled once at most, then waited for: its work tidies up without a task of its own."""
_ANSWER_SECONDS = 600.0
"""How long a person, or their model, may take for one answer, in seconds."""
_LONGEST_MESSAGE = 500
_REQUESTS: Final[Mapping[QuestionMethod, TypeAdapter[types.InputRequest]]] = {
    "elicitation/create": TypeAdapter(types.ElicitRequest),
    "sampling/createMessage": TypeAdapter(types.CreateMessageRequest),
    "roots/list": TypeAdapter(types.ListRootsRequest),
}
_ANSWERS: Final[Mapping[QuestionMethod, TypeAdapter[types.InputResponse]]] = {
    "elicitation/create": TypeAdapter(types.ElicitResult),
    "sampling/createMessage": TypeAdapter(types.CreateMessageResult | types.CreateMessageResultWithTools),
    "roots/list": TypeAdapter(types.ListRootsResult),
}
LEVELS: tuple[types.LoggingLevel, ...] = get_args(types.LoggingLevel)
"""From the least to the most urgent."""
_LEVEL_KEY = "kiwi.log_level"
_MOST_LINES = 256
"""How many lines may wait for a client that reads slowly; those beyond are dropped."""
INTERVAL = 0.1
"""The minimum time between two notifications, in seconds. Of the reports in between, only the latest is sent."""
Send: TypeAlias = Callable[[float, float | None, str | None], Awaitable[None]]
"""Sends one note: how much is done, of how much, and in words where there are any."""


class _Asked(NamedTuple):
    """Questions that were asked together: the key of each by its sent name, and all answers, once they arrive."""

    names: Mapping[str, str]
    all: asyncio.Future[Answers]
    answers: dict[str, JsonObject]
    """The answers so far."""


class RunningCall:
    """One call in progress: its work, the open questions, and the current listener.

    `ask` is another way to put questions than to wait with them; `client` is what the client calls itself.
    """

    def __init__(self, principal: str, capabilities: JsonObject, ask: Ask | None = None, client: str = "") -> None:
        self.principal = principal
        self.capabilities = capabilities
        """What the client can be asked; nothing where it cannot be."""
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
        self._client = client
        self._ask = ask or self._wait_for
        self._asked: dict[str, _Asked] = {}
        self._early_answers: dict[str, JsonObject] = {}
        self._used: set[str] = set()
        self._news: asyncio.Future[None] | None = None
        self._work: asyncio.Task[Result] | None = None

    def start(self, work: Work, *, has_listener: bool, answers: Mapping[str, JsonObject]) -> None:
        """Begin; answers that came with the call itself are given when their questions are asked."""
        self._early_answers = dict(answers)
        self._work = asyncio.ensure_future(work(self._caller(has_listener=has_listener)))
        self._work.add_done_callback(lambda _: self._wake())

    async def run(self, work: Work) -> Result:
        """Do work that asks nothing and never continues alone, here and now."""
        return await work(self._caller(has_listener=self.hear is not silent))

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

    async def turn(self, *, or_thread: bool = False) -> None:
        """Wait until the work has ended or asks something, or has started a thread if that is enough."""
        while not (self.is_over or self.pending or (or_thread and self.thread_id)):
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def deliver(self, answers: Mapping[str, object]) -> None:
        """Accept answers; ignore those to questions that were not asked, and those that are invalid."""
        for name, answer in answers.items():
            question = self.pending.get(name)
            if question is not None and isinstance(answer, Mapping) and is_answer(question, answer):
                del self.pending[name]
                asked = self._asked.pop(name)
                asked.answers[asked.names[name]] = answer
                if len(asked.answers) == len(asked.names) and not asked.all.done():
                    asked.all.set_result(asked.answers)
                self._announce()

    def refuse(self, message: str, suggestion: str) -> None:
        """Answer nothing of what is asked, and say why."""
        reason = _unanswered(self.pending, message, suggestion)
        for asked in self._asked.values():
            if not asked.all.done():
                asked.all.set_exception(reason)
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
            self._ask if self.capabilities else no_answers,
            unheard if self.log is unheard else self._note,
            capabilities=self.capabilities,
            # The client that a person has started shows its questions to that person.
            is_owner=self.principal == STDIO,
            client=self._client,
        )

    def _report(self, progress: Progress) -> None:
        count = f"({progress.done:g}/{progress.total:g})" if progress.total else ""
        self.latest = " ".join(filter(None, (progress.message, count))) or self.latest
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
        refuse_unaskable(questions, self.capabilities)
        if len(self._used) + len(questions) > _MOST_QUESTIONS:
            raise _unanswered(questions, f"The tool asks more than {_MOST_QUESTIONS} questions in one call.")
        names = {self._unused(key, question): key for key, question in questions.items()}
        asked = _Asked(names, asyncio.get_running_loop().create_future(), {})
        self.pending |= {name: questions[key] for name, key in asked.names.items()}
        self._asked |= dict.fromkeys(asked.names, asked)
        self.deliver({name: self._early_answers.pop(name) for name in asked.names if name in self._early_answers})
        if self.pending:
            self._wake()
        try:
            async with asyncio.timeout(_QUESTION_SECONDS):
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
        self._announce()

    def _announce(self) -> None:
        if self.on_change is not None:
            self.on_change()


class _AnyObject(BaseModel):
    """Any object, nothing of it lost."""

    model_config = ConfigDict(extra="allow")


def askable(capabilities: types.ClientCapabilities | None) -> JsonObject:
    """Return what of a client's capabilities is about questions."""
    if capabilities is None or not (capabilities.elicitation or capabilities.sampling or capabilities.roots):
        return {}
    response = capabilities.model_dump(
        by_alias=True, mode="json", exclude_none=True, include={"elicitation", "sampling"}
    )
    # Changes of the roots are announced only to the direct peer of the client, and to no server behind it.
    return {**response, "roots": {}} if capabilities.roots is not None else response


def refuse_unaskable(questions: Questions, capabilities: JsonObject) -> None:
    """Refuse questions that a client did not say it can be asked, or that MCP does not know in this form."""
    lacking = {name for question in questions.values() if (name := _lacking(question, capabilities))}
    if lacking:
        names = ", ".join(f"`{name}`" for name in sorted(lacking))
        message = f"The tool asks a question, and this client cannot be asked: it does not declare {names}."
        raise _unanswered(questions, message)
    for question in questions.values():
        as_request(question)


def as_request(question: Question) -> types.InputRequest:
    """Return a question as the request that MCP has for it."""
    try:
        return _REQUESTS[question.method].validate_python({"method": question.method, "params": question.params})
    except ValidationError as error:
        raise Unanswered(
            [question.method],
            message=f"The tool asks a question in a form that MCP does not have ({question.method}): "
            f"{error.errors()[0]['msg']}."[:_LONGEST_MESSAGE],
            suggestion="Tell the author of the tool.",
        ) from error


def is_answer(question: Question, answer: object) -> bool:
    """Whether something answers a question, by its form."""
    try:
        _ANSWERS[question.method].validate_python(answer, by_name=False)
    except ValidationError:
        return False
    return True


async def ask_client(context: Context, questions: Questions) -> Answers:
    """Ask a client of the era of handshakes, one question after the other, on the connection that its call came by."""
    refuse_unaskable(questions, askable(context.session.client_capabilities))
    return {key: await _ask(context, question) for key, question in questions.items()}


async def _ask(context: Context, question: Question) -> JsonObject:
    sending = context.session.send_request(
        as_request(question),
        _AnyObject,
        request_read_timeout_seconds=_ANSWER_SECONDS,
        metadata=ServerMessageMetadata(related_request_id=context.request_id),
    )
    asked = {"answer": question}
    try:
        answer = await _unless_left(context, sending, question)
    except MCPError as refusal:
        message = f"The client did not answer the tool's question: {refusal.message[:_LONGEST_MESSAGE]}"
        raise _unanswered(asked, message) from refusal
    except ValidationError as error:
        raise _unanswered(asked, "What the client said to the tool's question is not an answer to it.") from error
    return cast("JsonObject", answer.model_dump(mode="json"))


async def _unless_left(context: Context, sending: Awaitable[_AnyObject], question: Question) -> _AnyObject:
    """Wait for an answer for as long as the client waits for its call: over HTTP, one that left cannot answer."""
    if (is_left := left(context)) is None:
        return await sending
    answering, leaving = asyncio.ensure_future(sending), asyncio.ensure_future(is_left.wait())
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            raise Unanswered([question.method], message="The client left before it answered the tool's question.")
        return answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


def _lacking(question: Question, capabilities: JsonObject) -> str:
    """Return the capability that a client would need to be asked, empty where it has that."""
    match question.method:
        case "elicitation/create":
            mode = "url" if question.params.get("mode") == "url" else "form"
            declared = as_object(capabilities.get("elicitation"))
            # An empty declaration is older than the modes, and means forms.
            is_able = "elicitation" in capabilities and (mode in declared or (mode == "form" and not declared))
            return "" if is_able else f"elicitation.{mode}"
        case "sampling/createMessage":
            if "sampling" not in capabilities:
                return "sampling"
            wants_tools = question.params.get("tools") or question.params.get("toolChoice")
            return "sampling.tools" if wants_tools and "tools" not in as_object(capabilities["sampling"]) else ""
        case "roots/list":
            return "" if "roots" in capabilities else "roots"


def _unanswered(questions: Questions, message: str, suggestion: str = "") -> Unanswered:
    methods = sorted({question.method for question in questions.values()})
    return Unanswered(methods, message=message, suggestion=suggestion)


async def set_level(context: Context, params: types.SetLevelRequestParams) -> types.EmptyResult:
    """Remember the minimum log level that a client wants, as long as it stays connected."""
    connection_of(context).state[_LEVEL_KEY] = params.level
    return types.EmptyResult()


@asynccontextmanager
async def listening(context: Context) -> AsyncIterator[tuple[Report, Note]]:
    """Send the client what a call reports and logs while the block lasts; the last of it goes out before it ends."""
    lines: deque[JsonObject] = deque()
    sending: asyncio.Task[None] | None = None

    def add(line: JsonObject) -> None:
        nonlocal sending
        if len(lines) < _MOST_LINES and _is_wanted(context, as_text(line.get("level"))):
            lines.append(line)
            if sending is None or sending.done():
                sending = asyncio.create_task(_send_lines(context, lines))

    note = add if allowed_log_levels(context.protocol_version, context.meta) else unheard
    try:
        if "progress_token" in (context.meta or {}):
            async with progress_relay(context.session.report_progress) as report:
                yield report, note
        else:
            yield silent, note
        if sending is not None:
            await sending
    finally:
        if sending is not None:
            sending.cancel()


@asynccontextmanager
async def progress_relay(send: Send, *, interval: float = INTERVAL) -> AsyncIterator[Report]:
    """Pass on what a call reports while the block lasts; the last report goes out before it ends."""
    latest: Progress | None = None
    last_sent: float | None = None
    news = asyncio.Event()

    def report(progress: Progress) -> None:
        nonlocal latest
        latest = progress
        news.set()

    async def send_latest() -> None:
        nonlocal latest, last_sent
        progress, latest = latest, None
        news.clear()
        if progress is not None:
            last_sent = ahead_of(last_sent, progress)
            await send(last_sent, progress.total, progress.message or None)

    async def pass_on() -> None:
        while True:
            await news.wait()
            await send_latest()
            await asyncio.sleep(interval)

    passing = asyncio.create_task(pass_on())
    try:
        yield report
    finally:
        passing.cancel()
    await send_latest()  # not after an exception: a cancelled call has no listener any more


def ahead_of(last: float | None, progress: Progress) -> float:
    """Return the progress as a number above the last one sent, as the protocol requires, and below the total."""
    if last is None or progress.done > last:
        return progress.done
    if progress.total is None:
        return last + 1
    return last + (progress.total - last) / 1_000 if last < progress.total else last + progress.total / 1_000


def _is_wanted(context: Context, level: str) -> bool:
    # A client of the new era says so with each request, one of the old era once for all of them.
    if level not in allowed_log_levels(context.protocol_version, context.meta):
        return False
    if context.protocol_version in MODERN_PROTOCOL_VERSIONS:
        return True
    least = connection_of(context).state.get(_LEVEL_KEY, "info")
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(least)


async def _send_lines(context: Context, lines: deque[JsonObject]) -> None:
    """Send lines of a log in the order in which they came."""
    with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
        while lines:
            line = lines.popleft()
            params = types.LoggingMessageNotificationParams.model_validate(
                {"level": line["level"], "data": line.get("data"), "logger": as_text(line.get("logger")) or None}
            )
            notification = types.LoggingMessageNotification(params=params)
            await context.session.send_notification(notification, related_request_id=context.request_id)
