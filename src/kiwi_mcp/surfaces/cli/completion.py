"""Completion for bash, zsh and fish: commands, options, and the names of items in the folders nearby.

A shell calls `kiwi __complete WORDS…` at each Tab; the last word is the one being typed. It is answered from
`commands.json` and from file names, without the kernel.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kiwi_mcp.surfaces.cli.help import UsageError, find, options_of, table

if TYPE_CHECKING:
    from kiwi_mcp.domain.json import Json
    from kiwi_mcp.surfaces.cli.rows import CommandRow

_ITEM_FOLDERS = ("tools", "directives", "knowledge", "skills")
_MANIFESTS = frozenset({"tool.yaml", "tool.yml", "SKILL.md"})
_SUFFIXES = frozenset({".py", ".sh", ".js", ".ts", ".rb", ".yaml", ".yml", ".md", ".json"})
_MOST_FOLDERS = 2_000
"""How many folders are looked at; a key press must not wait for more."""
_NAMES = {"ITEM": _ITEM_FOLDERS, "TOOL": ("tools",), "SERVER": ("servers",)}
_SCRIPTS = {
    "bash": """_kiwi() {
    local IFS=$'\\n'
    COMPREPLY=($(kiwi __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _kiwi kiwi
""",
    "zsh": """#compdef kiwi
_kiwi() {
    local -a found
    found=("${(@f)$(kiwi __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n "$found" ]]; then compadd -a found; else _files; fi
}
compdef _kiwi kiwi
""",
    "fish": """function __kiwi
    set -l words (commandline -opc) (commandline -ct)
    kiwi __complete $words[2..-1] 2>/dev/null
end
complete -c kiwi -a '(__kiwi)'
""",
}
_HOW = {
    "bash": 'Add this line to ~/.bashrc: eval "$(kiwi completion bash)"',
    "zsh": 'Add this line to ~/.zshrc, after compinit: eval "$(kiwi completion zsh)"',
    "fish": "Write it to ~/.config/fish/completions/kiwi.fish",
}


def script(_: CommandRow, options: Mapping[str, Json]) -> int:
    """Print the script of a shell."""
    shell = str(options["shell"])
    if shell not in _SCRIPTS:
        raise UsageError(f"There is no completion for `{shell}`.", "Use bash, zsh or fish.")
    sys.stdout.write(_SCRIPTS[shell])
    if sys.stderr.isatty():
        sys.stderr.write(f"hint: {_HOW[shell]}\n")
    return 0


def complete(words: Sequence[str]) -> None:
    """Print each way to complete the last word, one a line."""
    *before, typed = words or [""]
    found = sorted({word for word in candidates(before) if word.startswith(typed)})
    # Options are offered once a dash is typed.
    shown = [word for word in found if typed.startswith("-") or not word.startswith("-")]
    sys.stdout.write("".join(f"{word}\n" for word in shown))


def candidates(before: Sequence[str]) -> Iterator[str]:
    """Yield the words that may follow others."""
    count = len(before)
    for row in table()["commands"]:
        names = [row["path"], *([row["everyday"]] if "everyday" in row else [])]
        for path in (name.split() for name in names):
            if path[:count] == [*before] and len(path) > count:
                yield path[count]
    if not before:
        return
    try:
        row, rest = find(before)
    except UsageError:
        return
    waiting = next((option for option in options_of(row) if rest[-1:] and rest[-1] in option.get("flags", ())), None)
    if waiting is not None and waiting["input"] != "flag":
        yield from _names(waiting.get("metavar", ""))
        return
    yield "--help"
    for option in options_of(row):
        if "flags" in option:
            yield from option["flags"]
        else:
            yield from _names(option.get("metavar", ""))


def _names(metavar: str) -> Iterator[str]:
    for space in _spaces():
        for folder in _NAMES.get(metavar, ()):
            yield from _items(os.path.join(space, folder))  # noqa: PTH118 - without pathlib


def _spaces() -> Iterator[str]:
    """Yield the `.ai` folders that a command would see: the nearest project's and the user's."""
    user = os.path.expanduser(os.environ.get("USER_SPACE") or "~/.ai")  # noqa: PTH111 - without pathlib
    folder = os.getcwd()  # noqa: PTH109 - the same
    while True:
        own = os.path.join(folder, ".ai")  # noqa: PTH118 - the same
        if os.path.isdir(own):  # noqa: PTH112 - the same
            yield own
            break
        if os.path.dirname(folder) == folder:  # noqa: PTH120 - the same
            break
        folder = os.path.dirname(folder)  # noqa: PTH120 - the same
    yield user


def _items(root: str) -> Iterator[str]:
    """Yield the names of the items in a folder: folders with a manifest, and single files."""
    for count, (folder, folders, files) in enumerate(os.walk(root)):
        if count > _MOST_FOLDERS:
            return
        folders[:] = [name for name in folders if not name.startswith(".")]
        if _MANIFESTS & {*files}:
            folders.clear()
            yield os.path.basename(folder)  # noqa: PTH119 - without pathlib
            continue
        for name in files:
            stem, suffix = os.path.splitext(name)  # noqa: PTH122 - the same
            if suffix in _SUFFIXES and not stem.startswith((".", "_")):
                yield stem
