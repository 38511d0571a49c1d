"""What a server asks or logs during a call, routed to the right caller."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Final

from mcp.shared.exceptions import MCPError
from mcp_types import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, MISSING_REQUIRED_CLIENT_CAPABILITY, RequestId
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Answers, Caller, Question, QuestionMethod, Questions, unheard
from kiwi_mcp.domain.errors import KiwiError, Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact, map_texts
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.domain.secret import labels_secret, names_secret
from kiwi_mcp.drivers.mcp.rpc import GRANT_OF_CAPABILITY, NOTE_LEVEL
from kiwi_mcp.drivers.mcp.server import ServerConfig

THINKING = 600.0
"""How many seconds a caller has to answer a question; the call's own timeout is paused meanwhile."""
MOST_NOTES = 1_000
"""The most lines of a server's log that one call passes on."""
LONGEST_NOTE = 4_000
"""The most of one such line, in characters."""
MOST_NOT_PASSED = 10
"""The maximum number of reasons, for requests that were not passed on, that one call reports."""
LONGEST_REPORT = 500
"""The most that one step of progress says, in characters."""
_LEVELS = frozenset({"debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"})
_LOGGER = 200


class CallerChannel(Struct, eq=False):
    """A call in which the server may ask its caller questions and send notifications."""

    caller: Caller
    limit: asyncio.Timeout
    unanswered: Unanswered | None = None
    """The first question to a person or a model that the caller could not be asked, or did not answer."""
    not_passed: list[Unanswered] = field(default_factory=list)
    """Why requests of the server were not passed to the caller, each reason once."""
    _over: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _notes: int = 0
    _open: int = 0
    _left: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether no caller waits for the call any more."""
        return self._over.done() or self.limit.expired()

    def end(self) -> None:
        """Release the caller: a question that is still open is withdrawn."""
        if not self._over.done():
            self._over.set_result(None)

    async def ask(self, questions: Questions) -> Answers:
        """Return the caller's answer to each question; one that is not answered in time is refused."""
        try:
            return await self._thought(questions)
        except Unanswered as fault:
            # A server that gets no folders continues without them: if it fails later, that has other reasons.
            if any(question.method != "roots/list" for question in questions.values()):
                self.unanswered = self.unanswered or fault
            raise

    def refuse(self, fault: Unanswered) -> None:
        """Note why a request of the server is not passed to the caller."""
        is_known = any(known.message == fault.message for known in self.not_passed)
        if not is_known and len(self.not_passed) < MOST_NOT_PASSED:
            self.not_passed.append(fault)

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
    level, logger = as_text(params.get("level")), strip_controls(as_text(params.get("logger")))[:_LOGGER]
    shown: dict[str, Json] = {"level": level if level in _LEVELS else NOTE_LEVEL, "data": _bounded(params.get("data"))}
    return {**shown, "logger": logger} if logger else shown


def _bounded(data: Json) -> Json:
    if isinstance(data, str):
        return strip_controls(data)[:LONGEST_NOTE]
    try:
        text = compact(data)
    except (ValueError, RecursionError):
        return ""
    return map_texts(data, strip_controls) if len(text) <= LONGEST_NOTE else strip_controls(text)[:LONGEST_NOTE]


MOST_QUESTIONS = 32
"""The most questions that a server may ask at once."""
_MEANING: Final[Mapping[str, tuple[QuestionMethod, str]]] = {
    "roots": ("roots/list", "see the folders of clients"),
    "sampling": ("sampling/createMessage", "use the models of clients"),
    "questions": ("elicitation/create", "ask the users of clients"),
}
"""What an owner can allow a server: the method of the request, and what it does."""
_GRANTS: Final[Mapping[QuestionMethod, str]] = {method: grant for grant, (method, _) in _MEANING.items()}
_DECLINED: Final[Mapping[QuestionMethod, JsonObject]] = {
    "elicitation/create": {"action": "decline"},
    "roots/list": {"roots": []},
}
_SHOWN, _SHOWN_NAME = 5, 60


