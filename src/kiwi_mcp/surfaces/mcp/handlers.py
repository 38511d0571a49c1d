"""What requests about tools, resources, prompts and completion are answered with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace
from pydantic import ValidationError

from kiwi_mcp.domain.calls import NO_CALLER, Caller
from kiwi_mcp.domain.errors import Invalid, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Hints, Offer, Offers, match
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.kernel import whole
from kiwi_mcp.kernel.tool_names import description_of
from kiwi_mcp.kernel.verbs import BY_NAME, VERBS
from kiwi_mcp.surfaces.mcp import results
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall
from kiwi_mcp.surfaces.mcp.protocol import NOT_FOUND_IS_INVALID_SINCE, Context, KernelApi
from kiwi_mcp.surfaces.mcp.running_call import Result, askable
from kiwi_mcp.surfaces.mcp.tool_list import HELP, KNOWLEDGE, SKILL, ToolListWatcher, tail

RESOURCE_NOT_FOUND = -32002
"""The code of an unknown resource in the revisions that have one of its own."""
_LONGEST_NAME = 100
_LONGEST_ADDRESS = 500
_MOST_VALUES = 100
"""How many values the protocol allows in one answer to a completion."""
_OUR_END = {types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT}
"""Codes that no server sends: they mean that the connection is closed."""
_CAPABILITIES: Mapping[str, str] = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
"""The capability that a client needs to be asked, by the method of the question."""


def definitions(servers: Sequence[str] = (), namespaces: Sequence[str] = ()) -> list[types.Tool]:
    """Return the advertised tools, where some MCP servers are installed, and a registry has some namespaces."""
    return [
        types.Tool(
            name=verb.name,
            title=f"Kiwi {verb.name}",
            description=description_of(verb, servers, namespaces),
            input_schema=dict(verb.input_schema()),
            annotations=types.ToolAnnotations(
                read_only_hint=verb.is_read_only or None,
                destructive_hint=None if verb.is_read_only else verb.runs_items,
                open_world_hint=verb.runs_items,
            ),
        )
        for verb in VERBS
        if verb.is_meta_tool
    ]


def tools_of(offers: Offers, *, revision: str) -> list[types.Tool]:
    """Return the meta-tools that are offered, then the owner's tools, as a client of a revision reads them."""
    meta = {tool.name: tool for tool in definitions(offers.servers, offers.namespaces)}
    tools = [meta[name] for name in offers.meta_tools if name in meta]
    for offer in offers.tools:
        hints = types.ToolAnnotations(
            read_only_hint=offer.hints.is_read_only,
            destructive_hint=offer.hints.is_destructive,
            idempotent_hint=offer.hints.is_idempotent,
            open_world_hint=offer.hints.is_open_world,
        )
        tool = types.Tool(
            name=offer.name,
            title=offer.title or None,
            description=offer.description or offer.title or offer.name,
            input_schema={**offer.parameters, "type": "object"},
            output_schema=dict(offer.outputs) if results.declares_result(offer, revision) else None,
            annotations=hints if offer.hints != Hints() else None,
        )
        # One tool with a schema that the protocol does not know would cost the client its whole list.
        listed = types.ListToolsResult(tools=[tool]).model_dump(by_alias=True, mode="json", exclude_none=True)
        try:
            serialize_server_result("tools/list", revision, listed)
        except (ValidationError, ValueError):
            continue
        tools.append(tool)
    return tools


def prompts_of(offers: Offers) -> list[types.Prompt]:
    """Return the prompts that are offered."""
    prompts = []
    for offer in offers.prompts:
        required = as_list(offer.parameters.get("required"))
        arguments = [
            types.PromptArgument(
                name=name, description=as_text(as_object(schema).get("description")) or None, required=name in required
            )
            for name, schema in as_object(offer.parameters.get("properties")).items()
        ]
        title, description = offer.title or None, offer.description or None
        prompts.append(types.Prompt(name=offer.name, title=title, description=description, arguments=arguments or None))
    return prompts


