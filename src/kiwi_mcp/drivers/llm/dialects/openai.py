"""OpenAI: Chat Completions, with the many servers that are compatible with it, and Responses without stored data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256

from msgspec import Raw

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
from kiwi_mcp.drivers.llm.dialect import (
    ReplyReader,
    arguments_text,
    count,
    function_tool,
    input_schema,
    is_object,
    joined,
    labels_of,
    raise_error,
    temperature_of,
)
from kiwi_mcp.drivers.llm.provider import ModelChoice

_STOPS: dict[str, StopReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "filtered",
}
_INCOMPLETE: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "filtered"}


def _options(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    options: dict[str, object] = {}
    if (temperature := temperature_of(prompt, choice)) is not None:
        options["temperature"] = temperature
    if prompt.cache_key and "cache_key" in choice.quirks:
        options["prompt_cache_key"] = prompt.cache_key
    return options


def _content(part: ToolResultPart, choice: ModelChoice, kind: str) -> Json:
    """Return the content of a result; its label goes before it, where the server takes several texts."""
    if part.label and "plain_content" not in choice.quirks:
        return [{"type": kind, "text": text} for text in (part.label, part.content)]
    return part.content


def _usage(usage: JsonObject, sent: str, received: str) -> TokenUsage:
    read = count(usage, f"{sent}_tokens_details", "cached_tokens") or count(usage, "prompt_cache_hit_tokens")
    written = count(usage, f"{sent}_tokens_details", "cache_write_tokens")
    return TokenUsage(
        input=max(0, count(usage, f"{sent}_tokens") - read - written),
        cache_read=read,
        cache_write=written,
        output=count(usage, f"{received}_tokens"),
    )


def chat_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message."""
    body: dict[str, object] = {"model": choice.model, "stream": True}
    if "no_stream_options" not in choice.quirks:
        body["stream_options"] = {"include_usage": True}
    body |= {choice.cap_field or "max_completion_tokens": prompt.max_output, **_options(prompt, choice)}
    if prompt.tools:
        body["tools"] = [function_tool(tool) for tool in prompt.tools]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def chat_rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
        match message.role:
            case "user":
                texts = [part.text for part in message.parts if isinstance(part, TextPart)]
                yield from ({"role": "user", "content": text} for text in texts)
            case "assistant":
                yield _chat_reply(message, choice)
            case _:
                for part in message.parts:
                    if isinstance(part, ToolResultPart):
                        content = _content(part, choice, "text")
                        yield {"role": "tool", "tool_call_id": _call_id(part.id, choice), "content": content}
                if "plain_content" in choice.quirks:
                    yield from ({"role": "user", "content": label} for label in labels_of(message))


def _chat_reply(message: Message, choice: ModelChoice) -> JsonObject:
    thought = joined(message, ReasoningPart)
    calls: list[Json] = [
        {
            "id": _call_id(part.id, choice),
            "type": "function",
            "function": {"name": part.name, "arguments": arguments_text(part)},
        }
        for part in message.parts
        if isinstance(part, ToolCallPart)
    ]
    row: dict[str, Json] = {"role": "assistant", "content": joined(message, TextPart) or None}
    row |= {name: thought for name in ("reasoning", "reasoning_content") if thought and name in choice.quirks}
    return {**row, "tool_calls": calls} if calls else row


def _call_id(given: str, choice: ModelChoice) -> str:
    """Return the id of a call; some servers take nine letters and digits only."""
    is_short = len(given) == 9 and given.isascii() and given.isalnum()  # noqa: PLR2004 - what they ask for
    return sha256(given.encode()).hexdigest()[:9] if "short_ids" in choice.quirks and not is_short else given


class ChatReader(ReplyReader):
    """Reads the chunks of a completion."""

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one chunk."""
        self.answered_by = as_text(data.get("model")) or self.answered_by
        if usage := as_object(data.get("usage")):
            self.usage = _usage(usage, "prompt", "completion")
        deltas: list[ReplyDelta] = []
        for option in map(as_object, as_list(data.get("choices"))[:1]):
            deltas += self._delta(as_object(option.get("delta")))
            if reason := as_text(option.get("finish_reason")):
                self.stop = "refusal" if self.has_refused else _STOPS.get(reason, "end")
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
            self.has_refused = True
            yield from self.append("text", refusal)
        for number, call in enumerate(map(as_object, as_list(delta.get("tool_calls")))):
            function, index = as_object(call.get("function")), call.get("index")
            # Servers that leave out the index send each call whole, with an id of its own.
            key = ("call", index if isinstance(index, int) else as_text(call.get("id")) or f"#{number}")
            yield from self.start_call(key, id=as_text(call.get("id")), name=as_text(function.get("name")))
            arguments = function.get("arguments")
            written = arguments if isinstance(arguments, str | None) else compact(arguments)
            self.draft("call", key).text += written or ""


def responses_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its items."""
    body: dict[str, object] = {
        "model": choice.model,
        "stream": True,
        "store": False,
        "max_output_tokens": prompt.max_output,
    }
    if "encrypted_reasoning" in choice.quirks:
        body["include"] = ["reasoning.encrypted_content"]
    body |= _options(prompt, choice)
    if prompt.tools:
        body["tools"] = [
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": input_schema(tool.parameters),
                "strict": False,
            }
            for tool in prompt.tools
        ]
    if prompt.system:
        body["instructions"] = prompt.system
    return body


