"""Hooks of a thread: the first that fits a moment runs, and its action decides how the thread continues.

A hook that cannot run, does not end or returns no known action counts as `fail`.
"""

from __future__ import annotations

import re

from msgspec import to_builtins

from kiwi_mcp.domain.errors import Conflict, KiwiError, LeaseLost
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.plan import REPEATABLE
from kiwi_mcp.domain.threads import NewEvent
from kiwi_mcp.kernel.threads.start import StartRequest, grants_of, narrowed_by, new_thread
from kiwi_mcp.kernel.threads.steps import Step, end, pause, unless_continued
from kiwi_mcp.kernel.threads.work import ThreadWork
from kiwi_mcp.manifest.expressions import ExpressionFault, at_path
from kiwi_mcp.manifest.hooks import ACTIONS, Hook, HookAction, HookEvent

_LIMITS = {"turns": 5, "tokens": 60_000, "spend": 0.10, "seconds": 60, "spawns": 0, "tool_calls": 10}
"""The most that one run of a hook may use; it is taken from the thread, and its own limits may be smaller."""
_FACT = re.compile(r"\$?\{((?:event|directive|cost|limits|permissions)(?:\.[A-Za-z0-9_]+)+)\}")


async def pass_hooks(work: ThreadWork, *moments: HookEvent, code: str = "", detail: str = "") -> Step | None:
    """Run the hooks of some moments; return None where the thread continues, else how it waits or ends."""
    for moment in moments:
        action = await hook_action(work, moment, moment, code=code, detail=detail)
        if action and (step := await _obey(work, moment, action)):
            return step
    return None


async def _obey(work: ThreadWork, moment: HookEvent, action: HookAction) -> Step | None:
    message = f"A hook for `{moment}` decided: {action}."
    match action:
        case "fail":
            reason = work.state.hook_reasons.get(moment) or message
            return await end(work, "failed", "error", code="hook_failed", message=reason)
        case "abort":
            return await end(work, "cancelled", "cancelled", code="hook_aborted", message=message)
        case "skip" if moment == "before_step":
            return await end(work, "completed", "stop", message=message)
        case "escalate":
            key = f"hook:{moment}:{work.state.model_seq}"
            text = f"A hook for `{moment}` asks: may the thread continue?"
            return await unless_continued(work, key, "ask", text, limit="hook")
        case "suspend":
            return await pause(work)
        case _:
            return None


async def hook_action(
    work: ThreadWork,
    moment: HookEvent,
    key: str,
    *,
    code: str = "",
    detail: str = "",
    current: float | None = None,
    most: float | None = None,
) -> HookAction | None:
    """Return what the first hook that fits decides, once for each reply of the model; None where none fits."""
    if not work.start.hooks:
        return None
    if known := work.state.hooked.get(key):
        return known
    event: JsonObject = {"name": moment, "code": code, "detail": detail, "current": current, "max": most}
    facts = _facts(work, event)
    for hook in work.start.hooks:
        try:
            if not hook.fits(moment, facts):
                continue
            action, reason = await _run(work, hook, moment, key, facts)
        except ExpressionFault as fault:
            if not moment.startswith("before_"):
                await work.append(NewEvent("hooked", {"event": moment, "notice": f"A hook was left out: {fault}."}))
                continue
            action, reason = "fail", f"The expression of a hook is wrong: {fault}."
        body: JsonObject = {"key": key, "event": moment, "item": hook.item_id, "action": action, "reason": reason}
        await work.append(NewEvent("hooked", body))
        return action
    return None


def _facts(work: ThreadWork, event: JsonObject) -> JsonObject:
    """Return what expressions and inputs of hooks can name."""
    thread = work.thread
    limits: JsonObject = to_builtins(thread.limits)
    required = [call.name for call in work.state.failed_calls]
    granted = [one for grant in grants_of(thread) for one in grant.items.allow]
    return {
        "event": event,
        "directive": {"name": thread.directive, "inputs": thread.inputs},
        "cost": {**thread.usage.to_json(), "tokens": thread.usage.tokens, "duration": work.seconds()},
        "limits": {**limits, "spend": thread.limits.spend / 1_000_000, "duration": thread.limits.seconds},
        "permissions": {"granted": granted, "required": required},
    }


async def _run(work: ThreadWork, hook: Hook, moment: HookEvent, key: str, facts: JsonObject) -> tuple[HookAction, str]:
    """Run the item of a hook, and return its action, and why it is `fail` where the item did not decide that."""
    if hook.action:
        return hook.action, ""
    inputs = {name: _filled(value, facts) for name, value in hook.inputs.items()}
    try:
        if key in work.state.hooks_under_way:  # a process has died in it
            _refuse_repeat(work, hook)
        await work.append(NewEvent("hook_began", {"key": key, "event": moment, "item": hook.item_id}))
        if hook.runs_apart:
            result = await _run_thread(work, hook, f"hook:{key}:{work.state.model_seq}", inputs)
        else:
            result = await _run_item(work, hook, inputs)
    except LeaseLost:
        raise
    except KiwiError as error:
        return "fail", f"The hook {hook.item_id!r:.80} could not run: {error.message}"
    word = as_text(as_object(result).get("action")) or (result.strip() if isinstance(result, str) else "")
    action = next((one for one in ACTIONS if one == word), None)
    if action is None:
        return "fail", f"The hook {hook.item_id!r:.80} returned no known action: {text_of(result)[:200]!r}."
    return action, ""


def _refuse_repeat(work: ThreadWork, hook: Hook) -> None:
    """Refuse to run a tool twice that is not made for it. A thread is not run twice: it continues."""
    if not hook.runs_apart and work.catalog.find(hook.item_id).manifest.effect not in REPEATABLE:
        raise Conflict("It began before, and whether it was done is not known.", suggestion="Declare its `effect`.")


async def _run_thread(work: ThreadWork, hook: Hook, key: str, inputs: JsonObject) -> Json:
    """Run a directive as a child thread with a small budget, or continue the one of this key; return its result."""
    request = StartRequest(
        hook.item_id, inputs, _LIMITS, parent=narrowed_by(work.thread, work.state.skills), is_hook=True
    )
    child, start = new_thread(request, work.services.context(work.own_caller(), work.catalog))
    ended = await work.run_hook(child, start, key)
    if ended.status != "completed":
        said = f": {ended.message}" if ended.message else ""
        return f"its thread {ended.id} is {ended.status}{said}"
    return ended.result


async def _run_item(work: ThreadWork, hook: Hook, inputs: JsonObject) -> Json:
    """Run a tool with the rights of the thread; return its result."""
    request: JsonObject = {"item_id": hook.item_id, "parameters": inputs, "project_path": work.thread.project}
    answer = await work.services.dispatch("execute", {k: v for k, v in request.items() if v}, work.own_caller())
    if answer.error is not None:
        raise answer.error
    return answer.content.get("result")


def _filled(value: Json, facts: JsonObject) -> Json:
    """Return an input with facts in place of `{event.code}` and the like; one that is nothing else keeps its type."""
    if not isinstance(value, str):
        return value
    if whole := _FACT.fullmatch(value):
        return at_path(facts, tuple(whole[1].split(".")))
    return _FACT.sub(lambda found: text_of(at_path(facts, tuple(found[1].split(".")))), value)
