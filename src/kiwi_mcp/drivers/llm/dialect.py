"""What the dialects share: arguments and tools as they are sent, and a reply that is assembled from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal
from uuid import uuid4

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.domain.messages import (
    Message,
    MessagePart,
    ModelReply,
    Prompt,
    ReasoningPart,
    ReplyDelta,
    StopReason,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolDefinition,
    ToolResultPart,
)
from kiwi_mcp.drivers.llm.provider import ModelChoice


def input_schema(parameters: JsonObject) -> JsonObject:
    """Return the schema of a tool's arguments, which providers want to be an object's."""
    return parameters if parameters.get("type") == "object" else {"type": "object", "properties": {}, **parameters}


def function_tool(tool: ToolDefinition) -> JsonObject:
    """Return a tool as OpenAI and those that are compatible with it want it."""
    parameters = input_schema(tool.parameters)
    function: JsonObject = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def labels_of(message: Message) -> list[str]:
    """Return the labels of results, for a provider where a result has one text: they are sent as messages."""
    results = (part for part in message.parts if isinstance(part, ToolResultPart))
    return [f"{part.name}: {part.label}" for part in results if part.label]


def joined(message: Message, kind: type[TextPart | ReasoningPart]) -> str:
    """Return all texts of one kind in a message as one."""
    return "".join(part.text for part in message.parts if isinstance(part, kind))


def temperature_of(prompt: Prompt, choice: ModelChoice) -> float | None:
    """Return the temperature to send; None where the model takes none, or none was chosen."""
    wanted = choice.temperature if prompt.temperature is None else prompt.temperature
    return None if "no_temperature" in choice.quirks else wanted


def arguments_text(call: ToolCallPart) -> str:
    """Return a call's arguments as the text of an object: exactly the model's own, or below a key if it is no object.

    Many servers parse the arguments of earlier calls, and refuse the whole conversation for ever if they cannot.
    """
    if is_object(call.arguments):
        return call.arguments
    return compact({"unreadable_arguments": call.arguments} if call.arguments.strip() else {})


def arguments_of(call: ToolCallPart) -> Raw:
    """Return a call's arguments as an object that is written as `arguments_text` has it."""
    return Raw(arguments_text(call).encode())


def is_object(text: str) -> bool:
    """Whether a text is one whole JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


class ErrorEvent(Exception):
    """A provider reports an error inside of its stream, or sends what is no event of its dialect."""

    def __init__(self, message: str, *, kind: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        """The provider's own word for the error."""
        self.status = status


class _Draft(msgspec.Struct):
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    """The text, or the arguments of a call."""
    id: str = ""
    name: str = ""
    opaque: str = ""
    is_complete: bool = False


