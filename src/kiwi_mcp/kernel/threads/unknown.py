"""Calls without a result that are not simply made again: those that began, and those with an expired approval.

A call that began before this process had the thread runs again if its effect permits that. One that runs at most once
never does: its item's `probe` finds out whether it was done, else the owner says so.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

from kiwi_mcp.domain.errors import ApprovalNotFound, KiwiError
from kiwi_mcp.domain.json import JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.messages import ToolCallPart, ToolResultPart
from kiwi_mcp.domain.plan import REPEATABLE
from kiwi_mcp.domain.threads import NewEvent, WaitReason
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.threads.results import ResultStatus, failed_result
from kiwi_mcp.kernel.threads.state import BegunCall
from kiwi_mcp.kernel.threads.work import ThreadWork, new_question, store_question

Stopped: TypeAlias = Literal["stop"]
CallEnd: TypeAlias = tuple[ResultStatus, ToolResultPart]
STOPPED_BY_OWNER = "The owner stopped it at a call of which it is not known whether it was done."
_MOST_ATTEMPTS = 3
"""How often an idempotent call begins before the owner is asked."""
_ANSWERS = ("done", "not done", "run again", "stop")
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


async def settle_call(
    work: ThreadWork, call: ToolCallPart, payload: JsonObject
) -> WaitReason | Stopped | CallEnd | None:
    """Return None if a call is to be made, else its result or what it waits for."""
    begun = work.state.began.get(call.id)
    if begun is None:
        return await _expired(work, call)
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


async def _expired(work: ThreadWork, call: ToolCallPart) -> CallEnd | None:
    """Return the result of a call if its approval expired without an answer."""
    if (approval := work.state.approvals.get(call.id)) is None:
        return None
    get = partial(work.services.store.approvals().get, approval, now_ms())
    try:
        found = await work.stores.do(get)
    except ApprovalNotFound:
        return None
    is_silent = found.status == "expired" and not found.decided_at
    return ("timeout", failed_result(call, _EXPIRED)) if is_silent else None


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
        schema: JsonObject = {"type": "string", "enum": list(_ANSWERS)}
        limit = f"It was tried {begun.attempts} times" if begun.effect in REPEATABLE else "It runs at most once"
        text = (
            f"The call `{call.name}` began, and its process ended before the result was stored (run {begun.run_id}). "
            f"{limit}, so it is not repeated by itself. Arguments: {call.arguments[:1_000]}\nWas it done?"
        )
        question = new_question(work.thread, key, "ask", text, schema)
        body: JsonObject = {"waits_for": "ask", "question_id": question.id, "message": text, "call_id": call.id}
        await work.append(NewEvent("asked", body), also=partial(store_question, question))
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
