"""The agent loop: `advance` does the next step of a thread, and says whether it continues, waits or has ended.

The loop interprets nothing: arguments reach the tool, and the recorded output reaches the model, byte for byte. Every
failure of a call is a result for the model. What a call may do is decided by the gates, never here.
"""

from __future__ import annotations

import asyncio
import json

from msgspec import Struct, to_builtins

from kiwi_mcp.domain.errors import ApprovalRequired, KiwiError, LeaseLost
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.messages import ToolCallPart, ToolResultPart
from kiwi_mcp.domain.threads import FinishReason, NewEvent, ThreadChanges, ThreadStatus, WaitReason
from kiwi_mcp.kernel.threads.model import ModelRefused, ask_model
from kiwi_mcp.kernel.threads.results import ResultStatus, failed_result, is_waiting, result_of_answer
from kiwi_mcp.kernel.threads.work import CONTINUE, START, ThreadWork
from kiwi_mcp.kernel.verb import Answer

AT_ONCE = 8
"""How many calls of one reply run at the same time."""
_BROKEN = 3
"""How many replies in a row may break off before the thread fails."""
_NUDGE = "You have not called `return`. Call it now with the declared outputs, or continue with the task."
_REPEATED, _TWO_TURNS = 3, 4


class Continue(Struct, frozen=True):
    """There is a next step."""

    is_next: bool = True


class Wait(Struct, frozen=True):
    """The thread waits; nothing of it runs until something happens."""

    reason: WaitReason
    is_next: bool = False


class End(Struct, frozen=True):
    """The thread has ended."""

    status: ThreadStatus
    is_next: bool = False


Step = Continue | Wait | End
_CONTINUE = Continue()


async def advance(work: ThreadWork) -> Step:
    """Do the next step: obey a command, finish calls, end, or ask the model."""
    state, thread = work.state, work.thread
    if thread.command == "cancel":
        return await end(work, "cancelled", "cancelled", message="It was cancelled.")
    if thread.command == "pause":
        await work.append(NewEvent("limit", {"paused": True}), changes=ThreadChanges(status="paused"))
        return Wait("")
    if not thread.usage.turns and (asked := await work.stores.question_of(thread.id, START)) is not None:
        if asked.status == "open":
            return Wait("start")
        if asked.answer != CONTINUE:
            return await end(work, "cancelled", "cancelled", code="denied", message="The owner did not let it start.")
    if state.returned is not None:
        return await end(work, "completed", "stop", result=state.returned)
    if state.pending:
        return await make_calls(work)
    match state.stop:
        case "end" | "calls":
            return await finish_turn(work)
        case "length":
            return await end(work, "exhausted", "max_tokens", message="The model reached its output limit.")
        case "refusal" | "filtered":
            return await end(work, "failed", "error", code=state.stop, message=f"The model stopped: {state.stop}.")
        case "broken" if state.breaks >= _BROKEN:
            return await end(work, "failed", "error", code="stream_broken", message="The model's replies broke off.")
        case _:
            return await next_turn(work)


async def next_turn(work: ThreadWork) -> Step:
    """Ask the model, within the limits."""
    if limit := exceeded(work):
        return await stop_at_limit(work, limit)
    try:
        await ask_model(work)
    except ModelRefused as refused:
        return await stop_at_limit(work, refused.limit) if refused.limit else Wait("budget")
    except LeaseLost:
        raise
    except KiwiError as error:
        body: JsonObject = {"code": error.code, "message": error.message}
        await work.append(NewEvent("model_failed", body))
        return await end(
            work, "failed", "error", code=error.code, message=f"{error.message} {error.suggestion}".strip()
        )
    return _CONTINUE


def exceeded(work: ThreadWork) -> str:
    """Return the first limit that allows no further turn; empty where there is none."""
    limits, usage = work.thread.limits, work.thread.usage
    if usage.turns >= limits.turns:
        return "turns"
    if usage.tokens >= limits.tokens:
        return "tokens"
    if work.seconds() >= limits.seconds:
        return "duration"
    return ""


async def stop_at_limit(work: ThreadWork, limit: str) -> Step:
    """End a thread at a limit with what it has so far."""
    await work.append(NewEvent("limit", {"limit": limit}))
    return await end(work, "exhausted", "limit", code=f"{limit}_exceeded", message=f"The limit `{limit}` is reached.")


async def finish_turn(work: ThreadWork) -> Step:
    """End the turn of a model that called nothing."""
    if work.thread.kind == "conversation":
        await work.append(NewEvent("asked", {"waits_for": "message"}), changes=ThreadChanges("waiting", "message"))
        return Wait("message")
    if work.start.return_schema is None:
        return await end(work, "completed", "stop", result=work.state.text)
    if work.state.nudges:
        return await end(work, "failed", "error", code="no_return", message="The model ended without `return`.")
    await work.append(NewEvent("injected", {"text": _NUDGE, "is_nudge": True}))
    return _CONTINUE


