"""Answers: what every surface passes on, made from what happened."""

from __future__ import annotations

from dataclasses import dataclass

from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.domain.outcome import Outcome, Status
from kiwi_mcp.kernel.pipeline import Bound, Run
from kiwi_mcp.kernel.plan_digest import plan_digest

_FAILURES: dict[Status, tuple[str, str]] = {
    "error": ("execution_failed", "Execution failed"),
    "timeout": ("timeout", "Timed out"),
    "unavailable": ("unavailable", "Unavailable"),
    "cancelled": ("cancelled", "Cancelled"),
}
_EXIT_FAILED = 2


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: the object that surfaces show, and whether it tells of a failure."""

    content: JsonObject
    is_error: bool = False
    exit_code: int = 0
    passed: JsonObject | None = None
    """What an MCP server answered, word for word, where the call was one to it."""


def refusal(error: KiwiError, *, item_type: str, about: JsonObject) -> Answer:
    """Return the answer to a call that was refused before anything ran."""
    return Answer({**error.to_response(item_type), **about}, is_error=True, exit_code=error.exit_code)


def planned(bound: Bound, approval: JsonObject) -> Answer:
    """Return the answer to a dry run: the plan, and nothing done."""
    return Answer(
        {
            "tool_id": bound.chain.tool.id,
            "action": "run",
            "status": "planned",
            "plan": bound.plan.to_json(),
            "plan_digest": plan_digest(bound.plan),
            "approval": approval,
            **_warnings(bound),
        }
    )


def ran(run: Run, *, item_type: str) -> Answer:
    """Return the answer to a call that was made, whether or not the tool did what it was asked."""
    outcome, tool = run.outcome, run.bound.chain.tool
    told: dict[str, Json] = {
        "tool_id": tool.id,
        "action": "run",
        "status": outcome.status,
        **run.left.shown,
        "execution_time_ms": run.duration_ms,
        "output_path": run.kept.path if run.kept else None,
        "run_id": run.left.run_id,
        "identity": tool.identity,
        "integrity": tool.integrity,
        **_warnings(run.bound),
        **({"checkpoint": run.guard.told} if run.guard.told else {}),
        **({"approval": run.passed.to_json()} if run.passed else {}),
        **_details(outcome),
    }
    if outcome.is_success:
        return Answer(told, passed=outcome.passed)
    code, title = _FAILURES[outcome.status]
    failure = {
        "error": title,
        "code": code,
        "item_type": item_type,
        "message": outcome.message or title,
        "suggestion": outcome.suggestion or "Check tool parameters and logic; the logs say what the tool printed.",
    }
    return Answer({**failure, **told}, is_error=True, exit_code=_EXIT_FAILED, passed=outcome.passed)


def _details(outcome: Outcome) -> JsonObject:
    told: dict[str, Json] = dict(outcome.details)
    if outcome.exit_code not in {None, 0}:
        told["exit_code"] = outcome.exit_code
    if logs := outcome.logs.to_json():
        told["logs"] = logs
    return told


def _warnings(bound: Bound) -> JsonObject:
    return {"warnings": list(bound.warnings)} if bound.warnings else {}
