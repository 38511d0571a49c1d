"""Gemini, `streamGenerateContent`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import Raw

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
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
                call: _Part = {"functionCall": {"id": part.id, "name": part.name, "args": arguments_of(part)}}
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
                self.stop = _STOPS.get(reason, "end")
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
