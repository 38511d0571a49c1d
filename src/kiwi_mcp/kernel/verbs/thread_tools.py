"""The verbs behind the tools of threads (`return`, `ask`, `spawn`, `wait`, `checkpoints`) and the item `code`."""

from __future__ import annotations

from functools import partial

from msgspec import UNSET, UnsetType, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidArguments, InvalidProgram, PolicyDenied, ThreadWaiting
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.threads import NewEvent, Thread
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.code import read_program
from kiwi_mcp.kernel.threads.runner import ThreadRunner, awaited
from kiwi_mcp.kernel.threads.start import CODE, StartRequest, lowered_limits
from kiwi_mcp.kernel.threads.state import rebuild
from kiwi_mcp.kernel.threads.work import ThreadStores, asked_event, new_question, store_question
from kiwi_mcp.kernel.verb import ANYONE, AnyJson, Request, Response, verb
from kiwi_mcp.kernel.verbs.thread import AwaitedThread, ThreadResponse, is_tainted, run_here, shown_thread, start_child
from kiwi_mcp.manifest.program import return_faults
from kiwi_mcp.store.threads import ThreadFilter

_MOST_CHILDREN = 1_000


class ThreadToolRequest(Request, frozen=True, kw_only=True):
    """The arguments of a thread tool."""

    arguments: dict[str, AnyJson] = field(default_factory=dict)


class ThreadToolResponse(Response, frozen=True, kw_only=True):
    """What a thread tool returns."""

    status: str
    answer: AnyJson | UnsetType = UNSET
    thread_id: str | UnsetType = UNSET
    threads: list[AnyJson] | UnsetType = UNSET
    checkpoints: list[AnyJson] | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET


async def calling_thread(context: VerbContext) -> tuple[ThreadStores, Thread]:
    """Return the thread that calls; anyone else is refused, and that is recorded."""
    thread_id = context.caller.origin.thread
    if not thread_id:
        raise PolicyDenied(
            "Only a running thread can call this.", suggestion="Start one: `kiwi thread start ITEM`, or `help thread`."
        )
    stores = context.services.one(ThreadRunner).stores
    thread = await stores.do(lambda: stores.threads.get(thread_id))
    return stores, replace(thread, lease=context.caller.origin.lease)  # not that of a process that took it since


@verb("return", group="thread", wire=("thread_tools", "return"), access=ANYONE, records=False)
async def return_outputs(request: ThreadToolRequest, context: VerbContext) -> ThreadToolResponse:
    """End the calling thread with its outputs."""
    stores, thread = await calling_thread(context)
    state = rebuild(await stores.do(lambda: stores.threads.events(thread.id)))
    declared = state.start.outputs if state.start else {}
    if declared and (found := return_faults(declared, request.arguments)):
        raise InvalidArguments("return", found)
    await stores.do(lambda: stores.threads.append(thread, [NewEvent("returned", {"outputs": request.arguments})]))
    return ThreadToolResponse(status="returned")


@verb("ask", group="thread", wire=("thread_tools", "ask"), access=ANYONE, records=False)
async def ask_owner(request: ThreadToolRequest, context: VerbContext) -> ThreadToolResponse:
    """Ask the owner a question; the call has a result once it is answered."""
    stores, thread = await calling_thread(context)
    key = context.caller.origin.key
    known = await stores.question_of(thread.id, key)
    if known is None:
        choices = as_list(request.arguments.get("choices"))
        schema: JsonObject = {"type": "string", **({"enum": choices} if choices else {})}
        known = new_question(thread, key, "ask", as_text(request.arguments.get("question")), schema)
        event, also = asked_event(known), partial(store_question, known)
        await stores.do(lambda: stores.threads.append(thread, [event], also=also))
    if known.status == "open":
        raise ThreadWaiting("The owner has not answered yet.", waits_for="question", question_id=known.id)
    return ThreadToolResponse(status=known.status, answer=known.answer)


@verb("spawn", group="thread", wire=("thread_tools", "spawn"), access=ANYONE, records=False)
async def spawn_child(request: ThreadToolRequest, context: VerbContext) -> ThreadToolResponse:
    """Start a directive as a child of the calling thread."""
    await calling_thread(context)
    given = request.arguments
    inputs, limits = as_object(given.get("inputs")), as_object(given.get("limits"))
    wanted = StartRequest(as_text(given.get("item")), inputs, limits, is_detached=given.get("detached") is True)
    child = await context.services.one(ThreadRunner).spawn(wanted, context.caller)
    warnings = lowered_limits(limits, child.limits) or UNSET
    return ThreadToolResponse(status="started", thread_id=child.id, warnings=warnings)


