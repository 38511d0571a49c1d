"""Forks: a new thread whose journal begins with a copy of another one, up to a completed turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import convert

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.domain.threads import NewEvent, Thread, ThreadEvent, ThreadLimits
from kiwi_mcp.domain.times import now_ms
from kiwi_mcp.kernel.threads.start import narrowed
from kiwi_mcp.kernel.threads.state import ThreadState, rebuild
from kiwi_mcp.store.runs import new_run

_COPIED = frozenset(
    {"prompt", "model", "result", "injected", "compacted", "loaded", "skill", "instructions", "switched"}
)
"""The events that a conversation consists of. Questions, hooks, children and the end stay with the original."""
_NAMED = 8


def completed_turns(events: Sequence[ThreadEvent]) -> list[int]:
    """Return the number of the last event of each turn whose calls all have results."""
    state, found = ThreadState(), list[int]()
    for event in events:
        state.fold(event)
        if event.kind in {"model", "result"} and not state.pending:
            found.append(event.seq)
    return found


def turn_at(thread: Thread, events: Sequence[ThreadEvent], at: int | None) -> int:
    """Return the event that ends the turn at `at`, or the last completed turn; refuse what is no completed turn."""
    if any(event.is_erased for event in events):
        raise InvalidRequest(f"The texts of {thread.id} were erased.", suggestion="Name another thread.")
    turns = completed_turns(events)
    if at in turns or (at is None and turns):
        return at if at is not None else turns[-1]
    near = sorted(turns, key=lambda seq: abs(seq - (at or 0)))[:_NAMED]
    raise InvalidRequest(
        f"No turn ends at event {at}." if turns else f"{thread.id} has no completed turn.",
        suggestion=f"Turns end at {', '.join(map(str, sorted(near)))}; `kiwi thread show {thread.id}` shows them."
        if turns
        else "Start it again: `kiwi thread start`.",
    )


def fork_of(
    thread: Thread, events: Sequence[ThreadEvent], at: int, limits: Mapping[str, Json]
) -> tuple[Thread, list[NewEvent]]:
    """Return a thread that continues after the event `at` of another one, and its first events.

    Its program, its starter and its rights are those of the original. Its budget is its own, and no larger than what
    the original had at its start.
    """
    last = events[at - 1]
    origin: JsonObject = {"forked_from": thread.id, "forked_seq": at, "forked_sha256": last.sha256}
    made = [NewEvent("created", {"item": thread.item, "inputs": thread.inputs, "starter": thread.starter, **origin})]
    numbers: list[int] = []
    """The number in the copy that stands for each event of the original."""
    model = as_text(next((event.changes["model"] for event in events if "model" in event.changes), ""))
    for event in events[:at]:
        if event.kind in _COPIED:
            # A message that came while the model was asked is known by the number of its event.
            asked_at = event.body.get("asked_at")
            moved: JsonObject = {"asked_at": numbers[asked_at - 1]} if isinstance(asked_at, int) else {}
            made.append(NewEvent(event.kind, {**event.body, **moved}))
            model = as_text(event.body.get("name")) if event.kind == "switched" else model
        numbers.append(len(made))
    now = now_ms()
    first = next(event.changes["limits"] for event in events if "limits" in event.changes)
    is_finished = bool(rebuild(events[:at]).stop)
    is_idle = thread.kind == "conversation" and is_finished
    new = Thread(
        id=new_run(now)[0],
        kind=thread.kind,
        item=thread.item,
        directive=thread.directive,
        digest=thread.digest,
        starter=thread.starter,
        project=thread.project,
        limits=narrowed(convert(first, ThreadLimits), limits),
        created_at=now,
        rights=thread.rights,
        inputs=thread.inputs,
        model=model,
        status="waiting" if is_idle else "queued",
        waits_for="message" if is_idle else "",
        is_tainted=thread.is_tainted,
    )
    return new, made
