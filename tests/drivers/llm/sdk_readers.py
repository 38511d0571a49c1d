"""Read two streamed replies with the official SDK of a dialect and print what they hold; run with the SDKs' Python."""

from __future__ import annotations

import json
import sys
from typing import Any

TOOL: dict[str, Any] = {"type": "object", "properties": {"query": {"type": "string"}}}
ASK = "What is new?"


def openai_chat(host: str, key: str, model: str) -> dict[str, Any]:
    import openai  # noqa: PLC0415 - each dialect has an SDK of its own

    client = openai.OpenAI(base_url=f"http://{host}/v1", api_key=key, max_retries=0)
    function = {"name": "search", "description": "Find things", "parameters": TOOL}
    with client.chat.completions.stream(
        model=model,
        messages=[{"role": "user", "content": ASK}],
        max_completion_tokens=64,
        stream_options={"include_usage": True},
        tools=[{"type": "function", "function": function}],
    ) as stream:
        done = stream.get_final_completion()
    message = done.choices[0].message
    calls = [[call.function.name, call.function.arguments] for call in message.tool_calls or ()]
    return {"text": message.content or "", "calls": calls, "stop": done.choices[0].finish_reason}


def openai_responses(host: str, key: str, model: str) -> dict[str, Any]:
    import openai  # noqa: PLC0415 - each dialect has an SDK of its own

    client = openai.OpenAI(base_url=f"http://{host}/v1", api_key=key, max_retries=0)
    tool = {"type": "function", "name": "search", "description": "Find things", "parameters": TOOL, "strict": False}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": ASK}]}
    with client.responses.stream(model=model, input=[item], max_output_tokens=64, store=False, tools=[tool]) as stream:
        done = stream.get_final_response()
    calls = [[item.name, item.arguments] for item in done.output if item.type == "function_call"]
    return {"text": done.output_text, "calls": calls, "stop": done.status}


def anthropic(host: str, key: str, model: str) -> dict[str, Any]:
    import anthropic as sdk  # noqa: PLC0415 - each dialect has an SDK of its own

    client = sdk.Anthropic(base_url=f"http://{host}", api_key=key, max_retries=0)
    with client.messages.stream(
        model=model,
        max_tokens=64,
        messages=[{"role": "user", "content": [{"type": "text", "text": ASK}]}],
        tools=[{"name": "search", "description": "Find things", "input_schema": TOOL}],
    ) as stream:
        done = stream.get_final_message()
    text = "".join(block.text for block in done.content if block.type == "text")
    calls = [[block.name, json.dumps(block.input)] for block in done.content if block.type == "tool_use"]
    return {"text": text, "calls": calls, "stop": done.stop_reason}


def gemini(host: str, key: str, model: str) -> dict[str, Any]:
    from google import genai  # noqa: PLC0415 - each dialect has an SDK of its own

    client = genai.Client(api_key=key, http_options={"base_url": f"http://{host}", "api_version": "v1beta"})
    config = {"max_output_tokens": 64}
    text, calls, stop = "", [], ""
    for chunk in client.models.generate_content_stream(model=model, contents=ASK, config=config):
        for candidate in chunk.candidates or ():
            for part in candidate.content.parts or ():
                if part.function_call:
                    calls.append([part.function_call.name, json.dumps(part.function_call.args)])
                elif part.text and not part.thought:
                    text += part.text
            stop = candidate.finish_reason.name if candidate.finish_reason else stop
    return {"text": text, "calls": calls, "stop": stop}


if __name__ == "__main__":
    dialect, *arguments = sys.argv[1:]
    read = {"openai_chat": openai_chat, "openai_responses": openai_responses, "anthropic": anthropic, "gemini": gemini}
    sys.stdout.write(json.dumps([read[dialect](*arguments) for _ in range(2)]))
