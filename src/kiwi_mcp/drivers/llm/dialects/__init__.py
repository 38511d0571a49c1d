"""The dialects by name. Each has pure functions for requests, and a reader for the stream of one reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.messages import Message, Prompt
from kiwi_mcp.drivers.llm.dialect import ReplyReader
from kiwi_mcp.drivers.llm.dialects import anthropic, gemini, ollama, openai
from kiwi_mcp.drivers.llm.provider import ModelChoice


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
    "openai_chat": Dialect("messages", openai.chat_head, openai.chat_rows, openai.ChatReader),
    "openai_responses": Dialect("input", openai.responses_head, openai.responses_rows, openai.ResponsesReader),
    "anthropic": Dialect(
        "messages", anthropic.head, anthropic.rows, anthropic.AnthropicReader, {"anthropic-version": anthropic.VERSION}
    ),
    "gemini": Dialect("contents", gemini.head, gemini.rows, gemini.GeminiReader),
    "ollama": Dialect("messages", ollama.head, ollama.rows, ollama.OllamaReader, stream="lines"),
}
