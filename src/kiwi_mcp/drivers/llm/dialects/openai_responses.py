"""OpenAI Responses, without anything stored at the provider."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    input_schema,
    is_object,
    raise_error,
    temperature_of,
)
from kiwi_mcp.drivers.llm.provider import ModelChoice

_INCOMPLETE: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "filtered"}


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its items."""
    body: dict[str, object] = {
        "model": choice.model,
        "stream": True,
        "store": False,
        "max_output_tokens": prompt.max_output,
    }
    if "encrypted_reasoning" in choice.quirks:
        body["include"] = ["reasoning.encrypted_content"]
    if (temperature := temperature_of(prompt, choice)) is not None:
        body["temperature"] = temperature
    if prompt.cache_key and "cache_key" in choice.quirks:
        body["prompt_cache_key"] = prompt.cache_key
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


def rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject | Raw]:
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
                    yield {
                        "type": "function_call",
                        "call_id": part.id,
                        "name": part.name,
                        "arguments": arguments_text(part),
                    }
                case ToolResultPart():
                    yield _result(part, choice)
                case _:
                    continue
        if "plain_content" in choice.quirks:
            labels = [
                f"{part.name}: {part.label}"
                for part in message.parts
                if isinstance(part, ToolResultPart) and part.label
            ]
            for label in labels:
                yield {"type": "message", "role": "user", "content": [{"type": "input_text", "text": label}]}


def _result(part: ToolResultPart, choice: ModelChoice) -> JsonObject:
    output: Json = part.content
    if part.label and "plain_content" not in choice.quirks:
        output = [{"type": "input_text", "text": text} for text in (part.label, part.content)]
    return {"type": "function_call_output", "call_id": part.id, "output": output}


class ResponsesReader(ReplyReader):
    """Reads the events of a response."""

    def __init__(self, choice: ModelChoice) -> None:
        super().__init__(choice)
        self._refused = False
        self._has_text = False
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
                self._refused = True
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
        match item.get("type"):
            case "function_call":
                key = ("call", index)
                deltas = self.start_call(key, id=as_text(item.get("call_id")), name=as_text(item.get("name")))
                self.draft("call", key).text = as_text(item.get("arguments"))
                return deltas
            case "reasoning":
                self.draft("reasoning", ("reasoning", index))
            case _:
                pass
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
        self.stop = "refusal" if self._refused else _INCOMPLETE.get(reason, "length") if reason else "end"
        if usage := as_object(response.get("usage")):
            read = count(usage, "input_tokens_details", "cached_tokens")
            written = count(usage, "input_tokens_details", "cache_write_tokens")
            self.usage = TokenUsage(
                input=max(0, count(usage, "input_tokens") - read - written),
                cache_read=read,
                cache_write=written,
                output=count(usage, "output_tokens"),
            )
