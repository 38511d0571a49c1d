"""The shape of `commands.json`. Only type checkers and the generator read this module."""

from __future__ import annotations

from typing import NotRequired, TypedDict


class OptionRow(TypedDict):
    """One option or argument of a command."""

    field: str
    input: str
    help: str
    flags: NotRequired[list[str]]
    """Absent for an argument."""
    metavar: NotRequired[str]
    required: NotRequired[bool]
    many: NotRequired[bool]
    value: NotRequired[bool | str]
    """What a flag sets its field to."""
    default: NotRequired[str | int]
    local: NotRequired[bool]
    """Whether only the command line needs it."""


class CommandRow(TypedDict):
    """One command."""

    path: str
    help: str
    run: str
    """The function that carries it out: a module of this package, and a name in it."""
    options: list[OptionRow]
    aliases: list[str]
    wire: NotRequired[list[str]]
    """The verb that it calls, and the action if the verb has several."""
    about: NotRequired[str]
    """More help, below the options."""
    everyday: NotRequired[str]
    """The name by which the first page of the help lists it."""
    asks: NotRequired[bool]
    """Whether the owner may be asked for an approval meanwhile."""
    has_project: NotRequired[bool]
    """Whether it takes `--project`."""
    has_json: NotRequired[bool]
    """Whether it takes `--json`."""


class CommandTable(TypedDict):
    """All commands, and the groups with a line about each."""

    groups: dict[str, str]
    commands: list[CommandRow]
