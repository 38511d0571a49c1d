"""thread: the journal of a thread: costs, verify, export, keep, erase, record; replay and eval without its model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, to_builtins
from msgspec.structs import replace

from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError, NotFound, PolicyDenied
from kiwi_mcp.domain.json import JsonObject, as_text, compact
from kiwi_mcp.domain.threads import TOKEN_CLASSES, NewEvent, Thread
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.recordings import (
    Cassette,
    RecordedReplies,
    differences,
    knowledge_text,
    outcome_of,
    read_cassette,
    redactor_for,
    transcript_lines,
    transcript_path,
    turns_of,
)
from kiwi_mcp.kernel.threads.runner import ThreadRunner
from kiwi_mcp.kernel.threads.start import StartRequest, new_thread, unsigned_items
from kiwi_mcp.kernel.threads.state import rebuild
from kiwi_mcp.kernel.verb import ANYONE, OWNER, AnyJson, Argument, LongText, NameText, Option, Request, Response, verb
from kiwi_mcp.kernel.verbs.thread import (
    MAX_THREADS,
    ThreadId,
    ThreadIdRequest,
    ThreadResponse,
    find_old_thread,
    fork_at,
    own_thread,
    result_view,
    shown_thread,
    stores_of,
)
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, count_text, issue_text
from kiwi_mcp.primitives.secrets.key_storage import write_private
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.store.old_threads import TranscriptForm
from kiwi_mcp.store.threads import ThreadFilter

_LARGEST = 64_000_000
"""The size of the largest cassette that is read, in bytes."""


class ThreadCostsResponse(Response, frozen=True, kw_only=True):
    """What a thread and its children cost: the sums, and each entry of the ledger."""

    thread_id: str
    usage: AnyJson
    entries: list[AnyJson]


def _costs_view(response: ThreadCostsResponse) -> Iterator[ViewItem]:
    for one in response.entries:
        tokens = sum(one[name] for name in TOKEN_CLASSES) or one["reserved_tokens"]
        money = (one["spend"] or one["reserved"]) / 1_000_000
        yield TableRow(f"{one['at'][:19]}  {one['kind']:<15} {tokens:>9,} tokens {money:>10.6f} USD  {one['model']}")
    usage = response.usage
    classes = ", ".join(f"{usage[name]:,} {name.removesuffix('_tokens').replace('_', ' ')}" for name in TOKEN_CLASSES)
    about = " (partly estimated)" if usage["estimated"] else ""
    yield Data(f"{usage['spend']:.6f} USD, {count_text(usage['turns'], 'turn')}, tokens: {classes}{about}")


@verb("costs", group="thread", access=ANYONE, records=False, shows=_costs_view)
async def thread_costs(request: ThreadIdRequest, context: VerbContext) -> ThreadCostsResponse:
    """Show what a thread and its children cost."""
    stores = stores_of(context)
    thread = await own_thread(request.thread_id, context)
    entries = await stores.do(partial(stores.budget.ledger, thread.id))
    return ThreadCostsResponse(
        thread_id=thread.id,
        usage=thread.usage.to_json(),
        entries=[{**to_builtins(one), "at": iso(one.at)} for one in entries],
    )


class ThreadVerifyResponse(Response, frozen=True, kw_only=True):
    """The faults of a journal; none where it is intact."""

    thread_id: str
    valid: bool
    issues: list[AnyJson]

    def exit_status(self) -> int:
        """Return 5 for a journal that was changed."""
        return 0 if self.valid else 5


def _verify_view(response: ThreadVerifyResponse) -> Iterator[ViewItem]:
    for issue in response.issues:
        yield Notice(issue_text(issue))
    yield Data("The journal is intact." if response.valid else "The journal was changed or is damaged.")


@verb("verify", group="thread", access=ANYONE, records=False, shows=_verify_view)
async def verify_thread(request: ThreadIdRequest, context: VerbContext) -> ThreadVerifyResponse:
    """Check the hash chain of a journal, and rebuild the thread from it."""
    stores = stores_of(context)
    thread = await own_thread(request.thread_id, context)
    found = await stores.do(partial(stores.threads.verify, thread.id))
    return ThreadVerifyResponse(thread_id=thread.id, valid=not found, issues=[one.to_json() for one in found])


class ThreadExportRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to export, and in which form."""

    format: Annotated[TranscriptForm, Option("kiwi, or ryeos.", metavar="FORM")] = "kiwi"


