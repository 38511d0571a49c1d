"""A directive as a text that a model can follow: what it is for, with what, step by step, until when."""

from __future__ import annotations

from collections.abc import Iterator

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text, text_of

_TOLD = ("name", "description", "action")


def program_text(program: JsonObject) -> str:
    """Return the program that a directive is, as Markdown."""
    return "\n".join(_lines(program)).strip() + "\n"


def _lines(program: JsonObject) -> Iterator[str]:
    yield f"# {as_text(program.get('name'))}"
    yield from ("", as_text(program.get("description")))
    yield from _section("Context", _facts(program.get("context")))
    yield from _section("Inputs", _inputs(program))
    yield from _section("Steps", _steps(program))
    yield from _section("Outputs", _facts(program.get("outputs")))
    yield from _section("Done when", (f"- {text_of(one)}" for one in as_list(program.get("success_criteria"))))


def _section(title: str, lines: Iterator[str]) -> Iterator[str]:
    if found := list(lines):
        yield from ("", f"## {title}", "", *found)


def _inputs(program: JsonObject) -> Iterator[str]:
    given = as_object(program.get("provided_inputs"))
    for one in map(as_object, as_list(program.get("inputs"))):
        name = as_text(one.get("name"))
        value = text_of(given[name]) if name in given else "(not given)"
        about = as_text(one.get("description"))
        yield f"- {name}: {value}{f' ({about})' if about else ''}"


def _steps(program: JsonObject) -> Iterator[str]:
    for number, step in enumerate(map(as_object, as_list(program.get("process"))), 1):
        name, description, action = (as_text(step.get(word)).strip() for word in _TOLD)
        yield f"{number}. {': '.join(filter(None, (name, description)))}"
        yield from (f"   {line}" for line in action.splitlines())
        yield from (f"   {word}: {text_of(value)}" for word, value in step.items() if word not in _TOLD)


def _facts(value: Json) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    yield from (f"- {word}: {text_of(inner)}" for word, inner in as_object(value).items())
