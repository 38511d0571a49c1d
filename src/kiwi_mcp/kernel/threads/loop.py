"""The agent loop: `advance` does the next step of a thread, and says whether it continues, waits or has ended.

The loop interprets nothing: arguments reach the tool, and the recorded output reaches the model, byte for byte. Every
failure of a call is a result for the model. What a call may do is decided by the gates, never here.
"""

from __future__ import annotations

import asyncio

from msgspec import to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import KiwiError, LeaseLost
from kiwi_mcp.domain.json import Json, JsonObject, compact, text_of
from kiwi_mcp.domain.messages import TextPart, ToolCallPart, ToolResultPart
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges, WaitReason
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.drivers.composite import AT_ONCE as STEPS_AT_ONCE
from kiwi_mcp.drivers.composite import CompositeProgress, StepFault, step_id
from kiwi_mcp.drivers.llm.provider import worst_case_micros
from kiwi_mcp.kernel.threads.calls import STOPPED_BY_OWNER, Stopped, make_call, note_result
from kiwi_mcp.kernel.threads.code import next_segment
from kiwi_mcp.kernel.threads.hooks import at_limit, exceeded, hook_action, pass_hooks
from kiwi_mcp.kernel.threads.instructions import changed_texts
from kiwi_mcp.kernel.threads.model import ModelRefused, ask_model, make_room
from kiwi_mcp.kernel.threads.results import failed_result
from kiwi_mcp.kernel.threads.work import (
    CHOICE,
    CONTINUE,
    NEXT,
    START,
    STOP,
    Step,
    ThreadWork,
    complete,
    end,
    new_question,
    pause,
    unless_continued,
    wait_for,
    wait_for_message,
)
from kiwi_mcp.manifest.composite import CompositeStep
from kiwi_mcp.manifest.hooks import HookEvent

AT_ONCE = 8
"""How many calls of one reply run at the same time."""
_BROKEN, _FAILED = 3, 3
"""How many replies in a row may break off, and how many requests a hook may repeat, before the thread fails."""
_NUDGE = "You have not called `return`. Call it now with the declared outputs, or continue with the task."
_LOOP = "The thread makes the same calls again and again. May it continue?"
_PRICE = "The price of the model is not known, so its limit for money cannot be kept. May it continue?"
_STOPPED = "The user stopped the turn before this call had a result."
_TURN_ENDS = ("end", "calls", "length", "refusal", "filtered")
_REPEATED, _TWO_TURNS = 3, 4
_EXPIRED = "The owner did not answer in time, which is no refusal."


async def advance(work: ThreadWork) -> Step:
    """Do the next step: obey a command, else what the model or the steps of a composite lead to."""
    thread = work.thread
    if thread.command == "cancel":
        return await end(work, "cancelled", "cancelled", message="It was cancelled.")
    if thread.command == "pause":
        return await pause(work)
    if not thread.usage.turns and work.state.needs_start:
        asked = await work.stores.question_of(thread.id, START)
        if asked is None or asked.answer != CONTINUE:
            if asked is not None and asked.status == "open":
                return await wait_for(work, "start")
            return await end(work, "cancelled", "cancelled", code="denied", message="The owner did not let it start.")
    if work.state.progress is not None:
        return await advance_steps(work, work.state.progress)
    return await advance_model(work)


async def advance_model(work: ThreadWork) -> Step:
    """Finish the calls of the model, end, or ask it."""
    state, thread = work.state, work.thread
    if state.returned is not None and not state.has_unsent:
        step = await pass_hooks(work, "directive_return", "after_step", "after_complete")
        return step or await complete(work, state.returned)
    if state.pending or work.start.is_program:
        return await (make_calls(work) if state.pending else next_segment(work))
    if state.model_seq:  # all calls of a turn have results
        if failed := state.failed_calls:
            detail = f"{failed[0].name}: {failed[0].message}"
            if step := await pass_hooks(work, "error", code=failed[0].status, detail=detail):
                return step
        if step := await pass_hooks(work, "after_step"):
            return step
    if thread.kind == "conversation" and (state.stop in _TURN_ENDS or len(state.messages) == 1):
        return await wait_for_message(work)
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
    """Ask the model, within the limits and as the hooks allow."""
    state = work.state
    if limit := exceeded(work):
        return await at_limit(work, limit)
    if work.thread.kind == "conversation" and work.replies is None:
        changed = [*changed_texts(work.catalog, work.services.provenance, state.instructions, state.skills)]
        if changed:
            await work.append(*changed)
    first: tuple[HookEvent, ...] = () if state.model_seq else ("thread_started",)
    if step := await pass_hooks(work, *first, *(("thread_continued",) if state.is_resumed else ()), "before_step"):
        return step
    if worst_case_micros(1, 1, work.choice) is None and (
        step := await unless_continued(work, "price", "budget", _PRICE, limit="price")
    ):
        return step
    try:
        if step := await make_room(work):
            return step
        await ask_model(work)
    except ModelRefused as refused:
        return await at_limit(work, refused.limit)
    except LeaseLost:
        raise
    except KiwiError as error:
        return await model_failed(work, error)
    return NEXT


