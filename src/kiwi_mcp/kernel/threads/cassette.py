"""Cassettes: what a thread sent to its model and what was answered, to run it again without a model."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Struct

from kiwi_mcp.domain.errors import Conflict, InvalidRequest
from kiwi_mcp.domain.json import as_object, as_text
from kiwi_mcp.domain.messages import Message, ModelReply
from kiwi_mcp.domain.threads import Thread, ThreadEvent
from kiwi_mcp.kernel.threads.state import ThreadState
from kiwi_mcp.kernel.verb import AnyJson


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
