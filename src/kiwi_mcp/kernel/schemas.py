"""The schema of a request as a model needs it, in as few words as it can be said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.kernel.requests import Request

_SILENT = {"title", "$defs", "additionalProperties", "maxLength", "minimum", "maximum"}
"""What a schema says to programs only: the kernel checks it and tells what is wrong, so a model need not pay for it."""


def input_schema(request: type[Request]) -> JsonObject:
    """Return the schema of a request as a model needs it: self-contained, without titles and null alternatives."""
    schema = request.model_json_schema()
    short = dict(_shorten_object(schema, as_object(schema.get("$defs", {}))))
    short.pop("description", None)  # the tool's own description says it better
    return short


def _shorten(node: Json, shared: JsonObject) -> Json:
    if isinstance(node, Mapping):
        return _shorten_object(node, shared)
    if isinstance(node, Sequence) and not isinstance(node, str):
        return [_shorten(part, shared) for part in node]
    return node


def _shorten_object(node: JsonObject, shared: JsonObject) -> JsonObject:
    if reference := as_text(node.get("$ref")):
        named = as_object(shared[reference.rpartition("/")[2]])
        return _shorten_object({**named, **{word: value for word, value in node.items() if word != "$ref"}}, shared)
    plain = {**node, **_only_choice(node)}
    return {word: _part(word, value, shared) for word, value in plain.items() if not _is_noise(word, value)}


def _part(word: str, value: Json, shared: JsonObject) -> Json:
    if word == "properties":  # its members are names of the request's own, which may be called `title`
        return {name: _shorten(part, shared) for name, part in as_object(value).items()}
    return value if word in {"default", "enum", "const"} else _shorten(value, shared)


def _only_choice(node: JsonObject) -> JsonObject:
    """Return what remains of `X or null`: an absent parameter says the same as null."""
    choices = [as_object(choice) for choice in as_list(node.get("anyOf"))]
    real = [choice for choice in choices if choice.get("type") != "null"]
    return {**real[0], "anyOf": None} if len(real) == 1 and len(choices) > 1 else {}


def _is_noise(word: str, value: Json) -> bool:
    # A parameter left out is understood as empty, zero or false, so only other defaults are worth a word.
    return word in _SILENT or (word in {"default", "anyOf"} and not value)
