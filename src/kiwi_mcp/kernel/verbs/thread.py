"""thread: start directives as threads, list, show, watch, answer, inject, pause, resume, cancel, fork."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from typing import Annotated, cast, get_args

from msgspec import UNSET, Meta, UnsetType, field, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.calls import Question
from kiwi_mcp.domain.errors import InvalidRequest, NotFound, PolicyDenied, ThreadTaken, ThreadWaiting, Unanswered
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.messages import ReplyDelta
from kiwi_mcp.domain.outcome import Progress
from kiwi_mcp.domain.threads import (
    ENDED,
    EXIT_CODES,
    TOKEN_CLASSES,
    NewEvent,
    Thread,
    ThreadEvent,
    ThreadObserver,
    ThreadQuestion,
    ThreadStatus,
    unobserved,
)
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.approvals import is_askable
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.instructions import (
    ask_about_project,
    decide_instructions,
    instruction_texts,
    loaded_skills,
)
from kiwi_mcp.kernel.threads.recordings import redactor_for, transcript_path
from kiwi_mcp.kernel.threads.runner import ThreadRunner, waiting_approvals
from kiwi_mcp.kernel.threads.start import (
    StartRequest,
    fork_of,
    lowered_limits,
    starter_name,
    switched_model,
    turn_at,
    typed_inputs,
)
from kiwi_mcp.kernel.threads.wake import start_worker
from kiwi_mcp.kernel.threads.work import ThreadStores
from kiwi_mcp.kernel.verb import (
    ANYONE,
    OWNER,
    AnyJson,
    Argument,
    Item,
    LongText,
    NameText,
    Option,
    Request,
    Response,
    filled,
    verb,
)
from kiwi_mcp.kernel.view import Data, Hint, JsonData, Notice, TableRow, ViewItem, count_text, warning_rows
from kiwi_mcp.manifest.json_schema import faults
from kiwi_mcp.store.old_threads import OldThread, old_thread, old_threads
from kiwi_mcp.store.threads import ThreadFilter, Threads

MAX_THREADS = 1_000
"""How many threads of one tree are looked at."""
_GOING = frozenset({"queued", "running"})
_POLL = 0.3
"""How many seconds pass between two looks at a thread that another process runs."""

ThreadId = Annotated[NameText, Argument("The thread: its id, or the beginning of it.", "THREAD")]
Inputs = Annotated[
    dict[str, AnyJson],
    Option("An input as name=value; repeat it.", "--input", "-i", metavar="NAME=VALUE", kind="pairs"),
]
Limits = Annotated[
    dict[str, float],
    Option(
        "A limit as name=value (turns, tokens, spend, seconds, spawns, children, threads, tool_calls).",
        "--limit",
        metavar="NAME=N",
        kind="pairs",
    ),
]
Skills = Annotated[list[NameText], Option("A skill to load; repeat it.", "--skill", metavar="NAME")]
Queue = Annotated[NameText, Option("The queue whose workers run it.", metavar="NAME")]
Priority = Annotated[int, Meta(ge=-100, le=100), Option("Threads with a higher number are taken first.", metavar="N")]


class ThreadStartRequest(Request, frozen=True, kw_only=True):
    """What to start, with which inputs and limits."""

    item_id: Item
    inputs: Inputs = field(default_factory=dict)
    limits: Limits = field(default_factory=dict)
    model: Annotated[NameText | None, Option("The model, as provider/model; the directive's choice otherwise.")] = None
    wait: Annotated[bool, Option("Wait until the thread ends or waits for you.")] = False
    skills: Skills = field(default_factory=list)
    conversation: Annotated[bool, Option("Talk with it: it waits for a message before every turn.")] = False
    queue: Queue = "default"
    priority: Priority = 0
    project_path: LongText | None = None

    def named_item(self) -> str:
        """Return the item to start."""
        return self.item_id


class ThreadResponse(Response, frozen=True, kw_only=True):
    """One thread. `events` where it is shown whole."""

    thread_id: str
    status: str
    item: str | UnsetType = UNSET
    waits_for: str | UnsetType = UNSET
    result: AnyJson | UnsetType = UNSET
    finish_reason: str | UnsetType = UNSET
    usage: AnyJson | UnsetType = UNSET
    limits: AnyJson | UnsetType = UNSET
    model: str | UnsetType = UNSET
    code: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    questions: list[AnyJson] | UnsetType = UNSET
    approvals: list[str] | UnsetType = UNSET
    parent_id: str | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    warnings: list[str] | UnsetType = UNSET
    started_at: str | UnsetType = UNSET
    updated_at: str | UnsetType = UNSET
    ended_at: str | UnsetType = UNSET
    transcript_path: str | UnsetType = UNSET
    events: list[AnyJson] | UnsetType = UNSET


class AwaitedThread(ThreadResponse, frozen=True, kw_only=True):
    """A thread that the caller waited for, so that the exit code says how it ended."""

    def exit_status(self) -> int:
        """Return the exit code of its status."""
        waits_for_approval = self.status == "waiting" and self.waits_for == "approval"
        return EXIT_CODES.get("approval" if waits_for_approval else self.status, 0)


def stores_of(context: VerbContext) -> ThreadStores:
    """Return the stores of threads."""
    return context.services.one(ThreadRunner).stores


def result_view(response: ThreadResponse) -> Iterator[ViewItem]:
    """Yield what is shown of a thread: its result or its questions, and the next step."""
    yield from warning_rows(response.warnings or ())
    if response.result is not UNSET and response.result is not None:
        yield Data(response.result) if isinstance(response.result, str) else JsonData(response.result)
    if response.message:
        yield Notice(response.message)
    for question in response.questions or ():
        yield Notice(question_text(question))
        yield Hint(f"`kiwi thread answer {question['question_id']} ANSWER` answers it.")
    for approval in response.approvals or ():
        answer = f"`kiwi approvals approve {approval}` lets it run"
        yield Hint(f"`kiwi approvals show {approval}` shows the call that waits, {answer}.")
    yield Notice(f"thread {response.thread_id}: {_status_text(response)}")
    if response.status in {"queued", "running"}:
        yield Hint(f"`kiwi thread watch {response.thread_id}` follows it.")
    elif response.status == "waiting" and response.waits_for == "message":
        yield Hint(f"`kiwi chat --continue {response.thread_id}` continues the conversation.")
    elif response.status == "paused":
        yield Hint(f"`kiwi thread resume {response.thread_id}` continues it.")


def _answer_view(response: ThreadResponse) -> Iterator[ViewItem]:
    if not isinstance(response, AwaitedThread):
        yield Notice(f"Answered; the thread {'continues' if response.status in _GOING else 'still waits'}.")
    yield from result_view(response)


def _resume_view(response: ThreadResponse) -> Iterator[ViewItem]:
    if response.status in _GOING:
        yield Notice("The thread continues in the background.")
    yield from result_view(response)


def _cancel_view(response: ThreadResponse) -> Iterator[ViewItem]:
    if response.status == "cancelled":
        yield Notice("Cancelled.")
    elif response.ended_at:
        yield Notice("Nothing to cancel: it has ended.")
    else:
        yield Notice("The process that runs it was asked to stop; that takes a few seconds.")
    yield from result_view(response)


def question_text(question: JsonObject) -> str:
    """Return a question with its choices."""
    choices = f" ({', '.join(map(text_of, as_list(question['choices'])))})" if question.get("choices") else ""
    path = f" of {path}" if "/" in (path := as_text(question.get("path"))) else ""
    return f"question{path}: {text_of(question['message'])}{choices}"


def _status_text(response: ThreadResponse) -> str:
    usage = response.usage
    waits = f" for {response.waits_for}" if response.waits_for else ""
    numbers = usage if isinstance(usage, dict) else {}
    if any(type(numbers.get(name)) not in {int, float} for name in ("turns", "spend", *TOKEN_CLASSES)):
        return f"{response.status}{waits}"  # the costs of an old thread are what its files say
    tokens = sum(numbers[name] for name in TOKEN_CLASSES)
    turns = count_text(numbers["turns"], "turn")
    return f"{response.status}{waits}; {turns}, {tokens:,} tokens, {numbers['spend']:.4f} USD"


def is_tainted(context: VerbContext) -> bool:
    """Whether what a caller sends to a thread may come from outside text that it read."""
    return not context.is_owner and context.caller.reader in context.services.tainted_callers


@verb("start", group="thread", access=ANYONE, needs_receipt=True, asks=True, shows=result_view)
async def start(request: ThreadStartRequest, context: VerbContext) -> ThreadResponse:
    """Start a directive or a thread item: a model executes it with the rights and limits it declares."""
    services = context.services
    runner = services.one(ThreadRunner)
    wanted = StartRequest(
        request.item_id,
        request.inputs,
        request.limits,
        request.model or "",
        is_conversation=request.conversation,
        queue=request.queue,
        priority=request.priority,
        skills=tuple(request.skills),
    )
    if context.caller.origin.thread:
        return await start_child(wanted, context, is_waiting=request.wait)
    is_own = request.wait and not request.conversation
    own = services.context(context.caller, services.catalogs.at(request.project_path))
    warning = await ask_about_project(own)
    made, question = await runner.create(wanted, own, is_tainted=is_tainted(context), is_own=is_own)
    if is_own and (question is None or await _ask_here(made.id, context)):
        if context.caller.observe is unobserved:
            context.caller.report(Progress(f"thread {made.id}", thread_id=made.id))
        await run_here(made.id, context)
    warnings = [*lowered_limits(request.limits, made.limits), *filter(None, (warning,))] or UNSET
    if question is not None or request.wait or request.conversation:
        response = await shown_thread(made.id, context, AwaitedThread if request.wait else ThreadResponse)
        return replace(response, warnings=warnings)
    start_worker(services.user)
    return replace(_started(made), warnings=warnings)


def _started(thread: Thread) -> ThreadResponse:
    at, path = iso(thread.created_at), transcript_path(thread)
    return ThreadResponse(thread_id=thread.id, status=thread.status, started_at=at, transcript_path=path)


async def start_child(wanted: StartRequest, context: VerbContext, *, is_waiting: bool) -> ThreadResponse:
    """Start a child of the thread that calls, as `spawn` does; its rights and its budget are its parent's."""
    child = await context.services.one(ThreadRunner).spawn(wanted, context.caller)
    if is_waiting and not child.is_ended:
        raise ThreadWaiting("The child thread has not ended.", waits_for="child")
    if child.is_tainted:
        context.services.tainted_callers.add(context.caller.origin.thread)
    response = await _response(child, context) if is_waiting else _started(child)
    return replace(response, warnings=lowered_limits(wanted.limits, child.limits) or UNSET)


