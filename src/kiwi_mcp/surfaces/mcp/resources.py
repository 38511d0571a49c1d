"""Resources and templates."""

from __future__ import annotations

import mcp_types as types

from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.json import JsonObject, as_object, as_text, text_of
from kiwi_mcp.domain.mcp import Offer, Offers
from kiwi_mcp.domain.uri_template import match
from kiwi_mcp.kernel.kernel import whole
from kiwi_mcp.surfaces.mcp.calls import Calls, ClientCall, Reply
from kiwi_mcp.surfaces.mcp.errors import RESOURCE_NOT_FOUND, not_found, refused, unreadable
from kiwi_mcp.surfaces.mcp.protocol import Context, KernelApi
from kiwi_mcp.surfaces.mcp.results import passed_resource, with_label
from kiwi_mcp.surfaces.mcp.tool_list import HELP, KNOWLEDGE, ClientToolList, tail


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
        return with_label(_text(uri, as_text(as_object(result).get("content")) or text_of(result)), answer)


def _text(uri: str, text: str) -> types.ReadResourceResult:
    return types.ReadResourceResult(contents=[types.TextResourceContents(uri=uri, mime_type=_MARKDOWN, text=text)])
