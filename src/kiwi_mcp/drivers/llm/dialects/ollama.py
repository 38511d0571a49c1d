"""Ollama's own API, `/api/chat`: a line of JSON for each piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.messages import (
    Message,
    ModelReply,
    Prompt,
    ReasoningPart,
    ReplyDelta,
    StopReason,
    TextPart,
    TokenUsage,
    ToolCallPart,
    ToolResultPart,
)
from kiwi_mcp.drivers.llm.arguments import arguments_of, input_schema
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.drivers.llm.reply import ReplyBuilder, count, decode, raise_error
from kiwi_mcp.primitives.http.sse import ServerEvent

_STOPS: dict[str, StopReason] = {"stop": "end", "length": "length"}


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message, and the context size: the default is small."""
    temperature = choice.temperature if prompt.temperature is None else prompt.temperature
    options: dict[str, Json] = {"num_predict": prompt.max_output}
    if choice.context:
        options["num_ctx"] = choice.context
    if temperature is not None and "no_temperature" not in choice.quirks:
        options["temperature"] = temperature
    body: dict[str, object] = {"model": choice.model, "stream": True, "options": options}
    if prompt.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": input_schema(tool.parameters),
                },
            }
            for tool in prompt.tools
        ]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def rows(messages: Sequence[Message], _: ModelChoice, __: bool) -> Iterator[dict[str, Json | Raw]]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
        yield from _rows(message)


def _rows(message: Message) -> Iterator[dict[str, Json | Raw]]:
    match message.role:
        case "assistant":
            yield _reply(message)
        case "tool":
            results = [part for part in message.parts if isinstance(part, ToolResultPart)]
            for part in results:
                yield {"role": "tool", "tool_name": part.name, "tool_call_id": part.id, "content": part.content}
            # A message has one text, so the labels stand in messages of their own.
            for part in results:
                if part.label:
                    yield {"role": "system", "content": f"{part.name}: {part.label}"}
        case _:
            for text in message.parts:
                if isinstance(text, TextPart):
                    yield {"role": "user", "content": text.text}


def _reply(message: Message) -> dict[str, Json | Raw]:
    row: dict[str, Json | Raw] = {
        "role": "assistant",
        "content": "".join(part.text for part in message.parts if isinstance(part, TextPart)),
    }
    if thought := "".join(part.text for part in message.parts if isinstance(part, ReasoningPart)):
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


class OllamaReader:
    """Reads the lines of a reply."""

    def __init__(self, choice: ModelChoice) -> None:
        self._reply = ReplyBuilder(choice.provider, choice.model)
        self._calls = 0

    def feed(self, event: ServerEvent) -> list[ReplyDelta]:
        """Take one line."""
        line, reply = decode(event.data), self._reply
        raise_error(line.get("error"))
        reply.answered_by = as_text(line.get("model")) or reply.answered_by
        message = as_object(line.get("message"))
        deltas = reply.append("reasoning", as_text(message.get("thinking")))
        deltas += reply.append("text", as_text(message.get("content")))
        if message.get("tool_calls"):
            deltas += self._called(event.data)
        if line.get("done") is True:
            reply.stop = _STOPS.get(as_text(line.get("done_reason")), "end")
            if "eval_count" in line:
                reply.usage = _usage(line)
        return deltas

    def _called(self, data: str) -> Iterator[ReplyDelta]:
        for call in msgspec.json.decode(data, type=_Line).message.tool_calls or ():
            self._calls += 1
            key = ("call", self._calls)
            yield from self._reply.start_call(key, id=call.id or "", name=call.function.name)
            draft = self._reply.draft("call", key)
            draft.text, draft.is_complete = bytes(call.function.arguments).decode(), True

    def finish(self) -> ModelReply:
        """Return the reply."""
        return self._reply.reply()


def _usage(line: JsonObject) -> TokenUsage:
    return TokenUsage(input=count(line, "prompt_eval_count"), output=count(line, "eval_count"))
