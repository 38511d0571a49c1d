"""Parameters inferred from the function a Python tool is called by: names, annotations and defaults."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from kiwi_mcp.domain.json import Json, JsonObject

ENTRY_FUNCTIONS = ("main", "run", "execute")
"""The functions a Python tool may be called by, the first one present."""

_TYPES: Mapping[str, str] = {
    "str": "string", "Path": "string", "int": "integer", "float": "number", "bool": "boolean",
    "list": "array", "List": "array", "Sequence": "array", "Iterable": "array", "tuple": "array", "Tuple": "array",
    "set": "array", "dict": "object", "Dict": "object", "Mapping": "object", "None": "null",
}  # fmt: skip
_WHOLE_CALL = {"params", "parameters", "arguments", "inputs", "kwargs"}
_OPEN: JsonObject = {"type": "object", "properties": {}, "additionalProperties": True}


def parameters_of(tree: ast.Module, text: str) -> JsonObject:
    """Return the schema of the parameters of a file's entry function.

    A plain script, and a function that takes the whole call as one value, accept what they are given.
    """
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    entry = next((functions[name] for name in ENTRY_FUNCTIONS if name in functions), None)
    if entry is None:
        return _OPEN
    arguments = entry.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    if _takes_whole_call(entry.name, [argument.arg for argument in named]):
        return _OPEN
    if not named and arguments.kwarg is None and "argv" not in text and "argparse" not in text:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return _schema(arguments, named)


def _takes_whole_call(function: str, names: list[str]) -> bool:
    return (function == "execute" and names[:1] == ["params"]) or (len(names) == 1 and names[0] in _WHOLE_CALL)


def _schema(arguments: ast.arguments, named: list[ast.arg]) -> JsonObject:
    positional = [*arguments.posonlyargs, *arguments.args]
    padding: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*padding, *arguments.defaults, *arguments.kw_defaults]
    properties: dict[str, Json] = {}
    required: list[Json] = []
    for argument, default in zip(named, defaults, strict=True):
        properties[argument.arg] = _property(argument.annotation, default)
        if default is None:
            required.append(argument.arg)
    is_open = arguments.kwarg is not None or not named
    schema: JsonObject = {"type": "object", "properties": properties, "additionalProperties": is_open}
    return {**schema, "required": required} if required else schema


def _property(annotation: ast.expr | None, default: ast.expr | None) -> JsonObject:
    schema = dict(_type(annotation, 0))
    match default:
        case ast.Constant(value=None):
            return {**_nullable(schema), "default": None}
        case ast.Constant(value=str() | bool() | int() | float() as value):
            return {**schema, "default": value}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return {**schema, "default": -number}
        case ast.List(elts=[]):
            return {**schema, "default": []}
        case ast.Dict(keys=[]):
            return {**schema, "default": {}}
        case _:
            # Any other default is the function's own; the parameter is optional and Kiwi sends nothing for it.
            return schema


def _type(annotation: ast.expr | None, depth: int) -> JsonObject:
    if depth > 8:  # noqa: PLR2004 - nobody reads a deeper annotation
        return {}
    match annotation:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return {"type": _TYPES[name]} if name in _TYPES else {}
        case ast.Constant(value=None):
            return {"type": "null"}
        case ast.Constant(value=str() as text):
            return _quoted(text, depth)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _either([_type(left, depth + 1), _type(right, depth + 1)])
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name), slice=inner):
            return _generic(name, list(inner.elts) if isinstance(inner, ast.Tuple) else [inner], depth)
        case _:
            return {}


def _quoted(text: str, depth: int) -> JsonObject:
    try:
        return _type(ast.parse(text[:200], mode="eval").body, depth + 1)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {}


def _generic(name: str, inner: list[ast.expr], depth: int) -> JsonObject:
    match name:
        case "Optional":
            return _nullable(_type(inner[0], depth + 1))
        case "Union":
            return _either([_type(part, depth + 1) for part in inner])
        case "Literal":
            return {"enum": [value for part in inner for value in _literals(part)]}
        case "Annotated":
            texts = [part.value for part in inner[1:] if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            schema = _type(inner[0], depth + 1)
            return {**schema, "description": texts[0]} if texts else schema
        case _ if _TYPES.get(name) == "array" and len(inner) == 1 and (item := _type(inner[0], depth + 1)):
            return {"type": "array", "items": item}
        case _:
            return {"type": _TYPES[name]} if name in _TYPES else {}


def _literals(part: ast.expr) -> list[Json]:
    match part:
        case ast.Constant(value=None | str() | int() | float() as value):
            return [value]
        case _:
            return []


def _either(schemas: list[JsonObject]) -> JsonObject:
    if any(not schema for schema in schemas):
        return {}
    if len(schemas) == 2 and {"type": "null"} in schemas:  # noqa: PLR2004 - one type or null
        return _nullable(next((schema for schema in schemas if schema != {"type": "null"}), {"type": "null"}))
    return {"anyOf": list(schemas)}


def _nullable(schema: JsonObject) -> JsonObject:
    match schema.get("type"):
        case "null" | [*_, "null"]:
            return schema
        case str() as kind:
            return {**schema, "type": [kind, "null"]}
        case None if "enum" in schema:
            options = schema["enum"]
            return {**schema, "enum": [*(options if isinstance(options, list) else []), None]}
        case _:
            return schema if not schema else {"anyOf": [schema, {"type": "null"}]}
