"""Messages between a thread and a model, in no provider's format: each dialect translates them to its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from msgspec import Struct

from kiwi_mcp.domain.json import JsonObject

MessageRole: TypeAlias = Literal["user", "assistant", "tool"]
StopReason: TypeAlias = Literal["end", "calls", "length", "refusal", "filtered", "broken"]
"""Why a model stopped; `broken` means that its stream ended early."""


class TextPart(Struct, frozen=True, tag="text"):
    """Text of a person, a model or Kiwi."""

    text: str


class ReasoningPart(Struct, frozen=True, tag="reasoning"):
    """What a model thought. It is sent back to exactly the model that made it, and to no other."""

    text: str
    provider: str
    model: str
    opaque: str = ""
    """The provider's signature or encrypted form, returned unchanged."""


class ToolCallPart(Struct, frozen=True, tag="call"):
    """A call that a model asks for; `arguments` is the JSON text exactly as the model wrote it."""

    id: str
    name: str
    arguments: str
    opaque: str = ""
    """What the provider wants back with the call (a thought signature), unchanged."""


class ToolResultPart(Struct, frozen=True, tag="result"):
    """The result of a call: `content` is the recorded output, byte for byte; `label` stands beside it."""

    id: str
    name: str
    content: str
    is_error: bool = False
    label: str = ""
    """Where the content comes from and whether it may be followed; sent as a part of its own."""


MessagePart: TypeAlias = TextPart | ReasoningPart | ToolCallPart | ToolResultPart


class Message(Struct, frozen=True):
    """One message. Calls are parts of `assistant` messages, their results of the `tool` message that follows."""

    role: MessageRole
    parts: tuple[MessagePart, ...]


class ToolDefinition(Struct, frozen=True):
    """A tool as a model sees it; `name` matches `[A-Za-z0-9_-]{1,64}`."""

    name: str
    description: str
    parameters: JsonObject


class Prompt(Struct, frozen=True):
    """One request to a model. That of the next turn begins with the same tools, system text and messages."""

    system: str
    tools: tuple[ToolDefinition, ...]
    messages: Sequence[Message]
    max_output: int
    temperature: float | None = None
    cache_key: str = ""
    """The id of the thread, for providers that route by it."""


class TokenUsage(Struct, frozen=True):
    """Tokens by the four classes that have a price of their own; they do not overlap."""

    input: int = 0
    cache_read: int = 0
    cache_write: int = 0
    output: int = 0
    is_estimated: bool = False
    """Whether the provider counted nothing, so that the numbers are an estimate."""

    @property
    def total(self) -> int:
        """All tokens."""
        return self.input + self.cache_read + self.cache_write + self.output


class ModelReply(Struct, frozen=True):
    """What a model answered. Of a stream that broke it holds the complete parts only."""

    parts: tuple[MessagePart, ...]
    stop: StopReason
    usage: TokenUsage
    model: str

    @property
    def calls(self) -> tuple[ToolCallPart, ...]:
        """The calls that the model asks for, in its order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCallPart))

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning."""
        return "".join(part.text for part in self.parts if isinstance(part, TextPart))


class ReplyDelta(Struct, frozen=True):
    """A piece of a reply while it streams."""

    kind: Literal["text", "reasoning", "call"]
    text: str
