"""OpenAI Chat Completions, and the many servers that are compatible with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
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
from kiwi_mcp.drivers.llm.dialect import ReplyReader, arguments_text, count, function_tool, temperature_of
from kiwi_mcp.drivers.llm.provider import ModelChoice

_STOPS: dict[str, StopReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "filtered",
}


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message."""
    body: dict[str, object] = {"model": choice.model, "stream": True}
    if "no_stream_options" not in choice.quirks:
        body["stream_options"] = {"include_usage": True}
    body[choice.cap_field or "max_completion_tokens"] = prompt.max_output
    if (temperature := temperature_of(prompt, choice)) is not None:
        body["temperature"] = temperature
    if prompt.cache_key and "cache_key" in choice.quirks:
        body["prompt_cache_key"] = prompt.cache_key
    if prompt.tools:
        body["tools"] = [function_tool(tool) for tool in prompt.tools]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
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


class ChatReader(ReplyReader):
    """Reads the chunks of a completion."""

    def __init__(self, choice: ModelChoice) -> None:
        super().__init__(choice)
        self._refused = False

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one chunk."""
        self.answered_by = as_text(data.get("model")) or self.answered_by
        if usage := as_object(data.get("usage")):
            read = count(usage, "prompt_tokens_details", "cached_tokens") or count(usage, "prompt_cache_hit_tokens")
            written = count(usage, "prompt_tokens_details", "cache_write_tokens")
            self.usage = TokenUsage(
                input=max(0, count(usage, "prompt_tokens") - read - written),
                cache_read=read,
                cache_write=written,
                output=count(usage, "completion_tokens"),
            )
        deltas: list[ReplyDelta] = []
        for option in as_list(data.get("choices"))[:1]:
            delta = as_object(as_object(option).get("delta"))
            deltas += self._delta(delta)
            if reason := as_text(as_object(option).get("finish_reason")):
                self.stop = "refusal" if self._refused else _STOPS.get(reason, "end")
        return deltas

    def _delta(self, delta: JsonObject) -> Iterator[ReplyDelta]:
        yield from self.append("reasoning", as_text(delta.get("reasoning_content")) or as_text(delta.get("reasoning")))
        content = delta.get("content")
        yield from self.append("text", as_text(content))
        for part in map(as_object, as_list(content)):  # some servers stream parts
            yield from self.append("text", as_text(part.get("text")))
            for thought in map(as_object, as_list(part.get("thinking"))):
                yield from self.append("reasoning", as_text(thought.get("text")))
        if refusal := as_text(delta.get("refusal")):
            self._refused = True
            yield from self.append("text", refusal)
        for number, call in enumerate(map(as_object, as_list(delta.get("tool_calls")))):
            function, index = as_object(call.get("function")), call.get("index")
            # Servers that leave out the index send each call whole, with an id of its own.
            key = ("call", index if isinstance(index, int) else as_text(call.get("id")) or f"#{number}")
            yield from self.start_call(key, id=as_text(call.get("id")), name=as_text(function.get("name")))
            arguments = function.get("arguments")
            written = arguments if isinstance(arguments, str | None) else compact(arguments)
            self.draft("call", key).text += written or ""