class ThreadExportResponse(Response, frozen=True, kw_only=True):
    """A transcript, as lines of JSON."""

    thread_id: str
    format: str
    lines: list[str]


@verb("export", group="thread", access=ANYONE, records=False, shows=lambda response: map(Data, response.lines))
async def export_thread(request: ThreadExportRequest, context: VerbContext) -> ThreadExportResponse:
    """Print the transcript of a thread as lines of JSON, without secrets."""
    stores = stores_of(context)
    try:
        thread = await own_thread(request.thread_id, context)
    except NotFound:
        old = await asyncio.to_thread(find_old_thread, request.thread_id, context)
        if old is None:
            raise
        redactor = await _redactor("", context)
        lines = [redactor.text(compact(line)) for line in old.lines(request.format)]
        return ThreadExportResponse(thread_id=old.id, format=request.format, lines=lines)
    events = await stores.do(partial(stores.threads.events, thread.id))
    lines = [*transcript_lines(events, request.format, await _redactor(thread.project, context))]
    return ThreadExportResponse(thread_id=thread.id, format=request.format, lines=lines)


class ThreadKeepRequest(ThreadIdRequest, frozen=True, kw_only=True):
    """Which thread to keep, and under which name."""

    name: Annotated[NameText | None, Option("The name of the entry; that of the directive and the id otherwise.")] = (
        None
    )


class ThreadKeepResponse(Response, frozen=True, kw_only=True):
    """The entry of knowledge that was written."""

    thread_id: str
    item_id: str
    path: str


@verb("keep", group="thread", access=OWNER, needs_receipt=True, shows=lambda response: [Data(response.path)])
async def keep_thread(request: ThreadKeepRequest, context: VerbContext) -> ThreadKeepResponse:
    """Write a thread that has ended as an entry of knowledge, so that search finds what it did."""
    stores, thread = stores_of(context), await own_thread(request.thread_id, context)
    if not thread.is_ended:
        raise InvalidRequest(f"{thread.id} has not ended.", suggestion="Wait for its end, or cancel it.")
    events = await stores.do(partial(stores.threads.events, thread.id))
    if any(event.is_erased for event in events):
        raise InvalidRequest(f"The texts of {thread.id} were erased.", suggestion="Name another thread.")
    name = request.name or re.sub(r"[^a-z0-9_-]", "_", f"{thread.directive}_{thread.id[-8:]}".lower())
    content = knowledge_text(thread, events, name, await _redactor(thread.project, context))
    wanted: JsonObject = {"item_type": "knowledge", "item_id": name, "parameters": {"content": content}}
    project: JsonObject = {"project_path": thread.project} if thread.project else {}
    answer = await context.services.dispatch("execute", {"action": "create", **wanted, **project}, context.caller)
    if answer.error is not None:
        raise answer.error
    return ThreadKeepResponse(thread_id=thread.id, item_id=name, path=as_text(answer.content.get("path")))


@verb("erase", group="thread", access=OWNER, needs_receipt=True, shows=result_view)
async def erase_thread(request: ThreadIdRequest, context: VerbContext) -> ThreadResponse:
    """Erase all texts of a thread that has ended, and its transcript; its hashes, times and costs stay."""
    stores = stores_of(context)
    thread = await own_thread(request.thread_id, context)
    await stores.do(lambda: stores.threads.erase(thread.id, now_ms()))
    if thread.project:
        (Path(thread.project) / transcript_path(thread)).unlink(missing_ok=True)
    return await shown_thread(thread.id, context)


async def _redactor(project: str, context: VerbContext) -> Redactor:
    return await asyncio.to_thread(redactor_for, context.services.catalogs.at(project or None).space)


class ThreadRecordRequest(Request, frozen=True, kw_only=True):
    """Which thread to record, and into which file."""

    thread_id: ThreadId
    file: Annotated[LongText, Argument("A new file.", "FILE", kind="path")]


class ThreadRecordResponse(Response, frozen=True, kw_only=True):
    """The file, and how many replies it has."""

    thread_id: str
    path: str
    turns: int
    message: str


