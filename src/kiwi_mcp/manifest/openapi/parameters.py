"""Parameters and bodies of an operation as stand-alone schemas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import quote

from msgspec import Struct
from msgspec.structs import replace

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.names import unused_name
from kiwi_mcp.manifest.json_schema import schema_faults
from kiwi_mcp.manifest.openapi.document import Api, Operation, Unsupported, parameter_name, path_names, sentence

MAX_NODES = 4_000
MAX_ENUM = 300
MAX_DESCRIPTION = 300

_MAX_REFERENCES = 32
_MAX_PATTERN = 300
_MAX_NUMBER = 2**53 - 1
_TYPES = {"string", "number", "integer", "boolean", "array", "object", "null"}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_BESIDE_A_REFERENCE = {"$ref", "description", "summary", "title", "default", "example", "examples", "deprecated"}


class SchemaTooLarge(Exception):
    """A schema that grows over the limit when its references are put in."""


class Schemas(Struct):
    """Expands the schemas of one tool, down to a depth, counting what it makes.

    A deeper schema, a recursive one, or one in another document accepts any value. A `default` becomes a sentence: sent
    along with an update, it would overwrite fields that the caller did not mention.
    """

    api: Api
    depth: int
    made: int = 0

    def expand(self, node: Json, *, deeper: int = 0) -> dict[str, Json]:
        """Return a schema that refers to nothing outside itself, `deeper` than others of the tool."""
        return self._expand(node, self.depth + deeper, ())

    def _expand(self, node: Json, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        self.made += 1
        if self.made > MAX_NODES:
            raise SchemaTooLarge
        words = as_object(node)
        if "$ref" in words:
            return self._referred(words, depth, seen)
        schema = _simple_keywords(words)
        if depth > 0:
            schema = {**self._nested(words, depth - 1, seen), **schema}
        return _nullable(schema) if words.get("nullable") is True else schema

    def _referred(self, words: JsonObject, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        reference = as_text(words["$ref"])
        name = sentence(reference.rpartition("/")[2], limit=60).rstrip(".")
        if reference in seen or len(seen) > _MAX_REFERENCES:
            return {"description": f"Another `{name}`; any value is accepted here."}
        target = self.api.find(reference)
        if not isinstance(target, Mapping):
            return {"description": f"A `{name}`, which the document does not define; any value is accepted here."}
        if words.keys() <= _BESIDE_A_REFERENCE:
            schema = self._expand(target, depth, (*seen, reference))
            return {**schema, **_described(words)}
        beside = {word: value for word, value in words.items() if word != "$ref"}
        parts = [self._expand(target, depth, (*seen, reference)), self._expand(beside, depth, seen)]
        return _merged(_described(words), parts)

    def _nested(self, words: JsonObject, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        schema: dict[str, Json] = self._object(words, depth, seen)
        if isinstance(words.get("items"), Mapping):
            schema["items"] = self._expand(words["items"], depth, seen)
        for choice in ("anyOf", "oneOf"):
            # One of several loosened forms may be none: several of them can fit at once.
            forms = [self._expand(form, depth, seen) for form in as_list(words.get(choice))]
            if forms and all(form.keys() - {"description"} for form in forms):
                schema["anyOf"] = forms
        parts = [self._expand(part, depth, seen) for part in as_list(words.get("allOf"))]
        return _merged(schema, parts) if parts else schema

    def _object(self, words: JsonObject, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        schema: dict[str, Json] = {}
        properties: dict[str, Json] = {
            name: self._expand(inner, depth, seen)
            for name, inner in as_object(words.get("properties")).items()
            if not (as_object(inner).get("readOnly") is True or self.api.follow(inner).get("readOnly") is True)
        }
        if properties:
            schema["properties"] = properties
        if required := [
            name for name in as_list(words.get("required")) if isinstance(name, str) and name in properties
        ]:
            schema["required"] = required
        match words.get("additionalProperties"):
            case Mapping() as inner:
                schema["additionalProperties"] = self._expand(inner, depth, seen) or True
            case False if "patternProperties" in words:
                pass
            case bool() as is_open:
                schema["additionalProperties"] = is_open
        return schema


def types_of(schema: JsonObject) -> set[str]:
    """Return the types a schema names; empty where it names none."""
    written = schema.get("type")
    return {written} if isinstance(written, str) else {kind for kind in as_list(written) if isinstance(kind, str)}


def described(schema: JsonObject, *notes: Json) -> dict[str, Json]:
    """Return a schema with notes as its description."""
    said = sentence(*notes, limit=MAX_DESCRIPTION)
    return {**schema, "description": said} if said else dict(schema)


def _simple_keywords(words: JsonObject) -> dict[str, Json]:
    """Return the words of a schema that hold no other schema, where they are well formed."""
    schema: dict[str, Json] = _typed(words)
    if 0 < len(values := as_list(words.get("enum"))) <= MAX_ENUM:
        schema["enum"] = values
    if "const" in words:
        schema["const"] = words["const"]
    if isinstance(words.get("format"), str):
        schema["format"] = as_text(words["format"])[:40]
    if words.get("uniqueItems") is True:
        schema["uniqueItems"] = True
    schema |= {word: words[word] for word in _COUNTS if _is_number(words.get(word), least=0)}
    found = {word: words[word] for word in _NUMBERS if _is_number(words.get(word))}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if words.get(exclusive) is True and bound in found:
            # In OpenAPI 3.0 it is a flag beside the bound.
            found[exclusive] = found.pop(bound)
    return schema | found | _patterned(words) | _described(words)


def _typed(words: JsonObject) -> dict[str, Json]:
    kinds = sorted(types_of(words) & _TYPES)
    if kinds:
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"type": "object"} if "properties" in words and "type" not in words else {}


def _patterned(words: JsonObject) -> dict[str, Json]:
    pattern = words.get("pattern")
    if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN or schema_faults({"pattern": pattern}, ""):
        return {}
    return {"pattern": pattern}


def _described(words: JsonObject) -> dict[str, Json]:
    default = words.get("default")
    note = f"Default: {compact(default)}"[:80] if default not in (None, "", [], {}) else ""
    return described({}, words.get("description"), note)


def _nullable(schema: dict[str, Json]) -> dict[str, Json]:
    if kinds := types_of(schema):
        schema["type"] = [*sorted(kinds - {"null"}), "null"]
    if isinstance(values := schema.get("enum"), list) and None not in values:
        schema["enum"] = [*values, None]
    if isinstance(forms := schema.get("anyOf"), list):
        schema["anyOf"] = [*forms, {"type": "null"}]
    return schema


def _merged(own: JsonObject, parts: Iterable[JsonObject]) -> dict[str, Json]:
    """All of several schemas as one; where two say different things, the first is kept."""
    merged: dict[str, Json] = {}
    properties: dict[str, Json] = {}
    required: dict[Json, None] = {}
    for part in (own, *parts):
        merged = {**merged, **part, **merged}
        properties = {**properties, **as_object(part.get("properties")), **properties}
        required |= dict.fromkeys(as_list(part.get("required")))
    # A part that closes itself does not know the properties of the others.
    merged.pop("additionalProperties", None)
    return merged | ({"properties": properties} if properties else {}) | ({"required": [*required]} if required else {})


def _is_number(value: Json, least: float = -_MAX_NUMBER) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _MAX_NUMBER


_WIRE = re.compile(r"[^\x00-\x1f\x7f{}]{1,200}")
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,200}", re.ASCII)
# OpenAPI says the first three are described elsewhere; the rest belong to the connection.
_NOT_SETTABLE = {
    "accept", "content-type", "authorization", "cookie", "host", "content-length", "connection", "transfer-encoding",
    "te", "trailer", "upgrade", "expect",
}  # fmt: skip
_PLACES = ("path", "query", "header", "cookie")
_SEPARATORS = {"spaceDelimited": "spaces", "pipeDelimited": "`|`"}


class RequestParameter(Struct, frozen=True):
    """One value of a request: where it goes, under which name of the wire, and what it may be."""

    where: str
    wire: str
    schema: JsonObject
    is_required: bool
    style: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """The slot as a template writes it."""
        return f"{{{self.name}}}"

    @property
    def text_in_path(self) -> str:
        """The slot as the path of a URL writes it."""
        match self.style:
            case "label":
                return f".{self.text}"
            case "matrix":
                return f";{quote(self.wire, safe='')}={self.text}"
            case _:
                return self.text


def named(slots: Iterable[RequestParameter]) -> tuple[RequestParameter, ...]:
    """Return the slots with names no two of which are alike; the earlier keeps the plain one."""
    taken: dict[str, RequestParameter] = {}
    for slot in slots:
        plain = parameter_name(slot.wire)
        name = unused_name(plain if plain not in taken else f"{slot.where}_{plain}", taken)
        taken[name] = replace(slot, name=name)
    return tuple(taken.values())


def is_header(name: str) -> bool:
    """Whether a text can be the name of a header that a tool may send."""
    return _TOKEN.fullmatch(name) is not None and name.lower() not in _NOT_SETTABLE - {"authorization"}


def is_wire_name(name: str) -> bool:
    """Whether a text can stand as a name in a template: it has no braces, so it means only itself."""
    return _WIRE.fullmatch(name) is not None


def slots_of(api: Api, operation: Operation, schemas: Schemas) -> list[RequestParameter]:
    """Return the parameters of an operation, those of the path first."""
    found = [slot for parameter in _declared(api, operation) for slot in _slots(parameter, operation, schemas)]
    in_path = {slot.wire: slot for slot in found if slot.where == "path"}
    places = path_names(operation.path)
    # A placeholder in the path must be filled even if no parameter declares it.
    path = [in_path.get(wire, RequestParameter("path", wire, {"type": "string"}, is_required=True)) for wire in places]
    return [*path, *(slot for where in ("query", "header") for slot in found if slot.where == where)]


def _declared(api: Api, operation: Operation) -> Iterable[JsonObject]:
    listed = (*as_list(operation.shared.get("parameters")), *as_list(operation.words.get("parameters")))
    found: dict[tuple[str, str], JsonObject] = {}
    for node in listed:
        parameter = api.follow(node)
        key = (as_text(parameter.get("in")), as_text(parameter.get("name")))
        if key[0] not in _PLACES or not key[1]:
            raise Unsupported("a parameter cannot be read", "Give each parameter `name` and `in`, in this document.")
        found[key] = parameter
    return found.values()


def _slots(parameter: JsonObject, operation: Operation, schemas: Schemas) -> Iterator[RequestParameter]:
    where, wire = as_text(parameter["in"]), as_text(parameter["name"])
    is_required = parameter.get("required") is True or where == "path"
    if where == "header" and wire.lower() in _NOT_SETTABLE:
        return
    if where == "cookie" or not is_wire_name(wire) or (where == "header" and not is_header(wire)):
        if is_required and (where != "path" or wire in path_names(operation.path)):
            raise Unsupported(f"it needs the {where} parameter {wire[:80]!r}", "Write this tool by hand.")
        return
    slot = RequestParameter(where, wire, _schema(parameter, schemas), is_required, as_text(parameter.get("style")))
    yield from _spread(slot) if _is_spread(slot, parameter) else [_spelled(slot, parameter)]


def _schema(parameter: JsonObject, schemas: Schemas) -> dict[str, Json]:
    content = as_object(parameter.get("content"))
    node = as_object(next(iter(content.values()), {})).get("schema") if content else parameter.get("schema")
    schema = schemas.expand(node)
    return described(schema, parameter.get("description"), schema.get("description"))


def _is_spread(slot: RequestParameter, parameter: JsonObject) -> bool:
    """Whether an object goes into the query as a pair for each of its properties."""
    is_exploded = slot.style == "deepObject" or (slot.style in {"", "form"} and parameter.get("explode") is not False)
    properties = as_object(slot.schema.get("properties"))
    return slot.where == "query" and "content" not in parameter and is_exploded and bool(properties)


def _spread(slot: RequestParameter) -> Iterator[RequestParameter]:
    required = as_list(slot.schema.get("required")) if slot.is_required else ()
    for name, schema in as_object(slot.schema["properties"]).items():
        wire = f"{slot.wire}[{name}]" if slot.style == "deepObject" else name
        if is_wire_name(wire):
            yield RequestParameter("query", wire, as_object(schema), name in required)


def _spelled(slot: RequestParameter, parameter: JsonObject) -> RequestParameter:
    """Return the slot with a schema of values that a template writes as the document asks."""
    kinds = types_of(slot.schema)
    if "content" in parameter:
        # A list would become several pairs, and text would lose its quotation marks.
        return slot if kinds and not kinds & {"string", "array"} else _as_text(slot, "Written as JSON text")
    if not kinds & {"array", "object"}:
        return slot
    is_repeated = slot.where == "query" and slot.style in {"", "form"} and parameter.get("explode") is not False
    if is_repeated and "array" in kinds:
        return slot
    between = _SEPARATORS.get(slot.style, "commas")
    return _as_text(slot, f"Several values are written as one text, with {between} between them")


def _as_text(slot: RequestParameter, note: str) -> RequestParameter:
    return replace(slot, schema=described({"type": "string"}, slot.schema.get("description"), note))


def template(slots: Iterable[RequestParameter], where: str) -> Mapping[str, Json]:
    """Return the words of a template for one place: each name of the wire with the value that fills it."""
    return {slot.wire: slot.text for slot in slots if slot.where == where}


FORM = "application/x-www-form-urlencoded"
JSON = "application/json"
_ANY_JSON = {JSON, "*/*", "application/*"}

_MAX_PROPERTIES = 100
_TEXTS = {"application/xml", "application/yaml", "application/x-yaml", "application/graphql", "application/x-ndjson"}


class Body(Struct, frozen=True):
    """How a request's body is made: its media type, its slots, and whether one slot is all of it."""

    media: str
    slots: tuple[RequestParameter, ...]
    is_whole: bool

    @property
    def headers(self) -> JsonObject:
        """What must be said about the body; an object goes as JSON without saying."""
        media = JSON if self.media in _ANY_JSON else self.media
        return {"Content-Type": media} if self.is_whole or media != JSON else {}

    def template(self, slots: Iterable[RequestParameter]) -> Json:
        """Return the template of the body, with the names its slots were given."""
        own = [slot for slot in slots if slot.where == "body"]
        return own[0].text if self.is_whole else template(own, "body")