async def model_failed(work: ThreadWork, error: KiwiError) -> Step:
    """Note that the model gave no answer; a hook may have it asked again, else the thread fails."""
    await work.append(NewEvent("model_failed", {"code": error.code, "message": error.message}))
    key = f"error:{work.state.model_failures}"
    action = await hook_action(work, "error", key, code=error.code, detail=error.message)
    if action in {"retry", "continue"} and work.state.model_failures < _FAILED:
        return NEXT
    if action == "suspend":
        return await pause(work)
    if action == "escalate":
        question = f"The model gave no answer: {error.message} Shall it be asked again?"
        step = await unless_continued(work, f"{key}:{work.state.model_seq}", "ask", question, limit="error")
        return step or NEXT
    if work.thread.kind == "conversation":  # the next message tries it again
        return await wait_for_message(work)
    return await end(work, "failed", "error", code=error.code, message=f"{error.message} {error.suggestion}".strip())


async def finish_turn(work: ThreadWork) -> Step:
    """End the turn of a model that called nothing."""
    if not work.start.outputs:
        step = await pass_hooks(work, "after_complete")
        return step or await complete(work, work.state.text)
    if work.state.nudges:
        return await end(work, "failed", "error", code="no_return", message="The model ended without `return`.")
    await work.append(NewEvent("injected", {"text": _NUDGE, "is_nudge": True}))
    return NEXT


async def stop_turn(work: ThreadWork) -> Step:
    """Stop the turn of a conversation: the text so far is stored, and calls without a result get one that says so."""
    calls, text = [*work.state.pending.values()], "".join(work.streamed)
    parts: list[Json] = [to_builtins(TextPart(text))] if text else []
    reply: JsonObject = {"parts": parts, "stop": "end", "model": work.thread.model, "is_stopped": True}
    results = [
        NewEvent("result", {"status": "error", "call_id": call.id, "part": to_builtins(failed_result(call, _STOPPED))})
        for call in calls
    ]
    made = ThreadChanges(turns=1 if text else 0, tool_calls=len(calls))
    return await wait_for(work, "message", *([NewEvent("model", reply)] if text else []), *results, made=made)


async def make_calls(work: ThreadWork) -> Step:
    """Make the calls of the last reply, several at once."""
    calls = list(work.state.pending.values())
    left = max(0, work.thread.limits.tool_calls - work.thread.usage.tool_calls)
    key = f"loop:{work.state.model_seq}"
    recent = work.state.recent_calls  # the same three times, or two in turns twice
    is_same = len(recent) >= _REPEATED and len({*recent[-_REPEATED:]}) == 1
    in_turns = len(recent) >= _TWO_TURNS and recent[-_TWO_TURNS:-2] == recent[-2:] and recent[-1] != recent[-2]
    is_looping = not work.start.is_program and (is_same or in_turns)
    if is_looping and (step := await unless_continued(work, key, "loop", _LOOP, limit="loop")):
        return step
    gate = asyncio.Semaphore(AT_ONCE)

    async def make(call: ToolCallPart) -> WaitReason | Stopped:
        async with gate:
            return await make_call(work, call)

    try:
        async with asyncio.timeout(max(0.0, work.thread.limits.seconds - work.seconds())):
            if len(calls) == 1 and left:  # most replies make one call, which needs no task of its own
                waits = [await make_call(work, calls[0])]
            else:
                waits = await asyncio.gather(*map(make, calls[:left]))
    except TimeoutError:
        await work.sync()
        return await at_limit(work, "duration")
    for reason in waits:
        if reason == "stop":
            return await end(work, "cancelled", "cancelled", code="stopped", message=STOPPED_BY_OWNER)
        if reason:
            return await wait_for(work, reason)
    return await at_limit(work, "tool_calls") if left < len(calls) else NEXT


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
            for call in waiting[: min(left, STEPS_AT_ONCE - len(under_way))] if is_open and left > 0 else ():
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
        await note_result(work, call, "denied", failed_result(call, "The owner did not let this step run."))
    else:
        return None
    return ""