def _observing(context: VerbContext, after: int = 0) -> ThreadObserver:
    """Return an observer for the events behind a number: the caller sees them, or each turn and call as progress."""

    def observe(event: ThreadEvent | ReplyDelta) -> None:
        if isinstance(event, ThreadEvent) and event.seq <= after:
            return
        if context.caller.observe is not unobserved:
            context.caller.observe(event)
        elif isinstance(event, ThreadEvent) and (text := event_text(event)):
            context.caller.report(Progress(text))

    return observe


def event_text(event: ThreadEvent) -> str:
    """Return an event in a few words; empty for one that is not shown while it runs."""
    body = event.body
    match event.kind:
        case "model":
            calls = [as_text(as_object(part).get("name")) for part in as_list(body.get("parts"))]
            return f"turn: {', '.join(filter(None, calls)) or 'answer'}"
        case "result":
            return f"{as_text(as_object(body.get('part')).get('name'))}: {as_text(body.get('status'))}"
        case "step":
            return f"step {as_text(body.get('id'))}"
        case "asked":
            return f"waits for {as_text(body.get('waits_for'))}"
        case "spawned":
            return f"started {as_text(body.get('item'))}"
        case "limit":
            return f"limit reached: {as_text(body.get('limit'))}"
        case _:
            return ""


