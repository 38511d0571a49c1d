"""`McpDriver`: carries out one request to a server, lists all that a server offers, completes values, logs in.

A request has rounds of questions, may continue as a task, and its answer has a meaning for the caller.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from time import monotonic
from typing import Final
from weakref import WeakKeyDictionary

from mcp.shared.exceptions import MCPError
from mcp.shared.inbound import find_invalid_x_mcp_header
from mcp_types import CONNECTION_CLOSED, MISSING_REQUIRED_CLIENT_CAPABILITY
from msgspec import Struct, convert, field
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Ask, Caller, Space, no_answers
from kiwi_mcp.domain.errors import LoginRequired, Unanswered, Unavailable
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.items import Chain, Tool
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.mcp import Era, ServerListing
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.domain.plan import REPEATABLE, HttpSpec, Plan, ProcessSpec
from kiwi_mcp.domain.safe_text import strip_controls
from kiwi_mcp.drivers import Dispatch, Driver, unavailable
from kiwi_mcp.drivers.mcp.connection import QUOTED, ServerConnection, ServerInfo
from kiwi_mcp.drivers.mcp.oauth.account import account_for, forget, log_in, settled
from kiwi_mcp.drivers.mcp.pool import ConnectionPool, Lease
from kiwi_mcp.drivers.mcp.rpc import ProgressCallback
from kiwi_mcp.drivers.mcp.server import ServerConfig, ServerRequest, plan_of, server_of, wanted_of
from kiwi_mcp.drivers.mcp.server_events import LONGEST_REPORT, CallerChannel, answered, missing_grant
from kiwi_mcp.drivers.output import NotJsonOutput, parse
from kiwi_mcp.drivers.sandboxed import open_sandbox
from kiwi_mcp.manifest.json_schema import faults, schema_faults
from kiwi_mcp.manifest.runtime import seconds
from kiwi_mcp.primitives.http import client
from kiwi_mcp.primitives.http.origin_client import is_session_lost

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
                code = error.get("code")
                message = as_text(error.get("message")) or said or "The server gave no reason."
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
_PAUSE = 0.1
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
            details = {**fault.details, **_ASKED}
            return Outcome("error", message=fault.message, suggestion=fault.suggestion, details=details)
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
                    await asyncio.sleep(_PAUSE)
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
"""The detail of a call that failed because a question was not answered."""


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
        answer = as_object(json.loads(_shown(answer)))
        details = {"replaced_characters": True}
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


MOST_ITEMS = 10_000
"""The most items of one kind that are taken from a server."""
MOST_PAGES = 1_000
"""The most pages in which it may give them."""
MOST_BYTES = 64_000_000
"""The maximum size of the descriptions of all items of a server together, in bytes."""
MOST_ISSUES = 100
"""The maximum number of issues of one listing that are reported."""
_BREATH = 16
"""Items after which others have their turn."""
_LONGEST_NAME = 256
_METHOD_NOT_FOUND: Final = -32601
_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class _ListKind(Struct, frozen=True):
    """One kind of item: how it is listed, under which key, which field names it, and when it is valid."""

    method: str
    word: str
    named_by: str
    check: Callable[[JsonObject, str, Era], list[Issue]] = lambda _item, _at, _era: []


class _Taking(Struct):
    """A listing in progress: its size so far, its issues, and where it was cut short."""

    era: Era
    size: int = 0
    faults: list[Issue] = field(default_factory=list)
    untold: int = 0
    limits: list[Issue] = field(default_factory=list)


async def listed(connection: ServerConnection) -> ServerListing:
    """Ask a server for everything it offers."""
    greeting = await connection.greeted()
    taking = _Taking(greeting.era)
    found = {kind.word: await _all(connection, greeting, kind, taking) for kind in _KINDS}
    more = Issue("items", f"have {taking.untold:,} more faults", "The items with faults are left out.")
    return ServerListing(
        server_info=greeting.server_info,
        protocol_version=greeting.protocol_version,
        era=greeting.era,
        instructions=greeting.instructions,
        tools=found["tools"],
        prompts=found["prompts"],
        resources=found["resources"],
        templates=found["resourceTemplates"],
        issues=(*taking.faults, *([more] if taking.untold else []), *taking.limits),
    )


async def _all(
    connection: ServerConnection, greeting: ServerInfo, kind: _ListKind, taking: _Taking
) -> tuple[JsonObject, ...]:
    if kind.method.partition("/")[0] not in greeting.capabilities:
        return ()
    reason = f"the list has more than {MOST_ITEMS:,} items, {MOST_PAGES:,} pages or {MOST_BYTES:,} bytes"
    too_many = Issue(kind.word, reason, "The rest is left out.", severity="warning")
    kept: dict[str, JsonObject] = {}
    cursor = ""
    for _ in range(MOST_PAGES):
        try:
            page = await connection.ask(kind.method, {"cursor": cursor} if cursor else {})
        except MCPError as refusal:
            if refusal.code != _METHOD_NOT_FOUND:
                said = strip_controls(refusal.error.message)[:_LONGEST_NAME]
                fault = f"cannot be listed ({refusal.code}: {said})"
                taking.limits.append(Issue(kind.word, fault, "Ask the author of the server."))
            break
        is_whole, cursor = await _take(kind, page, kept, taking), as_text(page.get("nextCursor"))
        if not is_whole or (cursor and len(kept) >= MOST_ITEMS):
            taking.limits.append(too_many)
            break
        if not cursor:
            break
    else:
        taking.limits.append(too_many)
    return tuple(kept.values())


async def _take(kind: _ListKind, page: JsonObject, kept: dict[str, JsonObject], taking: _Taking) -> bool:
    """Keep what is sound on a page; whether all of the page was looked at."""
    items, before = as_list(page.get(kind.word)), len(kept)
    longest = _LONGEST_NAME if kind.named_by == "name" else 8 * _LONGEST_NAME
    for number, item in enumerate(map(as_object, items[: MOST_ITEMS - before])):
        if number % _BREATH == 0:
            await asyncio.sleep(0)
        taking.size += len(compact(items[number]))
        if taking.size > MOST_BYTES:
            return False
        name = as_text(item.get(kind.named_by))
        at = f"{kind.word}.{strip_controls(name)[:_LONGEST_NAME]}" if name else f"{kind.word}[{before + number}]"
        if not name or len(name) > longest or _CONTROLS.search(name):
            fix = "The server must give it one; the rest is kept."
            found = [Issue(at, f"has no usable `{kind.named_by}`", fix)]
        elif name in kept:
            found = [Issue(at, "is listed twice", "The first one is kept.", severity="warning")]
        else:
            found = kind.check(item, at, taking.era)
        if not found:
            kept[name] = item
        # The first faults are reported, and the others are counted.
        room = MOST_ISSUES - len(taking.faults)
        taking.faults += found[:room]
        taking.untold += len(found[room:])
    return len(items) <= MOST_ITEMS - before


def _tool_faults(item: JsonObject, at: str, era: Era) -> list[Issue]:
    found: list[Issue] = []
    for word in ("inputSchema", "outputSchema"):
        schema = item.get(word)
        if schema is None and word == "outputSchema":
            continue
        if not isinstance(schema, dict) or (word == "inputSchema" and schema.get("type") != "object"):
            found.append(Issue(f"{at}.{word}", "is not the schema of an object", "The server must fix it."))
        else:
            found += schema_faults(schema, f"{at}.{word}")
    # Since the new era words of a schema become names of headers; one that cannot be a name could be anything.
    if era == "modern" and (reason := find_invalid_x_mcp_header(item.get("inputSchema"))) is not None:
        wrong = f"names headers wrongly: {strip_controls(reason)[:_LONGEST_NAME]}"
        found.append(Issue(f"{at}.inputSchema", wrong, "The server must fix it."))
    return found


def _prompt_faults(item: JsonObject, at: str, _: Era) -> list[Issue]:
    arguments = item.get("arguments")
    if arguments is None:
        return []
    if isinstance(arguments, list) and all(as_text(as_object(each).get("name")) for each in arguments):
        return []
    return [Issue(f"{at}.arguments", "are not a list of arguments with names", "The server must fix it.")]


_KINDS = (
    _ListKind("tools/list", "tools", "name", _tool_faults),
    _ListKind("prompts/list", "prompts", "name", _prompt_faults),
    _ListKind("resources/list", "resources", "uri"),
    _ListKind("resources/templates/list", "resourceTemplates", "uriTemplate"),
)


MOST_PROPOSALS = 100
"""The most proposals that are taken: as many as the protocol allows."""
_OTHER_ERA: Final = -32022
_CHANGED: Final = frozenset({_OTHER_ERA, -32600, -32601})
"""What a server may say that was replaced by one of the other era."""
_COMPLETING = 5.0
"""How long a server may take to complete what is being typed, in seconds."""


class McpDriver(Driver):
    """Calls MCP servers.

    `on_change` gets the identity of a server with a list that has changed, or may have changed. `eras` remembers the
    protocol era of each server.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[str], None] | None = None
        self.eras: dict[str, Era] = {}
        self._pools: WeakKeyDictionary[asyncio.AbstractEventLoop, ConnectionPool] = WeakKeyDictionary()

    def bind(self, chain: Chain, inputs: JsonObject, space: Space) -> Plan:
        """Return the plan of an item of a server: how the server is reached, and what it is asked."""
        tool, server = chain.tool, server_of(chain.executor, space)
        wanted = wanted_of(chain, inputs)
        spec = replace(server.spec, timeout=seconds(tool.manifest.config.get("timeout"), server.spec.timeout))
        # A tool of a remote server only reads if the owner accepted its definition and the server says so
        # (`readOnlyHint`). What a file says about a server's tool does not count. For a local process, the sandbox
        # profile shows what it may change and reach.
        is_accepted = isinstance(spec, HttpSpec) and tool.integrity == "accepted"
        return replace(
            plan_of(chain, server),
            spec=spec,
            inputs=inputs,
            facts={"mcp": {"method": wanted.method, "name": wanted.name, "transport": server.transport}},
            effect=tool.manifest.effect or ("at_most_once" if wanted.method == "tools/call" else "idempotent"),
            only_reads=wanted.method != "tools/call" or (is_accepted and not tool.manifest.mutates_state),
        )

    async def aclose(self) -> None:
        """End every connection of this event loop."""
        if (pool := self._pools.pop(asyncio.get_running_loop(), None)) is not None:
            await pool.aclose()
        await settled()
        await client.aclose()

    async def prepare(self, plan: Plan, chain: Chain, space: Space) -> None:
        """Refuse a level of isolation that this machine does not have, for a server that is a process."""
        if isinstance(plan.spec, ProcessSpec) and plan.profile is not None:
            await open_sandbox(plan.profile, space)

    async def drive(
        self, plan: Plan, chain: Chain, space: Space, *, secrets: Mapping[str, str], caller: Caller, dispatch: Dispatch
    ) -> Outcome:
        """Ask the server, and give its answer as a result."""
        server = _server_in(plan, chain.executor, space)
        request = ServerCall(
            convert(plan.facts["mcp"], ServerRequest),
            plan.inputs,
            server.spec.timeout,
            chain.tool.manifest.parameters,
            chain.tool.manifest.outputs,
            caller,
            is_repeatable=plan.effect in REPEATABLE,
        )
        if caller.journal is not None:
            caller.journal.confirm()
        try:
            return await self._ask(server, secrets, request)
        except Unavailable as fault:
            return unavailable(fault)

    def plan_server(self, chain: Chain, space: Space) -> Plan:
        """Plan how a server is started or reached, to list it or to log in; `chain` is the server's own."""
        return plan_of(chain, server_of(chain.tool, space))

    async def list_items(self, plan: Plan, chain: Chain, space: Space, secrets: Mapping[str, str]) -> ServerListing:
        """Return everything that a server offers; `chain` is the server's own."""
        server = _server_in(plan, chain.tool, space)
        async with self._pool().using(server, secrets) as lease:
            try:
                async with lease.connection.watched(), asyncio.timeout(server.spec.timeout):
                    found = await listed(lease.connection)
            except TimeoutError:
                lease.retire()
                raise Unavailable(
                    f"The MCP server {server.name!r} did not list its items within {server.spec.timeout:g} seconds.",
                    suggestion="Give it a longer `timeout`, or ask its author.",
                    server=server.identity,
                ) from None
            lease.worked()
            return found

    async def log_in(
        self, plan: Plan, chain: Chain, space: Space, secrets: Mapping[str, str], ask: Ask, scopes: Sequence[str] = ()
    ) -> str:
        """Have a person log in to the server of this chain, and return the rights that they gave."""
        server = _server_in(plan, chain.tool, space)
        account = account_for(server, secrets)
        if account.record_or_reset().challenge is None:
            try:  # what the server wants, it says when it is asked without
                await self.list_items(plan, chain, space, secrets)
            except Unavailable as fault:
                if not isinstance(fault, LoginRequired):
                    raise
        tokens = await log_in(account, ask, server=server.name, scopes=scopes)
        await self._pool().end(server.identity)  # connections that began under another login are not reused
        return tokens.scope

    async def log_out(self, link: Tool, space: Space) -> bool:
        """Forget the tokens of a server, and say whether there were any."""
        server = server_of(link, space)
        await self._pool().end(server.identity)
        return server.oauth is not None and forget(server.oauth)

    async def restart(self, identity: str) -> None:
        """End the processes of a server, so that the next call starts it anew."""
        await self._pool().end(identity)

    async def complete(
        self,
        plan: Plan,
        chain: Chain,
        space: Space,
        secrets: Mapping[str, str],
        argument: str,
        value: str,
        context: Mapping[str, str],
    ) -> list[str]:
        """Return what a server proposes for an argument of a prompt or a template, of which `value` is typed so far.

        `context` are the arguments that are known already. A server that proposes nothing, or not in time, gives an
        empty list.
        """
        server = _server_in(plan, chain.executor, space)
        config = chain.tool.manifest.config
        about: JsonObject = {"type": "ref/prompt", "name": as_text(config.get("mcp_prompt_name"))}
        if uri := as_text(config.get("mcp_resource_uri")):
            about = {"type": "ref/resource", "uri": uri}
        params: dict[str, Json] = {"ref": about, "argument": {"name": argument, "value": value}}
        if context:
            params["context"] = {"arguments": dict(context)}
        async with self._pool().using(server, secrets) as lease:
            connection = lease.connection
            try:
                async with connection.watched(), asyncio.timeout(min(server.spec.timeout, _COMPLETING)):
                    is_able = "completions" in (await connection.greeted()).capabilities
                    if not is_able or not (about.get("uri") or about.get("name")):
                        return []
                    answer = await connection.ask("completion/complete", params)
            except (MCPError, TimeoutError):
                return []
        proposed = as_list(as_object(answer.get("completion")).get("values"))
        return [one for one in proposed if isinstance(one, str)][:MOST_PROPOSALS]

    def _pool(self) -> ConnectionPool:
        loop = asyncio.get_running_loop()
        if (pool := self._pools.get(loop)) is None:
            pool = self._pools[loop] = ConnectionPool(self.eras, self.on_change)
        return pool

    async def _ask(self, server: ServerConfig, secrets: Mapping[str, str], request: ServerCall) -> Outcome:
        pool, is_askable = self._pool(), bool(server.client) and request.caller.ask is not no_answers
        for is_last in (False, True):
            async with pool.using(server, secrets, is_askable=is_askable) as lease:
                try:
                    async with lease.connection.watched():
                        outcome = await asked(lease.connection, request)
                except Unavailable as fault:
                    return _with_findings(unavailable(fault), lease.connection)
                except MCPError as refusal:
                    if server.transport == "http" and (refusal.code in _CHANGED or _was_not_heard(refusal)):
                        lease.retire()
                        if not is_last and (request.is_repeatable or _was_not_heard(refusal)):
                            continue
                    lacking = missing_grant(refusal, server)
                    outcome = (
                        Outcome("error", message=lacking.message, suggestion=lacking.suggestion)
                        if lacking
                        else for_want_of(request.unanswered, refused(request.wanted.name, refusal))
                    )
                except TimeoutError:
                    late = replace(_late(lease, request), sent=lease.connection.left())
                    return _with_findings(late, lease.connection)
                if lease.worked() and self.on_change is not None:
                    self.on_change(server.identity)  # a server that came back may be another version of itself
                sent = lease.connection.left()
                if outcome.status == "error":
                    lease.connection.save_log()
                    if remedy := lease.connection.lacking(outcome.message, sent):
                        outcome = replace(outcome, suggestion=remedy)
                if outcome.status == "error" and request.not_passed:
                    outcome = replace(outcome, suggestion=request.not_passed[0].suggestion)
                outcome = _with_findings(replace(outcome, sent=sent), lease.connection)
                notices: list[Json] = [*lease.connection.notices()]
                notices += [f"{fault.message} {fault.suggestion}" for fault in request.not_passed]
                return replace(outcome, details={**outcome.details, "notices": notices}) if notices else outcome
        raise AssertionError("the last attempt has an outcome")