@verb("record", group="thread", access=OWNER, is_local=True)
async def record_thread(request: ThreadRecordRequest, context: VerbContext) -> ThreadRecordResponse:
    """Write the requests and replies of a thread into a file, without secrets."""
    stores = stores_of(context)
    thread = await stores.do(partial(stores.threads.get, request.thread_id))
    cassette = await _recorded(thread, context)
    redactor = await _redactor(thread.project, context)
    text = redactor.clean(msgspec.json.format(msgspec.json.encode(cassette)) + b"\n")
    try:
        await asyncio.to_thread(write_private, Path(request.file), text)
    except OSError as error:
        raise Conflict(
            f"{request.file} cannot be written: {error.strerror}.", suggestion="Name a file that does not exist yet."
        ) from error
    turns, message = len(cassette.turns), "Add `expect` to it, and run it with `kiwi thread replay` or `eval`."
    return ThreadRecordResponse(thread_id=thread.id, path=request.file, turns=turns, message=message)


async def _recorded(thread: Thread, context: VerbContext, after: int = 0) -> Cassette:
    """Return a thread with its children as a cassette; with `after`, only what came after that event."""
    stores = stores_of(context)
    events = await stores.do(partial(stores.threads.events, thread.id))
    wanted = ThreadFilter(parent_id=thread.id, limit=MAX_THREADS)
    children = await stores.do(partial(stores.threads.list, wanted))
    questions = await stores.do(partial(stores.questions.of_thread, thread.id))
    start = rebuild(events).start
    before = events[:after]
    spawned, asked = ({event.body.get(word) for event in before} for word in ("thread_id", "question_id"))
    return Cassette(
        format=1,
        item=thread.item,
        inputs=dict(thread.inputs),
        model=thread.model,
        system=start.system if start else "",
        turns=tuple(turns_of(events))[sum(event.kind == "model" for event in before) :],
        answers=tuple(
            one.answer for one in questions if one.kind == "ask" and one.status == "answered" and one.id not in asked
        ),
        children=tuple([await _recorded(one, context) for one in reversed(children) if one.id not in spawned]),
        outcome=to_builtins(outcome_of(thread, events)),
    )


class ThreadReplayRequest(Request, frozen=True, kw_only=True):
    """What to replay."""

    target: Annotated[LongText, Argument("A thread, or a file that `thread record` wrote.", "THREAD|FILE")]
    at: Annotated[
        Annotated[int, Meta(ge=1)] | None, Option("Begin after the turn of a thread that ends with this event.")
    ] = None
    project_path: LongText | None = None


class ThreadReplayResponse(Response, frozen=True, kw_only=True):
    """The new thread, and how it differs from what was recorded or is expected."""

    target: str
    passed: bool
    differences: list[str]
    thread_id: str = ""
    status: str = ""
    result: AnyJson = None
    tools: tuple[str, ...] = ()
    spend: float | None = None

    def exit_status(self) -> int:
        """Return 1 for a replay that differs."""
        return 0 if self.passed else 1


def _replay_view(response: ThreadReplayResponse) -> Iterator[ViewItem]:
    yield Data(f"{'passed' if response.passed else 'FAILED'}  {response.target}")
    yield from (Notice(f"  {difference}") for difference in response.differences)


@verb("replay", group="thread", access=OWNER, is_local=True, needs_receipt=True, asks=True, shows=_replay_view)
async def replay_thread(request: ThreadReplayRequest, context: VerbContext) -> ThreadReplayResponse:
    """Run a recorded thread again: the recorded replies stand in for the model, the tools run."""
    path = Path(request.target)
    if await asyncio.to_thread(path.is_file):
        if request.at is not None:
            raise InvalidRequest("A file is replayed from its beginning.", suggestion="Leave out `at`.")
        return await _replayed(path.name, await _read(path), request.project_path, context)
    stores = stores_of(context)
    thread = await stores.do(partial(stores.threads.get, request.target))
    cassette = await _recorded(thread, context, request.at or 0)
    if request.at is None:
        return await _replayed(thread.id, cassette, thread.project or None, context)
    return await _compared(thread.id, cassette, *await fork_at(thread.id, request.at, {}, context), context)


async def _read(path: Path) -> Cassette:
    size = (await asyncio.to_thread(path.stat)).st_size
    if size > _LARGEST:
        raise InvalidRequest(f"{path.name} is larger than {_LARGEST:,} bytes.", suggestion="Name a cassette.")
    return read_cassette(await asyncio.to_thread(path.read_bytes), path.name)