async def shown_thread(
    thread_id: str, context: VerbContext, kind: type[ThreadResponse] = ThreadResponse, *, has_events: bool = False
) -> ThreadResponse:
    """Return a thread as it stands; one that waits no longer is `queued`, since the next worker continues it."""
    thread = await own_thread(thread_id, context)
    runner = context.services.one(ThreadRunner)
    if thread.status == "waiting" and await runner.stores.do(partial(runner.is_answered, thread)):
        thread = replace(thread, status="queued", waits_for="")
    return await _response(thread, context, kind, has_events=has_events)


async def _response(
    thread: Thread, context: VerbContext, kind: type[ThreadResponse] = ThreadResponse, *, has_events: bool = False
) -> ThreadResponse:
    if thread.is_tainted and not context.is_owner:
        context.services.tainted_callers.add(context.caller.reader)
    stores = stores_of(context)
    questions = await stores.do(partial(_questions, stores, thread))
    events = await stores.do(partial(stores.threads.events, thread.id)) if has_events else ()
    approvals = await stores.do(partial(_approvals, stores, thread))
    return filled(
        kind,
        thread,
        thread_id=thread.id,
        result=thread.result,
        usage=thread.usage.to_json(),
        limits={**to_builtins(thread.limits), "spend": thread.limits.spend / 1_000_000},
        model=thread.model,
        questions=await stores.do(lambda: [_question(stores, one) for one in questions]) or UNSET,
        approvals=approvals or UNSET,
        started_at=iso(thread.created_at),
        updated_at=iso(thread.updated_at),
        ended_at=iso(thread.ended_at) if thread.ended_at else UNSET,
        transcript_path=transcript_path(thread),
        events=[_event(one) for one in events] if has_events else UNSET,
    )


