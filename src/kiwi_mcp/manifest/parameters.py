"""Parameters and outputs: the ways an author may declare them, as one JSON Schema, and the validation of values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidArguments, TooLarge
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import BAD_TEXT, is_bad_text, join
from kiwi_mcp.manifest.json_schema import faults, schema_faults, text_of_schema
from kiwi_mcp.manifest.names import did_you_mean

MAX_BYTES = 8_000_000
MAX_DEPTH = 64
_SMALL_SCHEMA = 1_500
"""The longest schema, in characters, that a refusal contains."""
MAX_INTEGER = 2**53 - 1
"""The largest number that every JSON reader keeps exactly."""

TYPES: Mapping[str, str] = {
    "string": "string", "str": "string", "text": "string",
    "integer": "integer", "int": "integer",
    "number": "number", "float": "number", "double": "number",
    "boolean": "boolean", "bool": "boolean",
    "array": "array", "list": "array", "tuple": "array", "set": "array",
    "object": "object", "dict": "object", "mapping": "object", "map": "object", "json": "object",
    "null": "null", "none": "null", "any": "",
}  # fmt: skip
"""Spellings of types in the list form; `any` is no type at all."""

_BOUNDS: Mapping[str, tuple[str, str]] = {"string": ("minLength", "maxLength"), "array": ("minItems", "maxItems")}
_OWN_WORDS = {"name", "type", "required", "min", "max", "nullable"}
_NOT_IN_NAMES = lazy_pattern(r"[\s=]")
_SCHEMA_WORDS = {
    "title", "description", "default", "enum", "const", "examples", "format", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minLength", "maxLength", "items", "prefixItems", "minItems",
    "maxItems", "uniqueItems", "contains", "properties", "additionalProperties", "patternProperties", "propertyNames",
    "minProperties", "maxProperties", "anyOf", "oneOf", "allOf", "not", "$ref", "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
_ONLY_IN_SCHEMAS = {
    "properties", "additionalProperties", "patternProperties", "$defs", "$ref", "$schema", "allOf", "anyOf", "oneOf",
}  # fmt: skip
_COMPOSED = {"$ref", "allOf", "anyOf", "oneOf", "if"}
_LIST_OF = lazy_pattern(r"(?:list|array|tuple|set)\s*[\[<]\s*(.+?)\s*[\]>]", re.ASCII)


def to_schema(declared: Json, place: str = "parameters") -> tuple[JsonObject, tuple[Issue, ...]]:
    """Return a list of parameters, a mapping of them or a JSON Schema as one closed schema, with its faults."""
    match declared:
        case None:
            return _closed({}), ()
        case Mapping() if _is_schema(declared):
            return _closed(declared), ()
        case Mapping():
            named: Sequence[Json] = [
                {"name": name, **(spec if isinstance(spec, Mapping) else {"type": spec})}
                for name, spec in declared.items()
            ]
            places = [join(place, name) for name in declared]
        case str() | bool() | int() | float():
            issue = Issue(place, "is neither a list of parameters nor a JSON Schema", "Write a list of `name`, `type`.")
            return _closed({}), (issue,)
        case _:
            named = declared
            places = [join(place, index) for index in range(len(named))]
    issues: list[Issue] = []
    return _closed(_from_list(named, places, issues)), tuple(issues)


def _is_schema(declared: JsonObject) -> bool:
    return declared.get("type") == "object" or any(
        word in declared and not (word == "properties" and "name" in as_object(declared[word]))
        for word in _ONLY_IN_SCHEMAS
    )


def _closed(schema: JsonObject) -> JsonObject:
    """Return a schema of an object that refuses what it does not declare, unless it says otherwise."""
    closed = {word: value for word, value in schema.items() if word not in {"$schema", "$id"}}
    closed.setdefault("type", "object")
    if "additionalProperties" not in closed and "unevaluatedProperties" not in closed:
        # A composed schema declares properties in its parts, which `additionalProperties` does not see.
        closed["unevaluatedProperties" if _COMPOSED & closed.keys() else "additionalProperties"] = False
    return closed


def _from_list(named: Sequence[Json], places: Sequence[str], issues: list[Issue]) -> JsonObject:
    properties: dict[str, Json] = {}
    required: list[Json] = []
    for spec, place in zip(named, places, strict=True):
        name = spec.get("name") if isinstance(spec, Mapping) else None
        if not isinstance(spec, Mapping) or not isinstance(name, str) or not name or not name.isprintable():
            issues.append(Issue(place, "has no `name`", "Give each parameter a `name` and a `type`."))
            continue
        if _NOT_IN_NAMES.search(name):
            issues.append(Issue(place, f"the name {name!r} holds a space or `=`", "Use letters, digits, `_` and `-`."))
            continue
        if name in properties:
            issues.append(Issue(place, f"the parameter {name!r} is declared twice", "Keep one of them."))
            continue
        properties[name] = _property(spec, place, issues)
        if _flag(spec, "required", place, issues):
            required.append(name)
    schema: dict[str, Json] = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


def _property(spec: JsonObject, place: str, issues: list[Issue]) -> JsonObject:
    schema: dict[str, Json] = {}
    kind = _type(spec.get("type", "any"), join(place, "type"), schema, issues)
    low, high = _BOUNDS.get(kind, ("minimum", "maximum"))
    for word, value in spec.items():
        if word in _SCHEMA_WORDS:
            schema[word] = value
        elif word in {"min", "max"}:
            schema[low if word == "min" else high] = value
        elif word not in _OWN_WORDS:
            hint = did_you_mean(word, _SCHEMA_WORDS | _OWN_WORDS)
            issues.append(Issue(join(place, word), f"{word!r} is not read", hint.strip() or "Remove it.", "warning"))
    if _flag(spec, "nullable", place, issues) and kind:
        schema["type"] = [kind, "null"]
    return schema


def _type(written: Json, place: str, schema: dict[str, Json], issues: list[Issue]) -> str:
    """Put a type as it was written into a schema, and return its own word; empty where any value will do."""
    words = [part.strip() for part in written.split("|")] if isinstance(written, str) else as_list(written)
    kinds: list[Json] = []
    for word in words:
        if not isinstance(word, str):
            issues.append(Issue(place, f"{word!r} is not a type", f"Choose one of {', '.join(TYPES)}."))
        elif (found := _LIST_OF.fullmatch(word.lower())) is not None:
            inner: dict[str, Json] = {}
            _type(found.group(1), place, inner, issues)
            schema["items"] = inner
            kinds.append("array")
        elif word.lower() not in TYPES:
            hint = did_you_mean(word.lower(), TYPES)
            issues.append(Issue(place, f"{word!r} is not a type", f"{hint}Choose one of {', '.join(TYPES)}."))
        elif TYPES[word.lower()]:
            kinds.append(TYPES[word.lower()])
    if not words:
        issues.append(Issue(place, "is not a type", f"Choose one of {', '.join(TYPES)}."))
    if kinds:
        schema["type"] = kinds[0] if len(kinds) == 1 else kinds
    return str(kinds[0]) if len(kinds) == 1 else ""


def _flag(spec: JsonObject, word: str, place: str, issues: list[Issue]) -> bool:
    value = spec.get(word, False)
    if not isinstance(value, bool):
        issues.append(Issue(join(place, word), f"{value!r} is not true or false", "Write `true` or `false`."))
        return False
    return value


def accept(tool_id: str, schema: JsonObject, given: JsonObject, *, max_bytes: int = MAX_BYTES) -> JsonObject:
    """Return parameters with defaults, or refuse them with every fault listed; nothing is converted."""
    issues: list[Issue] = []
    copied: Json = _Weight(tool_id, max_bytes).copy(given, "", 0, issues)
    if issues:
        raise InvalidArguments(tool_id, issues)
    try:  # most schemas have no default anywhere, which their text shows at once
        has_defaults = '"default"' in text_of_schema(schema)
    except ValueError:  # an invalid schema, which is reported when the values are validated
        has_defaults = True
    if has_defaults:
        copied = _filled(schema, copied, schema, 0)
    if found := faults(schema, copied):
        raise InvalidArguments(tool_id, found, schema if len(text_of_schema(schema)) <= _SMALL_SCHEMA else None)
    return cast("JsonObject", copied)  # a copy of the object that was given


class _Weight(Struct):
    """Copies JSON values, adding up their size, so that nothing too large or not JSON goes further."""

    tool_id: str
    limit: int
    size: int = 0

    def copy(self, value: Json, place: str, depth: int, issues: list[Issue]) -> Json:
        self.size += 1
        if self.size > self.limit:
            raise TooLarge(f"The parameters for {self.tool_id!r}", size=None, limit=self.limit)
        if depth > MAX_DEPTH:
            issues.append(Issue(place, f"nested more than {MAX_DEPTH} levels deep", "Flatten it."))
            return None
        match value:
            case str():
                return self.text(value, place, issues)
            case Mapping():
                copied: dict[str, Json] = {}
                for name, inner in value.items():
                    inside = f"{place}.{name}" if place else name
                    copied[self.text(name, place, issues)] = self.copy(inner, inside, depth + 1, issues)
                return copied
            case bool() | None:
                return value
            case int() if abs(value) > MAX_INTEGER:
                issues.append(Issue(place, "is a larger number than JSON keeps exactly", "Send it as text."))
                return None
            case float() if not math.isfinite(value):
                issues.append(Issue(place, f"{value} is not a JSON number", "Send a finite number."))
                return None
            case int() | float():
                return value
            case list() | tuple():
                return [self.copy(inner, join(place, index), depth + 1, issues) for index, inner in enumerate(value)]
            case _:
                issues.append(Issue(place, f"a {type(value).__name__} is not a JSON value", "Send a JSON value."))
                return None

    def text(self, value: str, place: str, issues: list[Issue]) -> str:
        if "\0" in value or (not value.isascii() and is_bad_text(value)):
            issues.append(Issue(place, BAD_TEXT, "Remove it."))
            self.size += len(value)
        else:
            self.size += len(value) if value.isascii() else len(value.encode())
        if self.size > self.limit:
            raise TooLarge(f"The parameters for {self.tool_id!r}", size=None, limit=self.limit)
        return value


def _filled(schema: Json, value: Json, root: JsonObject, depth: int) -> Json:
    """Return a value with the defaults of absent properties, also in the objects and lists within it."""
    schema = _target(as_object(schema), root)
    if depth > MAX_DEPTH:
        return value
    if isinstance(value, Mapping):
        declared = as_object(schema.get("properties"))
        targets = {name: _target(as_object(inner), root) for name, inner in declared.items() if name not in value}
        whole = {**{name: one["default"] for name, one in targets.items() if "default" in one}, **value}
        return {name: _filled(declared.get(name), inner, root, depth + 1) for name, inner in whole.items()}
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [_filled(schema["items"], inner, root, depth + 1) for inner in value]
    return value


def _target(schema: JsonObject, root: JsonObject) -> JsonObject:
    """Return the schema that a local reference leads to, one step, with the words beside the reference on top."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    here: Json = root
    for step in reference[2:].split("/"):
        here = as_object(here).get(step.replace("~1", "/").replace("~0", "~"))
    return {**as_object(here), **{word: value for word, value in schema.items() if word != "$ref"}}