def responses_rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject | Raw]:
    """Yield messages as items; each part is one of its own."""
    for message in messages:
        for part in message.parts:
            match part:
                case TextPart(text=text):
                    kind = "output_text" if message.role == "assistant" else "input_text"
                    yield {"type": "message", "role": message.role, "content": [{"type": kind, "text": text}]}
                case ReasoningPart(opaque=opaque) if is_object(opaque):
                    yield Raw(opaque.encode())
                case ToolCallPart():
                    arguments = arguments_text(part)
                    yield {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": arguments}
                case ToolResultPart():
                    output = _content(part, choice, "input_text")
                    yield {"type": "function_call_output", "call_id": part.id, "output": output}
                case _:
                    continue
        for label in labels_of(message) if "plain_content" in choice.quirks else ():
            yield {"type": "message", "role": "user", "content": [{"type": "input_text", "text": label}]}


class ResponsesReader(ReplyReader):
    """Reads the events of a response."""

    _has_text = False
    """Whether the text of the current message came in deltas."""

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one event."""
        index = data.get("output_index")
        match data.get("type"):
            case "response.created":
                self.answered_by = as_text(as_object(data.get("response")).get("model"))
            case "response.output_item.added":
                return self._start(index, as_object(data.get("item")))
            case "response.output_text.delta":
                self._has_text = True
                return self.append("text", as_text(data.get("delta")), ("text", index, data.get("content_index")))
            case "response.refusal.delta":
                self.has_refused = True
                return self.append("text", as_text(data.get("delta")), ("refusal", index))
            case "response.reasoning_summary_text.delta" | "response.reasoning_text.delta":
                return self.append("reasoning", as_text(data.get("delta")), ("reasoning", index))
            case "response.function_call_arguments.delta" if self.has(("call", index)):
                self.draft("call", ("call", index)).text += as_text(data.get("delta"))
            case "response.output_item.done":
                return self._complete(index, as_object(data.get("item")))
            case "response.completed" | "response.incomplete":
                self._end(as_object(data.get("response")))
            case "response.failed":
                raise_error(as_object(data.get("response")).get("error") or "The response failed.")
            case "error":
                raise_error({"message": data.get("message"), "type": data.get("code")})
            case _:
                pass
        return []

    def _start(self, index: Json, item: JsonObject) -> list[ReplyDelta]:
        if item.get("type") == "function_call":
            key = ("call", index)
            deltas = self.start_call(key, id=as_text(item.get("call_id")), name=as_text(item.get("name")))
            self.draft("call", key).text = as_text(item.get("arguments"))
            return deltas
        if item.get("type") == "reasoning":
            self.draft("reasoning", ("reasoning", index))
        return []

    def _complete(self, index: Json, item: JsonObject) -> list[ReplyDelta]:
        """Take the content of an item that has ended, also where its deltas were not sent."""
        deltas: list[ReplyDelta] = []
        match item.get("type"):
            case "function_call":
                deltas = self._start(index, item)
                self.draft("call", ("call", index)).is_complete = True
            case "reasoning":
                draft = self.draft("reasoning", ("reasoning", index))
                if as_text(item.get("encrypted_content")):
                    draft.opaque = compact({key: value for key, value in item.items() if key != "status"})
            case "message":
                # Some servers leave out the indices of deltas, so they cannot be compared with those of the item.
                for part in map(as_object, as_list(item.get("content")) if not self._has_text else ()):
                    deltas += self.append("text", as_text(part.get("text")), ("text", index, len(deltas)))
                self._has_text = False
            case _:
                pass
        return deltas

    def _end(self, response: JsonObject) -> None:
        self.answered_by = as_text(response.get("model")) or self.answered_by
        reason = as_text(as_object(response.get("incomplete_details")).get("reason"))
        self.stop = "refusal" if self.has_refused else _INCOMPLETE.get(reason, "length") if reason else "end"
        if usage := as_object(response.get("usage")):
            self.usage = _usage(usage, "input", "output")