class ReplyReader:
    """Reads the stream of one reply, and collects its parts."""

    def __init__(self, choice: ModelChoice) -> None:
        self._choice = choice
        self._drafts: dict[object, _Draft] = {}
        self.stop: StopReason | None = None
        """Why the model stopped; None while the provider has not said it."""
        self.usage: TokenUsage | None = None
        self.answered_by = ""
        """The name of the model, as the provider writes it."""
        self.has_refused = False
        """Whether the model said that it refuses."""

    def feed(self, text: str) -> list[ReplyDelta]:
        """Take one event or line, and return what is new in the reply; unknown events add nothing."""
        if text.strip() == "[DONE]":
            return []
        try:
            data = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ErrorEvent(f"It sent something that is no JSON: {text[:80]!r}.", kind="invalid") from None
        if not isinstance(data, dict):
            raise ErrorEvent(f"It sent something that is no event: {text[:80]!r}.", kind="invalid")
        raise_error(data.get("error"))
        return list(self.take(data, text))

    def take(self, data: JsonObject, text: str) -> Iterable[ReplyDelta]:
        """Take the object of one event, and its text as it was sent."""
        raise NotImplementedError

    def append(self, kind: Literal["text", "reasoning"], text: str, key: object = None) -> list[ReplyDelta]:
        """Add text to the part of a key; without a key to the last part, if it is of the same kind."""
        if not text:
            return []
        self.draft(kind, key).text += text
        return [ReplyDelta(kind, text)]

    def has(self, key: object) -> bool:
        """Whether a part of this key has begun."""
        return key in self._drafts

    def draft(self, kind: Literal["text", "reasoning", "call"], key: object = None) -> _Draft:
        """Return the part of a key, or a new one."""
        if key is None:
            last = next(reversed(self._drafts.values()), None)
            if last is not None and last.kind == kind and not last.is_complete and kind != "call":
                return last
            key = ("", len(self._drafts))
        if key not in self._drafts:
            self._drafts[key] = _Draft(kind)
        return self._drafts[key]

    def start_call(self, key: object, *, id: str, name: str) -> list[ReplyDelta]:  # noqa: A002 - the word of the domain
        """Note the id and name of a call; the calls before it are complete."""
        if key not in self._drafts:
            for draft in self._drafts.values():
                draft.is_complete = True
        draft = self.draft("call", key)
        draft.id = draft.id or id
        if not name or draft.name:
            return []
        draft.name = name
        return [ReplyDelta("call", name)]

    def add_call(self, given_id: str | None, name: str, arguments: Raw, opaque: str = "") -> list[ReplyDelta]:
        """Add a call that was sent whole, with its arguments as they were written."""
        key = ("call", len(self._drafts))
        deltas = self.start_call(key, id=given_id or "", name=name)
        draft = self.draft("call", key)
        draft.text, draft.opaque, draft.is_complete = bytes(arguments).decode(), opaque, True
        return deltas

    def finish(self) -> ModelReply:
        """Return the reply. Of a stream that ended early it has the complete calls, and the stop reason `broken`."""
        stop: StopReason = self.stop or "broken"
        parts: list[MessagePart] = []
        ids: set[str] = set()
        for draft in self._drafts.values():
            part = self._finished(draft, stop)
            if isinstance(part, ToolCallPart):
                if not part.id or part.id in ids:  # some providers give none
                    part = msgspec.structs.replace(part, id=f"call_{uuid4().hex[:24]}")
                ids.add(part.id)
            if part is not None:
                parts.append(part)
        return ModelReply(
            tuple(parts),
            "calls" if stop == "end" and ids else stop,
            self.usage if self.usage and self.usage.total else TokenUsage(is_estimated=True),
            self.answered_by or self._choice.model,
        )

    def _finished(self, draft: _Draft, stop: StopReason) -> MessagePart | None:
        match draft.kind:
            case "text":
                return TextPart(draft.text) if draft.text else None
            case "reasoning":
                reasoning = ReasoningPart(draft.text, self._choice.provider, self._choice.model, draft.opaque)
                return reasoning if draft.text or draft.opaque else None
            case _:
                # A call that was cut off by the end of the stream, or by the limit of tokens, is not one.
                is_cut = stop in {"broken", "length"} and not draft.is_complete and not is_object(draft.text)
                is_call = draft.name and not is_cut
                return ToolCallPart(draft.id, draft.name, draft.text, draft.opaque) if is_call else None


def raise_error(error: Json) -> None:
    """Raise the error that an event reports, if it does."""
    if not error:
        return
    details = as_object(error)
    message = as_text(details.get("message")) or (error if isinstance(error, str) else compact(error)[:500])
    code = details.get("code")
    kind = as_text(details.get("type")) or as_text(details.get("status")) or as_text(code)
    raise ErrorEvent(message, kind=kind, status=code if isinstance(code, int) else 0)


def count(usage: Mapping[str, Json], *path: str) -> int:
    """Return a number of tokens; 0 where it is missing."""
    value: Json = usage
    for key in path:
        value = as_object(value).get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
