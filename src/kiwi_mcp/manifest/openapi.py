"""OpenAPI documents as API tools.

A document is read first: references, server URLs and names. Then come stand-alone schemas, parameters, bodies and
credentials, and last the manifests of its operations.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping
from urllib.parse import quote, unquote, urljoin, urlsplit

from msgspec import Struct, field
from msgspec.structs import replace

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.domain.names import Version, is_tool_id, unused_name
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_json, read_yaml, refuse
from kiwi_mcp.manifest.json_schema import schema_faults
from kiwi_mcp.manifest.names import did_you_mean

MAX_BYTES = 16_000_000
MAX_NODES = 2_000_000
MAX_DEPTH = 100

METHODS = ("get", "put", "post", "delete", "options", "head", "patch", "trace")
_MAX_HOPS = 16
_SPOKEN = lazy_pattern(r"3\.[01](\.\d+)?(-\S+)?", re.ASCII)


class Unsupported(Exception):
    """An operation that the words of an api tool cannot say."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


class Operation(Struct, frozen=True):
    """One method of one path, and the path's own words."""

    method: str
    path: str
    words: JsonObject
    shared: JsonObject

    @property
    def place(self) -> str:
        """The operation as a person writes it: `GET /pets`."""
        return f"{self.method.upper()} {self.path}"

    @property
    def name(self) -> str:
        """The operation's own name, or method and path where it has none."""
        return as_text(self.words.get("operationId")) or self.place


class Api(Struct, frozen=True):
    """A document that was read."""

    root: JsonObject

    @property
    def title(self) -> str:
        """What the document calls itself."""
        return as_text(as_object(self.root.get("info")).get("title"))

    def operations(self) -> Iterator[Operation]:
        """Yield every operation, in the order of the document."""
        for path, item in as_object(self.root.get("paths")).items():
            shared = self.follow(item)
            for method in shared:
                if method in METHODS and isinstance(words := shared[method], Mapping):
                    yield Operation(method, path, words, shared)

    def follow(self, node: Json) -> JsonObject:
        """Return the object a node is or refers to within the document; empty where it leads nowhere."""
        for _ in range(_MAX_HOPS):
            found = as_object(node)
            if "$ref" not in found:
                return found
            node = self.find(found["$ref"])
        return {}

    def find(self, reference: Json) -> Json:
        """Return the target of a local reference, None if there is none here; other documents are never read."""
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return None
        here: Json = self.root
        for step in reference[2:].split("/"):
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(here, Mapping):
                here = here.get(key)
            else:
                items = as_list(here)
                here = items[int(key)] if re.fullmatch(r"\d{1,6}", key, re.ASCII) and int(key) < len(items) else None
        return here


def _read_api(text: str, *, what: str) -> Api:
    """Return the OpenAPI 3.0 or 3.1 document a text holds, in JSON or YAML."""
    read = read_json if text.lstrip("\ufeff \t\r\n")[:1] in {"{", "["} else read_yaml
    words = as_object(read(text, what=what, max_bytes=MAX_BYTES, max_nodes=MAX_NODES, max_depth=MAX_DEPTH).value)
    fix = "Pass an OpenAPI 3.0 or 3.1 document."
    if "swagger" in words:
        fix = "Convert it to OpenAPI 3 first, with a converter such as swagger2openapi."
        raise refuse(what, f"Swagger {words['swagger']} is not read", fix, place="swagger")
    if "openapi" not in words:
        raise refuse(what, "is missing: this is not an OpenAPI document", fix, place="openapi")
    if not _SPOKEN.fullmatch(str(words["openapi"])):
        raise refuse(what, f"version {words['openapi']!s:.40} is not read", fix, place="openapi")
    if not isinstance(words.get("paths"), Mapping) or not words["paths"]:
        fix = "Pass a document that describes requests."
        raise refuse(what, "is empty: there is nothing to call", fix, place="paths")
    return Api(words)


