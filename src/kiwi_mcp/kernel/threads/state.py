"""The state of a thread, rebuilt from its journal: messages, calls without a result, what was asked and spawned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
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
from kiwi_mcp.drivers.composite import CallEnd, CompositeProgress, StepBegin
from kiwi_mcp.kernel.threads.instructions import InstructionFile, SkillUse
from kiwi_mcp.manifest.composite import read_composite
from kiwi_mcp.manifest.hooks import Hook, HookAction

LEAST_GAIN = 0.3
"""The part of the context that a compaction must free, or it counts as a strike."""
_KEPT_TURNS = 2
_REMEMBERED = 4
_SUMMARY = "Summary of what was done before, made to save space:\n\n"
UNFINISHED = "No result: the call was not finished."


class CompositeStart(Struct, frozen=True):
    """The config of a composite, its inputs and the names of its parameters."""

    config: JsonObject
    inputs: JsonObject
    declared: tuple[str, ...] = ()


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
    outputs: JsonObject = {}
    """The outputs that the directive declares; with some, the thread must end with `return`."""
    checkpoint: str = ""
    """When a call of this thread that changes files gets a checkpoint: `auto` for each, `disabled` for none."""
    instructions: tuple[InstructionFile, ...] = ()
    """The files with instructions that its text has, in `system` or as data in `first`."""
    skills: tuple[SkillUse, ...] = ()
    """The skills that its starter chose; their texts are in `first`."""
    hooks: tuple[Hook, ...] = ()
    """The hooks of the directive; `before_step` hooks of its parents stand before its own."""
    is_program: bool = False
    """Whether `first` is a program of code mode, and `system` has the stubs of its items."""
    composite: CompositeStart | None = None
    """The steps that are followed instead of a model, where the thread runs a composite."""

    @property
    def has_model(self) -> bool:
        """Whether a model decides what the thread does next."""
        return not self.is_program and self.composite is None


class BegunCall(Struct, frozen=True):
    """A call that began: its last run, what its effect is, and how often it began."""

    run_id: str
    effect: str
    attempts: int


class FailedCall(Struct, frozen=True):
    """A call of the last reply that failed."""

    name: str
    status: str
    message: str


class ThreadState(Struct):
    """What the next step depends on. `fold` adds one event; nothing else changes it."""

    start: PromptStart | None = None
    progress: CompositeProgress | None = None
    """The steps of a composite; None in a thread whose next step a model decides."""
    messages: list[Message] = field(default_factory=list)
    pending: dict[str, ToolCallPart] = field(default_factory=dict)
    """The calls of the last reply that have no result yet, by id, in the model's order."""
    order: tuple[str, ...] = ()
    results: dict[str, ToolResultPart] = field(default_factory=dict)
    began: dict[str, BegunCall] = field(default_factory=dict)
    """The calls of the last reply that have begun."""
    approvals: dict[str, str] = field(default_factory=dict)
    """The approval that each call of the last reply waited for."""
    until: dict[str, int] = field(default_factory=dict)
    """When calls of `wait` stop waiting, by their id, in milliseconds since 1970."""
    later: list[str] = field(default_factory=list)
    """Messages that arrived while calls were under way."""
    unanswered: list[tuple[int, str]] = field(default_factory=list)
    """Messages since the last reply, each with the number of its event."""
    loaded: list[ToolDefinition] = field(default_factory=list)
    """Definitions that were added while the thread ran; only a provider with `tools: grow` has any."""
    loaded_targets: dict[str, str] = field(default_factory=dict)
    """The identity of the item that each of them means."""
    instructions: tuple[InstructionFile, ...] = ()
    """The files with instructions as the model knows them."""
    skills: list[SkillUse] = field(default_factory=list)
    """The skills that were loaded, in order; what one of them does not allow stays forbidden."""
    stop: str = ""
    """Why the model last stopped; empty once something came after its reply."""
    text: str = ""
    """The text of the last reply."""
    last_input: int = 0
    """The tokens of the last request and its reply, by the provider's count."""
    new_bytes: int = 0
    """How many bytes were added to the messages since that count."""
    recent_calls: list[str] = field(default_factory=list)
    """The calls of the last replies, each reply as names and arguments."""
    nudges: int = 0
    breaks: int = 0
    """How many replies in a row broke off without a call."""
    compactions: int = 0
    """How many compactions there were since the last result of a tool."""
    strikes: int = 0
    """How many compactions in a row gained too little."""
    compacted_from: int = 0
    """The tokens of the conversation before a compaction whose gain is not known yet."""
    summary_at: int = 0
    """The place of the summary in the messages; 0 where there is none."""
    raises: dict[str, int] = field(default_factory=dict)
    """How often each limit was raised."""
    hooked: dict[str, HookAction] = field(default_factory=dict)
    """What hooks decided since the last reply, by moment."""
    hook_reasons: dict[str, str] = field(default_factory=dict)
    hooks_under_way: set[str] = field(default_factory=set)
    """The moments whose hook has begun and has not decided."""
    needs_start: bool = False
    """Whether the owner was asked to permit the first start."""
    failed_calls: list[FailedCall] = field(default_factory=list)
    """The calls of the last reply that failed."""
    model_failures: int = 0
    """How many requests in a row the model did not answer."""
    is_resumed: bool = False
    """Whether the thread was resumed since the last reply."""
    returned: JsonObject | None = None
    model_seq: int = 0
    """The number of the event with the last reply."""
    seq: int = 0
    """The number of the last event."""
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
        self.seq, self.last_at, self.is_idle = event.seq, event.at, event.kind == "asked"
        match event.kind:
            case "prompt":
                self.start = start = msgspec.convert(body, PromptStart)
                self.skills += start.skills
                self.instructions = start.instructions
                self._say(start.first)
                if made := start.composite:
                    self.progress = CompositeProgress(read_composite(made.config), made.inputs, made.declared)
            case "model":
                self._fold_model(event)
            case "began":
                call_id = as_text(body.get("call_id"))
                effect = as_text(body.get("effect")) or "at_most_once"
                attempts = self.began[call_id].attempts + 1 if call_id in self.began else 1
                self.began[call_id] = BegunCall(as_text(body.get("run_id")), effect, attempts)
            case "result":
                self._fold_result(msgspec.convert(as_object(body.get("part")), ToolResultPart), event)
            case "injected":
                self.stop = ""
                self.nudges += 1 if body.get("is_nudge") else 0
                if not self.pending:
                    self.unanswered.append((event.seq, as_text(body.get("text"))))
                self._say(as_text(body.get("text")))
            case "loaded":
                tool = msgspec.convert(as_object(body.get("tool")), ToolDefinition)
                self.loaded.append(tool)
                self.loaded_targets[tool.name] = as_text(body.get("identity"))
                self.new_bytes += len(msgspec.json.encode(tool))
            case "compacted":
                self._fold_compaction(as_text(body.get("summary")))
            case "returned":
                self.returned = as_object(body.get("outputs"))
            case _:
                self._fold_control(event)

    def _fold_control(self, event: ThreadEvent) -> None:
        """Add an event that is no part of the conversation."""
        body = event.body
        match event.kind:
            case "skill":
                self.skills.append(msgspec.convert(body, SkillUse))
            case "instructions":
                self.instructions = msgspec.convert(body.get("files"), tuple[InstructionFile, ...])
            case "step":
                self._fold_step(msgspec.convert(body, StepBegin))
            case "switched":
                assert self.start is not None  # noqa: S101 - it follows `prompt`
                provider, model = as_text(body.get("provider")), as_text(body.get("model"))
                self.start = replace(self.start, provider=provider, model=model)
            case "model_failed":
                self.model_failures += 1
            case "limit" if body.get("raised"):
                name = as_text(body.get("limit"))
                self.raises[name] = self.raises.get(name, 0) + 1
            case "asked" if body.get("waits_for") == "start":
                self.needs_start = True
            case "asked" if isinstance(until := body.get("until"), int):
                self.until[as_text(body.get("call_id"))] = until
            case "asked" if body.get("approval_id"):
                self.approvals[as_text(body.get("call_id"))] = as_text(body.get("approval_id"))
            case "hook_began":
                self.hooks_under_way.add(as_text(body.get("key")))
            case "hooked" if body.get("key"):
                key = as_text(body.get("key"))
                self.hooks_under_way.discard(key)
                self.hooked[key] = msgspec.convert(body.get("action"), HookAction)
                self.hook_reasons[key] = as_text(body.get("reason"))
            case "resumed":
                self.is_resumed = self.model_seq > 0
                # A hook that suspended the thread has had its effect.
                self.hooked = {key: "continue" if did == "suspend" else did for key, did in self.hooked.items()}

    def _fold_model(self, event: ThreadEvent) -> None:
        parts = tuple(msgspec.convert(part, MessagePart) for part in as_list(event.body.get("parts")))
        usage = msgspec.convert(as_object(event.body.get("usage")), TokenUsage)
        calls = [part for part in parts if isinstance(part, ToolCallPart)]
        # A message that came while the model was asked follows its reply.
        asked_at = event.body.get("asked_at")
        late = [text for seq, text in self.unanswered if isinstance(asked_at, int) and seq > asked_at]
        if late:
            self.messages = self.messages[: -len(late)]
        self.unanswered.clear()
        if parts:
            self._add(Message("assistant", parts))
        if usage.total:  # a reply that was stopped has no count
            if self.compacted_from:
                is_small = usage.total - usage.output > (1 - LEAST_GAIN) * self.compacted_from
                self.strikes, self.compacted_from = self.strikes + 1 if is_small else 0, 0
            self.last_input, self.new_bytes = usage.total, 0
        self.hooked, self.hook_reasons, self.failed_calls = {}, {}, []
        self.hooks_under_way.clear()
        self.model_failures, self.is_resumed, self.returned = 0, False, None
        self.pending = {call.id: call for call in calls}
        self.order, self.results, self.began, self.approvals = tuple(self.pending), {}, {}, {}
        self.until.clear()
        made = "\n".join(f"{call.name} {call.arguments}" for call in calls)
        self.recent_calls = [*self.recent_calls, made][-_REMEMBERED:]
        self.stop, self.model_seq = as_text(event.body.get("stop")), event.seq
        self.breaks = self.breaks + 1 if self.stop == "broken" and not calls else 0
        self.text = "".join(part.text for part in parts if isinstance(part, TextPart)) or self.text
        for text in late:
            self.stop = ""
            self._say(text)

    def _fold_result(self, result: ToolResultPart, event: ThreadEvent) -> None:
        if (call := self.pending.pop(result.id, None)) is None:
            return  # a late result of a call that has one
        if self.progress is not None:
            self._fold_step_result(self.progress, call, result, event)
            return
        self.until.pop(result.id, None)
        self.results[result.id] = result
        self.compactions = 0
        if result.is_error:
            self.failed_calls.append(FailedCall(result.name, as_text(event.body.get("status")), result.content))
        if not self.pending:
            self.stop = ""
            self._add(Message("tool", tuple(self.results[call_id] for call_id in self.order)))
            for text in self.later:
                self._say(text)
            self.later.clear()

    def _fold_step(self, begun: StepBegin) -> None:
        assert self.progress is not None  # noqa: S101 - it follows `prompt`
        self.progress.begin(begun)
        name = self.progress.steps[begun.id].tool
        self.pending |= {one.id: ToolCallPart(one.id, name, compact(one.parameters)) for one in begun.calls}

    def _fold_step_result(
        self, progress: CompositeProgress, call: ToolCallPart, result: ToolResultPart, event: ThreadEvent
    ) -> None:
        body, status = event.body, as_text(event.body.get("status"))
        value: Json = None
        message = ""
        if result.is_error:  # a text, or an object with a message and a suggestion
            failure = as_object(_value(result.content))
            texts = (as_text(failure.get("message")), as_text(failure.get("suggestion")))
            message = " ".join(filter(None, texts)) or result.content
        elif "value" in body or status == "ok":
            value = body["value"] if "value" in body else _value(result.content)
        self.began.pop(result.id, None)
        self.approvals.pop(result.id, None)
        end = CallEnd(not result.is_error, value, status, message, as_text(body.get("run_id")))
        if not progress.end_call(result.id, end, event.at):
            self.pending[result.id] = replace(call, opaque=str(event.seq))

    def is_open(self, call: ToolCallPart) -> bool:
        """Whether this attempt of a call has no result yet."""
        pending = self.pending.get(call.id)
        return pending is not None and pending.opaque == call.opaque

    def key_of(self, call_id: str) -> str:
        """Return the key of a call in its thread; it is the same whenever the call is made again."""
        return call_id if self.progress is not None else f"{self.model_seq}.{self.order.index(call_id)}"

    def _fold_compaction(self, summary: str) -> None:
        pinned, _, tail = self.split()
        made = Message("user", (TextPart(f"{_SUMMARY}{summary}"),))
        self.compacted_from, self.compactions = self.last_input, self.compactions + 1
        self.messages = [self.messages[0], *pinned, made, *tail]
        self.summary_at = 1 + len(pinned)
        self.last_input, self.new_bytes = 0, sum(map(_size, self.messages))

    def split(self) -> tuple[list[Message], list[Message], list[Message]]:
        """Return the messages after the program: those that stay, those that a summary can replace, the last turns."""
        turns = [number for number, one in enumerate(self.messages) if one.role == "assistant"]
        if len(turns) <= _KEPT_TURNS:
            return [], [], self.messages[1:]
        begin = turns[-_KEPT_TURNS]
        before = list(enumerate(self.messages))[1:begin]
        pinned = [one for number, one in before if one.role == "user" and number != self.summary_at]
        return pinned, [one for _, one in before if one not in pinned], self.messages[begin:]

    def _say(self, text: str) -> None:
        if self.pending:
            self.later.append(text)
        else:
            self._add(Message("user", (TextPart(text),)))

    def _add(self, message: Message) -> None:
        self.messages.append(message)
        self.new_bytes += _size(message)

    @property
    def has_unsent(self) -> bool:
        """Whether a message waits for the next request."""
        return bool(self.later) or self.messages[-1].role == "user"

    @property
    def wake_at(self) -> int:
        """When the first of its calls of `wait` stops waiting, in milliseconds since 1970; 0 for never."""
        return min(self.until.values(), default=0)

    def request_messages(self) -> Sequence[Message]:
        """Return the messages of the next request; a call without a result gets one that says so."""
        if not self.pending:
            return self.messages
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


def _value(content: str) -> Json:
    try:
        found: Json = json.loads(content)
    except (ValueError, RecursionError):
        return content
    return found


def _size(message: Message) -> int:
    return len(msgspec.json.encode(message.parts))
