"""Typed stubs of items, for programs that call them as functions."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping
from textwrap import shorten

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text

_TYPES = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_LONGEST, _DEPTH, _CHOICES = 200, 4, 20
_HEAD = "from typing import Any, Literal\ninputs: dict[str, Any] = {}\n"


def identifier(name: str) -> str:
    """Return a name as a program writes it: `my-tool` is `my_tool`."""
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"{found}_" if keyword.iskeyword(found) or found[:1].isdigit() or not found else found


def stubs_of(items: Mapping[str, tuple[str, JsonObject, JsonObject]]) -> str:
    """Return the declarations that a program is checked against.

    `items` has the dotted name of each function, with its description, its parameters and the schema of its result.
    """
    classes: dict[str, list[str]] = {"": []}
    for name, (description, parameters, result) in sorted(items.items()):
        space, _, function = name.rpartition(".")
        for end in range(space.count(".") + 1 if space else 0):
            classes.setdefault(".".join(space.split(".")[: end + 1]), [])
        classes[space].append(_function(function, description, parameters, result))
    lines = [_HEAD]
    for space in sorted(classes, key=lambda one: one.count(".") if one else -1, reverse=True):
        inner = [one for one in classes if one and one.rpartition(".")[0] == space]
        fields = [f"    {one.rpartition('.')[2]}: {_class(one)}" for one in inner]
        lines.append("\n".join([f"class {_class(space)}:", *fields, *classes[space], "    pass\n"]))
    return "\n".join([*lines, f"tools: {_class('')} = {_class('')}()\n"])


def prelude_of(names: Mapping[str, object]) -> str:
    """Return the code that defines the functions of the stubs: each hands its arguments to `_call`."""
    spaces: dict[str, list[str]] = {"": []}
    for name in sorted(names):
        space, _, function = name.rpartition(".")
        for end in range(space.count(".") + 1 if space else 0):
            spaces.setdefault(".".join(space.split(".")[: end + 1]), [])
        body = f"    async def {function}(self, **given):\n        return await _call({name!r}, given)"
        spaces[space].append(body)
    lines = ["\n".join([f"class {_class(space)}:", *functions, "    pass"]) for space, functions in spaces.items()]
    places = [f"tools{'.' if space else ''}{space} = {_class(space)}()" for space in sorted(spaces)]
    return "\n".join([*lines, *places, ""])


def _class(space: str) -> str:
    return f"_Tools_{space.replace('.', '__')}" if space else "_Tools"


def _function(name: str, description: str, parameters: JsonObject, result: JsonObject) -> str:
    required = {as_text(one) for one in as_list(parameters.get("required"))}
    declared = as_object(parameters.get("properties"))
    usable = {one: schema for one, schema in declared.items() if one.isidentifier() and not keyword.iskeyword(one)}
    ordered = sorted(usable, key=lambda one: one not in required)
    given = [f"{one}: {type_of(usable[one])}{'' if one in required else ' = ...'}" for one in ordered]
    # Other names can be passed with `**{"other-name": value}`.
    is_open = len(usable) < len(declared) or parameters.get("additionalProperties") not in {None, False}
    words = ["self", *(["*"] if given else []), *given, *(["**more: Any"] if is_open or not declared else [])]
    text = json.dumps(shorten(description, _LONGEST, placeholder=" …"))
    returned = type_of(result.get("schema", result)) if result else "Any"
    return f"    async def {name}({', '.join(words)}) -> {returned}:\n        {text}\n        ..."


def type_of(schema: Json, depth: int = 0) -> str:
    """Return the Python type of a JSON schema; what it cannot say is `Any`."""
    found = as_object(schema)
    choices = as_list(found.get("enum"))
    if choices and len(choices) <= _CHOICES and all(isinstance(one, str) and one.isprintable() for one in choices):
        return f"Literal[{', '.join(map(repr, choices))}]"
    kind = found.get("type")
    if isinstance(kind, list):
        each = {type_of({**found, "type": one}, depth) for one in kind}
        return "Any" if "Any" in each else " | ".join(sorted(each))
    if kind == "array":
        return f"list[{type_of(found.get('items'), depth + 1) if depth < _DEPTH else 'Any'}]"
    if kind == "object":
        return "dict[str, Any]"
    return _TYPES.get(as_text(kind), "Any")
