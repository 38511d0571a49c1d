"""The MCP server behind Kiwi, on the official SDK: it offers what fixture.yaml says, over stdio.

It speaks every revision, as a server of today does: what a call cannot know it asks for in an `input_required` result,
and only for what its client says it can answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    CallToolRequestParams,
    CallToolResult,
    CompleteRequestParams,
    CompleteResult,
    Completion,
    GetPromptRequestParams,
    GetPromptResult,
    InputRequiredResult,
    InputResponseRequestParams,
    ListPromptsResult,
    ListResourcesResult,
    ListResourceTemplatesResult,
    ListToolsResult,
    PaginatedRequestParams,
    Prompt,
    ReadResourceRequestParams,
    ReadResourceResult,
    Resource,
    ResourceTemplate,
    Tool,
)

OFFERED: Mapping[str, Any] = yaml.safe_load(Path(__file__).with_name("fixture.yaml").read_text(encoding="utf-8"))
MISSING_CAPABILITY = -32021
CAPABILITIES = {"elicitation/create": "elicitation", "sampling/createMessage": "sampling", "roots/list": "roots"}
LINE, STEP = 0.02, 0.15
"""Seconds between two lines of a log, and between two words about how far a call is: Kiwi passes on ten in a second."""

Context = ServerRequestContext[Any, Any]


def filled(value: Any, given: Mapping[str, Any]) -> Any:
    """A value of fixture.yaml with what was given in place of `{name}`."""
    match value:
        case str():
            for name, word in given.items():
                value = value.replace(f"{{{name}}}", str(word))
            return value
        case dict():
            return {key: filled(inner, given) for key, inner in value.items()}
        case list():
            return [filled(inner, given) for inner in value]
        case _:
            return value


def asked(context: Context, questions: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the questions that this client can answer; it is refused where there are none."""
    declared = context.session.client_capabilities
    able = {key: one for key, one in questions.items() if getattr(declared, CAPABILITIES[one["method"]], None)}
    if not able:
        needed: dict[str, Any] = {CAPABILITIES[one["method"]]: {} for one in questions.values()}
        raise MCPError(MISSING_CAPABILITY, "The client cannot answer", data={"requiredCapabilities": needed})
    return able


def answers(
    context: Context, rounds: Sequence[Mapping[str, Any]], params: InputResponseRequestParams, given: Mapping[str, Any]
) -> InputRequiredResult | Mapping[str, Any]:
    """All answers to the rounds of questions, or the questions that are still open."""
    known: dict[str, Any] = json.loads(params.request_state or "{}")
    for key, value in (params.input_responses or {}).items():
        known[key] = value.model_dump(mode="json", by_alias=True, exclude_none=True)
    for questions in rounds:
        able = asked(context, filled(questions, given))
        if not able.keys() <= known.keys():
            words = {"resultType": "input_required", "inputRequests": able, "requestState": json.dumps(known)}
            return InputRequiredResult.model_validate(words)
    return known


async def list_tools(_: Context, __: PaginatedRequestParams | None) -> ListToolsResult:
    empty = {"type": "object", "properties": {}}
    tools = [
        Tool(name=name, description=tool["description"], input_schema=tool.get("inputSchema", empty))
        for name, tool in OFFERED["tools"].items()
    ]
    return ListToolsResult(tools=tools)


async def call_tool(context: Context, params: CallToolRequestParams) -> CallToolResult | InputRequiredResult:
    tool = OFFERED["tools"].get(params.name)
    if tool is None:
        raise MCPError(INVALID_PARAMS, f"There is no tool {params.name}")
    match tool.get("does"):
        case "log":
            for line in ("started", "going on", "done"):
                await context.session.send_log_message("info", line, related_request_id=str(context.request_id))
                await asyncio.sleep(LINE)
        case "progress":
            for done in (0, 50, 100):
                await context.session.report_progress(done, 100, f"{done} of 100")
                await asyncio.sleep(STEP)
        case "refuse":
            raise MCPError(INTERNAL_ERROR, "The job went wrong in a way that is no answer")
    found = answers(context, tool.get("rounds", ()), params, params.arguments or {})
    if isinstance(found, InputRequiredResult):
        return found
    await asyncio.sleep(tool.get("seconds", 0))
    content = tool.get("content") or [{"type": "text", "text": json.dumps(found)}]
    return CallToolResult.model_validate({"content": content, "isError": tool.get("isError", False)})


async def list_prompts(_: Context, __: PaginatedRequestParams | None) -> ListPromptsResult:
    prompts = [
        Prompt.model_validate({"name": name, "description": one["description"], "arguments": one.get("arguments", [])})
        for name, one in OFFERED["prompts"].items()
    ]
    return ListPromptsResult(prompts=prompts)


async def get_prompt(context: Context, params: GetPromptRequestParams) -> GetPromptResult | InputRequiredResult:
    prompt = OFFERED["prompts"].get(params.name)
    if prompt is None:
        raise MCPError(INVALID_PARAMS, f"There is no prompt {params.name}")
    found = answers(context, prompt.get("rounds", ()), params, {})
    if isinstance(found, InputRequiredResult):
        return found
    return GetPromptResult.model_validate({"messages": filled(prompt["messages"], params.arguments or {})})


async def list_resources(_: Context, __: PaginatedRequestParams | None) -> ListResourcesResult:
    resources = [
        Resource(uri=uri, name=one["name"], mime_type=one["mimeType"]) for uri, one in OFFERED["resources"].items()
    ]
    return ListResourcesResult(resources=resources)


async def list_templates(_: Context, __: PaginatedRequestParams | None) -> ListResourceTemplatesResult:
    one = OFFERED["template"]
    found = ResourceTemplate(uri_template=one["uri"], name=one["name"], mime_type=one["mimeType"])
    return ListResourceTemplatesResult(resource_templates=[found])


async def read_resource(_: Context, params: ReadResourceRequestParams) -> ReadResourceResult:
    one = OFFERED["resources"].get(params.uri)
    before, _, after = OFFERED["template"]["uri"].partition("{id}")
    if one is None and params.uri.startswith(before) and params.uri.endswith(after):
        filling = params.uri.removeprefix(before).removesuffix(after)
        one = {"mimeType": OFFERED["template"]["mimeType"], "text": json.dumps({"id": filling})}
    if one is None:
        raise MCPError(INVALID_PARAMS, "There is no such resource", data={"uri": params.uri})
    return ReadResourceResult.model_validate({"contents": [{"uri": params.uri, **one}]})


async def complete(_: Context, params: CompleteRequestParams) -> CompleteResult:
    values = [word for word in ("test-one", "test-two") if word.startswith(params.argument.value)]
    return CompleteResult(completion=Completion(values=values))


async def main() -> None:
    server: Server[Any] = Server(
        "conformance",
        version="1.0.0",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
        on_completion=complete,
    )
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    asyncio.run(main())