def _approvals(stores: ThreadStores, thread: Thread) -> list[str]:
    """Return the approvals that a thread waits for; of a root also those of its tree."""
    tree = stores.threads.list(ThreadFilter(root_id=thread.id, status="waiting", limit=MAX_THREADS)) or (thread,)
    waiting = [one for one in tree if one.waits_for == "approval"]
    return [found for one in waiting for found in waiting_approvals(stores.threads.events(one.id))]


async def own_thread(thread_id: str, context: VerbContext) -> Thread:
    """Return a thread; a caller sees those that it started, and a thread itself and its children."""
    stores, caller = stores_of(context), context.caller
    thread = await stores.do(partial(stores.threads.get, thread_id))
    own = (thread.id, thread.parent_id)
    if caller.origin.thread in own if caller.origin.thread else thread.starter == starter_name(context):
        return thread
    if not context.is_owner:
        raise PolicyDenied("That thread is not yours.", suggestion="Name one that you started.")
    return thread


def _questions(stores: ThreadStores, thread: Thread) -> Sequence[ThreadQuestion]:
    """Return the open questions of a thread; of a root those of its tree."""
    tree = {"thread_id": thread.id} if thread.parent_id else {"root_id": thread.id}
    return stores.questions.open(now_ms(), **tree)


def _question(stores: ThreadStores, one: ThreadQuestion) -> JsonObject:
    return {
        "question_id": one.id,
        "thread_id": one.thread_id,
        "path": stores.path_of(stores.threads.get(one.thread_id)),
        "kind": one.kind,
        "message": one.message,
        **({"choices": one.schema["enum"]} if "enum" in one.schema else {}),
        "expires_at": iso(one.expires_at),
    }


def _event(event: ThreadEvent) -> JsonObject:
    """Return an event as it is shown: without the snapshot of a program."""
    body = {name: value for name, value in event.body.items() if name != "snapshot"}
    return {**body, "seq": event.seq, "at": iso(event.at), "kind": event.kind}


class ThreadListRequest(Request, frozen=True, kw_only=True):
    """Which threads to list."""

    status: Annotated[NameText | None, Option("Only threads with this status.")] = None
    directive: Annotated[NameText | None, Option("Only threads of this directive.")] = None
    all: Annotated[bool, Option("Also conversations that wait for a message.")] = False
    conversations: Annotated[bool, Option("Only conversations of this project.")] = False
    old: Annotated[bool, Option("Only threads of earlier versions, in `.ai/threads` and `.ai/agent/threads`.")] = False
    limit: Annotated[int, Meta(ge=1, le=1_000), Option("At most this many.")] = 20


class ThreadListResponse(Response, frozen=True, kw_only=True):
    """Threads, the newest first."""

    threads: list[ThreadResponse]


def _list_view(response: ThreadListResponse) -> Iterator[ViewItem]:
    for one in response.threads:
        yield TableRow(f"{one.thread_id}  {(one.started_at or '')[:16]}  {_status_text(one):<56}  {one.item or ''}")
    if not response.threads:
        yield Notice("There are no threads that run, wait for you or have ended.")
        yield Hint("`kiwi thread start DIRECTIVE` starts one.")


@verb("list", group="thread", access=ANYONE, records=False, aliases=("thread",), shows=_list_view)
async def list_threads(request: ThreadListRequest, context: VerbContext) -> ThreadListResponse:
    """List threads, the newest first."""
    stores, space = stores_of(context), context.services.catalogs.at(None).space
    if request.old:
        found_old = await asyncio.to_thread(_old_threads, context)
        named = [one for one in found_old if request.status in {None, one.status}]
        return ThreadListResponse(threads=[_old_response(one) for one in named[: request.limit]])
    if request.status is not None and request.status not in (known := get_args(ThreadStatus)):
        raise InvalidRequest(f"{request.status!r:.40} is not a status.", suggestion=f"Use one of: {', '.join(known)}.")
    project = str(space.project) if space.project_ai.is_dir() else ""
    wanted = ThreadFilter(
        status=cast("ThreadStatus | None", request.status),
        directive=request.directive,
        starter=None if context.is_owner else starter_name(context),
        kind="conversation" if request.conversations else None,
        project=project if request.conversations else None,
        has_idle=request.all or request.conversations or request.status is not None,
        limit=request.limit,
    )
    found = await stores.do(partial(stores.threads.list, wanted))
    return ThreadListResponse(
        threads=[
            ThreadResponse(
                thread_id=one.id,
                item=one.item,
                kind=one.kind,
                status=one.status,
                waits_for=one.waits_for or UNSET,
                usage=one.usage.to_json(),
                started_at=iso(one.created_at),
                finish_reason=one.finish_reason or UNSET,
            )
            for one in found
        ]
    )


