"""One call of a thread: the request, what is known of an earlier attempt, the answer as a result in the journal.

A call without a result that began before this process had the thread runs again if its effect permits that. One that
runs at most once never does: its item's `probe` finds out whether it was done, else the owner says so.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from typing import Literal, TypeAlias

from msgspec import to_builtins

from kiwi_mcp.domain.errors import ApprovalNotFound, ApprovalRequired, KiwiError, ThreadWaiting, Unavailable
from kiwi_mcp.domain.json import JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.messages import ToolCallPart, ToolDefinition, ToolResultPart
from kiwi_mcp.domain.plan import REPEATABLE
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges, WaitReason
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.threads.results import ResultStatus, failed_result, result_of_answer
from kiwi_mcp.kernel.threads.start import with_properties
from kiwi_mcp.kernel.threads.state import BegunCall
from kiwi_mcp.kernel.threads.work import ThreadWork, new_question

Stopped: TypeAlias = Literal["stop"]
CallEnd: TypeAlias = tuple[ResultStatus, ToolResultPart]
STOPPED_BY_OWNER = "The owner stopped it at a call of which it is not known whether it was done."
_MOST_ATTEMPTS = 3
"""How often an idempotent call begins before the owner is asked."""
_DONE = "Done: the owner says that the call was done before its process ended. Its output was lost."
_NOT_DONE = "Not done: the owner says that the call was not done. Make it again if it is still needed."
_UNKNOWN = (
    "Unknown: the process of this call ended before its result was stored, and the owner did not say in time whether "
    "it was done. Do not make the same call again without finding out."
)
_EXPIRED = (
    "Expired: the owner did not answer in time whether this call may run. Nothing was done, and that is no refusal. "
    "Continue without it, or make it again to ask once more."
)
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
    if isinstance(error := answer.error, ApprovalRequired):
        approval = as_text(error.details.get("approval_id"))
        await work.append(NewEvent("asked", {"waits_for": "approval", "call_id": call.id, "approval_id": approval}))
        return "approval"
    await work.sync()
    if isinstance(error, ThreadWaiting):  # a call of `wait` has noted when it ends
        return "child" if as_text(answer.content.get("waits_for")) == "child" else "question"
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
    result = NewEvent("result", {"status": status, "call_id": call.id, "part": to_builtins(part)})
    await work.append(result, *more, changes=ThreadChanges(tool_calls=1))


async def settle_call(
    work: ThreadWork, call: ToolCallPart, payload: JsonObject
) -> WaitReason | Stopped | CallEnd | None:
    """Return None if a call is to be made, else its result or what it waits for."""
    begun = work.state.began.get(call.id)
    if begun is None:
        if (approval_id := work.state.approvals.get(call.id)) is None:
            return None
        try:
            approval = await work.stores.do(partial(work.services.store.approvals().get, approval_id, now_ms()))
        except ApprovalNotFound:
            return None
        is_silent = approval.status == "expired" and not approval.decided_at
        return ("timeout", failed_result(call, _EXPIRED)) if is_silent else None
    if begun.effect in REPEATABLE and (begun.effect == "pure" or begun.attempts < _MOST_ATTEMPTS):
        return None
    match await _probe(work, call, payload):
        case {"done": True, **found}:
            return "ok", ToolResultPart(
                call.id, call.name, text_of(found.get("result")), label=f"[data from {call.name}]"
            )
        case {"done": False}:
            return None
        case _:
            return await _ask_owner(work, call, begun)


async def _probe(work: ThreadWork, call: ToolCallPart, payload: JsonObject) -> JsonObject:
    """Return what the probe of an item says of a call: whether it was `done`, and its `result`; else nothing."""
    try:
        name = as_text(work.catalog.find(as_text(payload.get("item_id"))).manifest.extra.get("probe"))
        if not name or work.catalog.find(name).manifest.effect != "pure":
            return {}
    except KiwiError:
        return {}
    parameters: JsonObject = {"key": work.caller(call).origin.key, "arguments": as_object(payload.get("parameters"))}
    project: JsonObject = {"project_path": work.thread.project} if work.thread.project else {}
    request: JsonObject = {"item_id": name, "parameters": parameters, **project}
    answer = await work.services.dispatch("execute", request, work.own_caller())
    return {} if answer.is_error else as_object(answer.content.get("result"))


async def _ask_owner(work: ThreadWork, call: ToolCallPart, begun: BegunCall) -> WaitReason | Stopped | CallEnd | None:
    """Return what the owner says of a call, or that the thread waits for it; None if it is to run again."""
    key = f"unknown:{work.caller(call).origin.key}:{begun.attempts}"
    known = await work.stores.question_of(work.thread.id, key)
    if known is None:
        schema: JsonObject = {"type": "string", "enum": ["done", "not done", "run again", "stop"]}
        limit = f"It was tried {begun.attempts} times" if begun.effect in REPEATABLE else "It runs at most once"
        text = (
            f"The call `{call.name}` began, and its process ended before the result was stored (run {begun.run_id}). "
            f"{limit}, so it is not repeated by itself. Arguments: {call.arguments[:1_000]}\nWas it done?"
        )
        await work.ask(new_question(work.thread, key, "ask", text, schema), call_id=call.id)
        return "question"
    if known.status == "open":
        return "question"
    match known.answer if known.status == "answered" else "":
        case "done":
            return "unknown", ToolResultPart(call.id, call.name, _DONE)
        case "not done":
            return "unknown", failed_result(call, _NOT_DONE)
        case "run again":
            return None
        case "stop":
            return "stop"
        case _:
            return "unknown", failed_result(call, _UNKNOWN)
