"""A reply that is assembled from a stream: its text, reasoning and calls, in the order in which they came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol
from uuid import uuid4

import msgspec

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.domain.messages import (
    MessagePart,
    ModelReply,
    ReasoningPart,
    ReplyDelta,
    StopReason,
    TextPart,
    TokenUsage,
    ToolCallPart,
)
from kiwi_mcp.drivers.llm.arguments import is_object
from kiwi_mcp.primitives.http.sse import ServerEvent


class ErrorEvent(Exception):
    """A provider reports an error inside of its stream, or sends what is no event of its dialect."""

    def __init__(self, message: str, *, kind: str = "", status: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        """The provider's own word for the error."""
        self.status = status


class ReplyReader(Protocol):
    """Reads the stream of one reply."""

    def feed(self, event: ServerEvent) -> list[ReplyDelta]:
        """Take one event, and return what is new in the reply; unknown events add nothing."""

    def finish(self) -> ModelReply:
        """Return the reply. Of a stream that ended early it has the complete calls, and the stop reason `broken`."""


class _Draft(msgspec.Struct):
    kind: Literal["text", "reasoning", "call"]
    text: str = ""
    """The text, or the arguments of a call."""
    id: str = ""
    name: str = ""
    opaque: str = ""
    is_complete: bool = False


class ReplyBuilder:
    """Collects the parts of a reply."""

    def __init__(self, provider: str, model: str) -> None:
        self._provider, self._model = provider, model
        self._drafts: dict[object, _Draft] = {}
        self.stop: StopReason | None = None
        """Why the model stopped; None while the provider has not said it."""
        self.usage: TokenUsage | None = None
        self.answered_by = ""
        """The name of the model, as the provider writes it."""

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
        is_new = key not in self._drafts
        if is_new:
            for draft in self._drafts.values():
                draft.is_complete = True
        draft = self.draft("call", key)
        draft.id = draft.id or id
        if name and not draft.name:
            draft.name = name
            return [ReplyDelta("call", name)]
        return []

    def reply(self) -> ModelReply:
        """Return what has been collected."""
        stop: StopReason = self.stop or "broken"
        parts = [part for draft in self._drafts.values() if (part := self._part(draft, stop)) is not None]
        parts = _with_unique_ids(parts)
        if stop == "end" and any(isinstance(part, ToolCallPart) for part in parts):
            stop = "calls"
        return ModelReply(
            tuple(parts),
            stop,
            self.usage if self.usage and self.usage.total else TokenUsage(is_estimated=True),
            self.answered_by or self._model,
        )

    def _part(self, draft: _Draft, stop: StopReason) -> MessagePart | None:
        match draft.kind:
            case "text":
                return TextPart(draft.text) if draft.text else None
            case "reasoning":
                reasoning = ReasoningPart(draft.text, self._provider, self._model, draft.opaque)
                return reasoning if draft.text or draft.opaque else None
            case _:
                # A call that was cut off by the end of the stream, or by the limit of tokens, is not one.
                is_cut = stop in {"broken", "length"} and not draft.is_complete and not is_object(draft.text)
                return (
                    None if is_cut or not draft.name else ToolCallPart(draft.id, draft.name, draft.text, draft.opaque)
                )


def _with_unique_ids(parts: list[MessagePart]) -> list[MessagePart]:
    seen: set[str] = set()
    found: list[MessagePart] = []
    for part in parts:
        if isinstance(part, ToolCallPart):
            if not part.id or part.id in seen:
                part = msgspec.structs.replace(part, id=f"call_{uuid4().hex[:24]}")  # noqa: PLW2901 - providers without ids
            seen.add(part.id)
        found.append(part)
    return found


def decode(data: str) -> JsonObject:
    """Return the object that an event holds."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise ErrorEvent(f"It sent something that is no JSON: {data[:80]!r}.", kind="invalid") from None
    if not isinstance(value, dict):
        raise ErrorEvent(f"It sent something that is no event: {data[:80]!r}.", kind="invalid")
    return value


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
