"""Agent loops of others, each with one tool in its process: prints the CPU per turn. Run with the Python of `agents`.

Usage: agent_clients.py NAME ADDRESS TURNS...
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

NOTE = "A kiwi is a bird."
_SCHEMA = {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]}
_TASK = "Read the note."
_Loop = Callable[[], Awaitable[object]]
"""Runs a task to its end; what it needs was made before."""


def read(number: int) -> str:
    """Read the note.

    Args:
        number: Any number.
    """
    return f"{NOTE} ({number})"


def openai_sdk(url: str, _: int) -> _Loop:
    import openai  # noqa: PLC0415 - each loop imports what it needs alone

    function = {"name": "read", "description": "Read the note.", "parameters": _SCHEMA}
    tools, client = [{"type": "function", "function": function}], openai.AsyncOpenAI(base_url=url, api_key="x")

    async def loop() -> None:
        messages: list[Any] = [{"role": "user", "content": _TASK}]
        while True:
            done = await client.chat.completions.create(model="bench", messages=messages, tools=tools)
            message = done.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return
            for call in message.tool_calls:
                result = read(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return loop


def anthropic_sdk(url: str, _: int) -> _Loop:
    import anthropic  # noqa: PLC0415 - as above

    tool = {"name": "read", "description": "Read the note.", "input_schema": _SCHEMA}
    client = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="x")

    async def loop() -> None:
        messages: list[Any] = [{"role": "user", "content": _TASK}]
        while True:
            done = await client.messages.create(model="bench", max_tokens=1_024, messages=messages, tools=[tool])
            messages.append({"role": "assistant", "content": done.content})
            calls = [block for block in done.content if block.type == "tool_use"]
            if not calls:
                return
            results = [{"type": "tool_result", "tool_use_id": call.id, "content": read(**call.input)} for call in calls]
            messages.append({"role": "user", "content": results})

    return loop


def openai_agents(url: str, turns: int) -> _Loop:
    import agents  # noqa: PLC0415 - as above
    import openai  # noqa: PLC0415 - as above

    agents.set_tracing_disabled(disabled=True)
    client = openai.AsyncOpenAI(base_url=url, api_key="x")
    model = agents.OpenAIChatCompletionsModel(model="bench", openai_client=client)
    agent = agents.Agent(name="bench", model=model, tools=[agents.function_tool(read)])
    return lambda: agents.Runner.run(agent, _TASK, max_turns=turns + 1)


def pydantic_ai(url: str, turns: int) -> _Loop:
    from pydantic_ai import Agent, UsageLimits  # noqa: PLC0415 - as above
    from pydantic_ai.models.openai import OpenAIChatModel  # noqa: PLC0415 - as above
    from pydantic_ai.providers.openai import OpenAIProvider  # noqa: PLC0415 - as above

    model = OpenAIChatModel("bench", provider=OpenAIProvider(base_url=url, api_key="x"))
    agent = Agent(model, tools=[read])
    return lambda: agent.run(_TASK, usage_limits=UsageLimits(request_limit=turns + 1))


def langgraph(url: str, turns: int) -> _Loop:
    from langchain_openai import ChatOpenAI  # noqa: PLC0415 - as above
    from langgraph.prebuilt import create_react_agent  # noqa: PLC0415 - as above

    agent = create_react_agent(ChatOpenAI(model="bench", base_url=url, api_key="x"), [read])
    return lambda: agent.ainvoke({"messages": [("user", _TASK)]}, {"recursion_limit": 2 * turns + 2})


def smolagents(url: str, turns: int) -> _Loop:
    from smolagents import LogLevel, OpenAIServerModel, ToolCallingAgent, tool  # noqa: PLC0415 - as above

    model = OpenAIServerModel("bench", api_base=url.replace("/run", "/final_answer"), api_key="x")
    agent = ToolCallingAgent([tool(read)], model, verbosity_level=LogLevel.OFF, max_steps=turns + 1)
    return lambda: asyncio.to_thread(agent.run, _TASK)


LOOPS: dict[str, Callable[[str, int], _Loop]] = {
    "openai SDK": openai_sdk,
    "anthropic SDK": anthropic_sdk,
    "openai-agents": openai_agents,
    "pydantic-ai": pydantic_ai,
    "langgraph": langgraph,
    "smolagents": smolagents,
}


async def _main(name: str, address: str, *counts: str) -> None:
    found: dict[str, float] = {}
    for number, count in enumerate(("3", *counts)):  # the first is warm-up
        loop = LOOPS[name](f"http://{address}/run{os.getpid()}-{number}/{count}/read/v1", int(count))
        began = time.process_time()
        await loop()
        found[count] = (time.process_time() - began) * 1_000 / int(count)
    print(json.dumps({count: found[count] for count in counts}))


if __name__ == "__main__":
    asyncio.run(_main(*sys.argv[1:]))