FORMATS = ("json", "text", "file")
"""The values of `format` in older manifests. `file` is the path of a file that the tool wrote, from the project."""


def is_old_form(outputs: JsonObject) -> bool:
    """Whether outputs are declared by `format` and `schema`; in a JSON Schema, `format` stands beside `type`."""
    return "format" in outputs and "type" not in outputs


def output_schema(outputs: JsonObject) -> JsonObject:
    """Return the schema of a result; empty where none is declared, or only the name of one."""
    declared = as_object(outputs.get("schema")) if is_old_form(outputs) else outputs
    return declared if isinstance(declared.get("type"), str) and not schema_faults(declared, "outputs") else {}


def output_faults(outputs: JsonObject, result: Json, project: Path) -> tuple[str, ...]:
    """Return how a result differs from what its author declares."""
    found = [f"{issue.place} {issue.reason}" for issue in faults(output_schema(outputs), result, place="result")]
    declared = outputs.get("format") if is_old_form(outputs) else None
    if declared in {"text", "file"} and not isinstance(result, str):
        found.append(f"result is not text, as `format: {declared}` says")
    elif declared == "file" and isinstance(result, str) and not _is_file(project, result):
        found.append("result is not the path of a file, as `format: file` says")
    return tuple(found)


def _is_file(project: Path, named: str) -> bool:
    try:
        path = (project / named.strip()).resolve()
        return path.is_relative_to(project.resolve()) and path.is_file()
    except (OSError, ValueError, RuntimeError):  # no name that a file can have, or a loop of links
        return False
