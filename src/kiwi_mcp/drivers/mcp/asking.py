"""One request to its end: sent, asked back for what it lacks, sent again, or followed as a task."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic
from typing import Final

from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.exceptions import MCPError

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.errors import Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.outcome import Outcome, Progress, silent
from kiwi_mcp.drivers.mcp.bind import Wanted
from kiwi_mcp.drivers.mcp.connection import Connection
from kiwi_mcp.drivers.mcp.failures import harmless
from kiwi_mcp.drivers.mcp.questions import answered
from kiwi_mcp.drivers.mcp.result import Ended, failed, for_want_of, outcome_of, unanswered
from kiwi_mcp.drivers.mcp.talk import LONGEST_REPORT, Talk
from kiwi_mcp.drivers.mcp.tasks import Followed

MOST_ROUNDS = 10
"""How often a server may ask back before it answers one request."""
_BREATH = 0.1
"""How long a server that asks for another try and nothing else is left alone, in seconds."""
_HEADER_MISMATCH: Final = -32020
_PAGES = 100


@dataclass(slots=True)
class Request:
    """One request on its way: what is asked, with what, for how long, and who waits for it."""

    wanted: Wanted
    inputs: JsonObject
    timeout: float
    parameters: JsonObject
    outputs: JsonObject
    caller: Caller
    is_repeatable: bool
    asked_at: float = 0.0
    unanswered: Unanswered | None = None
    """The first question on the way that was not answered."""

    @property
    def progress(self) -> ProgressFnT | None:
        """What is told of the server's progress, if anybody listens."""
        if self.caller.report is silent:
            return None

        async def told(progress: float, total: float | None, message: str | None) -> None:
            said = harmless(message or "")[:LONGEST_REPORT]
            self.caller.report(Progress(said, done=progress, total=total))

        return told


async def asked(connection: Connection, request: Request) -> Outcome:
    """Return the outcome of a request; what the server refuses is raised as the SDK's error."""
    request.asked_at = monotonic()
    async with asyncio.timeout(request.timeout) as limit:
        talk = Talk(request.caller, limit)
        try:
            await connection.listen(request.caller)
            with connection.talking(talk):
                answer = await _settled(connection, request, talk)
        except Unanswered as fault:
            return unanswered(fault)
        except Ended as end:
            return end.outcome
        finally:
            request.unanswered = talk.unanswered
    return for_want_of(talk.unanswered, outcome_of(request.wanted, answer, request.outputs))


async def _settled(connection: Connection, request: Request, talk: Talk) -> JsonObject:
    """Return the answer itself, however often the server asks back first."""
    first = params = request.wanted.params(request.inputs)
    is_modern = (await connection.greeted()).era == "modern"
    for _ in range(MOST_ROUNDS + 1):
        answer = await _sent(connection, request, params)
        match answer.get("resultType", "complete") if is_modern else "complete":
            case "complete":
                return answer
            case "input_required":
                params = {**first, **await _supplied(answer, talk)}
            case "task" if request.wanted.method == "tools/call" and connection.has_tasks:
                return await Followed(connection, request.wanted.name, answer, talk).result()
            case _:
                raise Ended(failed("The server answered with a kind of result that this client does not know."))
    raise Ended(failed(f"The server asked back more than {MOST_ROUNDS} times and never answered."))


async def _supplied(answer: JsonObject, talk: Talk) -> JsonObject:
    """Return what the next try carries: the answers that were asked for, and the server's state as it gave it."""
    more: dict[str, Json] = {}
    if wanted := answer.get("inputRequests"):
        more["inputResponses"] = await answered(wanted, talk)
    else:
        await asyncio.sleep(_BREATH)
    if "requestState" in answer:
        more["requestState"] = answer["requestState"]
    return more


async def _sent(connection: Connection, request: Request, params: JsonObject) -> JsonObject:
    wanted, caller, progress = request.wanted, request.caller, request.progress
    # Only over HTTP are there headers, in which a server may want parts of the arguments too.
    schema = request.parameters if connection.server.transport == "http" else None
    try:
        return await connection.ask(wanted.method, params, caller=caller, progress=progress, schema=schema)
    except MCPError as refusal:
        if refusal.code != _HEADER_MISMATCH:
            raise
        # It wants others than the tool's manifest knows of; which ones, its own list says.
        told = await _schema(connection, wanted.name)
        return await connection.ask(wanted.method, params, caller=caller, progress=progress, schema=told)


async def _schema(connection: Connection, name: str) -> Json:
    cursor = ""
    for _ in range(_PAGES):
        page = await connection.ask("tools/list", {"cursor": cursor} if cursor else {})
        for tool in map(as_object, as_list(page.get("tools"))):
            if tool.get("name") == name:
                return tool.get("inputSchema")
        if not (cursor := as_text(page.get("nextCursor"))):
            break
    return None
