"""Operations of a document as manifests of API tools, with credentials."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from msgspec import Struct, field

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.manifest.json_schema import schema_faults
from kiwi_mcp.manifest.names import did_you_mean
from kiwi_mcp.manifest.openapi.document import (
    Api,
    Operation,
    Unsupported,
    path_template,
    read_api,
    semantic,
    sentence,
    server_url,
    short_name,
    snake,
    tool_ids,
    variable_name,
)
from kiwi_mcp.manifest.openapi.parameters import (
    Body,
    RequestParameter,
    Schemas,
    SchemaTooLarge,
    accepted,
    body_of,
    is_header,
    is_wire_name,
    named,
    slots_of,
    template,
)


class Credentials(Struct, frozen=True):
    """The `auth` word of a tool, and what headers and query carry beside it; values are `${NAME}`."""

    auth: JsonObject = field(default_factory=dict)
    headers: JsonObject = field(default_factory=dict)
    query: JsonObject = field(default_factory=dict)

    def carries(self, slot: RequestParameter) -> bool:
        """Whether a slot would be filled by the credentials already."""
        is_auth = slot.where == self.auth.get("in") and slot.wire.lower() == as_text(self.auth.get("name")).lower()
        taken = {"header": self.headers, "query": self.query}.get(slot.where, {})
        return is_auth or slot.wire.lower() in {name.lower() for name in taken}


def credentials_of(api: Api, operation: Operation, prefix: str, auth: JsonObject) -> Credentials:
    """Return the first way to authenticate that the words of an api tool can say; `auth` where none is asked for."""
    ways = as_list(operation.words.get("security", api.root.get("security")))
    if not ways:
        return Credentials(auth)
    for way in ways:
        if (found := _expressed(api, list(as_object(way)), variable_name(prefix))) is not None:
            return found
    names = sorted({name for way in ways for name in as_object(way)})
    raise Unsupported(
        f"it asks for {', '.join(names)[:200]}, which an api tool cannot give", "Write a script for this operation."
    )


def _expressed(api: Api, names: list[str], prefix: str) -> Credentials | None:
    """Return the credentials for schemes that are all asked for at once."""
    schemes = as_object(api.components.get("securitySchemes"))
    auth: JsonObject = {}
    headers: dict[str, Json] = {}
    query: dict[str, Json] = {}
    for name in names:
        scheme = api.follow(schemes.get(name))
        word = _auth(scheme, f"{prefix}_{_key_suffix(api, name)}", prefix)
        if word and not auth and (len(names) == 1 or word["type"] != "api_key"):
            auth = word
        elif not word or word["type"] != "api_key":
            return None
        else:
            (query if word["in"] == "query" else headers)[as_text(word["name"])] = word["key"]
    return Credentials(auth, headers, query)


def _auth(scheme: JsonObject, key: str, prefix: str) -> JsonObject:
    """Return the `auth` word of one scheme; empty where there is none for it."""
    match scheme.get("type"), as_text(scheme.get("scheme")).lower(), scheme.get("in"):
        case ("http", "bearer", _) | ("oauth2" | "openIdConnect", _, _):
            return {"type": "bearer", "token": f"${{{prefix}_TOKEN}}"}
        case ("http", "basic", _):
            return {"type": "basic", "username": f"${{{prefix}_USERNAME}}", "password": f"${{{prefix}_PASSWORD}}"}
        case ("apiKey", _, "header" | "query" as place):
            name = as_text(scheme.get("name"))
            is_name = is_header(name) if place == "header" else is_wire_name(name)
            return {"type": "api_key", "key": f"${{{key}}}", "name": name, "in": place} if is_name else {}
        case ("apiKey", _, "cookie") if is_header(name := as_text(scheme.get("name"))):
            return {"type": "api_key", "key": f"{name}=${{{key}}}", "name": "Cookie", "in": "header"}
        case _:
            return {}


def _key_suffix(api: Api, name: str) -> str:
    """`API_KEY` for the only key of a document, the scheme's name where there are several."""
    schemes = as_object(api.components.get("securitySchemes"))
    keys = [each for each in schemes if api.follow(schemes[each]).get("type") == "apiKey"]
    return snake(name).upper() if len(keys) > 1 and snake(name) else "API_KEY"


MAX_DESCRIPTION = 400
MAX_SCHEMA_BYTES = 48_000
MAX_MANIFEST_BYTES = 128_000

_MAX_PREFIX = 40
_MAX_TAGS = 5
_MAX_PLACE = 300
_DEPTHS = (12, 5, 3, 2, 1, 0, -1)
"""How deep schemas are spelled out: as deep as fits. A body goes one level deeper, so the last makes it bare too."""


