"""run: execute an item or a program of code mode, or only show the plan with `--dry-run`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Struct, field
from msgspec.structs import replace

import kiwi_mcp.kernel.mcp_servers as mcp_servers  # noqa: PLR0402 - the package itself imports this module
from kiwi_mcp.domain.calls import Call
from kiwi_mcp.domain.errors import KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.outcome import Status
from kiwi_mcp.kernel.approvals import ApprovalGate
from kiwi_mcp.kernel.checkpoints import checkpoint as checkpoints
from kiwi_mcp.kernel.context import Context, VerbContext
from kiwi_mcp.kernel.permission import ItemVisibility
from kiwi_mcp.kernel.pipeline import callable_chain, plan_call, prepare
from kiwi_mcp.kernel.pipeline import run as run_call
from kiwi_mcp.kernel.recorder import Run
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OF_TYPE,
    Answer,
    AnyJson,
    Argument,
    DryRun,
    ItemKind,
    ItemRequest,
    LongText,
    Option,
    Request,
    Response,
    misplaced,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, JsonData, Notice, ViewItem, warning_rows

_FAILURES: dict[Status, tuple[str, str]] = {
    "error": ("execution_failed", "Execution failed"),
    "timeout": ("timeout", "Timed out"),
    "unavailable": ("unavailable", "Unavailable"),
    "cancelled": ("cancelled", "Cancelled"),
}
_CODE = "builtin/kiwi/code"
_UNFINISHED = ("queued", "running", "waiting", "paused")
"""The statuses of a thread that has not ended."""
_OF_THREAD = (
    "thread_id", "status", "result", "usage", "finish_reason", "started_at", "transcript_path", "waits_for",
    "questions", "approvals",
)  # fmt: skip
Parameters = dict[str, AnyJson]


class CallRequest(ItemRequest, frozen=True, kw_only=True):
    """The request of a verb about one call of an item."""

    item_type: Annotated[ItemKind | None, Option(OF_TYPE, "--item-type", metavar="TYPE")] = None
    parameters: Annotated[Parameters, Argument("The tool's parameters.", "NAME=VALUE", kind="parameters")] = field(
        default_factory=dict
    )
    frozen: bool = False
    checkpoint: bool = False

    def call(self, context: Context) -> Call:
        """Return the call in a project."""
        return Call(
            self.item_id,
            context.catalog.space,
            self.parameters,
            is_frozen=self.frozen,
            item_type=self.of_type,
            has_checkpoint=self.checkpoint,
            origin=context.caller.origin,
        )


class RunRequest(CallRequest, frozen=True, kw_only=True):
    """What to run."""

    dry_run: DryRun = False
    frozen: Annotated[bool, Option("Refuse an item that differs from the lockfile.")] = False
    checkpoint: Annotated[bool, Option("Save the project's files first, so that the run can be undone.")] = False
    mode: Annotated[
        Literal["thread"] | None, Option("thread: a model executes the directive.", metavar="MODE", kind="text")
    ] = None
    wait: Annotated[bool, Option("Start a thread in the background.", "--no-wait", value=False)] = True


class PrintedLogs(Struct, frozen=True):
    """What a tool printed beside its result."""

    stdout: str = ""
    stderr: str = ""
    truncated: bool = False
    stdout_bytes: int = 0


class CheckpointNote(Struct, frozen=True):
    """How a run can be undone."""

    undo: str = ""
    hint: str = ""


class CallResponse(Response, frozen=True, kw_only=True):
    """The result of a run; with `dry_run` its plan. A driver may add further keys."""

    tool_id: str
    action: str
    status: str
    result: AnyJson = None
    result_handle: str = ""
    result_characters: int = 0
    execution_time_ms: int = 0
    output_path: str | None = None
    run_id: str | None = None
    identity: str = ""
    integrity: str = ""
    warnings: tuple[str, ...] = ()
    checkpoint: CheckpointNote = CheckpointNote()
    approval: AnyJson = None
    logs: PrintedLogs = PrintedLogs()
    plan: AnyJson = None
    plan_digest: str = ""
    steps: AnyJson = None
    """Of a composite: how each step ended, or with `dry_run` the plan of each."""
    thread_id: str = ""
    """The thread that executed the item, with `usage` and `finish_reason`."""


def _view(response: CallResponse) -> Iterator[ViewItem]:
    yield from warning_rows(response.warnings)
    for printed in (response.logs.stdout.rstrip(), response.logs.stderr.rstrip()):
        if printed:
            yield Notice(printed)
    if response.status == "planned":
        yield JsonData(response.plan if response.steps is None else {"plan": response.plan, "steps": response.steps})
        return
    if response.status in _UNFINISHED:
        yield Notice(f"thread {response.thread_id}: {response.status}")
        yield Hint(f"`kiwi thread watch {response.thread_id}` follows it, `kiwi thread show` has its questions.")
        return
    result = response.result
    yield Data(result) if isinstance(result, str) else JsonData(result)
    if response.result_handle:
        shown = len(result) if isinstance(result, str) else 0
        yield Notice(f"That is the beginning of {response.result_characters} characters.")
        yield Hint(f"kiwi load --type output {response.result_handle} --offset {shown}")
    if response.logs.truncated:
        written = response.logs.stdout_bytes
        yield Notice(f"warning: the output was cut; the tool wrote {written} bytes to standard output.")
    stored = f" · {response.output_path}" if response.output_path else ""
    yield Notice(f"{response.tool_id}: {response.status} in {response.execution_time_ms} ms{stored}")
    if response.checkpoint.hint:
        yield Hint(response.checkpoint.hint)
    if response.checkpoint.undo:
        yield Hint(f"`kiwi undo {response.checkpoint.undo}` puts back what it changed.")


@verb("run", wire=("execute", "run"), access=ANYONE, everyday="run", asks=True, response=CallResponse, shows=_view)
async def run(request: RunRequest, context: VerbContext) -> Answer:
    """Run a tool with its parameters."""
    services = context.services
    catalog = services.catalogs.for_item(request.item_id, request.project_path)
    call_context = Context(
        services, context.caller, catalog, context.rights, is_owner=services.is_owner(context.caller)
    )
    warnings = _taken(context.strays, request.call(call_context), call_context) if context.strays else ()
    if request.dry_run:
        answer = await _plan(request, call_context)
    elif request.mode == "thread" or not request.wait:
        answer = await _as_thread(request, context)
    else:
        run = await run_call(request.call(call_context), call_context, context.record)
        answer = _answer(run, request, call_context)
    if not warnings:
        return answer
    found = [*as_list(answer.content.get("warnings")), *warnings]
    return replace(answer, content={**answer.content, "warnings": found})


class CodeRequest(Request, frozen=True, kw_only=True):
    """A program to run: `code`, `inputs` and `items` inside `parameters`."""

    parameters: Annotated[
        Parameters, Argument("code=TEXT or code=@FILE, items, inputs.", "NAME=VALUE", kind="parameters")
    ]
    project_path: LongText | None = None
    dry_run: DryRun = False


@verb("code", wire=("execute", "code"), access=ANYONE, group="tool", asks=True, response=CallResponse, shows=_view)
async def run_code(request: CodeRequest, context: VerbContext) -> Answer:
    """Run a program that calls items as functions, in a sandbox; only its result is returned."""
    wanted = RunRequest(
        item_id="builtin/kiwi/code",
        parameters=request.parameters,
        project_path=request.project_path,
        dry_run=request.dry_run,
    )
    return await run(wanted, context)


def _taken(strays: Sequence[str], call: Call, context: Context) -> Sequence[str]:
    """Return a warning for each argument that is taken as a parameter; refuse one that the item does not have."""
    declared = as_object(callable_chain(call, context).tool.manifest.parameters.get("properties"))
    if unknown := [name for name in strays if name not in declared]:
        raise misplaced(unknown)
    return [f"`{name}` was taken as a parameter of the tool: put it inside `parameters`." for name in strays]


async def _as_thread(request: RunRequest, context: VerbContext) -> Answer:
    """Start a directive or a thread item, and return how it ended, what it waits for, or how to follow it."""
    began = time.monotonic()
    payload: JsonObject = {"action": "start", "item_id": request.item_id, "inputs": request.parameters}
    project: JsonObject = {"project_path": request.project_path} if request.project_path else {}
    started = await context.services.dispatch("thread", {**payload, **project, "wait": request.wait}, context.caller)
    if started.error is not None:
        raise started.error
    content = started.content
    known = {name: started.content[name] for name in _OF_THREAD if name in started.content}
    response: JsonObject = {"tool_id": request.item_id, "action": "run", **known}
    if content["status"] in _UNFINISHED:
        return Answer(response, exit_code=started.exit_code)
    response = {**response, "execution_time_ms": int((time.monotonic() - began) * 1_000)}
    if content["status"] == "completed":
        return Answer({**response, "status": "success"})
    failure = {
        "error": f"Thread {content['status']}",
        "code": content.get("code") or content["status"],
        "item_type": request.item_type,
        "message": content.get("message", ""),
        "suggestion": f"`kiwi thread show {content['thread_id']}` has its journal.",
    }
    return Answer({**failure, **response}, is_error=True, exit_code=started.exit_code)


async def _plan(request: RunRequest, context: Context) -> Answer:
    """Return what a call would do: the plan, judged by every rule, and nothing done."""
    planned = plan_call(request.call(context), context)
    return Answer(
        {
            "tool_id": planned.chain.tool.id,
            "action": "run",
            "status": "planned",
            "plan": planned.plan.to_json(),
            "plan_digest": planned.digest,
            "approval": await asyncio.to_thread(ApprovalGate(context).preview, planned),
            **({"steps": _planned_steps(planned, context)} if "steps" in planned.plan.facts else {}),
            **({"warnings": list(planned.warnings)} if planned.warnings else {}),
        }
    )


def _planned_steps(planned: Run, context: Context) -> list[Json]:
    """Return the steps of a composite, each with its own plan if its parameters are known before it runs."""
    found: list[Json] = []
    for step in map(as_object, as_list(planned.plan.facts["steps"])):
        identity = as_text(step.get("identity"))
        known = step.get("inputs")
        plan = dict[str, Json]()
        call = Call(identity, planned.call.space, as_object(known))
        try:
            if identity and known is None:  # the item is judged without parameters
                chain = callable_chain(call, context)
                prepare(chain, context.services.drivers.of(chain, tuple), call, context)
            elif identity:
                inner = plan_call(call, context)
                plan = {"plan": inner.plan.to_json(), "approval": ApprovalGate(context).preview(inner)}
                if "steps" in inner.plan.facts:
                    plan["steps"] = _planned_steps(inner, context)
        except KiwiError as error:
            plan = {"refused": {"code": error.code, "message": error.message, "suggestion": error.suggestion}}
        found.append({**step, **plan})
    return found


def _answer(run: Run, request: RunRequest, context: Context) -> Answer:
    """Return the answer to a call that was made, whether or not the tool did what it was asked."""
    services, outcome, tool, warnings = context.services, run.outcome, run.chain.tool, run.warnings
    response: dict[str, Json] = {
        "tool_id": tool.id,
        "action": "run",
        "status": outcome.status,
        **run.response,
        "execution_time_ms": run.duration_ms,
        "output_path": run.output.path if run.output else None,
        "run_id": run.id if run.is_recorded else None,
        "identity": tool.identity,
        "integrity": tool.integrity,
        **({"warnings": list(warnings)} if warnings else {}),
        **(_checkpoint(run) if run.checkpoint else {}),
        **({"approval": run.approved_by.to_json()} if run.approved_by else {}),
        **outcome.details,
    }
    if outcome.exit_code not in {None, 0}:
        response["exit_code"] = outcome.exit_code
    if logs := outcome.logs.to_json():
        response["logs"] = logs
    if outcome.is_success:
        # It was of use: for later searches, and for when its server is listed again.
        if run.chain.server is not None:
            services.one(mcp_servers.McpServers).note_use(run.chain.server.tool.identity)
        services.recall_log.add_use(tool.identity, run.call.space, context.caller, is_run=True)
        gives_instructions = tool.manifest.result_kind == "instructions"
        is_own = outcome.details.get("is_instructions") is True  # a native item gave what may instruct
        is_instructions = is_own or (gives_instructions and services.provenance.may_instruct(tool))
        if gives_instructions and not ItemVisibility(context.catalog, services.rights(context.caller)).hides:
            response |= context.catalog.version_warning(tool)
        return Answer(response, passed=outcome.passed, is_instructions=is_instructions)
    code, title = _FAILURES[outcome.status]
    failure = {
        "error": title,
        "code": code,
        "item_type": request.item_type,
        "message": outcome.message or title,
        "suggestion": outcome.suggestion or "Check tool parameters and logic; the logs say what the tool printed.",
    }
    return Answer({**failure, **response}, is_error=True, exit_code=1, passed=outcome.passed)


def _checkpoint(run: Run) -> JsonObject:
    """Return what was saved before a run, or that it should have been."""
    summary = run.checkpoint.summary if run.checkpoint else None
    if not summary:
        return {}
    if summary is not checkpoints.OFFER:
        return {"checkpoint": summary}
    operation: JsonObject = {"operation": run.chain.tool.id}
    call: JsonObject = {"item_type": "directive", "item_id": "git_checkpoint", "parameters": operation}
    hint = f"Run it with `checkpoint: true` next time; then execute {compact(call)} reviews what it changed."
    return {"checkpoint": summary, "checkpoint_recommended": True, "checkpoint_hint": hint}
