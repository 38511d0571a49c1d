"""One request to its end: rounds of questions, tasks polled, and what the answer means."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic
from typing import Final

from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, MISSING_REQUIRED_CLIENT_CAPABILITY
from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers.mcp.connection import QUOTED, ServerConnection
from kiwi_mcp.drivers.mcp.rpc import ProgressCallback
from kiwi_mcp.drivers.mcp.server import ServerRequest
from kiwi_mcp.drivers.mcp.server_events import LONGEST_REPORT, CallerChannel, answered
from kiwi_mcp.drivers.output import NotJsonOutput, parse
from kiwi_mcp.manifest.json_schema import faults

SOONEST, USUAL, LATEST = 0.1, 1.0, 30.0
"""How long to wait before a task is asked for again: at least, where the server does not say, and at most."""
MOST_POLLS = 10
"""How often one task may ask questions."""
_TERMINAL: Final = frozenset({"completed", "failed", "cancelled"})
_INTERNAL: Final = -32603


class TaskPoller:
    """One task at a server, for as long as its caller waits."""

    def __init__(self, connection: ServerConnection, name: str, created: JsonObject, talk: CallerChannel) -> None:
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
            raise CallFailed(failed("The server made a task of the call and did not name it."))
        try:
            while True:
                said = strip_controls(as_text(self._task.get("statusMessage")))[:LONGEST_REPORT]
                if said and said != self._told and self._talk.caller.report is not silent:
                    self._told = said
                    self._steps += 1
                    self._talk.caller.report(Progress(said, done=self._steps))
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
            said = strip_controls(refusal.error.message)[:QUOTED]
            gone = Outcome(
                "unavailable",
                message=f"The server does not know the task any more that {self._name!r} had become "
                f"({refusal.code}: {said}).",
                suggestion="Whether it was done is not known: look before you call it again.",
                details={"task": "gone", "mcp_code": refusal.code},
            )
            raise CallFailed(gone) from refusal

    async def _answer(self) -> None:
        asked = as_object(self._task.get("inputRequests"))
        if fresh := {key: one for key, one in asked.items() if key not in self._answered}:
            self._rounds += 1
            if self._rounds > MOST_POLLS:
                raise Unanswered([], message=f"The task asked questions more than {MOST_POLLS} times.")
            answers = await answered(fresh, self._talk, self._connection.server)
            self._answered |= fresh.keys()
            await self._asked("tasks/update", inputResponses=answers)

    def _finished(self) -> JsonObject:
        said = strip_controls(as_text(self._task.get("statusMessage")))[:QUOTED]
        match self._task.get("status"):
            case "completed":
                return as_object(self._task.get("result"))
            case "cancelled":
                message = f"The server called off the task that {self._name!r} had become. {said}".rstrip()
                fix, details = "Call it again if it is still wanted.", {"task": "cancelled"}
                raise CallFailed(Outcome("cancelled", message=message, suggestion=fix, details=details))
            case _:
                error = as_object(self._task.get("error"))
                code, message = error.get("code"), as_text(error.get("message")) or said or "The server gave no reason."
                fault = MCPError(code if isinstance(code, int) else _INTERNAL, message, error.get("data"))
                outcome = refused(self._name, fault)
                raise CallFailed(replace(outcome, details={**outcome.details, "task": "failed"}))


def poll_after(task: JsonObject) -> float:
    """Return how long to wait before a task is asked for again, in seconds."""
    wanted = task.get("pollIntervalMs")
    if task.get("status") in _TERMINAL:  # as it was made: what it gave has still to be asked for
        return 0.0
    if not isinstance(wanted, int | float) or isinstance(wanted, bool):
        return USUAL
    return max(SOONEST, min(LATEST * 1_000, wanted) / 1_000)  # in this order: it may be no number at all


IDEMPOTENCY_KEY = "kiwi-mcp/idempotency-key"
"""Where `_meta` has the key of a thread's call: the same whenever the call is repeated."""
MOST_ROUNDS = 10
"""How often a server may ask back before it answers one request."""
_BREATH = 0.1
"""How long a server that asks for another try and nothing else is left alone, in seconds."""
_HEADER_MISMATCH: Final = -32020
_PAGES = 100


class ServerCall(Struct):
    """One request on its way: what is asked, with what, for how long, and who waits for it."""

    wanted: ServerRequest
    inputs: JsonObject
    timeout: float
    parameters: JsonObject
    outputs: JsonObject
    caller: Caller
    is_repeatable: bool
    asked_at: float = 0.0
    unanswered: Unanswered | None = None
    """The first question on the way that was not answered."""
    not_passed: Sequence[Unanswered] = ()
    """Why requests of the server were not passed to the caller."""

    @property
    def progress(self) -> ProgressCallback | None:
        """The callback for the server's progress, if the caller listens."""
        if self.caller.report is silent:
            return None

        def report(done: float, total: float | None, message: str) -> None:
            self.caller.report(Progress(strip_controls(message)[:LONGEST_REPORT], done=done, total=total))

        return report


