"""A thread as files: transcripts, which are its journal as lines of JSON, and cassettes, which run it again.

A transcript is in Kiwi's older form or in that of RyeOS, with a copy in the project. A cassette has what was sent to
the model and what was answered, so that no model is needed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.calls import Space
from kiwi_mcp.domain.errors import Conflict, InvalidRequest, KiwiError
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.messages import Message, ModelReply
from kiwi_mcp.domain.threads import Thread, ThreadEvent
from kiwi_mcp.domain.times import iso
from kiwi_mcp.kernel.threads.state import ThreadState
from kiwi_mcp.kernel.verb import AnyJson
from kiwi_mcp.policy.secret_access import every_value
from kiwi_mcp.primitives.secrets.redaction import Redactor
from kiwi_mcp.store.folder import below, make_below, opened
from kiwi_mcp.store.old_threads import TranscriptForm

FILE = "transcript.jsonl"
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_MORE = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_Row: TypeAlias = tuple[str, JsonObject]
_LONGEST_PART, _LONGEST_ENTRY = 20_000, 400_000
"""How many characters of a text, and of all of them, an entry of knowledge has."""
_HEADINGS = {
    "user_message": "Task", "injected_message": "Message", "assistant_message": "Model", "tool_result": "Result of",
    "completed": "Result",
}  # fmt: skip


def transcript_path(thread: Thread) -> str:
    """Return where the transcript of a thread is, below its project."""
    return f".ai/threads/{thread.id}/{FILE}" if thread.project else ""


def redactor_for(space: Space) -> Redactor:
    """Return what removes every value that may be secret in a space. It raises where these cannot be read."""
    values: dict[str, str] = {}
    for name, value in every_value(space).items():
        short = name.partition("@")[0]  # without the file that it is from
        values[f"{short}#{len(values)}" if short in values else short] = value
    return Redactor(values)


def transcript_lines(events: Iterable[ThreadEvent], form: TranscriptForm, redactor: Redactor) -> Iterator[str]:
    """Yield the lines of a transcript, without the values of secrets."""
    rows = _kiwi_rows if form == "kiwi" else _ryeos_rows
    for event in events:
        at = iso(event.at)
        for kind, body in rows(event):
            line: JsonObject = (
                {"ts": at, "type": kind, **body}
                if form == "kiwi"
                else {"timestamp": at, "thread_id": event.thread_id, "event_type": kind, "payload": body}
            )
            yield redactor.text(compact(line))


def _kiwi_rows(event: ThreadEvent) -> Iterator[_Row]:
    body = event.body
    match event.kind:
        case "prompt":
            yield "user_message", {"text": body.get("first")}
        case "model":
            yield "turn_start", {"turn": event.seq}
            yield "assistant_message", {"text": _text(body), "model": body.get("model")}
            for call in _calls(body):
                arguments = as_text(call.get("arguments"))
                digest = sha256(arguments.encode(errors="surrogatepass")).hexdigest()
                yield "tool_call", {"id": call.get("id"), "tool": call.get("name"), "arguments_sha256": digest}
            micros = body.get("cost_micros")
            spend: Json = micros / 1_000_000 if isinstance(micros, int) else None
            yield "cost_update", {"usage": as_object(body.get("usage")), "spend": spend, "currency": "USD"}
            yield "turn_end", {"turn": event.seq, "stop": body.get("stop")}
        case "result":
            part = as_object(body.get("part"))
            about: JsonObject = {"id": part.get("id"), "tool": part.get("name"), "status": body.get("status")}
            yield "tool_result", {**about, "content": part.get("content")}
        case "injected":
            yield "injected_message", {"text": body.get("text")}
        case "model_failed":
            yield "error", dict(body)
        case "ended" if body.get("status") == "completed":
            yield "completed", {"result": body.get("result"), "finish_reason": body.get("finish_reason")}
        case "ended":
            yield "error", dict(body)
        case _:
            pass


def _ryeos_rows(event: ThreadEvent) -> Iterator[_Row]:
    body = event.body
    match event.kind:
        case "created":
            yield "thread_started", {"directive": body.get("item"), "inputs": body.get("inputs")}
        case "prompt":
            yield "system_prompt", {"text": body.get("system")}
            yield "cognition_in", {"text": body.get("first"), "role": "user"}
        case "model":
            is_cut = body.get("stop") in {"broken", "length"}
            yield "cognition_out", {"text": _text(body), "model": body.get("model"), "truncated": is_cut}
            for call in _calls(body):
                given = {"tool": call.get("name"), "call_id": call.get("id"), "input": call.get("arguments")}
                yield "tool_call_start", given
        case "result":
            part = as_object(body.get("part"))
            output = {"call_id": part.get("id"), "output": part.get("content")}
            yield "tool_call_result", {**output, "error": body.get("status") if part.get("is_error") else None}
        case "injected":
            yield "cognition_in", {"text": body.get("text"), "role": "user"}
        case "spawned":
            yield "child_thread_started", {"child_thread_id": body.get("thread_id"), "directive": body.get("item")}
        case "asked" | "limit":
            yield "thread_suspended", {"reason": body.get("waits_for") or "limit"}
        case "model_failed":
            yield "error_classified", dict(body)
        case "ended":
            kind = "thread_cancelled" if body.get("status") == "cancelled" else "thread_completed"
            yield kind, {"status": body.get("status"), "result": body.get("result"), "cost": {}}
        case _:
            pass


def _text(body: JsonObject) -> str:
    parts = map(as_object, as_list(body.get("parts")))
    return "".join(as_text(part.get("text")) for part in parts if part.get("type") == "text")


def _calls(body: JsonObject) -> list[JsonObject]:
    return [part for part in map(as_object, as_list(body.get("parts"))) if part.get("type") == "call"]


def knowledge_text(thread: Thread, events: Iterable[ThreadEvent], name: str, redactor: Redactor) -> str:
    """Return a thread as an entry of knowledge: its task, its turns and its result, without secrets."""
    title = f"{thread.directive}, {iso(thread.created_at)[:10]}, {thread.status}"
    parts = ["\n".join(("---", f"id: {name}", f"title: {compact(title)}", "version: 1.0.0",
             "entry_type: thread_transcript", f"thread: {compact(thread.id)}", "---"))]  # fmt: skip
    for event in events:
        for kind, about in _kiwi_rows(event):
            if heading := _HEADINGS.get(kind):
                text = text_of(about.get("text") or about.get("content") or about.get("result") or "")
                tool = f" {as_text(about['tool'])}" if "tool" in about else ""
                parts.append(f"## {heading}{tool}\n\n{text[:_LONGEST_PART]}" if text else "")
    # What only looks like a link is none.
    return redactor.text("\n\n".join(filter(None, parts))[:_LONGEST_ENTRY].replace("[[", "[ [")) + "\n"


class TranscriptMirror:
    """The file with the transcript of one thread. It is a copy: the journal stays the truth, and rewrites it.

    The first events replace the file, the others are appended. A disk that refuses, or a link on the way, ends the
    mirror and not the thread.
    """

    def __init__(self, thread: Thread, redactor: Redactor) -> None:
        self._project = Path(thread.project)
        self._folders = (".ai", "threads", thread.id)
        self._redactor = redactor
        self._is_new = True
        self._is_usable = bool(thread.project)

    def add(self, events: Iterable[ThreadEvent]) -> None:
        """Write events."""
        if not self._is_usable:
            return
        lines = "".join(f"{line}\n" for line in transcript_lines(events, "kiwi", self._redactor))
        try:
            with opened(self._project) as project:
                if self._is_new:
                    make_below(project, *self._folders)
                with below(project, *self._folders) as folder:
                    self._write(folder, lines.encode(errors="replace"))
        except (KiwiError, OSError):
            self._is_usable = False

    def _write(self, folder: int, data: bytes) -> None:
        if self._is_new:
            with suppress(FileNotFoundError):
                os.unlink(FILE, dir_fd=folder)
        descriptor = os.open(FILE, _NEW if self._is_new else _MORE, 0o600, dir_fd=folder)
        self._is_new = False
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


class RecordedTurn(Struct, frozen=True):
    """One request, as far as it is new since the one before, and its reply."""

    request: tuple[Message, ...]
    reply: ModelReply


class ThreadOutcome(Struct, frozen=True):
    """How a thread ended, which items it used in their order, and the price of its replies if it is known."""

    status: str
    result: AnyJson
    tools: tuple[str, ...]
    spend: float | None = None


class Expectations(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What an evaluation expects; what is left out may be anything."""

    status: str | None = None
    result: AnyJson = None
    contains: str | None = None
    """A text that the result contains."""
    tools: tuple[str, ...] | None = None
    max_spend: float | None = None


