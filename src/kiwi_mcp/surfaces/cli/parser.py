"""The arguments of one command, parsed by `argparse` from a row of `commands.json`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, TypeAlias

from kiwi_mcp.surfaces.cli.help import UsageError, options_of

if TYPE_CHECKING:
    from kiwi_mcp.surfaces.cli.rows import CommandRow, OptionRow

Given: TypeAlias = Mapping[str, object]
"""The texts of each option that was typed, by its field."""
_AFTER_DASHES = "\0"
"""Marks a word that was typed after `--`, which is never an option; no argument can contain it."""
_NOT_PARSED = {"command", "parameters"}


class _Parser(argparse.ArgumentParser):
    def __init__(self, row: CommandRow) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self._path = row["path"]

    def error(self, message: str) -> NoReturn:
        # An optional argument without a value comes as a usage error too.
        raise UsageError(
            f"{message[:1].upper()}{message[1:]}.".replace(_AFTER_DASHES, ""),
            f"`kiwi {self._path} --help` shows how it is used.",
        )


def parse(row: CommandRow, words: Sequence[str]) -> Given:
    """Return the texts of each option; those of `parameters` and `command` are lists of words."""
    before, after = _divided(words)
    options = options_of(row)
    command = next((option for option in options if option["input"] == "command"), None)
    if command is None:
        before += [_AFTER_DASHES + word for word in after]
    parser = _Parser(row)
    for option in options:
        if option["input"] not in _NOT_PARSED:
            _add(parser, option)
    found, left = parser.parse_known_intermixed_args(before)
    given = {name: _plain(value) for name, value in vars(found).items() if value not in (None, [])}
    parameters = next((option for option in options if option["input"] == "parameters"), None)
    if parameters is not None:
        given[parameters["field"]] = _plain(left)
    elif left:
        parser.error(f"unknown argument{'s' * (len(left) > 1)}: {' '.join(left)}")
    if command is not None:
        given[command["field"]] = after
    return given


def _divided(words: Sequence[str]) -> tuple[list[str], list[str]]:
    if "--" not in words:
        return [*words], []
    place = words.index("--")
    return [*words[:place]], [*words[place + 1 :]]


def _add(parser: _Parser, option: OptionRow) -> None:
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


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value.removeprefix(_AFTER_DASHES) if isinstance(value, str) else value