async def asked(connection: ServerConnection, request: ServerCall) -> Outcome:
    """Return the outcome of a request; what the server refuses is raised as the SDK's error."""
    request.asked_at = monotonic()
    async with asyncio.timeout(request.timeout) as limit:
        talk = CallerChannel(request.caller, limit)
        try:
            await connection.listen(request.caller)
            with connection.events.talking(talk):
                answer = await _settled(connection, request, talk)
        except Unanswered as fault:
            return unanswered(fault)
        except CallFailed as end:
            return end.outcome
        finally:
            request.unanswered, request.not_passed = talk.unanswered, talk.not_passed
    return for_want_of(talk.unanswered, outcome_of(request.wanted, answer, request.outputs))


async def _settled(connection: ServerConnection, request: ServerCall, talk: CallerChannel) -> JsonObject:
    """Return the answer itself, however often the server asks back first."""
    first = request.wanted.params(request.inputs)
    if request.caller.origin.key:
        first["_meta"] = {IDEMPOTENCY_KEY: request.caller.origin.key}
    params = first
    is_modern = (await connection.greeted()).era == "modern"
    for _ in range(MOST_ROUNDS + 1):
        answer = await _sent(connection, request, params)
        match answer.get("resultType", "complete") if is_modern else "complete":
            case "complete":
                return answer
            case "input_required":
                # The next try carries the answers that were asked for, and the server's state as it gave it.
                params = dict(first)
                if wanted := answer.get("inputRequests"):
                    params["inputResponses"] = await answered(wanted, talk, connection.server)
                else:
                    await asyncio.sleep(_BREATH)
                if "requestState" in answer:
                    params["requestState"] = answer["requestState"]
            case "task" if request.wanted.method == "tools/call" and connection.has_tasks:
                return await TaskPoller(connection, request.wanted.name, answer, talk).result()
            case _:
                raise CallFailed(failed("The server answered with a kind of result that this client does not know."))
    raise CallFailed(failed(f"The server asked back more than {MOST_ROUNDS} times and never answered."))


async def _sent(connection: ServerConnection, request: ServerCall, params: JsonObject) -> JsonObject:
    wanted, caller, progress = request.wanted, request.caller, request.progress
    # Only over HTTP are there headers, in which a server may want parts of the arguments too.
    schema = request.parameters if connection.server.transport == "http" else None
    try:
        return await connection.ask(wanted.method, params, caller=caller, progress=progress, schema=schema)
    except MCPError as refusal:
        if refusal.code != _HEADER_MISMATCH:
            raise
        # It wants others than the tool's manifest knows of; which ones, its own list says.
        response = await _schema(connection, wanted.name)
        return await connection.ask(wanted.method, params, caller=caller, progress=progress, schema=response)


async def _schema(connection: ServerConnection, name: str) -> Json:
    cursor = ""
    for _ in range(_PAGES):
        page = await connection.ask("tools/list", {"cursor": cursor} if cursor else {})
        for tool in map(as_object, as_list(page.get("tools"))):
            if tool.get("name") == name:
                return tool.get("inputSchema")
        if not (cursor := as_text(page.get("nextCursor"))):
            break
    return None


MOST_BLOCKS = 10_000
"""The most parts that one answer may have."""
_ENVELOPE = {"_meta", "resultType", "ttlMs", "cacheScope"}
_AWAY = frozenset({502, 503, 504})
_SUGGESTION = "The message is that of the server. Fix the parameters, or load the tool to see what it takes."
_ASKED: Final[JsonObject] = {"input_required": True}
"""What tells that a call failed for want of an answer to a question."""


