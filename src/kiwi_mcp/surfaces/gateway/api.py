"""The API of the gateway: a route for each verb, and the OpenAPI document that describes them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import cache

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse
from starlette.routing import Route

from kiwi_mcp import __version__
from kiwi_mcp.domain.calls import Caller
from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import JsonObject, as_object, compact
from kiwi_mcp.kernel.verb import Response, Verb, payload_of
from kiwi_mcp.kernel.verbs import every_verb
from kiwi_mcp.manifest.document import read_json
from kiwi_mcp.surfaces.gateway.auth import VisitedKernel
from kiwi_mcp.surfaces.gateway.mcp import MAX_BODY

API = "/v1/"
OPENAPI = "/openapi.json"


def is_api(path: str) -> bool:
    """Whether an address belongs to the API, and so needs a token that may use tools."""
    return path.startswith(API) or path == OPENAPI


def routes(kernel: VisitedKernel, wrap: Callable[[Endpoint], Endpoint]) -> Sequence[Route]:
    """Return a route for each verb that is not local, and one for the OpenAPI document."""
    described = Route(OPENAPI, _describe, methods=["GET"])
    return [described, *(Route(path_of(one), wrap(_endpoint(kernel, one)), methods=["POST"]) for one in _served())]


Endpoint = Callable[[HttpRequest], Awaitable[HttpResponse]]


def path_of(verb: Verb) -> str:
    """Return the address of a verb: `/v1/{group}/{name}`, or `/v1/{name}` without a group."""
    return API + verb.path.replace(" ", "/")


def _served() -> Iterator[Verb]:
    return (verb for verb in every_verb() if not verb.is_local)


def _endpoint(kernel: VisitedKernel, verb: Verb) -> Endpoint:
    async def answer(request: HttpRequest) -> HttpResponse:
        arguments = await _arguments(request)
        # A program sends this with its own token. A model's calls come over MCP and are never direct.
        result = await kernel.call(verb.wire[0], payload_of(verb, arguments), Caller(is_direct=True))
        wait = result.content.get("retry_after") if result.is_error else None
        headers = {"Retry-After": str(wait)} if wait else None
        return HttpResponse(compact(result.content), result.http_status, headers, "application/json")

    return answer


async def _arguments(request: HttpRequest) -> JsonObject:
    """Return the body of a request, which is a JSON object. An empty body has no arguments."""
    body = await request.body()
    try:
        value = read_json(body.decode() or "{}", what="The body", max_bytes=MAX_BODY).value
    except UnicodeDecodeError as error:
        raise InvalidRequest("The body is not UTF-8.", suggestion="Send a JSON object in UTF-8.") from error
    if not isinstance(value, dict):
        raise InvalidRequest("The body is not a JSON object.", suggestion="Send the arguments as a JSON object.")
    if "action" in value:
        raise InvalidRequest("Unknown argument `action`.", suggestion="The address names the action.")
    return value


async def _describe(_: HttpRequest) -> HttpResponse:
    return JSONResponse(openapi())


@cache
def openapi() -> JsonObject:
    """Return the OpenAPI document of all routes."""
    verbs = [*_served()]
    types = dict.fromkeys(part for verb in verbs for part in (verb.request, verb.response) if _has_schema(part))
    schemas, components = msgspec.json.schema_components([*types], ref_template="#/components/schemas/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {"title": "Kiwi", "version": __version__},
        "paths": {path_of(verb): {"post": _operation(verb, by_type)} for verb in verbs},
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _has_schema(part: type) -> bool:
    return part is not Response and hasattr(part, "__struct_fields__")


def _operation(verb: Verb, schemas: dict[type, dict[str, object]]) -> JsonObject:
    def content(part: type) -> JsonObject:
        return {"application/json": {"schema": as_object(schemas.get(part, {"type": "object"}))}}  # type: ignore[arg-type]

    return {
        "operationId": verb.path.replace(" ", "_"),
        "summary": verb.help,
        "requestBody": {"content": content(verb.request)},
        "responses": {
            "200": {"description": "The response.", "content": content(verb.response)},
            "default": {"description": "A refusal: `error`, `code`, `message`, `suggestion`."},
        },
    }
