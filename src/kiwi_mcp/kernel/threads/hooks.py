"""Hooks and limits of a thread, which decide whether and how it continues.

The first hook that fits a moment runs, and its action is the decision. One that cannot run, does not end or returns no
known action counts as `fail`.
"""

from __future__ import annotations

import re

from msgspec import to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import BudgetExceeded, Conflict, KiwiError, LeaseLost
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.plan import REPEATABLE
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges
from kiwi_mcp.kernel.threads.start import StartRequest, grants_of, narrowed_by, new_thread
from kiwi_mcp.kernel.threads.work import NEXT, Step, ThreadWork, end, pause, stop_at, unless_continued
from kiwi_mcp.manifest.expressions import ExpressionFault, at_path
from kiwi_mcp.manifest.hooks import ACTIONS, Hook, HookAction, HookEvent

_LIMITS = {"turns": 5, "tokens": 60_000, "spend": 0.10, "seconds": 60, "spawns": 0, "tool_calls": 10}
"""The most that one run of a hook may use; it is taken from the thread, and its own limits may be smaller."""
_FACT = re.compile(r"\$?\{((?:event|directive|cost|limits|permissions)(?:\.[A-Za-z0-9_]+)+)\}")


async def pass_hooks(work: ThreadWork, *moments: HookEvent, code: str = "", detail: str = "") -> Step | None:
    """Run the hooks of some moments; return None where the thread continues, else how it waits or ends."""
    for moment in moments:
        action = await hook_action(work, moment, moment, code=code, detail=detail)
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
                if step := await unless_continued(work, key, "ask", text, limit="hook"):
                    return step
            case "suspend":
                return await pause(work)
            case _:
                pass
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
        is_repeated = key in work.state.hooks_under_way and not hook.runs_apart  # a thread continues
        if (
            is_repeated and work.catalog.find(hook.item_id).manifest.effect not in REPEATABLE
        ):  # a process has died in it
            reason = "It began before, and whether it was done is not known."
            raise Conflict(reason, suggestion="Declare its `effect`.")
        await work.append(NewEvent("hook_began", {"key": key, "event": moment, "item": hook.item_id}))
        if hook.runs_apart:
            # A child thread with a small budget; the one that was started before continues.
            parent = narrowed_by(work.thread, work.state.skills)
            wanted = StartRequest(hook.item_id, inputs, _LIMITS, parent=parent, is_hook=True)
            child, start = new_thread(wanted, work.services.context(work.own_caller(), work.catalog))
            child_key = f"hook:{key}:{work.state.model_seq}"
            ended = await work.host.run_hook(work.thread, child, start, work.starter, child_key)
            await work.sync()
            failure = f"its thread {ended.id} is {ended.status}{f': {ended.message}' if ended.message else ''}"
            result = ended.result if ended.status == "completed" else failure
        else:
            request: JsonObject = {"item_id": hook.item_id, "parameters": inputs, "project_path": work.thread.project}
            answer = await work.services.dispatch("execute", {k: v for k, v in request.items() if v}, work.own_caller())
            if answer.error is not None:
                raise answer.error
            result = answer.content.get("result")
    except LeaseLost:
        raise
    except KiwiError as error:
        return "fail", f"The hook {hook.item_id!r:.80} could not run: {error.message}"
    word = as_text(as_object(result).get("action")) or (result.strip() if isinstance(result, str) else "")
    action = next((one for one in ACTIONS if one == word), None)
    if action is None:
        return "fail", f"The hook {hook.item_id!r:.80} returned no known action: {text_of(result)[:200]!r}."
    return action, ""


def _filled(value: Json, facts: JsonObject) -> Json:
    """Return an input with facts in place of `{event.code}` and the like; one that is nothing else keeps its type."""
    if not isinstance(value, str):
        return value
    if whole := _FACT.fullmatch(value):
        return at_path(facts, tuple(whole[1].split(".")))
    return _FACT.sub(lambda found: text_of(at_path(facts, tuple(found[1].split(".")))), value)


_FIELDS = {"turns": "turns", "tokens": "tokens", "spend": "spend", "duration": "seconds", "tool_calls": "tool_calls"}
"""The limits that the owner can raise while a thread runs, and where they are stored."""
_BY_ACTION = {"continue": "warn", "retry": "warn", "escalate": "escalate", "suspend": "suspend"}
_SPENDING = "What may be spent in a day is reached. The owner sets it in policy.yaml, below `spending`."


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


async def at_limit(work: ThreadWork, limit: str) -> Step:
    """Stop, ask the owner or warn: as a hook decides, else as the directive says."""
    field = _FIELDS.get(limit)
    if field is None:
        return await stop_at(work, limit, _SPENDING)
    most = getattr(work.thread.limits, field)
    action = await hook_action(work, "limit", f"limit:{limit}", code=f"{limit}_exceeded", current=most, most=most)
    raised = work.state.raises.get(limit, 0)
    match _BY_ACTION.get(action, "stop") if action else work.thread.limits.on_exceeded:
        case "warn" if limit not in {"tokens", "spend"} and not raised:  # which a warning does not raise
            return await _raise_limit(work, limit, field)
        case "escalate":
            shown = f"{most / 1_000_000:.2f} USD" if limit == "spend" else f"{most:,.0f}"
            question = f"The thread has reached its limit `{limit}` of {shown}. May it use as much again?"
            match await work.confirm(f"limit:{limit}:{raised}", "budget", question):
                case "continue":
                    return await _raise_limit(work, limit, field)
                case "asked":
                    return Step(waits_for="budget")
        case "suspend":
            return await pause(work)
    return await stop_at(work, limit)


async def _raise_limit(work: ThreadWork, limit: str, field: str) -> Step:
    """Raise a limit by its original amount; a child takes that from its parent, and stops if nothing is left there."""
    limits, times = work.thread.limits, work.state.raises.get(limit, 0)
    now = getattr(limits, field)
    more = now + max(1, now // (1 + times))
    body = NewEvent("limit", {"limit": limit, "raised": True, "from": now, "to": more})
    try:
        await work.append(body, changes=ThreadChanges(limits=replace(limits, **{field: more})))
    except BudgetExceeded:
        return await stop_at(work, limit)
    return NEXT
