"""The dialects against a real llama.cpp server, which reads our requests and writes its own streams."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.drivers.llm.conftest import Ask, chain_of

from kiwi_mcp.domain.errors import ModelFailed
from kiwi_mcp.domain.json import JsonObject
from kiwi_mcp.domain.messages import Message, ModelReply, Prompt, TextPart, ToolDefinition, ToolResultPart
from kiwi_mcp.drivers.llm.provider import ModelChoice, choose_model

PYTHON = Path(sys.prefix) / "models" / "llamacpp" / "bin" / "python"
DIALECTS = ("openai_chat", "openai_responses", "anthropic")
PARAMETERS: JsonObject = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = (ToolDefinition("get_weather", "The weather in a city", PARAMETERS),)
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("dialect", DIALECTS)]


@pytest.fixture(scope="module")
def llamacpp(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a llama.cpp server."""
    model = tmp_path_factory.mktemp("llamacpp") / "scripted.gguf"
    program = [str(PYTHON), str(Path(__file__).with_name("llamacpp_server.py")), str(model)]
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout is not None
        try:
            lines = (line for line in server.stdout if line.startswith("listening "))
            yield next(lines).split()[1]
        finally:
            server.kill()


def chosen(address: str, dialect: str) -> ModelChoice:
    config: JsonObject = {
        "dialect": dialect,
        "url": address,
        "cap_field": "max_tokens",
        "models": {"*": {"temperature": 0}},
    }
    return choose_model(chain_of(config), model="scripted")


def asks(*messages: Message, tools: tuple[ToolDefinition, ...] = TOOLS) -> Prompt:
    return Prompt("Be brief.", tools, (Message("user", (TextPart("How is the weather?"),)), *messages), 64)


async def answer_of(prompt: Prompt, choice: ModelChoice, ask_model: Ask) -> ModelReply:
    """Ask again if the server closed a connection in the moment in which it was used again, as it does now and then."""
    for _ in range(5):
        try:
            return await ask_model(prompt, choice)
        except ModelFailed as failed:
            if failed.kind != "connection":
                raise
    raise AssertionError("the server never answers")


@pytest.mark.req("K-TH-01")
async def test_it_calls_a_tool_reads_the_result_and_answers(llamacpp: str, ask_model: Ask, dialect: str) -> None:
    choice = chosen(llamacpp, dialect)

    first = await answer_of(asks(), choice, ask_model)
    results = tuple(ToolResultPart(call.id, call.name, "sunny", label="from the web") for call in first.calls)
    messages = asks(Message("assistant", first.parts), Message("tool", results))
    second = await answer_of(messages, choice, ask_model)

    assert [(call.name, call.arguments.replace(" ", "")) for call in first.calls] == [
        ("get_weather", '{"city":"Bern"}')
    ]
    assert (first.stop, second.stop, second.text) == ("calls", "end", "It is sunny in Bern.")
    assert first.usage.total > 0
    assert not first.usage.is_estimated


async def test_it_answers_without_tools(llamacpp: str, ask_model: Ask, dialect: str) -> None:
    reply = await answer_of(asks(tools=()), chosen(llamacpp, dialect), ask_model)

    assert (reply.text, reply.stop) == ("It is sunny in Bern.", "end")


async def test_a_conversation_over_its_context_is_a_clear_error(llamacpp: str, ask_model: Ask, dialect: str) -> None:
    long = Message("user", (TextPart("x" * 20_000),))

    with pytest.raises(ModelFailed) as caught:
        await answer_of(asks(long), chosen(llamacpp, dialect), ask_model)

    assert caught.value.kind == "context"
