"""OpenAI Chat Completions, and the many servers that are compatible with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
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
    ToolDefinition,
    ToolResultPart,
)
from kiwi_mcp.drivers.llm.arguments import arguments_text, input_schema
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.drivers.llm.reply import ReplyBuilder, count, decode, raise_error
from kiwi_mcp.primitives.http.sse import ServerEvent

_STOPS: dict[str, StopReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "filtered",
}


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message."""
    temperature = choice.temperature if prompt.temperature is None else prompt.temperature
    body: dict[str, object] = {"model": choice.model, "stream": True}
    if "no_stream_options" not in choice.quirks:
        body["stream_options"] = {"include_usage": True}
    body[choice.cap_field or "max_completion_tokens"] = prompt.max_output
    if temperature is not None and "no_temperature" not in choice.quirks:
        body["temperature"] = temperature
    if prompt.cache_key and "cache_key" in choice.quirks:
        body["prompt_cache_key"] = prompt.cache_key
    if prompt.tools:
        body["tools"] = [_tool(tool) for tool in prompt.tools]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
        yield from _rows(message, choice)


def _tool(tool: ToolDefinition) -> JsonObject:
    function: JsonObject = {
        "name": tool.name,
        "description": tool.description,
        "parameters": input_schema(tool.parameters),
    }
    return {"type": "function", "function": function}


def _rows(message: Message, choice: ModelChoice) -> Iterator[JsonObject]:
    match message.role:
        case "user":
            texts = [part.text for part in message.parts if isinstance(part, TextPart)]
            yield from ({"role": "user", "content": text} for text in texts)
        case "assistant":
            yield _reply(message, choice)
        case _:
            results = [part for part in message.parts if isinstance(part, ToolResultPart)]
            yield from (_result(part, choice) for part in results)
            if "plain_content" in choice.quirks:
                labels = [f"{part.name}: {part.label}" for part in results if part.label]
                yield from ({"role": "user", "content": label} for label in labels)


def _reply(message: Message, choice: ModelChoice) -> JsonObject:
    text = "".join(part.text for part in message.parts if isinstance(part, TextPart))
    thought = "".join(part.text for part in message.parts if isinstance(part, ReasoningPart))
    calls: list[Json] = [
        {
            "id": _id(part.id, choice),
            "type": "function",
            "function": {"name": part.name, "arguments": arguments_text(part)},
        }
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    row: dict[str, Json] = {"role": "assistant", "content": text or None}
    row |= {name: thought for name in ("reasoning", "reasoning_content") if thought and name in choice.quirks}
    return {**row, "tool_calls": calls} if calls else row


def _result(part: ToolResultPart, choice: ModelChoice) -> JsonObject:
    content: Json = part.content
    if part.label and "plain_content" not in choice.quirks:
        content = [{"type": "text", "text": part.label}, {"type": "text", "text": part.content}]
    return {"role": "tool", "tool_call_id": _id(part.id, choice), "content": content}


def _id(given: str, choice: ModelChoice) -> str:
    """Return the id of a call; some servers take nine letters and digits only."""
    is_short = len(given) == 9 and given.isascii() and given.isalnum()  # noqa: PLR2004 - what they ask for
    return sha256(given.encode()).hexdigest()[:9] if "short_ids" in choice.quirks and not is_short else given


class ChatReader:
    """Reads the chunks of a completion."""

    def __init__(self, choice: ModelChoice) -> None:
        self._reply = ReplyBuilder(choice.provider, choice.model)
        self._refused = False

    def feed(self, event: ServerEvent) -> list[ReplyDelta]:
        """Take one chunk."""
        if event.data.strip() == "[DONE]":
            return []
        chunk = decode(event.data)
        raise_error(chunk.get("error"))
        reply = self._reply
        reply.answered_by = as_text(chunk.get("model")) or reply.answered_by
        if usage := as_object(chunk.get("usage")):
            reply.usage = _usage(usage)
        deltas: list[ReplyDelta] = []
        for option in as_list(chunk.get("choices"))[:1]:
            delta = as_object(as_object(option).get("delta"))
            deltas += self._delta(delta)
            if reason := as_text(as_object(option).get("finish_reason")):
                reply.stop = "refusal" if self._refused else _STOPS.get(reason, "end")
        return deltas

    def _delta(self, delta: JsonObject) -> Iterator[ReplyDelta]:
        reply = self._reply
        yield from reply.append("reasoning", as_text(delta.get("reasoning_content")) or as_text(delta.get("reasoning")))
        content = delta.get("content")
        yield from reply.append("text", as_text(content))
        for part in map(as_object, as_list(content)):  # some servers stream parts
            yield from reply.append("text", as_text(part.get("text")))
            for thought in map(as_object, as_list(part.get("thinking"))):
                yield from reply.append("reasoning", as_text(thought.get("text")))
        if refusal := as_text(delta.get("refusal")):
            self._refused = True
            yield from reply.append("text", refusal)
        for number, call in enumerate(map(as_object, as_list(delta.get("tool_calls")))):
            function, index = as_object(call.get("function")), call.get("index")
            # Servers that leave out the index send each call whole, with an id of its own.
            key = ("call", index if isinstance(index, int) else as_text(call.get("id")) or f"#{number}")
            yield from reply.start_call(key, id=as_text(call.get("id")), name=as_text(function.get("name")))
            arguments = function.get("arguments")
            reply.draft("call", key).text += arguments if isinstance(arguments, str) else _written(arguments)

    def finish(self) -> ModelReply:
        """Return the reply."""
        return self._reply.reply()


def _written(arguments: Json) -> str:
    return compact(arguments) if arguments is not None else ""


def _usage(usage: JsonObject) -> TokenUsage:
    read = count(usage, "prompt_tokens_details", "cached_tokens") or count(usage, "prompt_cache_hit_tokens")
    written = count(usage, "prompt_tokens_details", "cache_write_tokens")
    return TokenUsage(
        input=max(0, count(usage, "prompt_tokens") - read - written),
        cache_read=read,
        cache_write=written,
        output=count(usage, "completion_tokens"),
    )
