"""The dialects against `@copilotkit/aimock`, another reading of the APIs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.llm.conftest import Ask, chain_of
from tests.plugins.scripted_model import DIALECT_NAMES

from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import Message, Prompt, TextPart, ToolDefinition, ToolResultPart
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model

FOLDER = Path(sys.prefix) / "models" / "npm" / "node_modules" / "@copilotkit" / "aimock" / "dist" / "index.js"
MODELS = {
    "openai_chat": "gpt-4o",
    "openai_responses": "gpt-4o",
    "anthropic": "claude-sonnet-4-5",
    "gemini": "gemini-2.5-flash",
    "ollama": "llama3.2",
}
TOOLS = (
    ToolDefinition("search", "Find things", {"type": "object", "properties": {"query": {"type": "string"}}}),
    ToolDefinition("help", "Explain", {}),
)
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECT_NAMES)]


@pytest.fixture(scope="module")
def aimock(processes: None) -> Iterator[str]:
    """The address of a running aimock."""
    program = ["node", str(Path(__file__).with_name("aimock.mjs")), str(FOLDER)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def chosen(aimock: str, dialect: str) -> ModelChoice:
    config: JsonObject = {"dialect": dialect, "url": aimock, "auth": "Bearer ${K}", "models": {MODELS[dialect]: {}}}
    return choose_model(chain_of(config), model=MODELS[dialect])


def asks(text: str, *messages: Message) -> Prompt:
    return Prompt("Be brief.", TOOLS, (Message("user", (TextPart(text),)), *messages), 256)


async def test_it_answers_with_a_text(aimock: str, ask_model: Ask, dialect: str) -> None:
    reply = await ask_model(asks("hello"), chosen(aimock, dialect))

    assert (reply.text, reply.stop) == ("Hello from aimock.", "end")
    assert reply.usage.output > 0


async def test_it_calls_two_tools_and_reads_their_results(aimock: str, ask_model: Ask, dialect: str) -> None:
    choice = chosen(aimock, dialect)

    first = await ask_model(asks("two calls"), choice)
    results = tuple(ToolResultPart(call.id, call.name, "sunny", label="from the web") for call in first.calls)
    history = (Message("assistant", first.parts), Message("tool", results))
    second = await ask_model(asks("two calls", *history), choice)

    assert [(call.name, call.arguments) for call in first.calls] == [("search", '{"query":"news"}'), ("help", "{}")]
    assert (first.stop, second.stop, second.text) == ("calls", "end", "It is sunny in Bern.")


async def test_a_rate_limit_is_waited_for(aimock: str, ask_model: Ask, dialect: str) -> None:
    waits: list[float] = []

    reply = await ask_model(asks(f"rate limit {dialect}"), chosen(aimock, dialect), waits=waits)

    assert reply.text == "Now."
    assert len(waits) == 1


async def test_a_stream_that_is_cut_off_is_broken(aimock: str, ask_model: Ask, dialect: str) -> None:
    reply = await ask_model(asks("cut off"), chosen(aimock, dialect))

    assert reply.stop == "broken"
    assert "A long answer that is cut off".startswith(reply.text[:10])
    assert reply.text != "A long answer that is cut off before it ends."
