"""The dialects by name: pure functions for requests, and a reader for the stream of one reply, for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Literal

import msgspec
from msgspec import Raw, Struct

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
    arguments_of,
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

_RawObject = dict[str, "Json | Raw"]
"""An object that holds arguments as the model wrote them."""
_CHAT_STOPS: dict[str, StopReason] = {
    "stop": "end",
    "tool_calls": "calls",
    "function_call": "calls",
    "length": "length",
    "content_filter": "filtered",
}
_INCOMPLETE: dict[str, StopReason] = {"max_output_tokens": "length", "content_filter": "filtered"}


def _openai_options(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    options: dict[str, object] = {}
    if (temperature := temperature_of(prompt, choice)) is not None:
        options["temperature"] = temperature
    if prompt.cache_key and "cache_key" in choice.quirks:
        options["prompt_cache_key"] = prompt.cache_key
    return options


def _openai_content(part: ToolResultPart, choice: ModelChoice, kind: str) -> Json:
    """Return the content of a result; its label goes before it, where the server takes several texts."""
    if part.label and "plain_content" not in choice.quirks:
        return [{"type": kind, "text": text} for text in (part.label, part.content)]
    return part.content


def _openai_usage(usage: JsonObject, sent: str, received: str) -> TokenUsage:
    read = count(usage, f"{sent}_tokens_details", "cached_tokens") or count(usage, "prompt_cache_hit_tokens")
    written = count(usage, f"{sent}_tokens_details", "cache_write_tokens")
    return TokenUsage(
        input=max(0, count(usage, f"{sent}_tokens") - read - written),
        cache_read=read,
        cache_write=written,
        output=count(usage, f"{received}_tokens"),
    )


def _chat_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request with the system text as its first message."""
    body: dict[str, object] = {"model": choice.model, "stream": True}
    if "no_stream_options" not in choice.quirks:
        body["stream_options"] = {"include_usage": True}
    body |= {choice.cap_field or "max_completion_tokens": prompt.max_output, **_openai_options(prompt, choice)}
    if prompt.tools:
        body["tools"] = [function_tool(tool) for tool in prompt.tools]
    if prompt.system:
        body["messages"] = [{"role": "system", "content": prompt.system}]
    return body


def _chat_rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject]:
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
                        content = _openai_content(part, choice, "text")
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
            self.usage = _openai_usage(usage, "prompt", "completion")
        deltas: list[ReplyDelta] = []
        for option in map(as_object, as_list(data.get("choices"))[:1]):
            deltas += self._delta(as_object(option.get("delta")))
            if reason := as_text(option.get("finish_reason")):
                self.stop = "refusal" if self.has_refused else _CHAT_STOPS.get(reason, "end")
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