async def _replayed(target: str, cassette: Cassette, project: str | None, context: VerbContext) -> ThreadReplayResponse:
    """Run a cassette as a new thread, and compare."""
    services = context.services
    catalog = services.catalogs.at(project)
    thread, start = new_thread(StartRequest(cassette.item, cassette.inputs), services.context(context.caller, catalog))
    unknown = unsigned_items(catalog.resolve(thread.item), services.provenance)
    if unknown and not await stores_of(context).was_started(thread):
        raise PolicyDenied(
            f"You have not signed {', '.join(unknown)}, and never let it start.",
            suggestion=f"Read it, then `kiwi sign {cassette.item}`.",
        )
    events = [
        NewEvent("created", {"item": thread.item, "inputs": thread.inputs, "replay_of": target}),
        NewEvent("prompt", to_builtins(start)),
    ]
    return await _compared(target, cassette, thread, events, context)


async def _compared(
    target: str, cassette: Cassette, thread: Thread, events: Sequence[NewEvent], context: VerbContext
) -> ThreadReplayResponse:
    """Run a new thread with recorded replies, and compare how it ends; what waits at the end is cancelled."""
    runner = context.services.one(ThreadRunner)
    stores = runner.stores
    # A paused thread is taken by no worker, which would ask the model.
    made = await stores.do(partial(stores.threads.create, replace(thread, status="paused", waits_for=""), events))
    await _run(made, cassette, context)
    ended = await stores.do(partial(stores.threads.get, made.id))
    journal = await stores.do(partial(stores.threads.events, made.id))
    found = outcome_of(ended, journal)
    if not ended.is_ended:
        await runner.cancel(ended)
    waits = [f"it waits for {ended.waits_for}"] if ended.status == "waiting" else []
    different = [*differences(found, cassette), *waits]
    return ThreadReplayResponse(
        target=target,
        passed=not different,
        differences=different,
        thread_id=made.id,
        status=found.status,
        result=found.result,
        tools=found.tools,
        spend=found.spend,
    )


async def _run(thread: Thread, cassette: Cassette, context: VerbContext) -> None:
    """Run a replayed thread, and give it the recorded answers to its questions."""
    runner, replies = context.services.one(ThreadRunner), RecordedReplies(cassette)
    questions = runner.stores.questions
    for answer in (*cassette.answers, None):
        await runner.replay(thread.id, context.caller, replies)
        asked = await runner.stores.do(partial(questions.open, now_ms(), thread_id=thread.id))
        question = next((one for one in asked if one.kind == "ask"), None)
        if question is None or answer is None:
            return
        await runner.stores.do(partial(questions.answer, question.id, answer, "replay", now_ms()))


class ThreadEvalRequest(Request, frozen=True, kw_only=True):
    """Which cassettes to run."""

    folder: Annotated[LongText, Argument("A folder with cassettes (*.json).", "FOLDER", kind="path")]
    project_path: LongText | None = None


class ThreadEvalResponse(Response, frozen=True, kw_only=True):
    """How many cassettes passed, and each of them."""

    passed: int
    failed: int
    cassettes: list[ThreadReplayResponse]

    def exit_status(self) -> int:
        """Return 1 where one failed."""
        return 1 if self.failed else 0


def _eval_view(response: ThreadEvalResponse) -> Iterator[ViewItem]:
    for one in response.cassettes:
        yield TableRow(f"{'passed' if one.passed else 'FAILED'}  {one.target}")
        yield from (Notice(f"  {difference}") for difference in one.differences)
    yield Data(f"{response.passed} passed, {response.failed} failed")


@verb("eval", group="thread", access=OWNER, is_local=True, needs_receipt=True, asks=True, shows=_eval_view)
async def evaluate(request: ThreadEvalRequest, context: VerbContext) -> ThreadEvalResponse:
    """Replay every cassette of a folder, and compare outputs, tools and cost with what each expects."""
    paths = sorted(await asyncio.to_thread(lambda: [*Path(request.folder).glob("*.json")]))
    if not paths:
        raise NotFound(
            f"{request.folder} has no cassettes.", suggestion="`kiwi thread record THREAD FOLDER/NAME.json` writes one."
        )
    found: list[ThreadReplayResponse] = []
    for path in paths:
        try:
            found.append(await _replayed(path.name, await _read(path), request.project_path, context))
        except KiwiError as error:  # it fails, and the others run
            message = f"{error.code}: {error.message}"
            found.append(ThreadReplayResponse(target=path.name, passed=False, differences=[message]))
    passed = sum(one.passed for one in found)
    return ThreadEvalResponse(passed=passed, failed=len(found) - passed, cassettes=found)