class CallFailed(Exception):
    """A request that ended without an answer to it, and how."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.message)
        self.outcome = outcome


def outcome_of(wanted: ServerRequest, answer: JsonObject, outputs: JsonObject) -> Outcome:
    """Return what an answer means, and the answer itself; `outputs` is the schema that the tool declares for it."""
    details: JsonObject = {}
    try:
        compact(answer).encode()
    except UnicodeEncodeError:  # halves of characters, which no text can hold
        answer, details = as_object(json.loads(_shown(answer))), {"replaced_characters": True}
    except (ValueError, RecursionError):
        return failed("The answer holds numbers that JSON has not, or is nested too deeply.")
    match wanted.method:
        case "tools/call":
            outcome = _called(answer, outputs)
        case "prompts/get":
            response = {word: value for word, value in answer.items() if word not in _ENVELOPE}
            outcome = Outcome("success", result=response, passed=answer)
        case _:
            outcome = Outcome("success", result=_read(answer), passed=answer)
    return replace(outcome, details={**outcome.details, **details}) if details else outcome


def unanswered(fault: Unanswered) -> Outcome:
    """Return the outcome of a request that stopped at a question."""
    return Outcome("error", message=fault.message, suggestion=fault.suggestion, details={**fault.details, **_ASKED})


def for_want_of(fault: Unanswered | None, outcome: Outcome) -> Outcome:
    """Return an outcome that reports an unanswered question, if the call failed after it."""
    if fault is None or outcome.status != "error":
        return outcome
    return replace(outcome, suggestion=fault.suggestion, details={**outcome.details, **fault.details, **_ASKED})


def refused(name: str, refusal: MCPError) -> Outcome:
    """Return the outcome of a request that the server refused."""
    details: dict[str, Json] = {"mcp_code": refusal.code}
    data: Json = refusal.error.data
    if data is not None and len(shown := _shown(data)) <= QUOTED:
        details["mcp_data"] = json.loads(shown)
    message = strip_controls(refusal.error.message)[:QUOTED]
    required = as_object(as_object(data).get("requiredCapabilities"))
    if refusal.code == MISSING_REQUIRED_CLIENT_CAPABILITY and required.keys() & {"elicitation", "sampling", "roots"}:
        details |= _ASKED
    # It was unreachable if an intermediary reports that, or if an answer broke off after it began.
    is_broken_off = refusal.code == CONNECTION_CLOSED and refusal.error.message.startswith("SSE stream")
    is_away = is_broken_off or as_object(data).get("http_status") in _AWAY
    return Outcome(
        "unavailable" if is_away else "error",
        message=f"The server refused {name!r} ({refusal.code}): {message}",
        suggestion=_SUGGESTION,
        details=details,
    )


def _called(answer: JsonObject, outputs: JsonObject) -> Outcome:
    blocks = as_list(answer.get("content"))
    if len(blocks) > MOST_BLOCKS:
        return failed(f"The answer has {len(blocks):,} parts, more than {MOST_BLOCKS:,}.")
    if answer.get("isError") is True:
        said = strip_controls("\n".join(_texts(blocks)))[:QUOTED].strip()
        return Outcome(
            "error",
            result=answer.get("structuredContent", _content(blocks, {}) if len(blocks) > 1 else None),
            message=said or "The tool failed and gave no reason.",
            suggestion=_SUGGESTION,
            passed=answer,
        )
    if "structuredContent" not in answer:
        return Outcome("success", result=_content(blocks, outputs), passed=answer)
    value = answer["structuredContent"]
    is_schema = outputs.keys() & {"type", "properties", "$ref", "anyOf", "oneOf", "allOf"}
    found: Sequence[Issue] = faults(outputs, value, place="result") if is_schema else ()
    if not found:
        return Outcome("success", result=value, passed=answer)
    return Outcome(
        "error",
        result=value,
        message=f"The result is not what the tool declares: {found[0].place} {found[0].reason}.",
        suggestion="The server is at fault, or its schema changed: refresh it.",
        details={"issues": [issue.to_json() for issue in found]},
    )


def _content(blocks: Sequence[Json], outputs: JsonObject) -> Json:
    """Return the parts of an answer: texts as text, one as JSON where the tool declares what it gives; else all."""
    if not blocks:
        return None
    texts = _texts(blocks)
    if len(texts) < len(blocks):
        return [dict(as_object(block)) for block in blocks]
    if len(texts) > 1:
        return "\n".join(texts)
    if outputs:
        with suppress(NotJsonOutput):
            return parse(texts[0].encode(errors="replace")).value
    return texts[0]


def _texts(blocks: Sequence[Json]) -> list[str]:
    return [as_text(as_object(block).get("text")) for block in blocks if as_object(block).get("type") == "text"]


def _read(answer: JsonObject) -> Json:
    """Return a resource: one text as text, else every part with its type and address."""
    contents = [as_object(part) for part in as_list(answer.get("contents"))[:MOST_BLOCKS]]
    if len(contents) == 1 and isinstance(text := contents[0].get("text"), str):
        return text
    return [dict(part) for part in contents]


def failed(message: str) -> Outcome:
    """Return the outcome of an answer that cannot be taken."""
    return Outcome("error", message=message, suggestion="The server is at fault; ask it for less.")


def _shown(value: Json) -> str:
    try:
        return compact(value).encode(errors="replace").decode()
    except (ValueError, RecursionError):
        return "null"
