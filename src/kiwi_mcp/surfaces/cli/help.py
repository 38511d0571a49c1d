"""The help pages, and the command that the words on a command line name; imports next to nothing.

Everything comes from `commands.json`, so a page is printed before the kernel or a parser is imported.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kiwi_mcp.surfaces.cli.rows import CommandRow, CommandTable, OptionRow

    Match = tuple[tuple[int, int, int], CommandRow, list[str]]

HELP = ("--help", "-h")
PROJECT: OptionRow = {
    "field": "project", "input": "text", "flags": ["--project", "-p"], "metavar": "FOLDER", "local": True,
    "help": "The project's folder; the nearest with an .ai folder otherwise.",
}  # fmt: skip
JSON: OptionRow = {
    "field": "json", "input": "flag", "flags": ["--json"], "value": True, "local": True,
    "help": "Print the answer as JSON.",
}  # fmt: skip
_COLUMN = 30
_OTHERS = ("status", "list", "chat", "worker", "up", "serve", "help", "call", "completion", "version")
_ABOUT = "Kiwi: one place for your tools, and one interface through which models and programs use them."
_START = f"""{_ABOUT}

  kiwi setup                    use the MCP servers of your clients through Kiwi
  kiwi init                     create the .ai folder of this project, for tools of your own
  kiwi search WHAT YOU NEED     find a tool
  kiwi run ITEM name=value      run it
  kiwi doctor                   check this installation

