"""The state of a thread, rebuilt from its journal: messages, calls without a result, what was asked and spawned."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text
from kiwi_mcp.domain.messages import (
    Message,
    MessagePart,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolDefinition,
    ToolResultPart,
)
from kiwi_mcp.domain.threads import ThreadEvent

UNFINISHED = "No result: the call was not finished."


class PromptStart(Struct, frozen=True):
    """What every request of a thread begins with, fixed when the thread starts."""

    system: str
    first: str
    """The first message: the program with its inputs."""
    tools: tuple[ToolDefinition, ...]
    targets: dict[str, str]
    """The identity of the item that each tool name means; a meta-tool has none."""
    provider: str
    """The identity of the provider item."""
    model: str
    tier: str = ""
    max_output: int = 0
    """The most tokens of one reply; 0 leaves it to the model."""
    return_schema: JsonObject | None = None
    """The schema of the declared outputs; with one, the thread must end with `return`."""
    checkpoint: str = ""
    """When a call of this thread that changes files gets a checkpoint: `auto` for each."""


class ThreadState(Struct):
    """What the next step depends on. `fold` adds one event; nothing else changes it."""

    start: PromptStart | None = None
    messages: list[Message] = field(default_factory=list)
    pending: dict[str, ToolCallPart] = field(default_factory=dict)
    """The calls of the last reply that have no result yet, by id, in the model's order."""
    order: tuple[str, ...] = ()
    results: dict[str, ToolResultPart] = field(default_factory=dict)
    began: set[str] = field(default_factory=set)
    """The calls that have begun to change or send something."""
    later: list[str] = field(default_factory=list)
    """Messages that arrived while calls were under way."""
    loaded: list[ToolDefinition] = field(default_factory=list)
    """Definitions that were added while the thread ran; only a provider with `tools: grow` has any."""
    stop: str = ""
    """Why the model last stopped; empty once something came after its reply."""
    text: str = ""
    """The text of the last reply."""
    last_input: int = 0
    """The tokens of the last request and its reply, by the provider's count."""
    new_bytes: int = 0
    """How many bytes were added to the messages since that count."""
    recent_calls: list[str] = field(default_factory=list)
    """The last calls, each as name and arguments."""
    nudges: int = 0
    breaks: int = 0
    """How many replies in a row broke off without a call."""
    compactions: int = 0
    """How many compactions there were since the last result of a tool."""
    strikes: int = 0
    """How many compactions gained too little."""
    returned: JsonObject | None = None
    model_seq: int = 0
    """The number of the event with the last reply."""
    active_ms: int = 0
    """For how long the thread has worked; the time that it waited does not count."""
    last_at: int = 0
    is_idle: bool = True
    """Whether the thread waits since the last event."""

    def fold(self, event: ThreadEvent) -> None:
        """Add one event."""
        body = event.body
        if not self.is_idle and event.kind != "resumed":
            self.active_ms += event.at - self.last_at
        self.last_at, self.is_idle = event.at, event.kind == "asked"
        match event.kind:
            case "prompt":
                self.start = msgspec.convert(body, PromptStart)
                self._add(Message("user", (TextPart(self.start.first),)))
            case "model":
                self._fold_model(event)
            case "began":
                self.began.add(as_text(body.get("call_id")))
            case "result":
                self._fold_result(msgspec.convert(as_object(body.get("part")), ToolResultPart))
            case "injected":
                self.stop = ""
                self.nudges += 1 if body.get("is_nudge") else 0
                self._say(as_text(body.get("text")))
            case "loaded":
                self.loaded.append(msgspec.convert(as_object(body.get("tool")), ToolDefinition))
            case "compacted":
                self._fold_compaction(body)
            case "returned":
                self.returned = as_object(body.get("outputs"))
            case _:
                pass

    def _fold_model(self, event: ThreadEvent) -> None:
        parts = tuple(msgspec.convert(part, MessagePart) for part in as_list(event.body.get("parts")))
        usage = msgspec.convert(as_object(event.body.get("usage")), TokenUsage)
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        if parts:
            self.messages.append(Message("assistant", parts))
        self.last_input, self.new_bytes = usage.total, 0
        self.pending = {call.id: call for call in calls}
        self.order, self.results = tuple(self.pending), {}
        self.recent_calls = [*self.recent_calls, *(f"{call.name} {call.arguments}" for call in calls)][-12:]
        self.stop, self.model_seq = as_text(event.body.get("stop")), event.seq
        self.breaks = self.breaks + 1 if self.stop == "broken" and not calls else 0
        self.text = "".join(part.text for part in parts if isinstance(part, TextPart)) or self.text

    def _fold_result(self, result: ToolResultPart) -> None:
        if result.id not in self.pending:
            return  # a late result of a call that has one
        del self.pending[result.id]
        self.results[result.id] = result
        self.compactions = 0
        if not self.pending:
            self.stop = ""
            self._add(Message("tool", tuple(self.results[call_id] for call_id in self.order)))
            for text in self.later:
                self._add(Message("user", (TextPart(text),)))
            self.later.clear()

    def _fold_compaction(self, body: JsonObject) -> None:
        kept = as_list(body.get("tail"))
        tail = [msgspec.convert(one, Message) for one in kept]
        self.messages = [
            Message("user", (TextPart(self.start.first if self.start else ""),)),
            Message("user", (TextPart(as_text(body.get("summary"))),)),
            *tail,
        ]
        self.compactions += 1
        self.strikes += 1 if body.get("is_small_gain") else 0
        self.last_input, self.new_bytes = 0, sum(map(_size, self.messages))

    def _say(self, text: str) -> None:
        if self.pending:
            self.later.append(text)
        else:
            self._add(Message("user", (TextPart(text),)))

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self.new_bytes += _size(message)

    def request_messages(self) -> tuple[Message, ...]:
        """Return the messages of the next request; a call without a result gets one that says so."""
        if not self.pending:
            return tuple(self.messages)
        parts = [
            self.results.get(call_id) or ToolResultPart(call_id, self.pending[call_id].name, UNFINISHED, is_error=True)
            for call_id in self.order
        ]
        later = [Message("user", (TextPart(text),)) for text in self.later]
        return (*self.messages, Message("tool", tuple(parts)), *later)


def rebuild(events: Iterable[ThreadEvent]) -> ThreadState:
    """Return the state after some events."""
    state = ThreadState()
    for event in events:
        state.fold(event)
    return state


def _size(message: Message) -> int:
    return len(msgspec.json.encode(message.parts))
