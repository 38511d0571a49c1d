"""Output of all views: data to stdout, messages and hints to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterable
from shutil import get_terminal_size

from msgspec import Struct

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.domain.safe_text import escape_controls
from kiwi_mcp.kernel import view

_WORD = lazy_pattern(r"[^\W_]+")
_MARK = lazy_pattern(r"^( *)(✓|!|✗|error:|warning:|hint:)(?= )", re.MULTILINE)
_COLOURS = {"✓": 32, "!": 33, "✗": 31, "error:": 31, "warning:": 33, "hint:": 36}


class Screen(Struct, frozen=True):
    """Where data goes: as it is into a pipe or where raw text is wanted, safe on a terminal."""

    is_raw: bool = False

    def data(self, text: str) -> None:
        """Write data."""
        is_shown = not self.is_raw and sys.stdout.isatty()
        sys.stdout.write((coloured(escape_controls(text)) if is_shown else text) + "\n")
        sys.stdout.flush()

    def line(self, text: str, marks: Collection[str] = ()) -> None:
        """Write a line of a table; cut what does not fit the terminal, and highlight the marked words."""
        if not sys.stdout.isatty():
            self.data(text)
            return
        whole = fitted(escape_controls(text), get_terminal_size().columns)
        sys.stdout.write((whole if os.environ.get("NO_COLOR") else coloured(strong(whole, marks))) + "\n")
        sys.stdout.flush()

    def json(self, value: Json) -> None:
        """Write a value as JSON for people."""
        self.data(json.dumps(value, ensure_ascii=False, indent=2))

    def show(self, items: Iterable[view.ViewItem]) -> None:
        """Write what a view yields."""
        for item in items:
            match item:
                case view.Data(text):
                    self.data(text)
                case view.TableRow(text, bold):
                    self.line(text, bold)
                case view.JsonData(value):
                    self.json(value)
                case view.Notice(text):
                    talk(text)
                case view.Hint(text):
                    talk(f"hint: {text}")


def fitted(text: str, width: int) -> str:
    """Return a line that is no longer than a width, with a sign where it was cut."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)].rstrip()}…"


def strong(text: str, marks: Collection[str]) -> str:
    """Return a text with some words highlighted on a terminal."""
    return _WORD.sub(lambda one: f"\x1b[1m{one[0]}\x1b[0m" if one[0] in marks else one[0], text) if marks else text


def coloured(text: str) -> str:
    """Return a text for a terminal with the marks ✓ ! ✗ and the words error, warning and hint in colour."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return _MARK.sub(lambda found: f"{found[1]}\x1b[{_COLOURS[found[2]]}m{found[2]}\x1b[0m", text)


def talk(text: str) -> None:
    """Write something a person should read and a program should not."""
    safe = escape_controls(text)
    sys.stderr.write((coloured(safe) if sys.stderr.isatty() else safe) + "\n")


def show_error(content: JsonObject, *, is_json: bool) -> None:
    """Show a refusal or a failure, with what to do next."""
    if is_json:
        Screen().json(content)
        return
    logs = as_object(content.get("logs"))
    for name in ("stdout", "stderr"):
        if printed := as_text(logs.get(name)).rstrip():
            talk(printed)
    Screen().show(view.warning_rows(as_list(content.get("warnings"))))
    talk(f"error: {as_text(content.get('message')) or as_text(content.get('error'))}")
    issues = [as_object(issue) for issue in as_list(content.get("issues"))]
    for issue in issues:
        talk(view.issue_text(issue))
    if (result := content.get("result")) is not None:
        talk(f"reply: {text_of(result)[:2000]}")
    if diff := as_text(content.get("diff")):
        talk(diff.rstrip())
    # What to do next as it is typed in a terminal; the suggestion itself is written for callers of any kind.
    hint, item = as_text(content.get("suggestion")), as_text(content.get("tool_id"))
    hint = hint.replace(f"create .ai/tools/{item}.yaml", f"write one: `kiwi new {item} --python`")
    if schema := as_object(content.get("parameters_schema")):
        needed = as_list(schema.get("required"))
        names = (f"{name}=…" if name in needed else f"[{name}=…]" for name in as_object(schema.get("properties")))
        hint = f"`kiwi run {' '.join([item, *names])}`; `kiwi load {item}` describes them."
    elif content.get("code") == "project_path_required":
        hint = "Change to a folder of your own, or name one: `--project FOLDER`. `kiwi init` makes a folder a project."
    if hint and hint not in [issue.get("fix") for issue in issues]:
        talk(f"hint: {hint}")
