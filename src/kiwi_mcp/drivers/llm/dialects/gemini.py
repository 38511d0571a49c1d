"""Gemini, `streamGenerateContent`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
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

_UNSIGNED = "skip_thought_signature_validator"
"""What Gemini takes in place of the signature of a call that another model made."""
_STOPS: dict[str, StopReason] = {
    "STOP": "end",
    "MAX_TOKENS": "length",
    "SAFETY": "filtered",
    "RECITATION": "filtered",
    "LANGUAGE": "filtered",
    "BLOCKLIST": "filtered",
    "PROHIBITED_CONTENT": "filtered",
    "SPII": "filtered",
}
_Part = dict[str, "Json | Raw"]


def head(prompt: Prompt, choice: ModelChoice) -> dict[str, object]:
    """Return a request without its contents."""
    temperature = choice.temperature if prompt.temperature is None else prompt.temperature
    generation: dict[str, Json] = {"maxOutputTokens": prompt.max_output}
    if temperature is not None and "no_temperature" not in choice.quirks:
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


def rows(messages: Sequence[Message], _: ModelChoice, __: bool) -> list[JsonObject]:
    """Return messages in a row as one content, since the roles must alternate."""
    role = "model" if messages[0].role == "assistant" else "user"
    return [{"role": role, "parts": [part for message in messages for part in _parts(message)]}]


def _parts(message: Message) -> Iterator[_Part]:
    is_first = True
    for part in message.parts:
        match part:
            case TextPart(text=text):
                yield {"text": text}
            case ReasoningPart(opaque=opaque) if opaque:
                yield {"text": "", "thoughtSignature": opaque}
            case ToolCallPart():
                call: _Part = {"functionCall": _call(part)}
                # Only the first of several calls has a signature.
                if part.opaque or is_first:
                    call["thoughtSignature"] = part.opaque or _UNSIGNED
                is_first = False
                yield call
            case ToolResultPart():
                key = "error" if part.is_error else "output"
                response: JsonObject = {**({"label": part.label} if part.label else {}), key: part.content}
                yield {"functionResponse": {"id": part.id, "name": part.name, "response": response}}
            case _:
                continue


def _call(part: ToolCallPart) -> Json:
    return {"id": part.id, "name": part.name, "args": arguments_of(part)}


class _Call(msgspec.Struct):
    name: str = ""
    id: str | None = None
    args: Raw = Raw(b"{}")


class _ContentPart(msgspec.Struct, rename="camel"):
    function_call: _Call | None = None


class _Content(msgspec.Struct):
    parts: list[_ContentPart] = []


class _Candidate(msgspec.Struct):
    content: _Content | None = None


class _Chunk(msgspec.Struct):
    """The calls of a chunk, with their arguments as they were written."""

    candidates: list[_Candidate] = []


class GeminiReader:
    """Reads the chunks of a content."""

    def __init__(self, choice: ModelChoice) -> None:
        self._reply = ReplyBuilder(choice.provider, choice.model)
        self._calls = 0

    def feed(self, event: ServerEvent) -> list[ReplyDelta]:
        """Take one chunk."""
        chunk, reply = decode(event.data), self._reply
        raise_error(chunk.get("error"))
        reply.answered_by = as_text(chunk.get("modelVersion")) or reply.answered_by
        if usage := as_object(chunk.get("usageMetadata")):
            reply.usage = _usage(usage)
        if as_text(as_object(chunk.get("promptFeedback")).get("blockReason")):
            reply.stop = "filtered"
        deltas: list[ReplyDelta] = []
        for candidate in map(as_object, as_list(chunk.get("candidates"))[:1]):
            parts = list(map(as_object, as_list(as_object(candidate.get("content")).get("parts"))))
            calls = _calls(event.data) if any("functionCall" in part for part in parts) else []
            for number, part in enumerate(parts):
                deltas += self._part(part, calls[number] if calls else None)
            if reason := as_text(candidate.get("finishReason")):
                reply.stop = _STOPS.get(reason, "end")
        return deltas

    def _part(self, part: JsonObject, call: _Call | None) -> list[ReplyDelta]:
        reply, signature = self._reply, as_text(part.get("thoughtSignature"))
        if call is not None:
            self._calls += 1
            key = ("call", self._calls)
            deltas = reply.start_call(key, id=call.id or "", name=call.name)
            draft = reply.draft("call", key)
            draft.text, draft.opaque, draft.is_complete = bytes(call.args).decode(), signature, True
            return deltas
        if part.get("thought"):
            return reply.append("reasoning", as_text(part.get("text")))
        deltas = reply.append("text", as_text(part.get("text")))
        if signature:  # of a text; it is sent back as a part of its own
            reply.draft("reasoning", ("signature", signature)).opaque = signature
        return deltas

    def finish(self) -> ModelReply:
        """Return the reply."""
        return self._reply.reply()


def _calls(data: str) -> list[_Call | None]:
    chunk = msgspec.json.decode(data, type=_Chunk)
    content = chunk.candidates[0].content
    return [part.function_call for part in content.parts] if content else []


def _usage(usage: JsonObject) -> TokenUsage:
    read = count(usage, "cachedContentTokenCount")
    prompt = count(usage, "promptTokenCount") + count(usage, "toolUsePromptTokenCount")
    return TokenUsage(
        input=max(0, prompt - read),
        cache_read=read,
        output=count(usage, "candidatesTokenCount") + count(usage, "thoughtsTokenCount"),
    )