def _responses_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its items."""
    body: dict[str, object] = {
        "model": choice.model,
        "stream": True,
        "store": False,
        "max_output_tokens": prompt.max_output,
    }
    if "encrypted_reasoning" in choice.quirks:
        body["include"] = ["reasoning.encrypted_content"]
    body |= _openai_options(prompt, choice)
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


def _responses_rows(messages: Sequence[Message], choice: ModelChoice, _: bool) -> Iterator[JsonObject | Raw]:
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
                    output = _openai_content(part, choice, "input_text")
                    yield {"type": "function_call_output", "call_id": part.id, "output": output}
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
        return deltas

    def _end(self, response: JsonObject) -> None:
        self.answered_by = as_text(response.get("model")) or self.answered_by
        reason = as_text(as_object(response.get("incomplete_details")).get("reason"))
        self.stop = "refusal" if self.has_refused else _INCOMPLETE.get(reason, "length") if reason else "end"
        if usage := as_object(response.get("usage")):
            self.usage = _openai_usage(usage, "input", "output")


_ANTHROPIC_VERSION = "2023-06-01"
"""The version in which keys are sent as `x-api-key` and a temperature is accepted; `headers` can name a later one."""
_CACHED: JsonObject = {"type": "ephemeral"}
_REDACTED = "redacted:"
"""What an opaque text begins with that is not the signature of a thought, but the encrypted thought itself."""
_LONG = 15
"""A cache entry is found again up to 20 blocks further on, so a long message gets a marker in its middle too."""
_ANTHROPIC_STOPS: dict[str, StopReason] = {
    "end_turn": "end",
    "stop_sequence": "end",
    "pause_turn": "end",
    "tool_use": "calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}


def _anthropic_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
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


def _anthropic_rows(messages: Sequence[Message], _: ModelChoice, is_last: bool) -> list[JsonObject]:
    """Return messages in a row as one, since the roles must alternate; the last has a cache marker at its end."""
    blocks = [block for message in messages for block in _anthropic_blocks(message)]
    if is_last:
        blocks[-1]["cache_control"] = _CACHED
        if len(blocks) > _LONG:
            blocks[_LONG - 1]["cache_control"] = _CACHED
    return [{"role": "assistant" if messages[0].role == "assistant" else "user", "content": blocks}]


def _anthropic_blocks(message: Message) -> Iterator[_RawObject]:
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
                yield _anthropic_result(part)
            case _:  # a thought without its signature is refused
                continue


def _anthropic_result(part: ToolResultPart) -> _RawObject:
    content: Json = part.content
    if part.label:
        # A text block must not be blank.
        texts = [part.label, *([part.content] if part.content.strip() else [])]
        content = [{"type": "text", "text": text} for text in texts]
    block: _RawObject = {"type": "tool_result", "tool_use_id": part.id, "content": content}
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
                    self._stop = _ANTHROPIC_STOPS.get(reason, "end")
            case "message_stop":
                self.stop = self._stop or "end"
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


_UNSIGNED = "skip_thought_signature_validator"
"""What Gemini takes in place of the signature of a call that another model made."""
_GEMINI_STOPS: dict[str, StopReason] = {
    "STOP": "end",
    "MAX_TOKENS": "length",
    "SAFETY": "filtered",
    "RECITATION": "filtered",
    "LANGUAGE": "filtered",
    "BLOCKLIST": "filtered",
    "PROHIBITED_CONTENT": "filtered",
    "SPII": "filtered",
}


def _gemini_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its contents."""
    generation: dict[str, Json] = {"maxOutputTokens": prompt.max_output}
    if (temperature := temperature_of(prompt, choice)) is not None:
        generation["temperature"] = temperature
    body: dict[str, object] = {"generationConfig": generation}
    if prompt.tools:
        declared = [
            {"name": tool.name, "description": tool.description, "parametersJsonSchema": input_schema(tool.parameters)}
            for tool in prompt.tools
        ]
        body["tools"] = [{"functionDeclarations": declared}]
    if prompt.system:
        body["systemInstruction"] = {"parts": [{"text": prompt.system}]}
    return body


def _gemini_rows(messages: Sequence[Message], _: ModelChoice, __: bool) -> list[JsonObject]:
    """Return messages in a row as one content, since the roles must alternate."""
    role = "model" if messages[0].role == "assistant" else "user"
    return [{"role": role, "parts": [part for message in messages for part in _gemini_parts(message)]}]


def _gemini_parts(message: Message) -> Iterator[_RawObject]:
    is_first = True
    for part in message.parts:
        match part:
            case TextPart(text=text):
                yield {"text": text}
            case ReasoningPart(opaque=opaque) if opaque:
                yield {"text": "", "thoughtSignature": opaque}
            case ToolCallPart():
                call: _RawObject = {"functionCall": {"id": part.id, "name": part.name, "args": arguments_of(part)}}
                # Only the first of several calls has a signature.
                if part.opaque or is_first:
                    call["thoughtSignature"] = part.opaque or _UNSIGNED
                is_first = False
                yield call
            case ToolResultPart():
                key = "error" if part.is_error else "output"
                response: JsonObject = {**({"label": part.label} if part.label else {}), key: part.content}
                yield {"functionResponse": {"id": part.id, "name": part.name, "response": response}}


class _FunctionCall(msgspec.Struct):
    name: str = ""
    id: str | None = None
    args: Raw = Raw(b"{}")


class _ContentPart(msgspec.Struct, rename="camel"):
    function_call: _FunctionCall | None = None


class _Content(msgspec.Struct):
    parts: list[_ContentPart] = []


class _Candidate(msgspec.Struct):
    content: _Content | None = None


class _Chunk(msgspec.Struct):
    """The calls of a chunk, with their arguments as they were written."""

    candidates: list[_Candidate] = []