def resources_of(offers: Offers) -> list[types.Resource]:
    """Return the resources that are offered."""
    return [types.Resource.model_validate({"uri": offer.name, **_described(offer)}) for offer in offers.resources]


def templates_of(offers: Offers) -> list[types.ResourceTemplate]:
    """Return the templates of addresses that are offered."""
    return [
        types.ResourceTemplate.model_validate({"uriTemplate": offer.name, **_described(offer)})
        for offer in offers.templates
    ]


def unknown_tool(name: str) -> MCPError:
    """Return the refusal of a call to a tool that no client sees."""
    name = name[:_LONGEST_NAME]
    message = f"Unknown tool: {name!r}. Find it with `search`, then run it with `execute`."
    return MCPError(types.INVALID_PARAMS, message, {"code": "tool_not_found", "tool_id": name})


class Handlers:
    """What each request is answered with, from what a kernel offers; calls of its items go through `calls`."""

    def __init__(self, kernel: KernelApi, changes: ToolListWatcher, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = changes.menu
        self._changes = changes
        self._calls = calls

    async def list_tools(self, context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """Return the meta-tools and the owner's always-send tools."""
        return types.ListToolsResult(tools=tools_of(await self._menu.now(), revision=context.protocol_version))

    async def list_prompts(self, *_: object) -> types.ListPromptsResult:
        """Return the prompts that clients see."""
        return types.ListPromptsResult(prompts=prompts_of(await self._menu.now()))

    async def list_resources(self, *_: object) -> types.ListResourcesResult:
        """Return the resources that clients see."""
        return types.ListResourcesResult(resources=resources_of(await self._menu.now()))

    async def list_templates(self, *_: object) -> types.ListResourceTemplatesResult:
        """Return the templates of addresses that clients see."""
        return types.ListResourceTemplatesResult(resource_templates=templates_of(await self._menu.now()))

    async def call_tool(self, context: Context, params: types.CallToolRequestParams) -> Result:
        """Answer a call of a meta-tool, or of one of the owner's tools."""
        # The names of the meta-tools are never those of other tools, so their calls wait for nothing.
        verb = BY_NAME.get(params.name)
        offer = None if verb is not None and verb.is_meta_tool else await self._menu.tool(params.name)
        if offer is not None:
            task = offer.task
        elif verb is not None:
            task = "auto" if verb.runs_items else "never"
        else:
            raise unknown_tool(params.name)
        arguments, revision = params.arguments or {}, context.protocol_version

        async def work(caller: Caller) -> types.CallToolResult:
            if offer is None:
                answer = await self._kernel.call(params.name, arguments, caller)
            else:
                answer = await self._execute(offer, arguments, caller)
            self._changes.expect()
            if offer is None:
                return results.with_label(results.as_result(answer, revision=revision), answer)
            if refusal := _passed_refusal(answer, context):
                raise refusal
            return results.with_label(await results.tool_result(self._kernel, answer, offer, revision=revision), answer)

        asked = ClientCall("tools/call", params.name, arguments, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work, task=task)

    def schema_of(self, name: str) -> JsonObject | None:
        """Return the schema of one of the owner's tools as last read; headers of requests are compared with it."""
        offer = self._menu.known_tool(name)
        return offer.parameters if offer is not None else None

    async def read_resource(self, context: Context, params: types.ReadResourceRequestParams) -> Result:
        """Return what a resource holds."""

        async def work(caller: Caller) -> types.ReadResourceResult:
            if topic := tail(params.uri, HELP):
                page = await self._kernel.call("help", {"topic": topic}, caller)
                if page.is_error:
                    raise _not_found(params.uri, context)
                return results.with_label(_text_resource(params.uri, as_text(page.content.get("help"))), page)
            offer, filled = await self._resource(params.uri)
            if offer is None:
                raise _not_found(params.uri, context)
            answer = await self._execute(offer, filled, caller)
            if answer.is_error and answer.content.get("mcp_code") == RESOURCE_NOT_FOUND:
                raise _not_found(params.uri, context)
            if answer.is_error:
                raise _refused(answer, context)
            if answer.passed is None:
                result = (await whole(self._kernel, answer)).get("result")
                found = as_object(result)
                text = as_text(found.get("content")) or as_text(found.get("text")) or text_of(result)
                return results.with_label(_text_resource(params.uri, text), answer)
            if (passed := results.passed_resource(answer.passed)) is None:
                raise _unreadable(params.uri)
            return results.with_label(passed, answer)

        asked = ClientCall("resources/read", params.uri, {}, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def get_prompt(self, context: Context, params: types.GetPromptRequestParams) -> Result:
        """Return a prompt with its arguments filled in."""
        offer = await self._prompt(params.name)
        if offer is None:
            name = params.name[:_LONGEST_NAME]
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {name!r}", {"code": "tool_not_found", "name": name})
        properties = as_object(offer.parameters.get("properties"))
        given = {
            name: _typed(value, as_object(properties.get(name)).get("type"))
            for name, value in (params.arguments or {}).items()
        }

        async def work(caller: Caller) -> types.GetPromptResult:
            answer = await self._execute(offer, given, caller)
            if answer.is_error:
                raise _refused(answer, context)
            if answer.passed is None:
                program = as_object((await whole(self._kernel, answer)).get("result"))
                content = types.TextContent(text=as_text(program.get("text")))
                messages = [types.PromptMessage(role="user", content=content)]
                prompt = types.GetPromptResult(description=offer.description or None, messages=messages)
                return results.with_label(prompt, answer)
            if (passed := results.passed_prompt(answer.passed, revision=context.protocol_version)) is None:
                raise _unreadable(offer.name)
            # The user chose a prompt of a server that the owner accepted.
            return results.with_label(passed, replace(answer, is_instructions=True))

        asked = ClientCall("prompts/get", params.name, given, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def complete(self, _context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        """Return what may follow on what was typed: our own values that begin like it, else what a server proposes."""
        offer, known = await self._completed(params)
        argument = params.argument
        found = [value for value in known if value.casefold().startswith(argument.value.casefold())]
        if not known and offer is not None and offer.identity:
            given = (params.context.arguments if params.context else None) or {}
            found = [*await self._kernel.complete(offer.identity, argument.name, argument.value, given)]
        completion = types.Completion(values=found[:_MOST_VALUES], total=len(found), has_more=len(found) > _MOST_VALUES)
        return types.CompleteResult(completion=completion)

    async def _execute(self, offer: Offer, parameters: JsonObject, caller: Caller) -> Answer:
        payload: JsonObject = {"item_type": offer.item_type, "item_id": offer.identity, "parameters": parameters}
        return await self._kernel.call("execute", payload, caller)

    async def _resource(self, uri: str) -> tuple[Offer | None, JsonObject]:
        """Return the item that an address leads to, None where it leads nowhere, and what the address is made with."""
        offers = await self._menu.now()
        for offer in offers.resources:
            if offer.name == uri:
                return offer if offer.identity else None, {}
        if name := tail(uri, KNOWLEDGE):  # an address must never run anything: only what can be read is found
            return self._kernel.offered(name, "resource"), {}
        if path := tail(uri, SKILL):
            name, _, file = path.partition("/")
            return self._kernel.offered(name, "prompt", "skill"), {"file": file} if file else {}
        for offer in offers.templates:
            if offer.identity and (filled := match(offer.name, uri)) is not None:
                return offer, filled
        return None, {}

    async def _prompt(self, name: str) -> Offer | None:
        """Return the prompt of a name: one that is listed, or else any directive."""
        listed = (offer for offer in (await self._menu.now()).prompts if offer.name == name)
        return next(listed, None) or self._kernel.offered(name, "prompt")

    async def _completed(self, params: types.CompleteRequestParams) -> tuple[Offer | None, Sequence[str]]:
        """Return what a completion is for, and the values for it that are known here."""
        if isinstance(params.ref, types.PromptReference):
            if (prompt := await self._prompt(params.ref.name)) is None:
                return None, ()
            schema = as_object(as_object(prompt.parameters.get("properties")).get(params.argument.name))
            if schema.get("type") == "boolean":
                return prompt, ("true", "false")
            values = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
            return prompt, [text_of(value) for value in values]
        uri = params.ref.uri
        if uri.startswith(HELP):
            response = await self._kernel.call("help", {}, NO_CALLER)
            return None, [text_of(topic) for topic in as_list(response.content.get("topics"))]
        offers = await self._menu.now()
        if uri.startswith(KNOWLEDGE):
            query: JsonObject = {"query": params.argument.value, "item_type": "knowledge", "limit": _MOST_VALUES}
            found = as_list((await self._kernel.call("search", query, NO_CALLER)).content.get("results"))
            listed = {tail(offer.name, KNOWLEDGE) for offer in offers.resources} - {""}
            return None, sorted(listed | {as_text(as_object(one).get("name")) for one in found})
        return next((one for one in offers.templates if one.name == uri), None), ()


def _described(offer: Offer) -> Mapping[str, str | None]:
    description, mime_type = offer.description or None, offer.mime_type or None
    return {"name": offer.title or offer.name, "description": description, "mimeType": mime_type}


def _text_resource(uri: str, text: str) -> types.ReadResourceResult:
    contents = types.TextResourceContents(uri=uri, mime_type="text/markdown", text=text)
    return types.ReadResourceResult(contents=[contents])


def _typed(value: str, kind: Json) -> Json:
    """Return an argument of a prompt, which is always text, as the type that its schema asks for."""
    if kind in {None, "string"}:
        return value
    try:
        read: Json = json.loads(value)
    except ValueError:  # the check of the value reports that it is not a number
        return value
    return read


def _passed_refusal(answer: Answer, context: Context) -> MCPError | None:
    """Return the error that a client gets instead of a result: the server's own, or that it could not be asked."""
    content = answer.content
    message, code = as_text(content.get("message")), content.get("mcp_code")
    if content.get("status") == "error" and isinstance(code, int) and code not in _OUR_END:
        return MCPError(code, message, content.get("mcp_data"))
    if context.protocol_version in MODERN_PROTOCOL_VERSIONS and content.get("input_required") is True:
        wanted = {_CAPABILITIES.get(text_of(method), "") for method in as_list(content.get("asked"))} - {""}
        if missing := sorted(wanted - askable(context.session.client_capabilities).keys()):
            data: JsonObject = {"requiredCapabilities": {name: {} for name in missing}}
            return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, message, data)
    return None


def _refused(answer: Answer, context: Context) -> MCPError:
    """Return the error of an answer that the protocol has no result for, with its whole content."""
    content = answer.content
    is_callers = answer.exit_code in {NotFound.exit_code, Invalid.exit_code}
    code = types.INVALID_PARAMS if is_callers else types.INTERNAL_ERROR
    message = f"{as_text(content.get('error'))}: {as_text(content.get('message'))}"
    return _passed_refusal(answer, context) or MCPError(code, message, dict(content))


def _not_found(uri: str, context: Context) -> MCPError:
    is_invalid = context.protocol_version >= NOT_FOUND_IS_INVALID_SINCE
    code = types.INVALID_PARAMS if is_invalid else RESOURCE_NOT_FOUND
    return MCPError(code, "Resource not found", {"uri": uri[:_LONGEST_ADDRESS]})


def _unreadable(name: str) -> MCPError:
    message = f"The server's answer for {name[:_LONGEST_ADDRESS]!r} is not one that MCP has"
    return MCPError(types.INTERNAL_ERROR, message)