# Neither `$` nor braces are among them: a literal text can then make no placeholder and no variable.
_LITERAL = "/:@!&'()*+,;=%~-._?"
_HOST = lazy_pattern(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?", re.ASCII)
_ABSOLUTE = lazy_pattern(r"[A-Za-z][A-Za-z0-9+.-]*:|//", re.ASCII)
_PLACE = lazy_pattern(r"\{([^{}/]+)\}")


def _server_url(api: Api, operation: Operation, base_url: str | None) -> str:
    """Return the address an operation's path is added to; `base_url`, where given, takes its place."""
    own = as_list(operation.words.get("servers")) or as_list(operation.shared.get("servers"))
    urls = [_substituted(as_object(server)) for server in own or as_list(api.root.get("servers"))]
    if base_url is not None:
        base = _absolute(base_url)
        if not base:
            raise InvalidRequest(
                f"`base_url` is not an absolute http or https address: {base_url[:200]!r}.",
                suggestion="Pass an address such as `https://api.example.com/v1`.",
            )
        first = urls[0] if urls else ""
        if first in {"", "/"} or _ABSOLUTE.match(first):
            return base
        return _absolute(urljoin(base_url, first)) or base
    if found := next(filter(None, map(_absolute, urls)), ""):
        return found
    reason = f"no absolute server address: {', '.join(urls)[:200] or 'none is given'}"
    fix = "Pass `base_url`, the address the paths are added to, such as `https://api.example.com/v1`."
    if own:
        raise Unsupported(f"it has {reason}", fix)
    raise InvalidRequest(f"The document has {reason}.", suggestion=fix)


def _absolute(url: str) -> str:
    """Return a usable absolute address without a slash at its end; empty where the text is not one."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    if parts.scheme not in {"http", "https"} or not _HOST.fullmatch(parts.netloc):
        return ""
    return f"{parts.scheme}://{parts.netloc}{quote(parts.path, safe=_LITERAL)}".rstrip("/")


def _path_template(path: str, names: Mapping[str, str]) -> str:
    """Return a path with each `{wire name}` replaced by its entry in `names`, and everything else as literal text."""
    literal = path.partition("#")[0]
    parts = _PLACE.split(literal if literal.startswith("/") else f"/{literal}")
    # A split on one group gives text and name in turn.
    return "".join(names[part] if at % 2 else quote(part, safe=_LITERAL) for at, part in enumerate(parts))


def _path_names(path: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_PLACE.findall(path.partition("#")[0])))


def _substituted(server: JsonObject) -> str:
    """Return the server's address with its variables at their defaults."""
    variables = as_object(server.get("variables"))
    defaults = {name: str(as_object(one).get("default", f"{{{name}}}")) for name, one in variables.items()}
    return _PLACE.sub(lambda place: defaults.get(place[1], place[0]), as_text(server.get("url")))


MAX_ID = 120
"""Shorter than a tool id may be, so that a number fits behind it."""

_MAX_NAME = 64
_TITLE_WORDS = 3
_HUMP = lazy_pattern(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BREAK = lazy_pattern(r"\s+[-+|\u2013\u2014]\s*|[:(,]")
_VERSION = lazy_pattern(r"v?(\d{1,9})(?:[.-](\d{1,9}))?(?:[.-](\d{1,9}))?(?!\d)", re.ASCII | re.IGNORECASE)
_FILLER = {
    "", "a", "an", "the", "of", "for", "and", "s", "api", "apis", "rest", "restful", "http", "web", "service",
    "services", "official", "public", "open", "openapi", "swagger", "spec", "specification", "definition",
    "documentation", "docs", "reference", "description", "schema", "example", "sample", "simple",
    "v1", "v2", "v3", "v4",
}  # fmt: skip
_INVISIBLE = {"Cc", "Cf", "Cs", "Co", "Cn"}
"""The categories of characters that cannot be seen."""


def _snake(text: str) -> str:
    """Return a text as an ASCII name in snake_case; empty where nothing of it is left."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", plain).lower()).strip("_")


def _short_name(title: str) -> str:
    """Return the first words of a title that name something: `GitHub v3 REST API` is `github`."""
    for phrase in _BREAK.split(title):
        # An API's own spelling (`GitHub`) is one word, so humps do not count here.
        words = [word for word in _snake(phrase.lower()).split("_") if word not in _FILLER and not word.isdigit()]
        if words:
            return "_".join(words[:_TITLE_WORDS])[:40].strip("_")
    return "api"


def _parameter_name(wire: str) -> str:
    """Return the name a template can use for a name of the wire: `filter[name]` is `filter_name`."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", wire, re.ASCII):
        return wire[:_MAX_NAME]
    name = _snake(wire)[:_MAX_NAME]
    return name if name and not name[0].isdigit() else f"p_{name}".rstrip("_")


def _variable_name(prefix: str) -> str:
    """Return the beginning of the names of an API's variables: `GITHUB` of `github`."""
    name = _snake(prefix).upper()
    return f"API_{name}" if name[:1].isdigit() else name


def _tool_ids(prefix: str, operations: Iterable[str]) -> tuple[str, ...]:
    """Return a tool id for each operation, in order, no two alike."""
    taken: dict[str, None] = {}
    for operation in operations:
        name = _snake(operation)
        is_prefixed = name == prefix or name.startswith(f"{prefix}_")
        whole = (name if is_prefixed else f"{prefix}_{name}")[:MAX_ID].strip("_")
        taken[unused_name(whole if is_tool_id(whole) else f"api_{whole}"[:MAX_ID].strip("_"), taken)] = None
    return tuple(taken)


def _semantic(version: Json) -> str:
    """Return a document's version as a semantic one: `v2` is 2.0.0, a date is its three numbers."""
    text = str(version).strip()
    exact = Version.parse(text)
    if exact is None and (found := _VERSION.match(text)):
        major, minor, patch = (int(number or 0) for number in found.groups())
        exact = Version(major, minor, patch)
    return str(exact) if exact not in {None, Version(0, 0, 0)} else "1.0.0"


def _sentence(*texts: Json, limit: int) -> str:
    """Return the first paragraphs of texts as one line, without what cannot be seen, cut at a word."""
    sentences: list[str] = []
    for text in texts:
        # No more than this is ever shown, and a paragraph of a megabyte is not worth splitting.
        paragraph = re.split(r"\n[ \t\r]*\n", as_text(text)[:4_000].strip(), maxsplit=1)[0]
        spaced = (" " if one in "\t\r\n" else one for one in paragraph)
        line = " ".join("".join(one for one in spaced if unicodedata.category(one) not in _INVISIBLE).split())
        if line and not any(line.rstrip(".") in earlier for earlier in sentences):
            sentences.append(line if line.endswith((".", "!", "?", ":")) else f"{line}.")
    whole = " ".join(sentences)
    if len(whole) <= limit:
        return whole
    return f"{whole[: limit - 1].rpartition(' ')[0] or whole[: limit - 1]}…"


_MAX_SCHEMA_NODES = 4_000
MAX_ENUM = 300
_MAX_SCHEMA_DESCRIPTION = 300

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
        if self.made > _MAX_SCHEMA_NODES:
            raise SchemaTooLarge
        words = as_object(node)
        if "$ref" in words:
            return self._referred(words, depth, seen)
        schema = _simple_keywords(words)
        if depth > 0:
            schema = {**self._nested(words, depth - 1, seen), **schema}
        if words.get("nullable") is True:
            if kinds := _types_of(schema):
                schema["type"] = [*sorted(kinds - {"null"}), "null"]
            if isinstance(values := schema.get("enum"), list) and None not in values:
                schema["enum"] = [*values, None]
            if isinstance(forms := schema.get("anyOf"), list):
                schema["anyOf"] = [*forms, {"type": "null"}]
        return schema

    def _referred(self, words: JsonObject, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        reference = as_text(words["$ref"])
        name = _sentence(reference.rpartition("/")[2], limit=60).rstrip(".")
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
        schema: dict[str, Json] = {}
        properties: dict[str, Json] = {
            name: self._expand(inner, depth, seen)
            for name, inner in as_object(words.get("properties")).items()
            if not (as_object(inner).get("readOnly") is True or self.api.follow(inner).get("readOnly") is True)
        }
        if properties:
            schema["properties"] = properties
        required = [name for name in as_list(words.get("required")) if isinstance(name, str) and name in properties]
        if required:
            schema["required"] = required
        match words.get("additionalProperties"):
            case Mapping() as inner:
                schema["additionalProperties"] = self._expand(inner, depth, seen) or True
            case False if "patternProperties" in words:
                pass
            case bool() as is_open:
                schema["additionalProperties"] = is_open
        if isinstance(words.get("items"), Mapping):
            schema["items"] = self._expand(words["items"], depth, seen)
        for choice in ("anyOf", "oneOf"):
            # One of several loosened forms may be none: several of them can fit at once.
            forms = [self._expand(form, depth, seen) for form in as_list(words.get(choice))]
            if forms and all(form.keys() - {"description"} for form in forms):
                schema["anyOf"] = forms
        parts = [self._expand(part, depth, seen) for part in as_list(words.get("allOf"))]
        return _merged(schema, parts) if parts else schema


def _types_of(schema: JsonObject) -> set[str]:
    written = schema.get("type")
    return {written} if isinstance(written, str) else {kind for kind in as_list(written) if isinstance(kind, str)}


def _with_description(schema: JsonObject, *notes: Json) -> dict[str, Json]:
    text = _sentence(*notes, limit=_MAX_SCHEMA_DESCRIPTION)
    return {**schema, "description": text} if text else dict(schema)


def _simple_keywords(words: JsonObject) -> dict[str, Json]:
    """Return the words of a schema that hold no other schema, where they are well formed."""
    schema: dict[str, Json] = {}
    if kinds := sorted(_types_of(words) & _TYPES):
        schema["type"] = kinds[0] if len(kinds) == 1 else kinds
    elif "properties" in words and "type" not in words:
        schema["type"] = "object"
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
    pattern = words.get("pattern")
    if isinstance(pattern, str) and len(pattern) <= _MAX_PATTERN and not schema_faults({"pattern": pattern}, ""):
        found["pattern"] = pattern
    return schema | found | _described(words)


def _described(words: JsonObject) -> dict[str, Json]:
    default = words.get("default")
    note = f"Default: {compact(default)}"[:80] if default not in (None, "", [], {}) else ""
    return _with_description({}, words.get("description"), note)


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
        lead = {"label": ".", "matrix": f";{quote(self.wire, safe='')}="}.get(self.style, "")
        return lead + self.text


def _named(slots: Iterable[RequestParameter]) -> tuple[RequestParameter, ...]:
    """Return the slots with names no two of which are alike; the earlier keeps the plain one."""
    taken: dict[str, RequestParameter] = {}
    for slot in slots:
        plain = _parameter_name(slot.wire)
        name = unused_name(plain if plain not in taken else f"{slot.where}_{plain}", taken)
        taken[name] = replace(slot, name=name)
    return tuple(taken.values())


def _is_header(name: str) -> bool:
    """Whether a text can be the name of a header that a tool may send."""
    return _TOKEN.fullmatch(name) is not None and name.lower() not in _NOT_SETTABLE - {"authorization"}


def _is_wire_name(name: str) -> bool:
    """Whether a text can stand as a name in a template: it has no braces, so it means only itself."""
    return _WIRE.fullmatch(name) is not None


def _slots_of(api: Api, operation: Operation, schemas: Schemas) -> list[RequestParameter]:
    """Return the parameters of an operation, those of the path first."""
    declared: dict[tuple[str, str], JsonObject] = {}
    for node in (*as_list(operation.shared.get("parameters")), *as_list(operation.words.get("parameters"))):
        parameter = api.follow(node)
        where, wire = as_text(parameter.get("in")), as_text(parameter.get("name"))
        if where not in _PLACES or not wire:
            raise Unsupported("a parameter cannot be read", "Give each parameter `name` and `in`, in this document.")
        declared[where, wire] = parameter
    found = [slot for parameter in declared.values() for slot in _slots(parameter, operation, schemas)]
    in_path = {slot.wire: slot for slot in found if slot.where == "path"}
    places = _path_names(operation.path)
    # A placeholder in the path must be filled even if no parameter declares it.
    path = [in_path.get(wire, RequestParameter("path", wire, {"type": "string"}, is_required=True)) for wire in places]
    return [*path, *(slot for where in ("query", "header") for slot in found if slot.where == where)]


def _slots(parameter: JsonObject, operation: Operation, schemas: Schemas) -> Iterator[RequestParameter]:
    where = as_text(parameter["in"])
    wire = as_text(parameter["name"])
    style = as_text(parameter.get("style"))
    is_required = parameter.get("required") is True or where == "path"
    if where == "header" and wire.lower() in _NOT_SETTABLE:
        return
    if where == "cookie" or not _is_wire_name(wire) or (where == "header" and not _is_header(wire)):
        if is_required and (where != "path" or wire in _path_names(operation.path)):
            raise Unsupported(f"it needs the {where} parameter {wire[:80]!r}", "Write this tool by hand.")
        return
    content = as_object(parameter.get("content"))
    node = as_object(next(iter(content.values()), {})).get("schema") if content else parameter.get("schema")
    expanded = schemas.expand(node)
    schema = _with_description(expanded, parameter.get("description"), expanded.get("description"))
    is_form = where == "query" and style in {"", "form"} and parameter.get("explode") is not False
    properties = as_object(schema.get("properties"))
    is_spread = is_form or (where == "query" and style == "deepObject")
    if not (is_spread and properties and "content" not in parameter):
        yield _spelled(RequestParameter(where, wire, schema, is_required, style), parameter, is_form=is_form)
        return
    # An object goes into the query as a pair for each of its properties.
    required = as_list(schema.get("required")) if is_required else ()
    for name, inner in properties.items():
        key = f"{wire}[{name}]" if style == "deepObject" else name
        if _is_wire_name(key):
            yield RequestParameter("query", key, as_object(inner), name in required)


def _spelled(slot: RequestParameter, parameter: JsonObject, *, is_form: bool) -> RequestParameter:
    """Return the slot with a schema of values that a template writes as the document asks."""
    kinds = _types_of(slot.schema)
    if "content" in parameter:
        # A list would become several pairs, and text would lose its quotation marks.
        is_as_written = kinds and not kinds & {"string", "array"}
        note = "Written as JSON text"
    else:
        is_as_written = not kinds & {"array", "object"} or (is_form and "array" in kinds)
        between = _SEPARATORS.get(slot.style, "commas")
        note = f"Several values are written as one text, with {between} between them"
    if is_as_written:
        return slot
    return replace(slot, schema=_with_description({"type": "string"}, slot.schema.get("description"), note))


def _template(slots: Iterable[RequestParameter], where: str) -> Mapping[str, Json]:
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
        return own[0].text if self.is_whole else _template(own, "body")


def _body_of(api: Api, operation: Operation, schemas: Schemas) -> Body | None:
    words = api.follow(operation.words.get("requestBody"))
    content = as_object(words.get("content"))
    if not content:
        return None
    written = _chosen(content)
    media = _media_type(written)
    is_required = words.get("required") is True
    if _is_text(media):
        schema = _with_description({"type": "string"}, words.get("description"), f"The body, as {media}")
        return Body(media, (RequestParameter("body", "body", schema, is_required),), is_whole=True)
    # The body's properties become parameters, so what they hold is one level further down.
    schema = schemas.expand(as_object(content[written]).get("schema"), deeper=1)
    properties, kinds = as_object(schema.get("properties")), _types_of(schema)
    if (
        "object" in kinds
        and "anyOf" not in schema
        and schema.get("additionalProperties", False) is False
        and 0 < len(properties) <= _MAX_PROPERTIES
        and all(_is_wire_name(name) for name in properties)
    ):
        required = as_list(schema.get("required"))
        slots = [RequestParameter("body", name, as_object(one), name in required) for name, one in properties.items()]
        return Body(media, tuple(slots), is_whole=False)
    note = "The body"
    if media == FORM:
        schema["type"], note = "object", "The fields of the form"
    elif "string" in kinds or not (kinds or "anyOf" in schema):
        # The primitive sends text as it is, so that a tool can send any text.
        note = "The body; a text is sent as it is, so write it as JSON, in quotation marks"
    whole = _with_description(schema, as_text(words.get("description")) or schema.get("description"), note)
    return Body(media, (RequestParameter("body", "body", whole, is_required),), is_whole=True)


def _accepted(api: Api, operation: Operation) -> JsonObject:
    """Return the header that asks for the media type an operation's success has, JSON where there is a choice."""
    for status, node in as_object(operation.words.get("responses")).items():
        media = [_media_type(written) for written in as_object(api.follow(node).get("content"))]
        if status.startswith("2") and media:
            best = next(filter(_is_json, media), media[0])
            return {"Accept": best} if _is_wire_name(best) and "*" not in best and best.isascii() else {}
    return {}


def _chosen(content: JsonObject) -> str:
    for fits in (lambda media: media == JSON, _is_json, lambda media: media == FORM, _is_text):
        for written in content:
            if fits(_media_type(written)) and _is_wire_name(written):
                return written
    kinds = ", ".join(written[:60] for written in list(content)[:3])
    raise Unsupported(f"its body is {kinds}, which an api tool cannot send", "Write a script for this operation.")


def _media_type(media: str) -> str:
    return media.partition(";")[0].strip().lower()


def _is_json(media: str) -> bool:
    return media in _ANY_JSON or media == "text/json" or media.endswith("+json")


def _is_text(media: str) -> bool:
    return media.startswith("text/") or media in _TEXTS or media.endswith(("+xml", "+yaml"))


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


def _credentials_of(api: Api, operation: Operation, prefix: str, auth: JsonObject) -> Credentials:
    """Return the first way to authenticate that the words of an api tool can say; `auth` where none is asked for."""
    ways = as_list(operation.words.get("security", api.root.get("security")))
    if not ways:
        return Credentials(auth)
    for way in ways:
        if (found := _expressed(api, list(as_object(way)), _variable_name(prefix))) is not None:
            return found
    names = sorted({name for way in ways for name in as_object(way)})
    raise Unsupported(
        f"it asks for {', '.join(names)[:200]}, which an api tool cannot give", "Write a script for this operation."
    )


def _expressed(api: Api, names: list[str], prefix: str) -> Credentials | None:
    """Return the credentials for schemes that are all asked for at once."""
    defined = as_object(as_object(api.root.get("components")).get("securitySchemes"))
    schemes = {name: api.follow(node) for name, node in defined.items()}
    is_only_key = sum(scheme.get("type") == "apiKey" for scheme in schemes.values()) < 2  # noqa: PLR2004 - not several
    auth: JsonObject = {}
    headers: dict[str, Json] = {}
    query: dict[str, Json] = {}
    for name in names:
        # The only key of a document is `API_KEY`; several have the names of their schemes.
        key = "" if is_only_key else _snake(name).upper()
        word = _auth(schemes.get(name, {}), f"{prefix}_{key or 'API_KEY'}", prefix)
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
            is_name = _is_header(name) if place == "header" else _is_wire_name(name)
            return {"type": "api_key", "key": f"${{{key}}}", "name": name, "in": place} if is_name else {}
        case ("apiKey", _, "cookie") if _is_header(name := as_text(scheme.get("name"))):
            return {"type": "api_key", "key": f"{name}=${{{key}}}", "name": "Cookie", "in": "header"}
        case _:
            return {}


_MAX_DESCRIPTION = 400
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
    api = _read_api(text, what=what)
    name = _snake(prefix)[:_MAX_PREFIX].strip("_") or _short_name(api.title)
    options = _ImportOptions(name, base_url, frozenset(only), auth or {})
    operations = tuple(api.operations())
    # Names are given before operations are chosen, so that they never depend on the choice.
    by_id = dict(zip(_tool_ids(options.prefix, (each.name for each in operations)), operations, strict=True))
    known = {tool_id: {tool_id, each.name, each.place} for tool_id, each in by_id.items()}
    if unknown := sorted(options.only.difference(*known.values())):
        hint = did_you_mean(unknown[0], set().union(*known.values()))
        raise InvalidRequest(
            f"{what} has no operation {unknown[0]!r}.",
            suggestion=f"{hint}Name operations by operationId or as `GET /path`.",
            unknown=list(unknown),
        )
    manifests: list[JsonObject] = []
    skipped: list[Issue] = []
    for tool_id, operation in by_id.items():
        if options.only and options.only.isdisjoint(known[tool_id]):
            continue
        try:
            manifests.append(_manifest(api, operation, tool_id, options))
        except Unsupported as fault:
            skipped.append(Issue(operation.place[:_MAX_PLACE], fault.reason, fault.fix, "warning"))
    return OpenApiImport(tuple(manifests), tuple(skipped))


def _manifest(api: Api, operation: Operation, tool_id: str, options: _ImportOptions) -> JsonObject:
    words = operation.words
    if words.get("deprecated") is True and not options.only:
        raise Unsupported("it is deprecated", "Name it in `only` to import it all the same.")
    if operation.method == "trace":
        raise Unsupported("TRACE is not a method of api tools", "Leave it out.")
    credentials = _credentials_of(api, operation, options.prefix, options.auth)
    slots, body, parameters = _shape(api, operation, credentials)
    in_path = {slot.wire: slot.text_in_path for slot in slots if slot.where == "path"}
    config: dict[str, Json] = {
        "method": operation.method.upper(),
        "url_template": _server_url(api, operation, options.base_url) + _path_template(operation.path, in_path),
        "query": {**_template(slots, "query"), **credentials.query},
        "headers": {
            **_accepted(api, operation),
            **(body.headers if body else {}),
            **_template(slots, "header"),
            **credentials.headers,
        },
        "auth": credentials.auth,
    }
    config = {word: value for word, value in config.items() if value}
    tags = [name for tag in as_list(words.get("tags")) if isinstance(tag, str) and (name := _snake(tag)[:40])]
    manifest: JsonObject = {
        "tool_id": tool_id,
        "tool_type": "api",
        "executor": "http_client",
        "version": _semantic(as_object(api.root.get("info")).get("version")),
        "description": _sentence(words.get("summary"), words.get("description"), limit=_MAX_DESCRIPTION)
        or f"{operation.place} of {_sentence(api.title, limit=80) or options.prefix}",
        "category": options.prefix,
        "tags": list(dict.fromkeys(tags))[:_MAX_TAGS],
        "config": {**config, "body_template": body.template(slots)} if body else config,
        "parameters": parameters,
    }
    if len(compact(manifest)) > MAX_MANIFEST_BYTES:
        raise Unsupported("its address and names are longer than a manifest may be", "Write this tool by hand.")
    return manifest


def _shape(
    api: Api, operation: Operation, credentials: Credentials
) -> tuple[tuple[RequestParameter, ...], Body | None, JsonObject]:
    """Return the slots of an operation, its body and the schema of its parameters, at the depth that fits."""
    for depth in _DEPTHS:
        try:
            schemas = Schemas(api, depth)
            declared = [slot for slot in _slots_of(api, operation, schemas) if not credentials.carries(slot)]
            body = _body_of(api, operation, schemas)
        except SchemaTooLarge:
            continue
        slots = _named((*declared, *(body.slots if body else ())))
        properties: dict[str, Json] = {slot.name: slot.schema for slot in slots}
        required = [slot.name for slot in slots if slot.is_required]
        parameters: JsonObject = {"type": "object", "properties": properties, "additionalProperties": False}
        parameters = {**parameters, "required": required} if required else parameters
        if len(compact(parameters)) <= MAX_SCHEMA_BYTES and not schema_faults(parameters, "parameters"):
            return slots, body, parameters
    raise Unsupported("its parameters are more than a tool can describe", "Write this tool by hand.")
