"""What every view is drawn with: data to stdout, talk to stderr, and issues a person can act on."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from shutil import get_terminal_size

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.search.words import stem
from kiwi_mcp.surfaces.cli.terminal import shown

_WORD = re.compile(r"[^\W_]+")
# A full stop within a number, a name or an abbreviation such as `e.g.` ends nothing.
_SENTENCE_END = re.compile(r"(?<!\b[a-zA-Z])(?<!\betc)[.!?](?=\s+[A-Z\d`\"'(])")


@dataclass(frozen=True, slots=True)
class Screen:
    """Where data goes: as it is into a pipe or where raw text is wanted, safe on a terminal."""

    is_raw: bool = False

    def data(self, text: str) -> None:
        """Write data."""
        sys.stdout.write((text if self.is_raw or not sys.stdout.isatty() else shown(text)) + "\n")
        sys.stdout.flush()

    def line(self, text: str, marks: Iterable[str] = ()) -> None:
        """Write a line of a table; what a terminal has no room for is cut, and forms of the marked words stand out."""
        if not sys.stdout.isatty():
            self.data(text)
            return
        whole = fitted(shown(text), get_terminal_size().columns)
        sys.stdout.write((whole if os.environ.get("NO_COLOR") else strong(whole, marks)) + "\n")
        sys.stdout.flush()

    def json(self, value: Json) -> None:
        """Write a value as JSON for people."""
        self.data(json.dumps(value, ensure_ascii=False, indent=2))


def fitted(text: str, width: int) -> str:
    """Return a line that is no longer than a width, with a sign where it was cut."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)].rstrip()}…"


def strong(text: str, marks: Iterable[str]) -> str:
    """Return a text in which some words stand out on a terminal, in whichever form they are written."""
    stems = {stem(word) for word in marks}
    return _WORD.sub(lambda one: f"\x1b[1m{one[0]}\x1b[0m" if stem(one[0].lower()) in stems else one[0], text)


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    line = text.strip().partition("\n")[0]
    return line[: found.end()].rstrip() if (found := _SENTENCE_END.search(line)) else line


def talk(text: str) -> None:
    """Write something a person should read and a program should not."""
    sys.stderr.write(shown(text) + "\n")


def issue_text(issue: JsonObject) -> str:
    """Return an issue with its place, its reason and its fix."""
    line = f" (line {issue['line']})" if issue.get("line") else ""
    place = as_text(issue.get("place"))
    mark = "!" if issue.get("severity") == "warning" else "✗"
    fault = f"  {mark} {place + ': ' if place else ''}{as_text(issue.get('reason'))}{line}"
    return f"{fault}\n      fix: {as_text(issue.get('fix'))}"


def show_warnings(content: JsonObject) -> None:
    """Tell what the owner should know of an answer."""
    for warning in as_list(content.get("warnings")):
        talk(issue_text(warning) if isinstance(warning, Mapping) else f"warning: {text_of(warning)}")


def show_message(content: JsonObject, screen: Screen) -> None:
    """Show an answer that is a sentence."""
    show_warnings(content)
    screen.data(as_text(content.get("message")) or json.dumps(content, ensure_ascii=False))
    for word in ("path", "trash_path", "signature"):
        if value := as_text(content.get(word)):
            talk(f"  {word}: {value}")
    for name in as_list(content.get("created")):
        talk(f"  + {text_of(name)}")
    for issue in as_list(content.get("skipped")):
        talk(issue_text(as_object(issue)))
    if following := as_text(content.get("next")):
        talk(f"hint: {following}")