@verb("checkpoints", group="thread", wire=("thread_tools", "checkpoints"), access=ANYONE, records=False)
async def list_checkpoints(request: ThreadToolRequest, context: VerbContext) -> ThreadToolResponse:
    """List the checkpoints of the calling thread's project; its directive has to permit `undo.list`."""
    _, thread = await calling_thread(context)
    wanted: JsonObject = {**request.arguments, "action": "list", "project_path": thread.project or None}
    answer = await context.services.dispatch("undo", wanted, context.caller)
    if answer.error is not None:
        raise answer.error
    return ThreadToolResponse(status="listed", checkpoints=[*as_list(answer.content.get("checkpoints"))])


@verb("wait", group="thread", wire=("thread_tools", "wait"), access=ANYONE, records=False)
async def wait_children(request: ThreadToolRequest, context: VerbContext) -> ThreadToolResponse:
    """Wait for children of the calling thread, and return how each ended; after `timeout` also what others have."""
    stores, parent = await calling_thread(context)
    wanted = [as_text(one) for one in as_list(request.arguments.get("threads"))]
    children = await stores.do(lambda: stores.threads.list(ThreadFilter(parent_id=parent.id, limit=_MOST_CHILDREN)))
    if unknown := [one for one in wanted if one not in {child.id for child in children}]:
        raise PolicyDenied(
            f"{unknown[0]!r:.60} is no child of this thread.", suggestion="Wait for threads that you spawned."
        )
    found = awaited([*reversed(children)], wanted)
    running = [child.id for child in found if not child.is_ended]
    if running and not await _is_over(request.arguments.get("timeout"), parent, stores, context):
        raise ThreadWaiting(f"{len(running)} of its children have not ended.", waits_for="child")
    if any(one.is_tainted for one in found):  # the text that a child read may be in its result
        context.services.tainted_callers.add(parent.id)
    names = ("status", "result", "message")
    shown = [{"thread_id": one.id, **{name: getattr(one, name) for name in names}} for one in found]
    for one in shown:
        if one["thread_id"] in running:
            state = rebuild(await stores.do(partial(stores.threads.events, str(one["thread_id"]))))
            one["result"] = state.text or None
    return ThreadToolResponse(status="timeout" if running else "ended", threads=shown)


async def _is_over(seconds: Json, parent: Thread, stores: ThreadStores, context: VerbContext) -> bool:
    """Whether a call of `wait` has waited for as long as it may; its end is stored when it begins."""
    if not isinstance(seconds, int | float):
        return False
    state = rebuild(await stores.do(lambda: stores.threads.events(parent.id)))
    call_id = state.order[int(context.caller.origin.key.rpartition(".")[2])]
    until = state.until.get(call_id)
    if until is None:
        until = now_ms() + round(seconds * 1_000)
        body: JsonObject = {"waits_for": "child", "call_id": call_id, "until": until}
        await stores.do(lambda: stores.threads.append(parent, [NewEvent("asked", body)]))
    return now_ms() >= until


class ProgramRequest(Request, frozen=True, kw_only=True):
    """The arguments of the item `code`."""

    arguments: dict[str, AnyJson] = field(default_factory=dict)
    project_path: str | None = None


@verb("run", group="code", wire=("code_tools", "run"), access=ANYONE, records=False)
async def run_program(request: ProgramRequest, context: VerbContext) -> ThreadResponse:
    """Run a program until it ends or waits."""
    services, caller, given = context.services, context.caller, request.arguments
    if not caller.origin.run:
        raise PolicyDenied("Only the item `code` can call this.", suggestion="`kiwi run code`, or `help code`.")
    own = services.context(caller, services.catalogs.at(request.project_path))
    items = [as_text(one) for one in as_list(given.get("items"))]
    program = read_program(as_text(given.get("code")), items, caller.origin.run, own)
    wanted = StartRequest(CODE, as_object(given.get("inputs")), program=program)
    if caller.origin.thread:
        response = await start_child(wanted, context, is_waiting=True)
    else:
        made, _ = await services.one(ThreadRunner).create(wanted, own, is_tainted=is_tainted(context), is_own=True)
        await run_here(made.id, context)
        response = await shown_thread(made.id, context, AwaitedThread)
    if response.code == "invalid_program":
        raise InvalidProgram(str(response.message))
    return response