def _with_findings(outcome: Outcome, connection: ServerConnection) -> Outcome:
    """Return an outcome that names the settings of other programs that the server's process created."""
    found = connection.quarantined()
    if not (warnings := tuple(found.warnings())):
        return outcome
    passed = outcome.passed
    if passed is not None:  # a client that gets the server's own answer also gets the warnings
        passed = {**passed, "content": [*as_list(passed.get("content")), {"type": "text", "text": "\n".join(warnings)}]}
    details = {**outcome.details, **found.to_json()}
    return replace(outcome, details=details, warnings=(*outcome.warnings, *warnings), passed=passed)


def _was_not_heard(refusal: MCPError) -> bool:
    """Whether the server surely did nothing: it speaks another era, or has forgotten the session."""
    return refusal.code == _OTHER_ERA or is_session_lost(refusal.error.data)


def _late(lease: Lease, request: ServerCall) -> Outcome:
    # A server that sent nothing at all in the meantime hangs: it is restarted for the next call. A server that did send
    # something is only slow with this call, and was asked to stop.
    if lease.connection.heard_at < request.asked_at:
        lease.retire()
    return Outcome(
        "timeout",
        message=f"The MCP server {lease.connection.server.name!r} did not answer {request.wanted.name!r} within "
        f"{request.timeout:g} seconds; it was cancelled.",
        suggestion="Ask for less, or give the tool a longer `config.timeout`.",
    )


def _server_in(plan: Plan, link: Tool, space: Space) -> ServerConfig:
    """Return the server of a plan as the plan says that it is reached; without a sandbox there, the strictest."""
    assert isinstance(plan.spec, ProcessSpec | HttpSpec)  # noqa: S101 - this driver plans nothing else
    client = tuple(map(as_text, as_list(as_object(plan.facts.get("mcp")).get("client"))))
    server = replace(server_of(link, space), spec=plan.spec, client=client)
    return server if plan.profile is None else replace(server, profile=plan.profile)
