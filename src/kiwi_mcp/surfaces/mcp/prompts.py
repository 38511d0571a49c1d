"""Prompts, directives as text, argument completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import mcp_types as types
from mcp.shared.exceptions import MCPError
from msgspec.structs import replace

from kiwi_mcp.domain.calls import NO_CALLER, Caller
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Offer
from kiwi_mcp.kernel.kernel import whole
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall, Reply
from kiwi_mcp.surfaces.mcp.errors import refused, unreadable
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi
from kiwi_mcp.surfaces.mcp.results import passed_prompt, with_label
from kiwi_mcp.surfaces.mcp.tool_list import HELP, KNOWLEDGE, ClientToolList, tail
from kiwi_mcp.surfaces.mcp.tools import prompts_of

_NAME = 100


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