class ThreadIdRequest(Request, frozen=True, kw_only=True):
    """Which thread."""

    thread_id: ThreadId


def _show_view(response: ThreadResponse) -> Iterator[ViewItem]:
    for event in response.events or ():
        body = {name: value for name, value in event.items() if name not in {"seq", "at", "kind"}}
        yield TableRow(f"{event['seq']:>4}  {event['at'][11:19]}  {event['kind']:<12}  {_summary(event['kind'], body)}")
    yield from result_view(response)


def _summary(kind: str, body: JsonObject) -> str:
    """Return the body of an event in one line."""
    match kind:
        case "prompt":
            tools = len(as_list(body.get("tools")))
            text = f"{as_text(body.get('model'))}, {tools} tools: {as_text(body.get('first'))}"
        case "model":
            calls = [as_object(part) for part in as_list(body.get("parts")) if as_object(part).get("type") == "call"]
            made = [f"{as_text(call.get('name'))} {as_text(call.get('arguments'))}" for call in calls]
            text = "; ".join([*filter(None, [reply_text(body)]), *made])
        case "result":
            part = as_object(body.get("part"))
            text = f"{as_text(part.get('name'))} {as_text(body.get('status'))}: {as_text(part.get('content'))}"
        case "injected":
            text = as_text(body.get("text"))
        case "ended":
            text = f"{as_text(body.get('status'))} {as_text(body.get('message'))}"
        case _:
            text = compact(body) if body else ""
    return " ".join(text.split())


@verb("show", group="thread", access=ANYONE, records=False, shows=_show_view)
async def show_thread(request: ThreadIdRequest, context: VerbContext) -> ThreadResponse:
    """Show a thread with all events of its journal."""
    try:
        return await shown_thread(request.thread_id, context, has_events=True)
    except NotFound:
        old = await asyncio.to_thread(find_old_thread, request.thread_id, context)
        if old is None:
            raise
        redactor = await asyncio.to_thread(redactor_for, context.services.catalogs.at(None).space)
        events = [
            {**one.body, "seq": seq, "at": one.at, "kind": one.kind} for seq, one in enumerate(old.events, start=1)
        ]
        result = UNSET if old.result is None else redactor.json(old.result)
        return replace(_old_response(old), events=[redactor.json(event) for event in events], result=result)


def _old_threads(context: VerbContext) -> list[OldThread]:
    """Return the threads of earlier versions in the project; those that are in the store are not old."""
    if not context.is_owner:
        raise PolicyDenied("Only the owner reads threads of earlier versions.", suggestion="Ask the owner.")
    known, found = stores_of(context).threads, list[OldThread]()
    for one in old_threads(context.services.catalogs.at(None).space.project):
        try:
            known.get(one.id)
        except NotFound:
            found.append(one)
    return found


def find_old_thread(thread_id: str, context: VerbContext) -> OldThread | None:
    """Return a thread that an earlier version stored in the project, if the owner asks for one."""
    return old_thread(context.services.catalogs.at(None).space.project, thread_id) if context.is_owner else None


def _old_response(one: OldThread) -> ThreadResponse:
    return ThreadResponse(
        thread_id=one.id,
        status=one.status or "unknown",
        item=one.directive or UNSET,
        kind=f"old, {one.form}",
        model=one.model or UNSET,
        parent_id=one.parent_id or UNSET,
        started_at=one.started_at or UNSET,
        updated_at=one.updated_at or UNSET,
        usage=dict(one.cost) if one.cost else UNSET,
    )


class ThreadWatchRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to watch, and for how long."""

    seconds: Annotated[float, Meta(ge=0, le=86_400), Option("Watch for at most this many seconds.")] = 3_600


@verb("watch", group="thread", access=ANYONE, records=False, shows=result_view)
async def watch_thread(request: ThreadWatchRequest, context: VerbContext) -> ThreadResponse:
    """Watch a thread until it ends or waits; Ctrl-C leaves it running."""
    runner, watched = context.services.one(ThreadRunner), _Watched(_observing(context))
    stores, until = runner.stores, time.monotonic() + request.seconds
    thread = await own_thread(request.thread_id, context)
    if thread.status in _GOING and not await stores.do(partial(runner.lease_seconds, thread)):
        start_worker(context.services.user)  # the process that ran it has died
    while True:
        thread = await own_thread(request.thread_id, context)
        await stores.do(partial(watched.read, stores.threads, thread))
        # One whose question is answered continues as soon as a worker takes it.
        is_stopped = thread.status == "paused" or (thread.status == "waiting" and not runner.is_answered(thread))
        if thread.is_ended or is_stopped or time.monotonic() > until:
            return await shown_thread(thread.id, context, AwaitedThread)
        await asyncio.sleep(_POLL)


class _Watched:
    """What was shown of a thread that another process runs."""

    def __init__(self, observe: ThreadObserver) -> None:
        self._observe = observe
        self._seq = 0
        self._number = -1
        self._text = ""

    def read(self, threads: Threads, thread: Thread) -> None:
        """Observe the new events, and the new pieces of the reply that is being written."""
        for event in threads.events(thread.id, self._seq):
            if event.kind == "model":
                self._add(reply_text(event.body).removeprefix(self._text))  # what was not stored as a piece
            self._seq, self._number, self._text = event.seq, -1, ""
            self._observe(event)
        for delta in threads.deltas(thread.id, self._number):
            if delta.seq == self._seq + 1:
                self._number = delta.n
                self._add(delta.text)

    def _add(self, text: str) -> None:
        if text:
            self._text += text
            self._observe(ReplyDelta("text", text))


def reply_text(body: JsonObject) -> str:
    """Return the text of a reply, from the body of its event."""
    parts = (as_object(part) for part in as_list(body.get("parts")))
    return "".join(as_text(part.get("text")) for part in parts if part.get("type") == "text")


class ThreadAnswerRequest(Request, frozen=True, kw_only=True):
    """Which question to answer, and how."""

    question_id: Annotated[NameText, Argument("The question: its id, or the thread that asks.", "QUESTION")]
    answer: LongText
    wait: Annotated[bool, Option("Run the thread here until it ends or waits for you.")] = False


@verb("answer", group="thread", access=OWNER, needs_receipt=True, asks=True, shows=_answer_view)
async def answer_question(request: ThreadAnswerRequest, context: VerbContext) -> ThreadResponse:
    """Answer a question of a thread; the thread continues in the background."""
    stores = stores_of(context)
    by = context.services.store.actor.name
    question = await stores.do(partial(_asked, stores, request.question_id))
    given = typed_inputs({"properties": {"answer": question.schema}}, {"answer": request.answer})["answer"]
    if issues := tuple(faults(question.schema, given)):
        choices = " or ".join(f"`{text_of(one)}`" for one in as_list(question.schema.get("enum")))
        raise InvalidRequest(
            f"{request.answer!r:.80} is no answer to this question.",
            suggestion=f"Answer {choices}." if choices else issues[0].fix,
        )
    if question.status != "open":
        raise InvalidRequest(
            f"This question is {question.status}.", suggestion=f"`kiwi thread show {question.thread_id}` shows it."
        )
    answered = await stores.do(lambda: stores.questions.answer(question.id, given, by, now_ms()))
    thread = await stores.do(partial(stores.threads.get, answered.thread_id))
    return await _continue(thread, context, is_waiting=request.wait)


def _asked(stores: ThreadStores, wanted: str) -> ThreadQuestion:
    """Return a question by its id, or the one that a thread waits for."""
    with suppress(NotFound):
        return stores.questions.get(wanted)
    thread = stores.threads.get(wanted)
    found = stores.questions.open(now_ms(), thread_id=thread.id)
    if len(found) != 1:
        raise NotFound(
            f"The thread {thread.id} has {len(found)} open questions; it is {thread.status}.",
            suggestion=f"`kiwi thread show {thread.id}` lists its questions; name one by its id.",
        )
    return found[0]


async def _continue(thread: Thread, context: VerbContext, *, is_waiting: bool) -> ThreadResponse:
    """Let a thread continue, here where the caller waits, else in the background; return it."""
    if not is_waiting:
        start_worker(context.services.user)
        return await shown_thread(thread.id, context)
    await run_here(thread.id, context, after=thread.seq)
    return await shown_thread(thread.id, context, AwaitedThread)


async def run_here(thread_id: str, context: VerbContext, *, after: int = 0) -> None:
    """Run a thread until it ends or waits for something that the person at the client does not answer in a form."""
    runner = context.services.one(ThreadRunner)
    await runner.run(thread_id, context.caller, _observing(context, after))
    while answered := await _ask_here(thread_id, context):
        for one in dict.fromkeys((answered, thread_id)):  # a child continues before its parent
            await runner.run(one, context.caller, _observing(context, after))


async def _ask_here(thread_id: str, context: VerbContext) -> str:
    """Put the first open question of a thread to the person at an MCP client; return the thread that got an answer."""
    caller, stores = context.caller, stores_of(context)
    if not (caller.capabilities and is_askable(caller)):
        return ""
    found = await stores.do(lambda: _questions(stores, stores.threads.get(thread_id)))
    if not found:
        return ""
    asked, by = found[0], context.services.store.actor.name
    form: JsonObject = {"type": "object", "properties": {"answer": asked.schema}, "required": ["answer"]}
    message = question_text(await stores.do(partial(_question, stores, asked)))
    question = Question("elicitation/create", {"message": message, "requestedSchema": form}, is_own=True)
    try:
        said = (await caller.ask({"answer": question}))["answer"]
    except Unanswered:  # the client left, or does not show forms: the question stays open
        return ""
    answer = as_object(said.get("content")).get("answer")
    if said.get("action") != "accept" or answer is None or any(faults(asked.schema, answer)):
        return ""
    await stores.do(lambda: stores.questions.answer(asked.id, answer, by, now_ms()))
    return asked.thread_id


class ThreadResumeRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to resume, and with which message."""

    message: Annotated[LongText | None, Option("A message to the model.", "--message", "-m")] = None
    model: Annotated[NameText | None, Option("Continue with this model, as provider/model.")] = None
    skills: Skills = field(default_factory=list)
    wait: Annotated[bool, Option("Wait until the thread ends or waits for you.")] = False