class Cassette(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A recorded thread with its children. `expect` may be edited; without it, the recorded outcome is expected."""

    format: int = msgspec.field(name="kiwi_cassette")
    item: str
    inputs: dict[str, AnyJson] = {}
    model: str = ""
    system: str = ""
    turns: tuple[RecordedTurn, ...]
    answers: tuple[AnyJson, ...] = ()
    """The owner's answers to its questions."""
    children: tuple[Cassette, ...] = ()
    outcome: dict[str, AnyJson]
    expect: Expectations | None = None


def read_cassette(data: bytes, name: str) -> Cassette:
    """Return a cassette from its file."""
    try:
        found = msgspec.json.decode(data, type=Cassette)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidRequest(
            f"{name} is no cassette: {error}.", suggestion="`kiwi thread record THREAD FILE` writes one."
        ) from error
    if found.format != 1:
        raise InvalidRequest(f"{name} is of a later version of Kiwi.", suggestion="Record it again with this version.")
    return found


def turns_of(events: Sequence[ThreadEvent]) -> Iterator[RecordedTurn]:
    """Yield the requests and replies of a journal."""
    state, sent = ThreadState(), 0
    for event in events:
        if event.kind == "model":
            messages = state.request_messages()
            sent = sent if sent <= len(messages) else 0  # a compaction begins anew
            yield RecordedTurn(tuple(messages[sent:]), msgspec.convert(event.body, ModelReply))
            sent = len(messages)
        state.fold(event)


def outcome_of(thread: Thread, events: Sequence[ThreadEvent]) -> ThreadOutcome:
    """Return how a thread ended."""
    costs = [event.body.get("cost_micros") for event in events if event.kind == "model"]
    known = [cost for cost in costs if isinstance(cost, int)]
    tools: list[str] = []
    for call in (call for turn in turns_of(events) for call in turn.reply.calls):
        try:
            arguments = as_object(msgspec.json.decode(call.arguments or "{}"))
        except (msgspec.DecodeError, UnicodeError):
            arguments = {}
        tools.append((as_text(arguments.get("item_id")) if call.name == "execute" else "") or call.name)
    spend = sum(known) / 1_000_000 if len(known) == len(costs) else None
    return ThreadOutcome(thread.status, thread.result, tuple(tools), spend)


def differences(found: ThreadOutcome, cassette: Cassette) -> Iterator[str]:
    """Yield how an outcome differs from what a cassette expects."""
    recorded = msgspec.convert(cassette.outcome, ThreadOutcome)
    expect = cassette.expect or Expectations(recorded.status, recorded.result, None, recorded.tools)
    if expect.status is not None and found.status != expect.status:
        yield f"status: {found.status} instead of {expect.status}"
    if expect.result is not None and found.result != expect.result:
        yield f"result: {found.result!r:.200} instead of {expect.result!r:.200}"
    if expect.contains is not None and expect.contains not in str(found.result):
        yield f"result: {found.result!r:.200} does not contain {expect.contains!r:.200}"
    if expect.tools is not None and found.tools != expect.tools:
        yield f"tools: {', '.join(found.tools) or 'none'} instead of {', '.join(expect.tools) or 'none'}"
    if expect.max_spend is not None and (found.spend is None or found.spend > expect.max_spend):
        price = "a price that is not known" if found.spend is None else f"{found.spend:.6f} USD"
        yield f"spend: {price} instead of at most {expect.max_spend:.6f} USD"


class RecordedReplies:
    """Plays the replies of a cassette in place of a model: nothing is sent, and nothing is spent."""

    def __init__(self, cassette: Cassette) -> None:
        self._replies = deque(turn.reply for turn in cassette.turns)
        self._children = list(cassette.children)

    def next(self) -> ModelReply:
        """Return the next reply."""
        if not self._replies:
            raise Conflict(
                "The recording has no further reply: the thread took another way than when it was recorded.",
                suggestion="Look at its journal, and record the thread again if it is right now.",
            )
        return self._replies.popleft()

    def child(self, item: str) -> RecordedReplies:
        """Return the replies of the next recorded child of an item."""
        at = next((at for at, one in enumerate(self._children) if one.item == item), None)
        if at is None:
            return RecordedReplies(Cassette(format=1, item=item, turns=(), outcome={}))
        return RecordedReplies(self._children.pop(at))