def refusal(question: Question, server: ServerConfig) -> Unanswered | None:
    """Return why a request of a server is not passed to the client; None where it is."""
    if _GRANTS[question.method] not in server.client:
        return _not_allowed(_GRANTS[question.method], server)
    if question.method != "elicitation/create" or not (names := _secret_fields(question.params)):
        return None
    return Unanswered(
        [question.method],
        message=f"A form of the MCP server {server.name!r} asks for a secret ({', '.join(names)}), which MCP forbids.",
        suggestion="If the server needs it, its owner stores it (`kiwi secrets set NAME`) and writes `${NAME}` into "
        "`config.env` of the server.",
    )


def missing_grant(fault: MCPError, server: ServerConfig) -> Unanswered | None:
    """Return what the owner has not allowed a server that fails because its client does not announce that."""
    if fault.code != MISSING_REQUIRED_CLIENT_CAPABILITY:
        return None
    required = as_object(as_object(fault.error.data).get("requiredCapabilities"))
    grants = (GRANT_OF_CAPABILITY[name] for name in required if name in GRANT_OF_CAPABILITY)
    return next((_not_allowed(grant, server) for grant in grants if grant not in server.client), None)


async def answered(asked: Json, talk: CallerChannel, server: ServerConfig) -> Answers:
    """Return the caller's answers to what a server wants to know, which it gives as `inputRequests`.

    A form and a question for folders that are not passed on are declined. For a model's text there is no such answer.
    """
    requests = {key: as_object(one) for key, one in as_object(asked).items()}
    if len(requests) > MOST_QUESTIONS:
        methods = sorted({as_text(one.get("method")) for one in requests.values()})[:MOST_QUESTIONS]
        raise Unanswered(methods, message=f"The server asks {len(requests):,} questions at once.")
    questions = {
        key: Question(question_method(as_text(one.get("method"))), as_object(one.get("params")))
        for key, one in requests.items()
    }
    declined: dict[str, JsonObject] = {}
    for key, question in questions.items():
        if (refused := refusal(question, server)) is not None:
            talk.refuse(refused)
            if question.method not in _DECLINED:
                raise refused
            declined[key] = _DECLINED[question.method]
    passed = {key: _with_name(question, server) for key, question in questions.items() if key not in declined}
    answers = await talk.ask(passed) if passed else {}
    return {**declined, **{key: with_defaults(question, answers[key]) for key, question in passed.items()}}


def question_method(method: str) -> QuestionMethod:
    """Return the method of a request as that of a question; refuse others."""
    match method:
        case "elicitation/create" | "sampling/createMessage" | "roots/list":
            return method
        case _:
            raise Unanswered([method], message=f"The server asks {method!r}, which is no question of this protocol.")


def with_defaults(question: Question, answer: JsonObject) -> JsonObject:
    """Return an answer in which a field of a form that was left out has the value that the form gives it."""
    if question.method != "elicitation/create" or answer.get("action") != "accept":
        return answer
    fields = as_object(as_object(question.params.get("requestedSchema")).get("properties"))
    given = {name: value["default"] for name, field in fields.items() if "default" in (value := as_object(field))}
    return {**answer, "content": {**given, **as_object(answer.get("content"))}} if given else answer


def _with_name(question: Question, server: ServerConfig) -> Question:
    """Return a question as it is put: a form says which server asks."""
    if question.method != "elicitation/create":
        return question
    message = f"MCP server {server.name} asks: {as_text(question.params.get('message'))}"
    return replace(question, params={**question.params, "message": message})


def _not_allowed(grant: str, server: ServerConfig) -> Unanswered:
    method, what = _MEANING[grant]
    return Unanswered(
        [method],
        message=f"The MCP server {server.name!r} is not allowed to {what} ({method}).",
        suggestion=f"The owner can allow it: `kiwi mcp allow {server.name} --{grant}`.",
    )


def _secret_fields(params: JsonObject) -> list[str]:
    """Return the fields of a form that ask for a secret, as far as they are shown."""
    found: list[str] = []
    parts: list[Json] = [params.get("requestedSchema")]
    while parts:
        part = parts.pop()
        if isinstance(part, list | tuple):
            parts += part
        elif isinstance(part, Mapping):
            for name, field in as_object(part.get("properties")).items():
                if names_secret(name) or labels_secret(as_text(as_object(field).get("title"))):
                    found.append(name)
            parts += part.values()
    return [strip_controls(name)[:_SHOWN_NAME] for name in found[:_SHOWN]]


