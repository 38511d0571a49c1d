"""From an OpenAPI document to the manifests of api tools."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, compact
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.openapi.bodies import Body, accepted, body_of
from kiwi_mcp.manifest.openapi.document import Api, Inexpressible, Operation, read_api
from kiwi_mcp.manifest.openapi.schemas import Schemas, TooWide
from kiwi_mcp.manifest.openapi.security import Credentials, credentials_of
from kiwi_mcp.manifest.openapi.servers import path_template, server_url
from kiwi_mcp.manifest.openapi.slots import Slot, named, slots_of, template
from kiwi_mcp.manifest.openapi.words import semantic, sentence, short_name, snake, tool_ids
from kiwi_mcp.manifest.schema import schema_faults

MAX_DESCRIPTION = 400
MAX_SCHEMA_BYTES = 48_000
MAX_MANIFEST_BYTES = 128_000

_MAX_PREFIX = 40
_MAX_TAGS = 5
_MAX_PLACE = 300
_DEPTHS = (12, 5, 3, 2, 1, 0, -1)
"""How deep schemas are spelled out: as deep as fits. A body goes one level deeper, so the last makes it bare too."""


@dataclass(frozen=True, slots=True)
class OpenApiImport:
    """The tools a document makes, and the operations it does not make tools of, each with its reason."""

    manifests: tuple[JsonObject, ...]
    skipped: tuple[Issue, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the caller asked for besides the document itself."""

    prefix: str
    base_url: str | None
    only: frozenset[str]
    auth: JsonObject

    def names(self, tool_id: str, operation: Operation) -> bool:
        return not self.only.isdisjoint({tool_id, operation.name, operation.place})


@dataclass(frozen=True, slots=True)
class _Shape:
    """The slots of an operation and the schema they make, at the depth that fits."""

    slots: tuple[Slot, ...]
    body: Body | None
    parameters: JsonObject


def tools_from_openapi(
    text: str,
    *,
    what: str,
    prefix: str = "",
    base_url: str | None = None,
    only: Collection[str] = (),
    auth: JsonObject | None = None,
) -> OpenApiImport:
    """Return an api tool for each operation of an OpenAPI 3 document, in JSON or YAML.

    `base_url` takes the place of the document's servers; a relative server is added to it. `only` chooses operations
    by operationId, by tool id or as `GET /path`, deprecated ones too. `auth` is how to authenticate where the
    document asks for nothing.
    """
    api = read_api(text, what=what)
    name = snake(prefix)[:_MAX_PREFIX].strip("_") or short_name(api.title)
    wish = _Wish(name, base_url, frozenset(only), auth or {})
    operations = tuple(api.operations())
    # Names are given before operations are chosen, so that they never depend on the choice.
    by_id = dict(zip(tool_ids(wish.prefix, (each.name for each in operations)), operations, strict=True))
    _refuse_unknown(wish, by_id, what)
    manifests: list[JsonObject] = []
    skipped: list[Issue] = []
    for tool_id, operation in by_id.items():
        if wish.only and not wish.names(tool_id, operation):
            continue
        try:
            manifests.append(_bounded(_manifest(api, operation, tool_id, wish)))
        except Inexpressible as fault:
            skipped.append(Issue(operation.place[:_MAX_PLACE], fault.reason, fault.fix, "warning"))
    return OpenApiImport(tuple(manifests), tuple(skipped))


def _refuse_unknown(wish: _Wish, by_id: Mapping[str, Operation], what: str) -> None:
    known = {word for tool_id, each in by_id.items() for word in (tool_id, each.name, each.place)}
    if unknown := sorted(wish.only - known):
        raise InvalidRequest(
            f"{what} has no operation {unknown[0]!r}.",
            suggestion=f"{did_you_mean(unknown[0], known)}Name operations by operationId or as `GET /path`.",
            unknown=list(unknown),
        )


def _manifest(api: Api, operation: Operation, tool_id: str, wish: _Wish) -> JsonObject:
    words = operation.words
    if words.get("deprecated") is True and not wish.only:
        raise Inexpressible("it is deprecated", "Name it in `only` to import it all the same.")
    if operation.method == "trace":
        raise Inexpressible("TRACE is not a method of api tools", "Leave it out.")
    credentials = credentials_of(api, operation, wish.prefix, wish.auth)
    shape = _shape(api, operation, credentials)
    tags = [name for tag in as_list(words.get("tags")) if isinstance(tag, str) and (name := snake(tag)[:40])]
    return {
        "tool_id": tool_id,
        "tool_type": "api",
        "executor": "http_client",
        "version": semantic(as_object(api.root.get("info")).get("version")),
        "description": sentence(words.get("summary"), words.get("description"), limit=MAX_DESCRIPTION)
        or f"{operation.place} of {sentence(api.title, limit=80) or wish.prefix}",
        "category": wish.prefix,
        "tags": list(dict.fromkeys(tags))[:_MAX_TAGS],
        "config": _config(api, operation, credentials, shape, wish),
        "parameters": shape.parameters,
    }


def _bounded(manifest: JsonObject) -> JsonObject:
    if len(compact(manifest)) > MAX_MANIFEST_BYTES:
        raise Inexpressible("its address and names are longer than a manifest may be", "Write this tool by hand.")
    return manifest


def _shape(api: Api, operation: Operation, credentials: Credentials) -> _Shape:
    for depth in _DEPTHS:
        try:
            schemas = Schemas(api, depth)
            declared = [slot for slot in slots_of(api, operation, schemas) if not credentials.carries(slot)]
            body = body_of(api, operation, schemas)
        except TooWide:
            continue
        slots = named((*declared, *(body.slots if body else ())))
        parameters = _parameters(slots)
        if len(compact(parameters)) <= MAX_SCHEMA_BYTES and not schema_faults(parameters, "parameters"):
            return _Shape(slots, body, parameters)
    raise Inexpressible("its parameters are more than a tool can describe", "Write this tool by hand.")


def _parameters(slots: Iterable[Slot]) -> JsonObject:
    slots = tuple(slots)
    properties: dict[str, Json] = {slot.name: slot.schema for slot in slots}
    required: list[Json] = [slot.name for slot in slots if slot.is_required]
    schema: dict[str, Json] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _config(api: Api, operation: Operation, credentials: Credentials, shape: _Shape, wish: _Wish) -> JsonObject:
    in_path = {slot.wire: slot.text_in_path for slot in shape.slots if slot.where == "path"}
    body = shape.body
    words: dict[str, Json] = {
        "method": operation.method.upper(),
        "url_template": server_url(api, operation, wish.base_url) + path_template(operation.path, in_path),
        "query": {**template(shape.slots, "query"), **credentials.query},
        "headers": {
            **accepted(api, operation),
            **(body.headers if body else {}),
            **template(shape.slots, "header"),
            **credentials.headers,
        },
        "auth": credentials.auth,
    }
    said = {word: value for word, value in words.items() if value}
    return {**said, "body_template": body.template(shape.slots)} if body else said
