"""The next steps of a composite: begin those that can, make their calls, several at once, until all have ended."""

from __future__ import annotations

import asyncio

from msgspec import to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.json import JsonObject, compact, text_of
from kiwi_mcp.domain.messages import ToolCallPart, ToolResultPart
from kiwi_mcp.domain.threads import NewEvent, WaitReason
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.drivers.composite import AT_ONCE, CompositeProgress, StepFault, step_id
from kiwi_mcp.kernel.threads.calls import STOPPED_BY_OWNER, Stopped, make_call, note_result
from kiwi_mcp.kernel.threads.results import failed_result
from kiwi_mcp.kernel.threads.work import CHOICE, NEXT, STOP, Step, ThreadWork, complete, end, new_question, wait_for
from kiwi_mcp.manifest.composite import CompositeStep

_EXPIRED = "The owner did not answer in time, which is no refusal."
_STOPPED = "The owner did not let this step run."


async def advance_steps(work: ThreadWork, progress: CompositeProgress) -> Step:
    """Run the steps of a composite until it has ended or waits."""
    limits, waits = work.thread.limits, dict[str, WaitReason | Stopped]()
    try:
        async with asyncio.timeout(max(0.0, limits.seconds - work.seconds())):
            await _run_steps(work, progress, waits)
    except TimeoutError:
        await work.sync()
        return await _stop(work, progress, "duration", f"It took longer than {limits.seconds:g} seconds.")
    if "stop" in waits.values():
        return await end(work, "cancelled", "cancelled", code="stopped", message=STOPPED_BY_OWNER)
    if progress.failure:
        partly: JsonObject = {"steps": progress.summary(has_results=True)}
        message = progress.failed_message()
        return await end(work, "failed", "error", code="step_failed", message=message, result=partly)
    if progress.is_done:
        try:
            return await complete(work, {"output": progress.output(), "steps": progress.summary()})
        except StepFault as fault:
            partly = {"steps": progress.summary(has_results=True)}
            return await end(work, "failed", "error", code="output", message=f"`output`: {fault}", result=partly)
    if work.thread.command:
        return NEXT
    if waits:  # a child may run in this process, so it comes first
        reasons = [one for one in waits.values() if one != "stop"]
        return await wait_for(work, "child" if "child" in reasons else reasons[0])
    return await _stop(work, progress, "tool_calls", f"It made {limits.tool_calls} calls, which is its limit.")


async def _stop(work: ThreadWork, progress: CompositeProgress, limit: str, message: str) -> Step:
    await work.append(NewEvent("limit", {"limit": limit}))
    partly: JsonObject = {"steps": progress.summary(has_results=True)}
    return await end(work, "exhausted", "limit", code=f"{limit}_exceeded", message=message, result=partly)


async def _run_steps(work: ThreadWork, progress: CompositeProgress, waits: dict[str, WaitReason | Stopped]) -> None:
    """Begin steps and make calls until nothing runs and nothing can begin; `waits` gets what calls wait for."""
    under_way: dict[asyncio.Task[WaitReason | Stopped], str] = {}
    try:
        while True:
            while begun := progress.ready():
                await work.append(*(NewEvent("step", to_builtins(one)) for one in begun))
            left = work.thread.limits.tool_calls - work.thread.usage.tool_calls - len(under_way)
            is_open = not (progress.failure or work.thread.command or "stop" in waits.values())
            waiting = [one for one in work.state.pending.values() if one.id not in {*under_way.values(), *waits}]
            for call in waiting[: min(left, AT_ONCE - len(under_way))] if is_open and left > 0 else ():
                under_way[asyncio.create_task(_make_step_call(work, progress, call))] = call.id
            if not under_way:
                return
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                call_id, reason = under_way.pop(task), task.result()
                if reason:
                    waits[call_id] = reason
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _make_step_call(work: ThreadWork, progress: CompositeProgress, call: ToolCallPart) -> WaitReason | Stopped:
    """Make one call of a step, after its question and the pause before it is made again."""
    step = progress.steps[step_id(call.id)]
    if step.ask and (reason := await _ask(work, progress, step, call)) is not None:
        return reason
    if step.ask:
        known = await work.stores.question_of(work.thread.id, work.caller(call).origin.key)
        try:
            call = replace(call, arguments=compact(progress.parameters(step, known.answer if known else None)))
        except StepFault as fault:
            await note_result(work, call, "invalid_input", failed_result(call, str(fault)))
            return ""
    await asyncio.sleep(max(0, progress.retry_at.get(call.id, 0) - now_ms()) / 1_000)
    limit = asyncio.timeout(step.timeout)
    try:
        async with limit:
            return await make_call(work, call)
    except TimeoutError:
        if not limit.expired():
            raise
    await work.sync()
    if work.state.is_open(call):
        message = f"It took longer than {step.timeout:g} seconds."
        await note_result(work, call, "timeout", failed_result(call, message))
    return ""


async def _ask(
    work: ThreadWork, progress: CompositeProgress, step: CompositeStep, call: ToolCallPart
) -> WaitReason | None:
    """Ask the question of a step; return None once its call may be made, else what it waits for, or empty."""
    assert step.ask is not None  # noqa: S101 - the caller looked
    key = work.caller(call).origin.key
    known = await work.stores.question_of(work.thread.id, key)
    if known is None:
        choices: JsonObject = CHOICE if step.tool else {"type": "string"}
        try:
            message = progress.message(step)
        except StepFault as fault:
            await note_result(work, call, "invalid_input", failed_result(call, str(fault)))
            return ""
        known = new_question(work.thread, key, "ask", message, step.ask.schema or choices)
        if step.ask.expires is not None:
            known = replace(known, expires_at=known.created_at + round(step.ask.expires * 1_000))
        await work.ask(known, call_id=call.id)
    if known.status == "open" and known.expires_at > now_ms():
        return "question"
    if known.status != "answered":
        await note_result(work, call, "timeout", failed_result(call, _EXPIRED))
    elif not step.tool:
        part = ToolResultPart(call.id, call.name, text_of(known.answer))
        result: JsonObject = {"status": "ok", "call_id": call.id, "part": to_builtins(part), "value": known.answer}
        await work.append(NewEvent("result", result))
    elif not step.ask.schema and known.answer == STOP:
        await note_result(work, call, "denied", failed_result(call, _STOPPED))
    else:
        return None
    return ""