MOST_LEFT = 64
"""How many abandoned calls are tracked separately; with more, messages are never matched to a call again."""
_TALK: ContextVar[CallerChannel | None] = ContextVar("talk", default=None)


class ServerEvents:
    """What one server asks and logs, brought to the calls under way."""

    def __init__(self, server: ServerConfig) -> None:
        self._server = server
        self._talks: set[CallerChannel] = set()
        self._left: set[RequestId] = set()
        self._is_lost = False
        self.asks_without_call = False
        """Whether the server has asked a person or their model something without saying for which call."""

    @property
    def is_quiet(self) -> bool:
        """Whether no call is under way, and the server has answered all that were."""
        return not self._talks and not self._has_left

    @contextmanager
    def talking(self, talk: CallerChannel) -> Iterator[None]:
        """Know of a call for as long as the block lasts."""
        self._talks.add(talk)
        token = _TALK.set(talk)
        try:
            yield
        finally:
            self._talks.discard(talk)
            _TALK.reset(token)
            talk.end()

    def leave(self, number: RequestId) -> None:
        """Record that no caller waits any more for something of this call that the server may still be doing."""
        if _TALK.get() is None:
            return
        self._is_lost = self._is_lost or len(self._left) >= MOST_LEFT
        if not self._is_lost:
            self._left.add(number)

    def answered(self, number: RequestId) -> None:
        """Note that the server is done with something."""
        self._left.discard(number)

    async def answer(self, method: str, params: JsonObject) -> JsonObject:
        """Answer a request of the server; what it may not ask is refused."""
        if method == "ping":
            return {}
        if method not in _GRANTS:
            raise MCPError(METHOD_NOT_FOUND, "Method not found")
        named, question = _TALK.get(), Question(question_method(method), params)
        if (refused := refusal(question, self._server)) is not None:
            if (talk := self._belonging_to(named)) is not None:
                talk.refuse(refused)
            # What was not announced is not there; what was announced was asked for wrongly.
            code = INVALID_PARAMS if _GRANTS[question.method] in self._server.client else METHOD_NOT_FOUND
            raise MCPError(code, refused.message)
        # Folders are asked for by servers that hold one conversation for all, and can do without.
        self.asks_without_call = self.asks_without_call or (named is None and method != "roots/list")
        if (talk := self._belonging_to(named)) is None:
            raise MCPError(INVALID_REQUEST, self._no_caller())
        try:
            # The caller's answer to the one question that a request of a server of the old era is.
            answers = await talk.ask({question.method: _with_name(question, self._server)})
            return with_defaults(question, answers[question.method])
        except KiwiError as fault:
            raise MCPError(INVALID_REQUEST, fault.message) from None

    def note(self, params: JsonObject, context: Context | None) -> None:
        """Pass a line of the server's log to the call that it belongs to."""
        if (talk := self._belonging_to(context.get(_TALK) if context is not None else None)) is not None:
            talk.note(params)

    def _belonging_to(self, named: CallerChannel | None) -> CallerChannel | None:
        """Return the call that a message belongs to: the one it came with, else the only one."""
        if named is not None:
            return named if named in self._talks else None
        return next(iter(self._talks)) if len(self._talks) == 1 and not self._has_left else None

    @property
    def _has_left(self) -> bool:
        return self._is_lost or bool(self._left)

    def _no_caller(self) -> str:
        calls, left = len(self._talks), f"more than {MOST_LEFT}" if self._is_lost else len(self._left)
        if not calls or (calls == 1 and not self._has_left):
            return "It cannot be asked: its call is not running."
        others = f" and {left} without a waiting caller" if self._has_left else ""
        again = " Call again: each call has a connection of its own from now on." if self.asks_without_call else ""
        return (
            f"It cannot be asked: {calls} call{'s are' if calls > 1 else ' is'} under way{others}, and the request "
            f"does not say to which it belongs.{again}"
        )


def apart() -> Context:
    """Return the context of here for a conversation, which belongs to no call."""
    context = copy_context()
    context.run(_TALK.set, None)
    return context