`kiwi --help` lists all commands, `kiwi help` the guides.
"""
_tables: list[CommandTable] = []


class UsageError(Exception):
    """The command line cannot be understood; `suggestion` says what to type instead."""

    def __init__(self, message: str, suggestion: str) -> None:
        super().__init__(message)
        self.suggestion = suggestion


def table() -> CommandTable:
    """Return all commands and groups."""
    if not _tables:
        path = os.path.join(os.path.dirname(__file__), "commands.json")  # noqa: PTH118, PTH120 - without pathlib
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the same
            _tables.append(json.load(file))
    return _tables[0]


def show(words: Sequence[str]) -> bool:
    """Print the page that was asked for; False if a command was."""
    before = words[: words.index("--")] if "--" in words else words
    named = [word for word in before if word not in HELP]
    is_group = " ".join(words) in table()["groups"] and not any(_matches(words))
    if not is_group and len(named) == len(before):
        return False
    try:
        sys.stdout.write(_page(named))
    except UsageError:
        return False  # the command line is refused like any other one
    return True


def show_start() -> bool:
    """Print the first steps if nothing was done here yet; False if there is a state to show."""
    user = os.path.expanduser(os.environ.get("USER_SPACE") or "~/.ai")  # noqa: PTH111 - without pathlib
    if any(os.path.exists(f"{user}/{name}") for name in ("state/registry.db", "registry.yaml")):  # noqa: PTH110 - the same
        return False
    sys.stdout.write(_START)
    return True


def options_of(row: CommandRow) -> list[OptionRow]:
    """Return all options of a command, with those that most commands have."""
    common = [PROJECT] * bool(row.get("has_project")) + [JSON] * bool(row.get("has_json"))
    return [*row["options"], *common]


def find(words: Sequence[str]) -> tuple[CommandRow, list[str]]:
    """Return the command that words name, and the words that are left for it."""
    matches = [*_matches(words)]
    if not matches:
        raise _unknown(words)
    _, row, rest = max(matches, key=lambda match: match[0])
    return row, rest


def _matches(words: Sequence[str]) -> Iterator[Match]:
    for row in table()["commands"]:
        path = row["path"].split()
        if [*words[: len(path)]] == path:
            yield (len(path), 1, 1), row, [*words[len(path) :]]
    for row in table()["commands"]:
        for alias in row["aliases"]:
            parts = alias.split()
            names = [part for part in parts if part.islower() and not part.startswith("-")]
            flags = [part for part in parts if part.startswith("-")]
            is_longer = any(part.isupper() for part in parts)
            rest = [*words[len(names) :]]
            if [*words[: len(names)]] != names or not all(flag in rest for flag in flags):
                continue
            rest = [word for word in rest if word not in flags]
            has_word = any(_arguments(rest, names[0]))
            takes_words = any("flags" not in option for option in row["options"])
            if has_word if is_longer else takes_words or not has_word:
                yield (len(names), len(flags), int(is_longer)), row, rest


def _arguments(words: Sequence[str], name: str) -> Iterator[str]:
    """Yield the words that are neither flags nor the values of flags of the commands with a name."""
    called = [
        row for row in table()["commands"] if any(one.split()[0] == name for one in (row["path"], *row["aliases"]))
    ]
    options = [option for row in called for option in options_of(row) if option["input"] != "flag"]
    valued = {flag for option in options for flag in option.get("flags", ())}
    is_value = False
    for word in words:
        if not is_value and not word.startswith("-"):
            yield word
        is_value = not is_value and word in valued


def _unknown(words: Sequence[str]) -> UsageError:
    groups = table()["groups"]
    for count in (2, 1):
        group = " ".join(words[:count])
        if group in groups and len(words) >= count:
            given = " ".join(words[: count + 1])
            is_alone = len(words) == count or words[count].startswith("-")
            message = f"`kiwi {group}` needs a command." if is_alone else f"There is no command `kiwi {given}`."
            known = (row["path"] for row in table()["commands"] if row["path"].startswith(f"{group} "))
            return UsageError(message, f"{did_you_mean(given, known)}`kiwi {group} --help` lists its commands.")
    if words[0].startswith("-"):
        return UsageError(f"There is no option `{words[0]}` before a command.", "`kiwi --help` lists the commands.")
    names = {name.split()[0] for row in table()["commands"] for name in (row["path"], *row["aliases"])}
    inner = [row["path"] for row in table()["commands"] if row["path"].split()[-1] == words[0]]
    near = f"Did you mean `kiwi {inner[0]}`? " if inner else did_you_mean(words[0], sorted(names), "kiwi ")
    return UsageError(f"There is no command `{words[0]}`.", f"{near}`kiwi --help` lists the commands.")


def did_you_mean(word: str, known: Iterable[str], lead: str = "") -> str:
    """Return a hint that names a known word that differs in one letter, or in two that were exchanged."""
    for one in known:
        start = len(os.path.commonprefix([word, one]))  # noqa: RUF071 - letters are compared
        left, right = word[start:], one[start:]
        end = len(os.path.commonprefix([left[::-1], right[::-1]]))  # noqa: RUF071 - letters are compared
        left, right = left[: len(left) - end], right[: len(right) - end]
        if max(len(left), len(right)) <= 1 or (len(left) == 2 and left == right[::-1]):  # noqa: PLR2004 - two letters
            return f"Did you mean `{lead}{one}`? "
    return ""


def _page(words: list[str]) -> str:
    rows, groups = table()["commands"], table()["groups"]
    if not words or words[0].startswith("-"):
        lines = ["Usage: kiwi COMMAND [ARGUMENTS] [OPTIONS]\n\n", f"{_ABOUT}\n\nEveryday commands:\n"]
        lines += [_entry(row["everyday"], _first_sentence(row["help"])) for row in rows if "everyday" in row]
        lines.append("\nGroups (`kiwi GROUP --help` lists their commands):\n")
        lines += [_entry(name, text) for name, text in groups.items() if " " not in name and name not in _OTHERS]
        lines.append("\nOthers:\n")
        lines += [_entry(row["path"], _first_sentence(row["help"])) for row in rows if row["path"] in _OTHERS]
        lines.append("\n`kiwi COMMAND --help` shows the options of a command. Every command takes --json.\n")
        return "".join(lines)
    name = " ".join(words)
    if name in groups and not any(row["path"] == name for row in rows):
        inner = [row for row in rows if row["path"].startswith(f"{name} ")]
        return f"Usage: kiwi {name} COMMAND\n\n{groups[name]}\n\nCommands:\n{_list(inner, name)}"
    # An older name may mean several commands: all of them are listed.
    sharing = [row for row in rows if any(one.split()[:1] == words[:1] for one in row["aliases"])]
    if len(words) == 1 and len(sharing) > 1:
        return f"`kiwi {name}` stands for these commands:\n\n{_list(sharing)}"
    try:
        row, _ = find(words)
    except UsageError:
        if len(sharing) == 1:
            return _command_page(sharing[0])
        raise
    return _command_page(row)


def _list(rows: Sequence[CommandRow], group: str = "") -> str:
    """Return a line for each command, without the name of the group that they are in."""
    names = [" ".join([row["path"].removeprefix(group).strip(), *_metavars(row)]) for row in rows]
    return "".join(_entry(name, _first_sentence(row["help"])) for name, row in zip(names, rows, strict=True))


def _command_page(row: CommandRow) -> str:
    arguments = [option for option in row["options"] if "flags" not in option]
    lines = [" ".join(["Usage: kiwi", row["path"], *_metavars(row), "[OPTIONS]"]), f"\n\n{row['help']}\n"]
    if arguments:
        lines.append("\nArguments:\n")
        lines += [_entry(_metavar(option), option["help"]) for option in arguments]
    lines.append("\nOptions:\n")
    for option in options_of(row):
        if "flags" in option:
            flags = ", ".join(sorted(option["flags"], key=len))
            value = "" if option["input"] == "flag" else f" {option.get('metavar', '')}"
            default = f" [default: {option['default']}]" if option.get("default") is not None else ""
            lines.append(_entry(f"{flags}{value}", f"{option['help']}{default}"))
    lines.append(_entry("-h, --help", "Show this page."))
    if about := row.get("about"):
        lines.append(f"\n{about}\n")
    if inner := [one for one in table()["commands"] if one["path"].startswith(f"{row['path']} ")]:
        lines += ["\nCommands:\n", _list(inner, row["path"])]
    return "".join(lines)


def _metavars(row: CommandRow) -> Iterator[str]:
    for option in row["options"]:
        if "flags" not in option:
            name = _metavar(option)
            yield name if option.get("required") else f"[{name}]"


def _metavar(option: OptionRow) -> str:
    name = option.get("metavar", "")
    return f"{name}…" if option.get("many") and not name.endswith("…") else name


def _first_sentence(text: str) -> str:
    return text.partition(". ")[0].rstrip(".") + "."


def _entry(name: str, text: str) -> str:
    if len(name) > _COLUMN - 4:
        return f"  {name}\n{'':{_COLUMN}}{text}\n"
    return f"  {name:<{_COLUMN - 2}}{text}\n"
