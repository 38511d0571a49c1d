"""What requests about tools, resources, prompts and completion are answered with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import mcp_types as types
from mcp.shared.exceptions import MCPError
from mcp_types import Tool, ToolAnnotations
from mcp_types.methods import serialize_server_result
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from msgspec.structs import replace
from pydantic import ValidationError

from kiwi_mcp.domain.calls import NO_CALLER, Caller
from kiwi_mcp.domain.errors import Invalid, NotFound
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Hints, Offer, Offers, TaskUse, match
from kiwi_mcp.kernel import Answer
from kiwi_mcp.kernel.kernel import whole
from kiwi_mcp.kernel.tool_names import description_of
from kiwi_mcp.kernel.verbs import BY_NAME, VERBS, VerbFamily
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall, Reply
from kiwi_mcp.surfaces.mcp.client_requests import askable
from kiwi_mcp.surfaces.mcp.protocol import NOT_FOUND_IS_INVALID_SINCE, Context, KernelApi
from kiwi_mcp.surfaces.mcp.results import (
    as_result,
    declares_result,
    passed_prompt,
    passed_resource,
    tool_result,
    with_label,
)
from kiwi_mcp.surfaces.mcp.tool_list import HELP, KNOWLEDGE, SKILL, ClientToolList, ToolListWatcher, tail

RESOURCE_NOT_FOUND = -32002
"""The code of an unknown resource in the revisions that have one of its own."""

_CALLERS_FAULT = {NotFound.exit_code, Invalid.exit_code}
_OUR_END = {types.CONNECTION_CLOSED, types.REQUEST_TIMEOUT}
"""Codes that no server sends: they mean that the connection is closed."""
_ASKED_OF: Mapping[str, str] = {
    "elicitation/create": "elicitation",
    "sampling/createMessage": "sampling",
    "roots/list": "roots",
}
_ERROR_NAME = 500


def passed_refusal(answer: Answer, context: Context) -> MCPError | None:
    """Return the error that a client gets instead of a result: the server's own, or that it could not be asked."""
    return _of_server(answer.content) or _for_want_of_capability(answer.content, context)


def refused(answer: Answer, context: Context) -> MCPError:
    """Return the error of an answer that the protocol has no result for, with its whole content."""
    content = answer.content
    code = types.INVALID_PARAMS if answer.exit_code in _CALLERS_FAULT else types.INTERNAL_ERROR
    said = f"{as_text(content.get('error'))}: {as_text(content.get('message'))}"
    return passed_refusal(answer, context) or MCPError(code, said, dict(content))


def not_found(uri: str, *, revision: str) -> MCPError:
    """Return the error for an address that leads to nothing."""
    code = types.INVALID_PARAMS if revision >= NOT_FOUND_IS_INVALID_SINCE else RESOURCE_NOT_FOUND
    return MCPError(code, "Resource not found", {"uri": uri[:_ERROR_NAME]})


def unreadable(name: str) -> MCPError:
    """Return the error for an invalid answer of an MCP server."""
    return MCPError(types.INTERNAL_ERROR, f"The server's answer for {name[:_ERROR_NAME]!r} is not one that MCP has")


def _of_server(content: JsonObject) -> MCPError | None:
    code = content.get("mcp_code")
    if content.get("status") != "error" or not isinstance(code, int) or code in _OUR_END:
        return None
    return MCPError(code, as_text(content.get("message")), content.get("mcp_data"))


def _for_want_of_capability(content: JsonObject, context: Context) -> MCPError | None:
    if context.protocol_version not in MODERN_PROTOCOL_VERSIONS or content.get("input_required") is not True:
        return None
    wanted = {_ASKED_OF.get(text_of(method), "") for method in as_list(content.get("asked"))} - {""}
    missing = sorted(wanted - askable(context.session.client_capabilities).keys())
    if not missing:
        return None
    data: JsonObject = {"requiredCapabilities": {name: {} for name in missing}}
    return MCPError(types.MISSING_REQUIRED_CLIENT_CAPABILITY, as_text(content.get("message")), data)


def definitions(servers: Sequence[str] = (), namespaces: Sequence[str] = ()) -> list[Tool]:
    """Return the advertised tools, where some MCP servers are installed, and a registry has some namespaces."""
    return [_definition(verb, description_of(verb, servers, namespaces)) for verb in VERBS if verb.is_meta_tool]


def _definition(verb: VerbFamily, description: str) -> Tool:
    return Tool(
        name=verb.name,
        title=f"Kiwi {verb.name}",
        description=description,
        input_schema=dict(verb.input_schema()),
        annotations=ToolAnnotations(
            read_only_hint=verb.is_read_only or None,
            destructive_hint=None if verb.is_read_only else verb.runs_items,
            open_world_hint=verb.runs_items,
        ),
    )


