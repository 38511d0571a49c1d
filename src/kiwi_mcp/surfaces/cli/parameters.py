"""From words on a command line to a tool's parameters."""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from kiwi_mcp.domain.errors import InvalidRequest, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_object

_READ_LIMIT = 32_000_000
_SPELLINGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_object(text: str) -> JsonObject:
    """Return the JSON object that is given as text, as `@file`, or as `-` for standard input."""
    try:
        value: Json = json.loads(_source(text))
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidRequest(
            f"That is not JSON: {error}.", suggestion="""Send an object such as '{"name": "Ada"}'."""
        ) from error
    if not isinstance(value, Mapping):
        raise InvalidRequest(
            "A JSON object is needed here.", suggestion="""Send an object such as '{"name": "Ada"}'."""
        )
    return value


def _source(text: str) -> str:
    if text == "-":
        return _limited(sys.stdin.read(_READ_LIMIT + 1))
    if text.startswith("@"):
        path = Path(text[1:])
        if not path.is_file():
            raise InvalidRequest(f"{path} is not a file.", suggestion="Name a file after the @.")
        with path.open(encoding="utf-8") as file:
            return _limited(file.read(_READ_LIMIT + 1))
    return text


def _limited(text: str) -> str:
    if len(text) > _READ_LIMIT:
        raise TooLarge("The input", size=None, limit=_READ_LIMIT)
    return text


def from_words(words: Sequence[str], schema: JsonObject) -> JsonObject:
    """Return parameters from `name=value`, `--name value`, `--name=value` and `name:=json`, by the tool's own types."""
    properties = as_object(schema.get("properties"))
    given: dict[str, Json] = {}
    flags = {name for name, inner in properties.items() if as_object(inner).get("type") == "boolean"}
    for name, text, is_json in _pairs(words, flags):
        declared = as_object(properties.get(name))
        if text is None:
            given[name] = _flag(name, declared)
        else:
            given[name] = _json(name, text) if is_json else typed(name, text, declared)
    return given


def _flag(name: str, schema: JsonObject) -> bool:
    if schema.get("type", "boolean") != "boolean":
        raise InvalidRequest(f"--{name} needs a value.", suggestion=f"Write --{name} VALUE, or {name}=VALUE.")
    return True


def _pairs(words: Sequence[str], flags: AbstractSet[str]) -> Iterator[tuple[str, str | None, bool]]:
    """Give each parameter's name, its text if it has one, and whether that is JSON; a flag needs no text."""
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        name, mark, value = word.removeprefix("--").partition("=")
        is_flag = word.startswith("--")
        if mark and name.endswith(":"):
            yield name[:-1], value, True
        elif mark:
            yield _name(name, is_flag), value, False
        elif is_flag:
            parameter = _name(name, is_flag)
            is_alone = not waiting or (parameter in flags and waiting[0].lower() not in _SPELLINGS)
            yield parameter, None if is_alone else waiting.popleft(), False
        else:
            raise InvalidRequest(
                f"{word!r} is not a parameter.", suggestion="Write name=value, --name value, or name:=json."
            )


def _name(text: str, is_flag: bool) -> str:
    return text.replace("-", "_") if is_flag else text


def _json(name: str, text: str) -> Json:
    try:
        value: Json = json.loads(text)
    except ValueError as error:
        raise InvalidRequest(
            f"{name}: {text!r} is not JSON.", suggestion=f"Write {name}=text for plain text."
        ) from error
    return value


def typed(name: str, text: str, schema: JsonObject) -> Json:
    """Return the value a text stands for where the schema wants something other than text."""
    wanted = schema.get("type")
    types = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, list) else ["string"]
    if "string" in types:
        return text
    if "boolean" in types and text.lower() in _SPELLINGS:
        return _SPELLINGS[text.lower()]
    try:
        value: Json = json.loads(text)
    except ValueError:
        if {"array", "object"} & {*types}:
            example = "'[1, 2]'" if "array" in types else """'{"a": 1}'"""
            raise InvalidRequest(
                f"{name}: {text!r} is not JSON.", suggestion=f"Write it as JSON, such as {name}={example}."
            ) from None
        return text  # the kernel says what is wrong with it, in the tool's own words
    return value
