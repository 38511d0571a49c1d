"""Ollama's own API, `/api/chat`: a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
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
from kiwi_mcp.drivers.llm.dialect import (
    ReplyReader,
    arguments_of,
    count,
    function_tool,
    joined,
    labels_of,
    temperature_of,
)
from kiwi_mcp.drivers.llm.provider import ModelChoice

_STOPS: dict[str, StopReason] = {"stop": "end", "length": "length"}


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message, and the context size: the default is small."""
    options: dict[str, Json] = {"num_predict": prompt.max_output}
    if choice.context:
        options["num_ctx"] = choice.context
    if (temperature := temperature_of(prompt, choice)) is not None:
        options["temperature"] = temperature
    body: dict[str, object] = {"model": choice.model, "stream": True, "options": options}
    if prompt.tools:
        body["tools"] = [function_tool(tool) for tool in prompt.tools]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def rows(messages: Sequence[Message], _: ModelChoice, __: bool) -> Iterator[dict[str, Json | Raw]]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
        match message.role:
            case "assistant":
                yield _reply(message)
            case "tool":
                for part in message.parts:
                    if isinstance(part, ToolResultPart):
                        yield {"role": "tool", "tool_name": part.name, "tool_call_id": part.id, "content": part.content}
                for label in labels_of(message):
                    yield {"role": "system", "content": label}
            case _:
                for text in message.parts:
                    if isinstance(text, TextPart):
                        yield {"role": "user", "content": text.text}


def _reply(message: Message) -> dict[str, Json | Raw]:
    row: dict[str, Json | Raw] = {"role": "assistant", "content": joined(message, TextPart)}
    if thought := joined(message, ReasoningPart):
        row["thinking"] = thought
    calls = [
        {"id": part.id, "function": {"name": part.name, "arguments": arguments_of(part)}}
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    if calls:
        row["tool_calls"] = calls  # type: ignore[assignment]  # raw JSON is a value to the encoder
    return row


class _Function(msgspec.Struct):
    name: str = ""
    arguments: Raw = Raw(b"{}")


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None


class _Message(msgspec.Struct):
    tool_calls: list[_Call] | None = None


class _Line(msgspec.Struct):
    """The calls of a line, with their arguments as they were written."""

    message: _Message


class OllamaReader(ReplyReader):
    """Reads the lines of a reply."""

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one line."""
        self.answered_by = as_text(data.get("model")) or self.answered_by
        message = as_object(data.get("message"))
        deltas = self.append("reasoning", as_text(message.get("thinking")))
        deltas += self.append("text", as_text(message.get("content")))
        if message.get("tool_calls"):
            for call in msgspec.json.decode(text, type=_Line).message.tool_calls or ():
                deltas += self.add_call(call.id, call.function.name, call.function.arguments)
        if data.get("done") is True:
            self.stop = _STOPS.get(as_text(data.get("done_reason")), "end")
            if "eval_count" in data:
                self.usage = TokenUsage(input=count(data, "prompt_eval_count"), output=count(data, "eval_count"))
        return deltas
