"""What a terminal shows of a response: lines for standard output, notices and hints for standard error."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec
from msgspec import UnsetType

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, compact, text_of
from kiwi_mcp.domain.patterns import lazy_pattern

# A full stop within a number, a name or an abbreviation such as `e.g.` ends nothing.
_SENTENCE_END = lazy_pattern(r"(?<!\b[a-zA-Z])(?<!\betc)[.!?](?=\s+[A-Z\d`\"'(])")


class Data(msgspec.Struct, frozen=True):
    """Text for standard output."""

    text: str


class TableRow(msgspec.Struct, frozen=True):
    """A line of a table, cut at the width of a terminal; the words in `bold` are highlighted."""

    text: str
    bold: tuple[str, ...] = ()


class JsonData(msgspec.Struct, frozen=True):
    """A value for standard output, as JSON for people."""

    value: Any


class Notice(msgspec.Struct, frozen=True):
    """Text for standard error."""

    text: str


class Hint(msgspec.Struct, frozen=True):
    """What to do next, for standard error."""

    text: str


ViewItem: TypeAlias = Data | TableRow | JsonData | Notice | Hint
View: TypeAlias = Callable[[Any], Iterable[ViewItem]]
"""Returns what a terminal shows of a response; it prints nothing itself."""


def issue_text(issue: JsonObject) -> str:
    """Return an issue with its place, its reason and its fix."""
    line = f" (line {issue['line']})" if issue.get("line") else ""
    place = as_text(issue.get("place"))
    mark = "!" if issue.get("severity") == "warning" else "✗"
    fault = f"  {mark} {place + ': ' if place else ''}{as_text(issue.get('reason'))}{line}"
    return f"{fault}\n      fix: {as_text(issue.get('fix'))}"


def count_text(number: Json, noun: str) -> str:
    """Return a number with its noun, such as `1 turn` or `2 turns`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def first_sentence(text: str) -> str:
    """Return the first sentence of a description."""
    line = text.strip().partition("\n")[0]
    return line[: found.end()].rstrip() if (found := _SENTENCE_END.search(line)) else line


def warning_rows(warnings: Iterable[Json] | UnsetType) -> Iterator[ViewItem]:
    """Yield the warnings of a response: a sentence, or an issue with its place and its fix."""
    for warning in warnings or ():
        yield Notice(issue_text(warning) if isinstance(warning, Mapping) else f"warning: {text_of(warning)}")


def rows(lines: Iterable[str], empty: str) -> Iterator[ViewItem]:
    """Yield the lines of a table, or what is said if there are none."""
    found: list[ViewItem] = [TableRow(line) for line in lines]
    yield from found or [Notice(empty)]


def field_rows(response: Any, width: int, left_out: Collection[str] = ()) -> Iterator[ViewItem]:
    """Yield each field of a response as a line, with its value at a column."""
    for name, value in response.to_json().items():
        if name not in left_out:
            yield Data(f"{f'{name}:':<{width}} {text_of(value)}")


def next_hint(following: str | None | UnsetType) -> Iterator[ViewItem]:
    """Yield what to do next, if there is something."""
    if following:
        yield Hint(following)


def message_items(content: JsonObject) -> Iterator[ViewItem]:
    """Yield a response that is a sentence: warnings, the message, paths and new files, and what to do next."""
    yield from warning_rows(as_list(content.get("warnings")))
    yield Data(as_text(content.get("message")) or compact(content))
    for name in ("path", "trash_path", "signature"):
        if value := as_text(content.get(name)):
            yield Notice(f"  {name}: {value}")
    for created in as_list(content.get("created")):
        yield Notice(f"  + {text_of(created)}")
    for issue in as_list(content.get("skipped")):
        yield Notice(issue_text(as_object(issue)))
    yield from next_hint(as_text(content.get("next")))
