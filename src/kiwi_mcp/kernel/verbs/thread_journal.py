"""thread: read, check and erase the journal of a thread: costs, verify, export, keep, erase."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

from msgspec import to_builtins

from kiwi_mcp.domain.errors import InvalidRequest, NotFound
from kiwi_mcp.domain.json import JsonObject, as_text, compact
from kiwi_mcp.domain.threads import TOKEN_CLASSES, Thread
from kiwi_mcp.domain.times import iso, now_ms
from kiwi_mcp.kernel.context import VerbContext
from kiwi_mcp.kernel.threads.transcript import knowledge_text, redactor_for, transcript_lines, transcript_path
from kiwi_mcp.kernel.verb import ANYONE, OWNER, AnyJson, NameText, Option, Response, verb
from kiwi_mcp.kernel.verbs.thread import (
    ThreadIdRequest,
    ThreadResponse,
    count_text,
    find_old_thread,
    own_thread,
    result_view,
    shown_thread,
    stores_of,
)
from kiwi_mcp.kernel.view import Data, Notice, TableRow, ViewItem, issue_text
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.store.old_threads import TranscriptForm


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


def _export_view(response: ThreadExportResponse) -> Iterator[ViewItem]:
    yield from map(Data, response.lines)


@verb("export", group="thread", access=ANYONE, records=False, shows=_export_view)
async def export_thread(request: ThreadExportRequest, context: VerbContext) -> ThreadExportResponse:
    """Print the transcript of a thread as lines of JSON, without secrets."""
    stores = stores_of(context)
    try:
        thread = await own_thread(request.thread_id, context)
    except NotFound:
        old = await asyncio.to_thread(find_old_thread, request.thread_id, context)
        if old is None:
            raise
        redactor = await asyncio.to_thread(redactor_for, context.services.catalogs.at(None).space)
        lines = [redactor.text(compact(line)) for line in old.lines(request.format)]
        return ThreadExportResponse(thread_id=old.id, format=request.format, lines=lines)
    events = await stores.do(partial(stores.threads.events, thread.id))
    redactor = await _redactor(thread, context)
    lines = [*transcript_lines(events, request.format, redactor)]
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


def _keep_view(response: ThreadKeepResponse) -> Iterator[ViewItem]:
    yield Data(response.path)


@verb("keep", group="thread", access=OWNER, needs_receipt=True, shows=_keep_view)
async def keep_thread(request: ThreadKeepRequest, context: VerbContext) -> ThreadKeepResponse:
    """Write a thread that has ended as an entry of knowledge, so that search finds what it did."""
    stores, thread = stores_of(context), await own_thread(request.thread_id, context)
    if not thread.is_ended:
        raise InvalidRequest(f"{thread.id} has not ended.", suggestion="Wait for its end, or cancel it.")
    events = await stores.do(partial(stores.threads.events, thread.id))
    if any(event.is_erased for event in events):
        raise InvalidRequest(f"The texts of {thread.id} were erased.", suggestion="Name another thread.")
    name = request.name or re.sub(r"[^a-z0-9_-]", "_", f"{thread.directive}_{thread.id[-8:]}".lower())
    content = knowledge_text(thread, events, name, await _redactor(thread, context))
    wanted: JsonObject = {"action": "create", "item_type": "knowledge", "item_id": name}
    project: JsonObject = {"project_path": thread.project} if thread.project else {}
    answer = await context.services.dispatch(
        "execute", {**wanted, **project, "parameters": {"content": content}}, context.caller
    )
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


async def _redactor(thread: Thread, context: VerbContext) -> Redactor:
    space = context.services.catalogs.at(thread.project or None).space
    return await asyncio.to_thread(redactor_for, space)