def tools_of(offers: Offers, *, revision: str) -> list[types.Tool]:
    """Return the meta-tools that are offered, then the owner's tools, as a client of a revision reads them."""
    meta = {tool.name: tool for tool in definitions(offers.servers, offers.namespaces)}
    chosen = [meta[name] for name in offers.meta_tools if name in meta]
    # One tool with a schema that the protocol does not know would cost the client its whole list.
    offered = (tool_of(offer, revision=revision) for offer in offers.tools)
    return [*chosen, *(tool for tool in offered if _is_sound(tool, revision))]


def tool_of(offer: Offer, *, revision: str) -> types.Tool:
    """Return one of the owner's tools."""
    return types.Tool(
        name=offer.name,
        title=offer.title or None,
        description=offer.description or offer.title or offer.name,
        input_schema={**offer.parameters, "type": "object"},
        output_schema=dict(offer.outputs) if declares_result(offer, revision) else None,
        annotations=_annotations(offer.hints),
    )


def prompts_of(offers: Offers) -> list[types.Prompt]:
    """Return the prompts that are offered."""
    return [
        types.Prompt(
            name=offer.name,
            title=offer.title or None,
            description=offer.description or None,
            arguments=_arguments(offer) or None,
        )
        for offer in offers.prompts
    ]


def _arguments(offer: Offer) -> list[types.PromptArgument]:
    required = as_list(offer.parameters.get("required"))
    return [
        types.PromptArgument(
            name=name, description=as_text(as_object(schema).get("description")) or None, required=name in required
        )
        for name, schema in as_object(offer.parameters.get("properties")).items()
    ]


def _annotations(hints: Hints) -> types.ToolAnnotations | None:
    if hints == Hints():
        return None
    return types.ToolAnnotations(
        read_only_hint=hints.is_read_only,
        destructive_hint=hints.is_destructive,
        idempotent_hint=hints.is_idempotent,
        open_world_hint=hints.is_open_world,
    )


def _is_sound(tool: types.Tool, revision: str) -> bool:
    listed = types.ListToolsResult(tools=[tool]).model_dump(by_alias=True, mode="json", exclude_none=True)
    try:
        serialize_server_result("tools/list", revision, listed)
    except (ValidationError, ValueError):
        return False
    return True


_NAME = 100


