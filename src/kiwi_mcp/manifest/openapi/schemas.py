"""Schemas that stand alone: references put in, OpenAPI's own words translated, and always looser, never stricter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact
from kiwi_mcp.manifest.openapi.document import Api
from kiwi_mcp.manifest.openapi.words import sentence
from kiwi_mcp.manifest.schema import schema_faults

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


class TooWide(Exception):
    """A schema that grows over the limit when its references are put in."""


@dataclass(slots=True)
class Schemas:
    """Expands the schemas of one tool, down to a depth, counting what it makes.

    What lies deeper, comes back to itself, or lives in another document accepts any value. A `default` becomes a
    sentence: sent along with an update, it would overwrite what the caller did not mention.
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
            raise TooWide
        words = as_object(node)
        if "$ref" in words:
            return self._referred(words, depth, seen)
        schema = _plain(words)
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
            if forms and all(_says_something(form) for form in forms):
                schema["anyOf"] = forms
        parts = [self._expand(part, depth, seen) for part in as_list(words.get("allOf"))]
        return _merged(schema, parts) if parts else schema

    def _object(self, words: JsonObject, depth: int, seen: tuple[str, ...]) -> dict[str, Json]:
        schema: dict[str, Json] = {}
        properties: dict[str, Json] = {
            name: self._expand(inner, depth, seen)
            for name, inner in as_object(words.get("properties")).items()
            if not self._is_read_only(inner)
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

    def _is_read_only(self, node: Json) -> bool:
        return as_object(node).get("readOnly") is True or self.api.follow(node).get("readOnly") is True


def types_of(schema: JsonObject) -> set[str]:
    """Return the types a schema names; empty where it names none."""
    written = schema.get("type")
    return {written} if isinstance(written, str) else {kind for kind in as_list(written) if isinstance(kind, str)}


def described(schema: JsonObject, *notes: Json) -> dict[str, Json]:
    """Return a schema whose description says more."""
    said = sentence(*notes, limit=MAX_DESCRIPTION)
    return {**schema, "description": said} if said else dict(schema)


def _plain(words: JsonObject) -> dict[str, Json]:
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
    return schema | _bounded(words) | _patterned(words) | _described(words)


def _typed(words: JsonObject) -> dict[str, Json]:
    kinds = sorted(types_of(words) & _TYPES)
    if kinds:
        return {"type": kinds[0] if len(kinds) == 1 else kinds}
    return {"type": "object"} if "properties" in words and "type" not in words else {}


def _bounded(words: JsonObject) -> dict[str, Json]:
    found = {word: words[word] for word in _NUMBERS if _is_number(words.get(word))}
    for exclusive, bound in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if words.get(exclusive) is True and bound in found:
            # In OpenAPI 3.0 it is a flag beside the bound.
            found[exclusive] = found.pop(bound)
    return found


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


def _says_something(schema: JsonObject) -> bool:
    return bool(schema.keys() - {"description"})


def _is_number(value: Json, least: float = -_MAX_NUMBER) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= _MAX_NUMBER