@verb("resume", group="thread", access=ANYONE, asks=True, shows=_resume_view)
async def resume_thread(request: ThreadResumeRequest, context: VerbContext) -> ThreadResponse:
    """Continue a thread that waits or was paused."""
    runner = context.services.one(ThreadRunner)
    thread = await own_thread(request.thread_id, context)
    await _refuse_paused(thread, context)
    thread = await own_thread((await _free(thread, context)).id, context)
    await _refuse_paused(thread, context)
    catalog = context.services.catalogs.at(thread.project or None)
    switched = switched_model(thread, request.model, catalog) if request.model else None
    skills = [
        event
        for use, text in loaded_skills(request.skills, context.services.context(context.caller, catalog))
        for event in (NewEvent("skill", to_builtins(use)), NewEvent("injected", {"text": text}))
    ]
    await runner.wake(thread, request.message or "", switched, skills=skills, is_tainted=is_tainted(context))
    if request.message or skills or thread.waits_for != "message":
        return await _continue(thread, context, is_waiting=request.wait)
    return await shown_thread(thread.id, context)


async def _refuse_paused(thread: Thread, context: VerbContext) -> None:
    """Refuse to resume a thread that another caller, or a hook, has paused."""
    if context.is_owner or (thread.status != "paused" and thread.command != "pause"):
        return
    stores = stores_of(context)
    events = reversed(await stores.do(partial(stores.threads.events, thread.id)))
    since = takewhile(lambda event: event.kind != "resumed", events)
    if {event.body["by"] for event in since if event.body.get("pause")} != {starter_name(context)}:
        raise PolicyDenied("The owner has paused that thread.", suggestion="Ask the owner to resume it.")


async def _free(thread: Thread, context: VerbContext) -> Thread:
    """Return a thread that no other process has, or wait until the lease of a process that gives no sign has ended."""
    runner, beat_at = context.services.one(ThreadRunner), thread.beat_at
    is_reported = False
    while not runner.is_running(thread.id) and (left := await runner.stores.do(partial(runner.lease_seconds, thread))):
        if thread.beat_at != beat_at:  # that process is alive
            raise ThreadTaken(thread.id)
        if not is_reported:
            until = iso(now_ms() + int(left * 1_000))[11:19]
            context.caller.report(Progress(f"another process has the thread until {until} UTC; waiting"))
            is_reported = True
        await asyncio.sleep(min(left, _POLL))
        thread = await own_thread(thread.id, context)
    return thread


class ThreadInstructionsRequest(Request, frozen=True, kw_only=True):
    """Whether to accept the instructions of a project."""

    accept: Annotated[bool, Option("Let models follow the file of this project, exactly as it is now.")] = False
    refuse: Annotated[bool, Option("Send the file of this project as data, and do not ask again.")] = False
    project_path: LongText | None = None


class ThreadInstructionsResponse(Response, frozen=True, kw_only=True):
    """The files with instructions for threads, the weakest first."""

    files: list[AnyJson]


def _instructions_view(response: ThreadInstructionsResponse) -> Iterator[ViewItem]:
    for one in map(as_object, response.files):
        kind = "instructions" if one["is_accepted"] else "data: `kiwi thread instructions --accept` accepts it"
        yield TableRow(f"{as_text(one['source'])}  {as_text(one['digest'])[:12]}  {kind}")
    if not response.files:
        yield Notice("There are no files with instructions.")


