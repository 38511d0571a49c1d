"""One call of a thread: the request, what is known of an earlier attempt, the answer as a result in the journal."""

from __future__ import annotations

import json
import os
import re

from msgspec import to_builtins

from kiwi_mcp.domain.errors import ApprovalRequired, Unavailable
from kiwi_mcp.domain.json import JsonObject, as_object, as_text
from kiwi_mcp.domain.messages import ToolCallPart, ToolDefinition, ToolResultPart
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges, WaitReason
from kiwi_mcp.kernel.threads.results import ResultStatus, failed_result, is_waiting, result_of_answer
from kiwi_mcp.kernel.threads.start import with_properties
from kiwi_mcp.kernel.threads.unknown import Stopped, settle_call
from kiwi_mcp.kernel.threads.work import ThreadWork
from kiwi_mcp.kernel.verb import Answer

_NAME_LENGTH = 64


async def make_call(work: ThreadWork, call: ToolCallPart) -> WaitReason | Stopped:
    """Make one call and append its result; return what it waits for, if it does."""
    request = request_of(work, call)
    if isinstance(request, ToolResultPart):
        await note_result(work, call, "invalid_input" if call.name in work.targets else "not_found", request)
        return ""
    verb, payload = request
    if (settled := await settle_call(work, call, payload)) is not None:
        if isinstance(settled, str):
            return settled
        await note_result(work, call, *settled)
        return ""
    try:
        lock = await work.take_turn(payload)
    except Unavailable as busy:
        await note_result(work, call, "unavailable", failed_result(call, busy.message))
        return ""
    try:
        answer = await work.services.dispatch(verb, payload, work.caller(call))
    finally:
        if lock is not None:
            os.close(lock)
    if is_waiting(answer):
        return await _wait(work, call, answer)
    await work.sync()
    if work.state.is_open(call):  # else the record of a run has noted its result already
        status, part = result_of_answer(call, answer)
        loaded = loaded_tool(work, answer.content) if verb == "load" and status == "ok" else ()
        await note_result(work, call, status, part, *loaded)
    return ""


def loaded_tool(work: ThreadWork, content: JsonObject) -> tuple[NewEvent, ...]:
    """Return the event that adds a definition to further requests, for a provider that may get more tools later."""
    identity, metadata = as_text(content.get("identity")), as_object(content.get("metadata"))
    is_callable = bool(content.get("chain")) and content.get("permitted") is not False
    if work.choice.tools_mode != "grow" or not is_callable or identity in work.targets.values():
        return ()
    name = base = re.sub(r"[^A-Za-z0-9_-]", "_", as_text(content.get("name")) or "tool")[:_NAME_LENGTH]
    number = 1
    while name in work.targets:
        number += 1
        name = f"{base[: _NAME_LENGTH - 4]}_{number}"
    text = as_text(metadata.get("description")) or name
    tool = ToolDefinition(name, text, with_properties(as_object(content.get("parameters"))))
    return (NewEvent("loaded", {"tool": to_builtins(tool), "identity": identity}),)


async def _wait(work: ThreadWork, call: ToolCallPart, answer: Answer) -> WaitReason:
    error = answer.error
    if isinstance(error, ApprovalRequired):
        approval = as_text(error.details.get("approval_id"))
        await work.append(NewEvent("asked", {"waits_for": "approval", "call_id": call.id, "approval_id": approval}))
        return "approval"
    await work.sync()  # a call of `wait` has noted when it ends
    return "child" if as_text(answer.content.get("waits_for")) == "child" else "question"


def request_of(work: ThreadWork, call: ToolCallPart) -> tuple[str, JsonObject] | ToolResultPart:
    """Return the verb and the payload of a call, or the result that says why it cannot be made."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
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


async def note_result(
    work: ThreadWork, call: ToolCallPart, status: ResultStatus, part: ToolResultPart, *more: NewEvent
) -> None:
    """Append the result of a call."""
    await work.append(result_event(call, status, part), *more, changes=ThreadChanges(tool_calls=1))


def result_event(call: ToolCallPart, status: ResultStatus, part: ToolResultPart) -> NewEvent:
    """Return the event with the result of a call."""
    return NewEvent("result", {"status": status, "call_id": call.id, "part": to_builtins(part)})