class Tools:
    """What `tools/list` and `tools/call` are answered with."""

    def __init__(self, kernel: KernelApi, changes: ToolListWatcher, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = changes.menu
        self._changes = changes
        self._calls = calls

    async def list(self, context: Context, _params: types.PaginatedRequestParams | None) -> types.ListToolsResult:
        """Return the meta-tools and the owner's always-send tools."""
        offers = await self._menu.now()
        tools = tools_of(offers, revision=context.protocol_version)
        return types.ListToolsResult(tools=tools)

    async def call(self, context: Context, params: types.CallToolRequestParams) -> Reply:
        """Answer a call."""
        # The names of the meta-tools are never those of other tools, so their calls wait for nothing.
        verb = BY_NAME.get(params.name)
        offer = None if verb is not None and verb.is_meta_tool else await self._menu.tool(params.name)
        if offer is not None:
            return await self._call_offer(context, params, offer)
        if verb is None:
            raise unknown_tool(params.name)
        return await self._call_verb(context, params, "auto" if verb.runs_items else "never")

    def schema_of(self, name: str) -> JsonObject | None:
        """Return what one of the owner's tools takes, as it was last read; headers of requests are held against it."""
        offer = self._menu.known_tool(name)
        return offer.parameters if offer is not None else None

    async def _call_verb(self, context: Context, params: types.CallToolRequestParams, task: TaskUse) -> Reply:
        async def work(caller: Caller) -> types.CallToolResult:
            answer = await self._kernel.call(params.name, params.arguments or {}, caller)
            self._changes.expect()
            result = as_result(answer, revision=context.protocol_version)
            return with_label(result, answer)

        return await self._calls.answer(context, _asked(params), work, task=task)

    async def _call_offer(self, context: Context, params: types.CallToolRequestParams, offer: Offer) -> Reply:
        async def work(caller: Caller) -> types.CallToolResult:
            parameters = params.arguments or {}
            payload: JsonObject = {"item_type": offer.item_type, "item_id": offer.identity, "parameters": parameters}
            answer = await self._kernel.call("execute", payload, caller)
            self._changes.expect()
            if refusal := passed_refusal(answer, context):
                raise refusal
            result = await tool_result(self._kernel, answer, offer, revision=context.protocol_version)
            return with_label(result, answer)

        return await self._calls.answer(context, _asked(params), work, task=offer.task)


def _asked(params: types.CallToolRequestParams) -> ClientCall:
    return ClientCall("tools/call", params.name, params.arguments or {}, params.input_responses, params.request_state)


def unknown_tool(name: str) -> MCPError:
    """Return the refusal of a call to a tool that no client sees."""
    return MCPError(
        types.INVALID_PARAMS,
        f"Unknown tool: {name[:_NAME]!r}. Find it with `search`, then run it with `execute`.",
        {"code": "tool_not_found", "tool_id": name[:_NAME]},
    )


def resources_of(offers: Offers) -> list[types.Resource]:
    """Return the resources that are offered."""
    return [
        types.Resource(
            uri=offer.name,
            name=offer.title or offer.name,
            description=offer.description or None,
            mime_type=offer.mime_type or None,
        )
        for offer in offers.resources
    ]


def templates_of(offers: Offers) -> list[types.ResourceTemplate]:
    """Return the templates of addresses that are offered."""
    return [
        types.ResourceTemplate(
            uri_template=offer.name,
            name=offer.title or offer.name,
            description=offer.description or None,
            mime_type=offer.mime_type or None,
        )
        for offer in offers.templates
    ]


_MARKDOWN = "text/markdown"


class Resources:
    """What the requests about resources are answered with."""

    def __init__(self, kernel: KernelApi, menu: ClientToolList, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = menu
        self._calls = calls

    async def list(self, _context: Context, _params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        """Return the resources that clients see."""
        return types.ListResourcesResult(resources=resources_of(await self._menu.now()))

    async def list_templates(
        self, _context: Context, _params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        """Return the templates of addresses that clients see."""
        return types.ListResourceTemplatesResult(resource_templates=templates_of(await self._menu.now()))

    async def read(self, context: Context, params: types.ReadResourceRequestParams) -> Reply:
        """Return what a resource holds."""

        async def work(caller: Caller) -> types.ReadResourceResult:
            found = await self._read(params.uri, caller, context)
            if found is None:
                raise not_found(params.uri, revision=context.protocol_version)
            return found

        asked = ClientCall("resources/read", params.uri, {}, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def _read(self, uri: str, caller: Caller, context: Context) -> types.ReadResourceResult | None:
        if topic := tail(uri, HELP):
            page = await self._kernel.call("help", {"topic": topic}, caller)
            response = _text(uri, as_text(page.content.get("help")))
            return None if page.is_error else with_label(response, page)
        offer, filled = await self._found(uri)
        return await self._execute(uri, offer, filled, caller, context) if offer else None

    async def _found(self, uri: str) -> tuple[Offer | None, JsonObject]:
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

    async def _execute(
        self, uri: str, offer: Offer, filled: JsonObject, caller: Caller, context: Context
    ) -> types.ReadResourceResult:
        payload: JsonObject = {"item_type": offer.item_type, "item_id": offer.identity, "parameters": filled}
        answer = await self._kernel.call("execute", payload, caller)
        if answer.is_error and answer.content.get("mcp_code") == RESOURCE_NOT_FOUND:
            raise not_found(uri, revision=context.protocol_version)
        if answer.is_error:
            raise refused(answer, context)
        if answer.passed is not None:
            held = passed_resource(answer.passed)
            if held is None:
                raise unreadable(uri)
            return with_label(held, answer)
        result = (await whole(self._kernel, answer)).get("result")
        found = as_object(result)
        text = as_text(found.get("content")) or as_text(found.get("text")) or text_of(result)
        return with_label(_text(uri, text), answer)


def _text(uri: str, text: str) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=_MARKDOWN, text=text)])


class Prompts:
    """What `prompts/list` and `prompts/get` are answered with."""

    def __init__(self, kernel: KernelApi, menu: ClientToolList, calls: Calls) -> None:
        self._kernel = kernel
        self._menu = menu
        self._calls = calls

    async def list(self, _context: Context, _params: types.PaginatedRequestParams | None) -> types.ListPromptsResult:
        """Return the prompts that clients see."""
        return types.ListPromptsResult(prompts=prompts_of(await self._menu.now()))

    async def get(self, context: Context, params: types.GetPromptRequestParams) -> Reply:
        """Return a prompt with its arguments filled in."""
        offer = await self.find(params.name)
        if offer is None:
            name = params.name[:_NAME]
            raise MCPError(types.INVALID_PARAMS, f"Unknown prompt: {name!r}", {"code": "tool_not_found", "name": name})
        given = typed(params.arguments or {}, offer.parameters)

        async def work(caller: Caller) -> types.GetPromptResult:
            return await self._get(offer, given, caller, context)

        asked = ClientCall("prompts/get", params.name, given, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def find(self, name: str) -> Offer | None:
        """Return the prompt of a name: one that is listed, or else any directive."""
        for offer in (await self._menu.now()).prompts:
            if offer.name == name:
                return offer
        return self._kernel.offered(name, "prompt")

    async def _get(self, offer: Offer, given: JsonObject, caller: Caller, context: Context) -> types.GetPromptResult:
        payload: JsonObject = {"item_type": offer.item_type, "item_id": offer.identity, "parameters": given}
        answer = await self._kernel.call("execute", payload, caller)
        if answer.is_error:
            raise refused(answer, context)
        if answer.passed is not None:
            prompt = passed_prompt(answer.passed, revision=context.protocol_version)
            if prompt is None:
                raise unreadable(offer.name)
            # The user chose a prompt of a server that the owner accepted.
            return with_label(prompt, replace(answer, is_instructions=True))
        program = as_object((await whole(self._kernel, answer)).get("result"))
        prompt = types.GetPromptResult(
            description=offer.description or None,
            messages=[types.PromptMessage(role="user", content=types.TextContent(text=as_text(program.get("text"))))],
        )
        return with_label(prompt, answer)


def typed(arguments: Mapping[str, str], schema: JsonObject) -> JsonObject:
    """Return a prompt's arguments, which are always text, as the types that its schema asks for."""
    properties = as_object(schema.get("properties"))
    return {name: _typed(value, as_object(properties.get(name)).get("type")) for name, value in arguments.items()}


def _typed(value: str, kind: Json) -> Json:
    if kind in {None, "string"}:
        return value
    try:
        read: Json = json.loads(value)
    except ValueError:  # the check of the value reports that it is not a number
        return value
    return read


_MOST = 100
"""How many values the protocol allows in one answer."""


class Completions:
    """What `completion/complete` is answered with; nothing where nothing is known."""

    def __init__(self, kernel: KernelApi, menu: ClientToolList, prompts: Prompts) -> None:
        self._kernel = kernel
        self._menu = menu
        self._prompts = prompts

    async def complete(self, _context: Context, params: types.CompleteRequestParams) -> types.CompleteResult:
        """Return what may follow on what was typed: our own values that begin like it, else what a server proposes."""
        offer, known = await self._about(params)
        typed = params.argument.value.casefold()
        found = [value for value in known if value.casefold().startswith(typed)]
        if not known and offer is not None and offer.identity:
            given = (params.context.arguments if params.context else None) or {}
            argument = params.argument
            found = [*await self._kernel.complete(offer.identity, argument.name, argument.value, given)]
        completion = types.Completion(values=found[:_MOST], total=len(found), has_more=len(found) > _MOST)
        return types.CompleteResult(completion=completion)

    async def _about(self, params: types.CompleteRequestParams) -> tuple[Offer | None, Sequence[str]]:
        """Return what a completion is for, and the values for it that are known here."""
        if isinstance(params.ref, types.PromptReference):
            prompt = await self._prompts.find(params.ref.name)
            return prompt, values_of(_property(prompt.parameters, params.argument.name)) if prompt else ()
        uri = params.ref.uri
        if uri.startswith(HELP):
            response = await self._kernel.call("help", {}, NO_CALLER)
            return None, [text_of(topic) for topic in as_list(response.content.get("topics"))]
        if uri.startswith(KNOWLEDGE):
            return None, sorted({*await self._listed(), *await self._found(params.argument.value)})
        return next((one for one in (await self._menu.now()).templates if one.name == uri), None), ()

    async def _listed(self) -> Sequence[str]:
        named = (tail(offer.name, KNOWLEDGE) for offer in (await self._menu.now()).resources)
        return [name for name in named if name]

    async def _found(self, typed: str) -> Sequence[str]:
        query: JsonObject = {"query": typed, "item_type": "knowledge", "limit": _MOST}
        found = await self._kernel.call("search", query, NO_CALLER)
        return [as_text(as_object(one).get("name")) for one in as_list(found.content.get("results"))]


def values_of(schema: JsonObject) -> Sequence[str]:
    """Return the values that a schema allows by name."""
    if schema.get("type") == "boolean":
        return ("true", "false")
    named = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    return [text_of(value) for value in named]


def _property(schema: JsonObject, name: str) -> JsonObject:
    return as_object(as_object(schema.get("properties")).get(name))