class GeminiReader(ReplyReader):
    """Reads the chunks of a content."""

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one chunk."""
        self.answered_by = as_text(data.get("modelVersion")) or self.answered_by
        if usage := as_object(data.get("usageMetadata")):
            read = count(usage, "cachedContentTokenCount")
            prompt = count(usage, "promptTokenCount") + count(usage, "toolUsePromptTokenCount")
            self.usage = TokenUsage(
                input=max(0, prompt - read),
                cache_read=read,
                output=count(usage, "candidatesTokenCount") + count(usage, "thoughtsTokenCount"),
            )
        if as_text(as_object(data.get("promptFeedback")).get("blockReason")):
            self.stop = "filtered"
        deltas: list[ReplyDelta] = []
        for candidate in map(as_object, as_list(data.get("candidates"))[:1]):
            parts = list(map(as_object, as_list(as_object(candidate.get("content")).get("parts"))))
            calls: list[_ContentPart] = []
            if any("functionCall" in part for part in parts):
                content = msgspec.json.decode(text, type=_Chunk).candidates[0].content
                calls = content.parts if content else []
            for number, part in enumerate(parts):
                deltas += self._part(part, calls[number].function_call if calls else None)
            if reason := as_text(candidate.get("finishReason")):
                self.stop = _GEMINI_STOPS.get(reason, "end")
        return deltas

    def _part(self, part: JsonObject, call: _FunctionCall | None) -> list[ReplyDelta]:
        signature = as_text(part.get("thoughtSignature"))
        if call is not None:
            return self.add_call(call.id, call.name, call.args, signature)
        if part.get("thought"):
            return self.append("reasoning", as_text(part.get("text")))
        deltas = self.append("text", as_text(part.get("text")))
        if signature:  # of a text; it is sent back as a part of its own
            self.draft("reasoning", ("signature", signature)).opaque = signature
        return deltas


_OLLAMA_STOPS: dict[str, StopReason] = {"stop": "end", "length": "length"}


def _ollama_head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
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


def _ollama_rows(messages: Sequence[Message], _: ModelChoice, __: bool) -> Iterator[_RawObject]:
    """Yield messages; each text and each result is one of its own."""
    for message in messages:
        match message.role:
            case "assistant":
                yield _ollama_reply(message)
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


def _ollama_reply(message: Message) -> _RawObject:
    row: _RawObject = {"role": "assistant", "content": joined(message, TextPart)}
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


class _OllamaFunction(msgspec.Struct):
    name: str = ""
    arguments: Raw = Raw(b"{}")


class _OllamaCall(msgspec.Struct):
    function: _OllamaFunction
    id: str | None = None


class _OllamaMessage(msgspec.Struct):
    tool_calls: list[_OllamaCall] | None = None


class _OllamaLine(msgspec.Struct):
    """The calls of a line, with their arguments as they were written."""

    message: _OllamaMessage


class OllamaReader(ReplyReader):
    """Reads the lines of a reply."""

    def take(self, data: JsonObject, text: str) -> list[ReplyDelta]:
        """Take one line."""
        self.answered_by = as_text(data.get("model")) or self.answered_by
        message = as_object(data.get("message"))
        deltas = self.append("reasoning", as_text(message.get("thinking")))
        deltas += self.append("text", as_text(message.get("content")))
        if message.get("tool_calls"):
            for call in msgspec.json.decode(text, type=_OllamaLine).message.tool_calls or ():
                deltas += self.add_call(call.id, call.function.name, call.function.arguments)
        if data.get("done") is True:
            self.stop = _OLLAMA_STOPS.get(as_text(data.get("done_reason")), "end")
            if "eval_count" in data:
                self.usage = TokenUsage(input=count(data, "prompt_eval_count"), output=count(data, "eval_count"))
        return deltas


class Dialect(Struct, frozen=True):
    """How the models of a kind of provider are asked, and how their answers are read."""

    messages: str
    """The key of the messages, which are the last of a request."""
    head: Callable[[Prompt, ModelChoice], dict[str, object]]
    """Returns a request without its messages, or with the system text as their first."""
    rows: Callable[[Sequence[Message], ModelChoice, bool], Iterable[object]]
    """Returns messages in a row of one side, the model's or the user's; the flag marks the last of a request."""
    reader: Callable[[ModelChoice], ReplyReader]
    headers: Mapping[str, str] = {}
    stream: Literal["sse", "lines"] = "sse"


DIALECTS: Mapping[str, Dialect] = {
    "openai_chat": Dialect("messages", _chat_head, _chat_rows, ChatReader),
    "openai_responses": Dialect("input", _responses_head, _responses_rows, ResponsesReader),
    "anthropic": Dialect(
        "messages", _anthropic_head, _anthropic_rows, AnthropicReader, {"anthropic-version": _ANTHROPIC_VERSION}
    ),
    "gemini": Dialect("contents", _gemini_head, _gemini_rows, GeminiReader),
    "ollama": Dialect("messages", _ollama_head, _ollama_rows, OllamaReader, stream="lines"),
}
