"""Resources: pages of help, knowledge, and the resources of MCP servers as they are."""

from __future__ import annotations

import mcp_types as types

from kiwi_mcp.domain.caller import Caller
from kiwi_mcp.domain.json import JsonObject, as_object, as_text, text_of
from kiwi_mcp.surfaces.mcp.addresses import HELP, KNOWLEDGE, match, tail
from kiwi_mcp.surfaces.mcp.calls import Asked, Calls, Reply
from kiwi_mcp.surfaces.mcp.listing import resources_of, templates_of
from kiwi_mcp.surfaces.mcp.marks import marked
from kiwi_mcp.surfaces.mcp.menu import Menu
from kiwi_mcp.surfaces.mcp.passed import passed_resource
from kiwi_mcp.surfaces.mcp.port import Context, KernelApi
from kiwi_mcp.surfaces.mcp.refusals import RESOURCE_NOT_FOUND, not_found, refused, unreadable
from kiwi_mcp.surfaces.mcp.whole import whole

_MARKDOWN = "text/markdown"


class Resources:
    """What the requests about resources are answered with."""

    def __init__(self, kernel: KernelApi, menu: Menu, calls: Calls) -> None:
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

        asked = Asked("resources/read", params.uri, {}, params.input_responses, params.request_state)
        return await self._calls.answer(context, asked, work)

    async def _read(self, uri: str, caller: Caller, context: Context) -> types.ReadResourceResult | None:
        if topic := tail(uri, HELP):
            page = await self._kernel.call("help", {"topic": topic}, caller)
            told = _text(uri, as_text(page.content.get("help")))
            return None if page.is_error else marked(told, page, "instructions")
        identity, filled = await self._found(uri)
        return await self._execute(uri, identity, filled, caller, context) if identity else None

    async def _found(self, uri: str) -> tuple[str, JsonObject]:
        """Return the item that an address leads to, empty where it leads nowhere, and what the address is made with."""
        offers = await self._menu.now()
        for offer in offers.resources:
            if offer.name == uri:
                return offer.identity, {}
        if name := tail(uri, KNOWLEDGE):  # an address must never run anything: only what can be read is found
            known = self._kernel.offered(name, "resource")
            return known.identity if known else "", {}
        for offer in offers.templates:
            if offer.identity and (filled := match(offer.name, uri)) is not None:
                return offer.identity, filled
        return "", {}

    async def _execute(
        self, uri: str, identity: str, filled: JsonObject, caller: Caller, context: Context
    ) -> types.ReadResourceResult:
        payload: JsonObject = {"item_type": "knowledge", "item_id": identity, "parameters": filled}
        answer = await self._kernel.call("execute", payload, caller)
        if answer.is_error and answer.content.get("mcp_code") == RESOURCE_NOT_FOUND:
            raise not_found(uri, revision=context.protocol_version)
        if answer.is_error:
            raise refused(answer, context)
        if answer.passed is not None:
            held = passed_resource(answer.passed)
            if held is None:
                raise unreadable(uri)
            return marked(held, answer)
        result = (await whole(self._kernel, answer)).get("result")
        return marked(_text(uri, as_text(as_object(result).get("content")) or text_of(result)), answer)


def _text(uri: str, text: str) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=_MARKDOWN, text=text)])
