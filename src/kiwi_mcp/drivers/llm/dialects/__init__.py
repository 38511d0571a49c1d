"""The dialects by name. Each is a module with `request`, pure, and a reader for the stream of one reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.messages import Prompt
from kiwi_mcp.drivers.llm.conversation import DialectRequest
from kiwi_mcp.drivers.llm.dialects import anthropic, gemini, ollama, openai_chat, openai_responses
from kiwi_mcp.drivers.llm.provider import ModelChoice
from kiwi_mcp.drivers.llm.reply import ReplyReader


class Dialect(Struct, frozen=True):
    """How the models of a kind of provider are asked, and how their answers are read."""

    request: Callable[[Prompt, ModelChoice], DialectRequest]
    reader: Callable[[ModelChoice], ReplyReader]
    stream: Literal["sse", "lines"] = "sse"


DIALECTS: Mapping[str, Dialect] = {
    "openai_chat": Dialect(openai_chat.request, openai_chat.ChatReader),
    "openai_responses": Dialect(openai_responses.request, openai_responses.ResponsesReader),
    "anthropic": Dialect(anthropic.request, anthropic.AnthropicReader),
    "gemini": Dialect(gemini.request, gemini.GeminiReader),
    "ollama": Dialect(ollama.request, ollama.OllamaReader, "lines"),
}