class OpenApiImport(Struct, frozen=True):
    """The tools a document makes, and the operations it does not make tools of, each with its reason."""

    manifests: tuple[JsonObject, ...]
    skipped: tuple[Issue, ...] = ()


class _ImportOptions(Struct, frozen=True):
    """What the caller asked for besides the document itself."""

    prefix: str
    base_url: str | None
    only: frozenset[str]
    auth: JsonObject

    def names(self, tool_id: str, operation: Operation) -> bool:
        return not self.only.isdisjoint({tool_id, operation.name, operation.place})


class _Shape(Struct, frozen=True):
    """The slots of an operation and the schema they make, at the depth that fits."""

    slots: tuple[RequestParameter, ...]
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
    options = _ImportOptions(name, base_url, frozenset(only), auth or {})
    operations = tuple(api.operations())
    # Names are given before operations are chosen, so that they never depend on the choice.
    by_id = dict(zip(tool_ids(options.prefix, (each.name for each in operations)), operations, strict=True))
    _refuse_unknown(options, by_id, what)
    manifests: list[JsonObject] = []
    skipped: list[Issue] = []
    for tool_id, operation in by_id.items():
        if options.only and not options.names(tool_id, operation):
            continue
        try:
            manifests.append(_bounded(_manifest(api, operation, tool_id, options)))
        except Unsupported as fault:
            skipped.append(Issue(operation.place[:_MAX_PLACE], fault.reason, fault.fix, "warning"))
    return OpenApiImport(tuple(manifests), tuple(skipped))


def _refuse_unknown(options: _ImportOptions, by_id: Mapping[str, Operation], what: str) -> None:
    known = {word for tool_id, each in by_id.items() for word in (tool_id, each.name, each.place)}
    if unknown := sorted(options.only - known):
        raise InvalidRequest(
            f"{what} has no operation {unknown[0]!r}.",
            suggestion=f"{did_you_mean(unknown[0], known)}Name operations by operationId or as `GET /path`.",
            unknown=list(unknown),
        )


def _manifest(api: Api, operation: Operation, tool_id: str, options: _ImportOptions) -> JsonObject:
    words = operation.words
    if words.get("deprecated") is True and not options.only:
        raise Unsupported("it is deprecated", "Name it in `only` to import it all the same.")
    if operation.method == "trace":
        raise Unsupported("TRACE is not a method of api tools", "Leave it out.")
    credentials = credentials_of(api, operation, options.prefix, options.auth)
    shape = _shape(api, operation, credentials)
    tags = [name for tag in as_list(words.get("tags")) if isinstance(tag, str) and (name := snake(tag)[:40])]
    return {
        "tool_id": tool_id,
        "tool_type": "api",
        "executor": "http_client",
        "version": semantic(as_object(api.root.get("info")).get("version")),
        "description": sentence(words.get("summary"), words.get("description"), limit=MAX_DESCRIPTION)
        or f"{operation.place} of {sentence(api.title, limit=80) or options.prefix}",
        "category": options.prefix,
        "tags": list(dict.fromkeys(tags))[:_MAX_TAGS],
        "config": _config(api, operation, credentials, shape, options),
        "parameters": shape.parameters,
    }


def _bounded(manifest: JsonObject) -> JsonObject:
    if len(compact(manifest)) > MAX_MANIFEST_BYTES:
        raise Unsupported("its address and names are longer than a manifest may be", "Write this tool by hand.")
    return manifest


def _shape(api: Api, operation: Operation, credentials: Credentials) -> _Shape:
    for depth in _DEPTHS:
        try:
            schemas = Schemas(api, depth)
            declared = [slot for slot in slots_of(api, operation, schemas) if not credentials.carries(slot)]
            body = body_of(api, operation, schemas)
        except SchemaTooLarge:
            continue
        slots = named((*declared, *(body.slots if body else ())))
        parameters = _parameters(slots)
        if len(compact(parameters)) <= MAX_SCHEMA_BYTES and not schema_faults(parameters, "parameters"):
            return _Shape(slots, body, parameters)
    raise Unsupported("its parameters are more than a tool can describe", "Write this tool by hand.")


def _parameters(slots: Iterable[RequestParameter]) -> JsonObject:
    slots = tuple(slots)
    properties: dict[str, Json] = {slot.name: slot.schema for slot in slots}
    required: list[Json] = [slot.name for slot in slots if slot.is_required]
    schema: dict[str, Json] = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**schema, "required": required} if required else schema


def _config(
    api: Api, operation: Operation, credentials: Credentials, shape: _Shape, options: _ImportOptions
) -> JsonObject:
    in_path = {slot.wire: slot.text_in_path for slot in shape.slots if slot.where == "path"}
    body = shape.body
    words: dict[str, Json] = {
        "method": operation.method.upper(),
        "url_template": server_url(api, operation, options.base_url) + path_template(operation.path, in_path),
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
