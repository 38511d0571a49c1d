"""The arguments of a command, parsed by a row of `commands.json` and read as values; the parameters of a tool."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kiwi_mcp.domain.errors import InvalidRequest, NotFound, TooLarge
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.surfaces.cli.help import UsageError, did_you_mean, options_of

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow, OptionRow


_AFTER_DASHES = "\0"
"""Marks a word that was typed after `--`, which is never an option; no argument can contain it."""
_NOT_PARSED = {"command", "parameters"}
_READ_LIMIT = 32_000_000
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
_SPELLINGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


class _Parser(argparse.ArgumentParser):
    def __init__(self, row: CommandRow) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self._path = row["path"]

    def error(self, message: str, hint: str = "") -> NoReturn:
        raise UsageError(
            f"{message[:1].upper()}{message[1:]}.".replace(_AFTER_DASHES, ""),
            f"{hint}`kiwi {self._path} --help` shows how it is used.",
        )


def parse(row: CommandRow, words: Sequence[str]) -> Mapping[str, object]:
    """Return the texts of each option that was typed; those of `parameters` and `command` are lists of words."""
    place = words.index("--") if "--" in words else len(words)
    before, after = [*words[:place]], [*words[place + 1 :]]
    options = options_of(row)
    command = next((option for option in options if option["input"] == "command"), None)
    if command is None:
        before += [_AFTER_DASHES + word for word in after]
    parser = _Parser(row)
    for option in options:
        if option["input"] not in _NOT_PARSED:
            flags, dest = option.get("flags"), option["field"]
            if flags and option["input"] == "flag":
                parser.add_argument(*flags, dest=dest, action="store_const", const=option.get("value", True))
            elif flags:
                action = "append" if option.get("many") else "store"
                parser.add_argument(*flags, dest=dest, action=action, metavar=option.get("metavar"))
            elif option.get("many"):
                parser.add_argument(dest, nargs="*", metavar=option.get("metavar"))
            else:
                parser.add_argument(dest, nargs=None if option.get("required") else "?", metavar=option.get("metavar"))
    found, left = parser.parse_known_intermixed_args(before)
    given = {name: _plain(value) for name, value in vars(found).items() if value not in (None, [])}
    parameters = next((option for option in options if option["input"] == "parameters"), None)
    if parameters is not None:
        given[parameters["field"]] = _plain(left)
    elif left:
        hint = did_you_mean(left[0], (flag for option in options for flag in option.get("flags") or ()))
        if command is not None and not left[0].startswith("-"):
            hint = f"Put `--` before its command: `kiwi {row['path']} NAME -- {left[0]} …`. "
        parser.error(f"unknown argument{'s' * (len(left) > 1)}: {' '.join(left)}", hint)
    if command is not None:
        given[command["field"]] = after
    return given


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.removeprefix(_AFTER_DASHES) if isinstance(value, str) else value


def read(row: CommandRow, given: Mapping[str, object]) -> dict[str, Json]:
    """Return the value of each option that was typed, by its field; `given` has the texts."""
    values: dict[str, Json] = {}
    for option in options_of(row):
        field = option["field"]
        if field in given and field not in values:
            values[field] = _value(given[field], option)
    return values


def here() -> Path:
    """Return the current folder."""
    try:
        return Path.cwd()
    except FileNotFoundError as error:
        raise NotFound("The current folder no longer exists.", suggestion="Change to one that does.") from error


def _value(texts: object, option: OptionRow) -> Json:
    """Return the value of what was typed for an option: one text, several, or that a flag is set."""
    flag = option.get("flags", [option["field"]])[0]
    several = texts if isinstance(texts, list) else []
    match option["input"]:
        case "files":
            return {Path(name).name: _content(Path(name)) for name in several}
        case "pairs":
            return _named_values(several, flag)
    if isinstance(texts, list):
        return [_single(text, option["input"], flag) for text in texts]
    if isinstance(texts, str):
        return _single(texts, option["input"], flag)
    return texts if isinstance(texts, bool) else str(texts)


def _single(text: str, kind: str, flag: str) -> Json:
    match kind:
        case "number":
            try:
                return int(text)
            except ValueError:
                hint = f"Write {flag} 10, or see --help."
                raise UsageError(f"`{flag}` takes a number, not {text!r}.", hint) from None
        case "path":
            return str(here() / Path(text).expanduser())
        case "file":
            return {"name": Path(text).name, "text": _content(Path(text))}
        case "json":
            return read_object(text)
        case "commas":
            return [word.strip() for word in text.split(",") if word.strip()]
        case "variable" if _VARIABLE.fullmatch(text):
            # Only a text that looks like a name becomes one: a token given by mistake must not end up in a file.
            return f"${{{text}}}"
        case _:
            return text


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}.", suggestion="Name a readable text file.") from error


def _named_values(words: Sequence[str], flag: str) -> JsonObject:
    """Return NAME=VALUE words, or `Name: value` as headers are written elsewhere, as an object."""
    found: dict[str, Json] = {}
    for word in words:
        mark = "=" if "=" in word and (":" not in word or word.index("=") < word.index(":")) else ":"
        name, given, value = word.partition(mark)
        if not given or not name.strip():
            raise InvalidRequest(f"{flag} takes NAME=VALUE.", suggestion=f"Write {flag} NAME=VALUE.")
        found[name.strip()] = value.strip() if mark == ":" else value
    return found


def read_object(text: str) -> JsonObject:
    """Return the JSON object that is given as text, as `@file`, or as `-` for standard input."""
    fix = """Send an object such as '{"name": "Ada"}'."""
    is_read = text == "-" or text.startswith("@")
    try:
        if text == "-":
            text = sys.stdin.read(_READ_LIMIT + 1)
        elif is_read:
            path = Path(text[1:])
            if not path.is_file():
                raise InvalidRequest(f"{path} is not a file.", suggestion="Name a file after the @.")
            with path.open(encoding="utf-8") as file:
                text = file.read(_READ_LIMIT + 1)
        if is_read and len(text) > _READ_LIMIT:
            raise TooLarge("The input", size=None, limit=_READ_LIMIT)
        value: Json = json.loads(text)
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidRequest(f"That is not JSON: {error}.", suggestion=fix) from error
    if not isinstance(value, Mapping):
        raise InvalidRequest("A JSON object is needed here.", suggestion=fix)
    return value


def from_words(words: Sequence[str], schema: JsonObject) -> JsonObject:
    """Return parameters from `name=value`, `--name value`, `--name=value` and `name:=json`, by the tool's own types."""
    properties = as_object(schema.get("properties"))
    given: dict[str, Json] = {}
    flags = {name for name, inner in properties.items() if as_object(inner).get("type") == "boolean"}
    for name, text, is_json in _pairs(words, flags):
        declared = as_object(properties.get(name))
        if text is None:
            if declared.get("type", "boolean") != "boolean":
                raise InvalidRequest(f"--{name} needs a value.", suggestion=f"Write --{name} VALUE, or {name}=VALUE.")
            given[name] = True
        elif is_json:
            try:
                given[name] = json.loads(text)
            except ValueError as error:
                fix = f"Write {name}=text for plain text."
                raise InvalidRequest(f"{name}: {text!r} is not JSON.", suggestion=fix) from error
        else:
            given[name] = typed(name, text, declared)
    return given


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
            yield name.replace("-", "_") if is_flag else name, value, False
        elif is_flag:
            name = name.replace("-", "_")
            is_alone = not waiting or (name in flags and waiting[0].lower() not in _SPELLINGS)
            yield name, None if is_alone else waiting.popleft(), False
        else:
            hint = "Write name=value, --name value, or name:=json."
            raise InvalidRequest(f"{word!r} is not a parameter.", suggestion=hint)


def typed(name: str, text: str, schema: JsonObject) -> Json:
    """Return the value of a text if the schema wants a type other than text."""
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