@verb("instructions", group="thread", access=OWNER, shows=_instructions_view)
async def show_instructions(request: ThreadInstructionsRequest, context: VerbContext) -> ThreadInstructionsResponse:
    """Show the files with instructions for threads; accept or refuse that of the project."""
    services = context.services
    own = services.context(context.caller, services.catalogs.at(request.project_path))
    if request.accept or request.refuse:
        for one in instruction_texts(own.space, services.provenance):
            if one.is_of_project:
                decide_instructions(one.file.digest, own, is_accepted=request.accept and not request.refuse)
    texts = instruction_texts(own.space, services.provenance)
    return ThreadInstructionsResponse(files=[to_builtins(one.file) for one in texts])


class ThreadInjectRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread gets which message."""

    message: Annotated[LongText, Argument("The message to the model.", "MESSAGE")]


@verb("inject", group="thread", access=ANYONE, shows=result_view)
async def inject_message(request: ThreadInjectRequest, context: VerbContext) -> ThreadResponse:
    """Give a thread a message, also while it runs: the next request to the model has it."""
    thread = await own_thread(request.thread_id, context)
    await context.services.one(ThreadRunner).inject(thread, request.message, is_tainted=is_tainted(context))
    return await _continue(thread, context, is_waiting=False)


@verb("pause", group="thread", access=ANYONE, shows=result_view)
async def pause_thread(request: ThreadIdRequest, context: VerbContext) -> ThreadResponse:
    """Pause a thread before its next step, until the owner, or the caller that paused it, resumes it."""
    thread = await own_thread(request.thread_id, context)
    await context.services.one(ThreadRunner).pause(thread, starter_name(context))
    return await shown_thread(thread.id, context)


class ThreadCancelRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to cancel."""

    tree: Annotated[bool, Option("Cancel the whole tree of threads that it belongs to.")] = False


@verb("cancel", group="thread", access=ANYONE, shows=_cancel_view)
async def cancel_thread(request: ThreadCancelRequest, context: VerbContext) -> ThreadResponse:
    """Cancel a thread and its children; what runs is stopped within seconds."""
    runner = context.services.one(ThreadRunner)
    thread = await own_thread(request.thread_id, context)
    if request.tree:
        thread = await own_thread(thread.root_id, context)
    await runner.cancel(thread)
    if request.tree:  # those that are detached too
        tree = ThreadFilter(root_id=thread.id, limit=MAX_THREADS)
        for one in await runner.stores.do(partial(runner.stores.threads.list, tree)):
            await runner.cancel(one)
    response = await shown_thread(thread.id, context)
    if response.status not in ENDED:  # the process that runs it stops it; where that one has died, a worker does
        start_worker(context.services.user)
    return response


class ThreadForkRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to fork, after which turn, and how the new one continues."""

    at: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Option("The event that ends a turn, as `thread show` numbers them; the last completed turn otherwise."),
    ] = None
    message: Annotated[LongText | None, Option("A message to the model.", "--message", "-m")] = None
    limits: Limits = field(default_factory=dict)
    wait: Annotated[bool, Option("Wait until the thread ends or waits for you.")] = False


@verb("fork", group="thread", access=ANYONE, needs_receipt=True, asks=True, shows=result_view)
async def fork_thread(request: ThreadForkRequest, context: VerbContext) -> ThreadResponse:
    """Start a new thread from a completed turn of another one, with the same rights and a budget of its own."""
    thread, made = await fork_at(request.thread_id, request.at, request.limits, context)
    stores = stores_of(context)
    if request.message:
        made.append(NewEvent("injected", {"text": request.message}))
        thread = replace(thread, status="queued", waits_for="", is_tainted=thread.is_tainted or is_tainted(context))
    elif thread.waits_for:
        made.append(NewEvent("asked", {"waits_for": thread.waits_for}))
    new = await stores.do(partial(stores.threads.create, thread, made))
    if new.waits_for:
        return await shown_thread(new.id, context)
    return await _continue(new, context, is_waiting=request.wait)


async def fork_at(
    thread_id: str, at: int | None, limits: Mapping[str, Json], context: VerbContext
) -> tuple[Thread, list[NewEvent]]:
    """Return the fork of a thread after a turn, with its first events; nothing is stored."""
    if context.caller.origin.thread:
        raise PolicyDenied("A thread forks no thread: its budget would be its own.", suggestion="Use `spawn`.")
    stores = stores_of(context)
    thread = await own_thread(thread_id, context)
    events = await stores.do(partial(stores.threads.events, thread.id))
    return fork_of(thread, events, turn_at(thread, events, at), limits)