async def end(
    work: ThreadWork,
    status: ThreadStatus,
    reason: FinishReason,
    *,
    result: Json = None,
    code: str = "",
    message: str = "",
) -> End:
    """Append the end of a thread. One that stops early keeps the text of its last reply as a partial result."""
    given = result if result is not None else (work.state.text or None)
    body: JsonObject = {"status": status, "finish_reason": reason, "code": code, "message": message, "result": given}
    changes = ThreadChanges(status=status, result=given, finish_reason=reason, code=code, message=message)
    await work.append(NewEvent("ended", body), changes=changes)
    return End(status)


async def make_calls(work: ThreadWork) -> Step:
    """Make the calls of the last reply, several at once; those that change files of the project one after another."""
    calls = list(work.state.pending.values())
    left = work.thread.limits.tool_calls - work.thread.usage.tool_calls
    if is_repeating(work.state.recent_calls) and not await work.is_confirmed("loop"):
        return Wait("question")
    gate, in_turn = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
    waits = await asyncio.gather(*(_make_call(work, call, gate, in_turn) for call in calls[: max(0, left)]))
    for call in calls[max(0, left) :]:
        await _note(work, call, "error", failed_result(call, "Not called: the limit `tool_calls` is reached."))
    for reason in waits:
        if reason:
            changes = ThreadChanges(status="waiting", waits_for=reason)
            await work.append(NewEvent("asked", {"waits_for": reason}), changes=changes)
            return Wait(reason)
    return await stop_at_limit(work, "tool_calls") if left < len(calls) else _CONTINUE


async def _make_call(
    work: ThreadWork, call: ToolCallPart, gate: asyncio.Semaphore, in_turn: asyncio.Lock
) -> WaitReason:
    """Make one call and append its result; return what it waits for, if it does."""
    if call.id in work.state.began:
        # It began before this process had the thread: whether it was done is not known, and it is not done twice.
        result = failed_result(call, "Unknown: the call began, and whether it was done is not known.")
        await _note(work, call, "unknown", result)
        return ""
    request = request_of(work, call)
    if isinstance(request, ToolResultPart):
        await _note(work, call, "invalid_input" if call.name in work.targets else "not_found", request)
        return ""
    verb, payload = request
    async with gate:
        if work.changes_files(payload):
            async with in_turn:
                answer = await work.services.dispatch(verb, payload, work.caller(call))
        else:
            answer = await work.services.dispatch(verb, payload, work.caller(call))
    if is_waiting(answer):
        return await _wait(work, call, answer)
    await work.sync()
    if call.id in work.state.pending:  # the record of a run has noted its result already
        status, part = result_of_answer(call, answer)
        await _note(work, call, status, part)
    return ""


async def _wait(work: ThreadWork, call: ToolCallPart, answer: Answer) -> WaitReason:
    error = answer.error
    if isinstance(error, ApprovalRequired):
        approval = as_text(error.details.get("approval_id"))
        await work.append(NewEvent("asked", {"waits_for": "approval", "call_id": call.id, "approval_id": approval}))
        return "approval"
    return "child" if as_text(answer.content.get("waits_for")) == "child" else "question"


def request_of(work: ThreadWork, call: ToolCallPart) -> tuple[str, JsonObject] | ToolResultPart:
    """Return the verb and the payload of a call, or the result that says why it cannot be made."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return failed_result(call, f"Invalid input: the arguments are not JSON ({error}). Send a JSON object.")
    if not isinstance(arguments, dict):
        return failed_result(call, "Invalid input: the arguments are not a JSON object.")
    identity = work.targets.get(call.name)
    if identity is None:
        known = ", ".join(work.targets)
        return failed_result(call, f"No tool is named {call.name!r}. Tools: {known}. `search` finds others.")
    project: JsonObject = {"project_path": work.thread.project} if work.thread.project else {}
    if identity:
        return "execute", {"item_id": identity, "parameters": arguments, **project}
    return call.name, {**arguments, **(project if call.name != "help" else {})}


async def _note(work: ThreadWork, call: ToolCallPart, status: ResultStatus, part: ToolResultPart) -> None:
    body: JsonObject = {"status": status, "call_id": call.id, "part": to_builtins(part)}
    await work.append(NewEvent("result", body), changes=ThreadChanges(tool_calls=1))


def is_repeating(calls: list[str]) -> bool:
    """Whether the last calls repeat: the same three times, or two in turns twice."""
    same = len(calls) >= _REPEATED and len({*calls[-_REPEATED:]}) == 1
    in_turns = len(calls) >= _TWO_TURNS and calls[-_TWO_TURNS:-2] == calls[-2:] and calls[-1] != calls[-2]
    return same or in_turns