def body_of(api: Api, operation: Operation, schemas: Schemas) -> Body | None:
    """Return the body of an operation, or None where it has none."""
    words = api.follow(operation.words.get("requestBody"))
    content = as_object(words.get("content"))
    if not content:
        return None
    written = _chosen(content)
    media = _media_type(written)
    is_required = words.get("required") is True
    if _is_text(media):
        schema = described({"type": "string"}, words.get("description"), f"The body, as {media}")
        return Body(media, (RequestParameter("body", "body", schema, is_required),), is_whole=True)
    # The body's properties become parameters, so what they hold is one level further down.
    schema = schemas.expand(as_object(content[written]).get("schema"), deeper=1)
    properties = as_object(schema.get("properties"))
    if (
        "object" in types_of(schema)
        and "anyOf" not in schema
        and schema.get("additionalProperties", False) is False
        and 0 < len(properties) <= _MAX_PROPERTIES
        and all(is_wire_name(name) for name in properties)
    ):
        return Body(media, tuple(_flattened(schema)), is_whole=False)
    return Body(media, (_whole(media, schema, words, is_required=is_required),), is_whole=True)


def accepted(api: Api, operation: Operation) -> JsonObject:
    """Return the header that asks for the media type an operation's success has, JSON where there is a choice."""
    for status, node in as_object(operation.words.get("responses")).items():
        media = [_media_type(written) for written in as_object(api.follow(node).get("content"))]
        if status.startswith("2") and media:
            best = next(filter(_is_json, media), media[0])
            return {"Accept": best} if is_wire_name(best) and "*" not in best and best.isascii() else {}
    return {}


