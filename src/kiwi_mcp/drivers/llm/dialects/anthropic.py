"""Anthropic Messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text, compact
from kiwi_mcp.domain.messages import (
    Message,
    Prompt,
    ReasoningPart,
    ReplyDelta,
    StopReason,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolResultPart,
)
from kiwi_mcp.drivers.llm.dialect import ReplyReader, arguments_of, count, input_schema, temperature_of
from kiwi_mcp.drivers.llm.provider import ModelChoice

VERSION = "2023-06-01"
"""The version in which keys are sent as `x-api-key` and a temperature is accepted; `headers` can name a later one."""
_CACHED: JsonObject = {"type": "ephemeral"}
_REDACTED = "redacted:"
"""What an opaque text begins with that is not the signature of a thought, but the encrypted thought itself."""
_LONG = 15
"""A cache entry is found again up to 20 blocks further on, so a long message gets a marker in its middle too."""
_STOPS: dict[str, StopReason] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "pause_turn": "end",
    "tool_use": "calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}
_Block = dict[str, "Json | Raw"]


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its messages, with a cache marker after the tools and the system text."""
    body: dict[str, object] = {"model": choice.model, "stream": True, "max_tokens": prompt.max_output}
    if (temperature := temperature_of(prompt, choice)) is not None:
        body["temperature"] = min(temperature, 1.0)
    if prompt.tools:
        tools = [
            {"name": tool.name, "description": tool.description, "input_schema": input_schema(tool.parameters)}
            for tool in prompt.tools
        ]
        body["tools"] = tools if prompt.system else [*tools[:-1], {**tools[-1], "cache_control": _CACHED}]
    if prompt.system:
        body["system"] = [{"type": "text", "text": prompt.system, "cache_control": _CACHED}]
    return body


def rows(messages: Sequence[Message], _: ModelChoice, is_last: bool) -> list[JsonObject]:
    """Return messages in a row as one, since the roles must alternate; the last has a cache marker at its end."""
    blocks = [block for message in messages for block in _blocks(message)]
    if is_last:
        blocks[-1]["cache_control"] = _CACHED
        if len(blocks) > _LONG:
            blocks[_LONG - 1]["cache_control"] = _CACHED
    return [{"role": "assistant" if messages[0].role == "assistant" else "user", "content": blocks}]


def _blocks(message: Message) -> Iterator[_Block]:
    for part in message.parts:
        match part:
            case TextPart(text=text):
                yield {"type": "text", "text": text}
            case ReasoningPart(opaque=opaque) if opaque.startswith(_REDACTED):
                yield {"type": "redacted_thinking", "data": opaque.removeprefix(_REDACTED)}
            case ReasoningPart(text=text, opaque=opaque) if opaque:
                yield {"type": "thinking", "thinking": text, "signature": opaque}
            case ToolCallPart():
                yield {"type": "tool_use", "id": part.id, "name": part.name, "input": arguments_of(part)}
            case ToolResultPart():
                yield _result(part)
            case _:  # a thought without its signature is refused
                continue


def _result(part: ToolResultPart) -> _Block:
    content: Json = part.content
    if part.label:
        # A text block must not be blank.
        texts = [part.label, *([part.content] if part.content.strip() else [])]
        content = [{"type": "text", "text": text} for text in texts]
    block: _Block = {"type": "tool_result", "tool_use_id": part.id, "content": content}
    return {**block, "is_error": True} if part.is_error else block


class AnthropicReader(ReplyReader):
    """Reads the events of a message."""

    def __init__(self, choice: ModelChoice) -> None:
        super().__init__(choice)
        self._usage: dict[str, Json] = {}
        self._stop: StopReason | None = None

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one event."""
        match data.get("type"):
            case "message_start":
                message = as_object(data.get("message"))
                self.answered_by = as_text(message.get("model"))
                self._count(message.get("usage"))
            case "content_block_start":
                return self._start(data.get("index"), as_object(data.get("content_block")))
            case "content_block_delta":
                return self._delta(data.get("index"), as_object(data.get("delta")))
            case "content_block_stop":
                index = data.get("index")
                if self.has(index):
                    draft = self.draft("text", index)
                    draft.is_complete = True
                    if draft.kind == "call" and not draft.text:
                        draft.text = "{}"  # a call without arguments has no deltas
            case "message_delta":
                self._count(data.get("usage"))
                if reason := as_text(as_object(data.get("delta")).get("stop_reason")):
                    self._stop = _STOPS.get(reason, "end")
            case "message_stop":
                self.stop = self._stop or "end"
            case _:
                pass
        return []

    def _start(self, index: Json, block: JsonObject) -> list[ReplyDelta]:
        match block.get("type"):
            case "text":
                return self.append("text", as_text(block.get("text")), index)
            case "thinking":
                self.draft("reasoning", index).opaque = as_text(block.get("signature"))
                return self.append("reasoning", as_text(block.get("thinking")), index)
            case "redacted_thinking":
                self.draft("reasoning", index).opaque = f"{_REDACTED}{as_text(block.get('data'))}"
            case "tool_use":
                deltas = self.start_call(index, id=as_text(block.get("id")), name=as_text(block.get("name")))
                if given := as_object(block.get("input")):
                    self.draft("call", index).text = compact(given)
                return deltas
            case _:
                pass
        return []

    def _delta(self, index: Json, delta: JsonObject) -> list[ReplyDelta]:
        match delta.get("type"):
            case "text_delta":
                return self.append("text", as_text(delta.get("text")), index)
            case "thinking_delta":
                return self.append("reasoning", as_text(delta.get("thinking")), index)
            case "signature_delta":
                self.draft("reasoning", index).opaque += as_text(delta.get("signature"))
            case "input_json_delta" if self.has(index):
                self.draft("call", index).text += as_text(delta.get("partial_json"))
            case _:
                pass
        return []

    def _count(self, usage: Json) -> None:
        self._usage |= {name: value for name, value in as_object(usage).items() if value is not None}
        if self._usage:
            self.usage = TokenUsage(
                input=count(self._usage, "input_tokens"),
                cache_read=count(self._usage, "cache_read_input_tokens"),
                cache_write=count(self._usage, "cache_creation_input_tokens"),
                output=count(self._usage, "output_tokens"),
            )
