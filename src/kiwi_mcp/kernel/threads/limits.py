"""Limits of a thread: which one is reached, and what happens then."""

from __future__ import annotations

from msgspec.structs import replace

from kiwi_mcp.domain.errors import BudgetExceeded
from kiwi_mcp.domain.threads import NewEvent, ThreadChanges
from kiwi_mcp.kernel.threads.hooks import hook_action
from kiwi_mcp.kernel.threads.steps import NEXT, Step, Wait, pause, stop_at
from kiwi_mcp.kernel.threads.work import ThreadWork

_FIELDS = {"turns": "turns", "tokens": "tokens", "spend": "spend", "duration": "seconds", "tool_calls": "tool_calls"}
"""The limits that the owner can raise while a thread runs, and where they are stored."""
_HARD = ("tokens", "spend")
"""The limits that a warning does not raise."""
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
        case "warn" if limit not in _HARD and not raised:
            return await _raise_limit(work, limit, field)
        case "escalate":
            match await work.confirm(f"limit:{limit}:{raised}", "budget", _question(limit, most)):
                case "continue":
                    return await _raise_limit(work, limit, field)
                case "asked":
                    return Wait("budget")
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


def _question(limit: str, most: float) -> str:
    shown = f"{most / 1_000_000:.2f} USD" if limit == "spend" else f"{most:,.0f}"
    return f"The thread has reached its limit `{limit}` of {shown}. May it use as much again?"