def _chosen(content: JsonObject) -> str:
    for fits in (lambda media: media == JSON, _is_json, lambda media: media == FORM, _is_text):
        for written in content:
            if fits(_media_type(written)) and is_wire_name(written):
                return written
    kinds = ", ".join(written[:60] for written in list(content)[:3])
    raise Unsupported(f"its body is {kinds}, which an api tool cannot send", "Write a script for this operation.")


def _media_type(media: str) -> str:
    return media.partition(";")[0].strip().lower()


def _is_json(media: str) -> bool:
    return media in _ANY_JSON or media == "text/json" or media.endswith("+json")


def _is_text(media: str) -> bool:
    return media.startswith("text/") or media in _TEXTS or media.endswith(("+xml", "+yaml"))


def _flattened(schema: JsonObject) -> Iterator[RequestParameter]:
    required = as_list(schema.get("required"))
    for name, inner in as_object(schema.get("properties")).items():
        yield RequestParameter("body", name, as_object(inner), name in required)


def _whole(media: str, schema: Mapping[str, Json], words: JsonObject, *, is_required: bool) -> RequestParameter:
    kinds = types_of(schema)
    if media == FORM:
        schema = {**schema, "type": "object"}
        note = "The fields of the form"
    elif "string" in kinds or not (kinds or "anyOf" in schema):
        # The primitive sends text as it is, so that a tool can send any text.
        note = "The body; a text is sent as it is, so write it as JSON, in quotation marks"
    else:
        note = "The body"
    said = as_text(words.get("description")) or schema.get("description")
    return RequestParameter("body", "body", described(schema, said, note), is_required)
