"""The one renderer: `{name}` becomes a caller's value or a fact, `${NAME}` stays for the primitive to reveal.

One pass; what was put in is never read again. Rendered text has one meaning: `${NAME}` is a variable of the template,
and every other `${`, wherever it came from, is written `$${`. `reveal` in the primitives undoes both at once.
In a template `{{name}}` is the literal text `{name}`; braces around anything that is not a name are only braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, Literal, TypeAlias

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, text_of


class Absent(Enum):
    """The value of an optional parameter that was not given."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Values: TypeAlias = Mapping[str, "Json | Absent"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a template: text, the name of a value, or a variable exactly as it is written."""

    kind: Literal["text", "name", "variable"]
    text: str


# A part after a dot never begins with an underscore, so `{x.__class__}` is text.
_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z][A-Za-z0-9_]*)*"
_TOKEN = re.compile(
    rf"(?P<dollar>\$\$\{{)|(?P<variable>\$\{{[A-Za-z_][A-Za-z0-9_]*(?::-[^{{}}]*)?\}})"
    rf"|\{{(?P<literal>\{{{_NAME}\}})\}}|\{{(?P<name>{_NAME})\}}"
)
_VARIABLE_NAME = re.compile(r"\$\{([A-Za-z0-9_]+)")


@lru_cache(maxsize=4096)
def pieces(template: str) -> tuple[Piece, ...]:
    """Return the parts of a template, in order."""
    found: list[Piece] = []
    end = 0
    for token in _TOKEN.finditer(template):
        found.append(Piece("text", template[end : token.start()]))
        found.append(_piece(token))
        end = token.end()
    found.append(Piece("text", template[end:]))
    return tuple(piece for piece in found if piece.text)


def _piece(token: re.Match[str]) -> Piece:
    match token.lastgroup:
        case "dollar":
            return Piece("text", "${")
        case "literal":
            return Piece("text", token["literal"])
        case "variable":
            return Piece("variable", token["variable"])
        case _:
            return Piece("name", token["name"])


def escape(text: str) -> str:
    """Return a caller's text so that it reads as itself after `reveal`."""
    return text.replace("${", "$${")


def plain(text: str) -> str:
    """Return rendered text for a place where nothing is revealed: the text as it was before `escape`."""
    return text.replace("$${", "${")


def assemble(parts: Iterable[Piece]) -> str:
    """Join texts and variables into rendered text in which a `${` that is not a variable's is escaped.

    Texts are joined before they are escaped: `$` may end one and `{` begin the next.
    """
    out: list[str] = []
    literal = ""
    for part in parts:
        if part.kind == "text":
            literal += part.text
            continue
        if literal.endswith("$"):
            raise InvalidRequest(
                f"A value ends with `$` directly before `{part.text}`, where it would change what that means.",
                suggestion="Send the value without the last `$`, or separate the two in the template.",
            )
        out += (escape(literal), part.text)
        literal = ""
    return "".join((*out, escape(literal)))


def render_text(template: str, values: Values) -> str:
    """Return a template with its values put in, as text."""
    return assemble(_filled(piece, values) for piece in pieces(template))


def render(template: Json, values: Values) -> Json:
    """Return a template of any shape with its values put in.

    A string that is one placeholder and nothing else keeps the value's type; where that value is absent, the list
    item or the key it stands for is left out (and a whole template is null).
    """
    rendered = _render(template, values)
    return None if isinstance(rendered, Absent) else rendered


def placeholders(template: Json) -> tuple[str, ...]:
    """Return the names of the values a template uses, in order, each once."""
    return _named(template, "name", lambda text: text)


def variables(template: Json) -> tuple[str, ...]:
    """Return the names of the variables a template uses, in order, each once."""
    return _named(template, "variable", _variable_name)


def defaulted(template: Json) -> tuple[str, ...]:
    """Return the names of the variables that a template can do without: each is written with a default."""
    written = _named(template, "variable", lambda text: text)
    needed = {_variable_name(text) for text in written if ":-" not in text}
    return tuple(name for name in dict.fromkeys(map(_variable_name, written)) if name not in needed)


def value_of(name: str, values: Values) -> Json | Absent:
    """Return the value a placeholder stands for."""
    if name in values:
        return values[name]
    known = ", ".join(f"`{{{each}}}`" for each in sorted(values)[:20]) or "no name at all"
    raise InvalidManifest(
        "The template",
        [
            Issue(
                place=name,
                reason=f"`{{{name}}}` is neither a parameter nor a fact",
                fix=f"Declare a parameter `{name}`, write `{{{{{name}}}}}` for the bare text, or use {known}.",
            )
        ],
    )


def text_for(name: str, values: Values) -> str:
    """Return the text of a value that must be there."""
    value = value_of(name, values)
    if isinstance(value, Absent):
        raise InvalidRequest(
            f"`{name}` was not given, and the template needs it inside a longer text.",
            suggestion=f"Send `{name}`, or let the manifest declare a default for it.",
            parameter=name,
        )
    return text_of(value)


def _filled(piece: Piece, values: Values) -> Piece:
    return Piece("text", text_for(piece.text, values)) if piece.kind == "name" else piece


def _render(template: Json, values: Values) -> Json | Absent:
    match template:
        case str():
            return _render_string(template, values)
        case Mapping():
            return _render_object(template, values)
        case Sequence():
            items = (_render(item, values) for item in template)
            return [item for item in items if not isinstance(item, Absent)]
        case _:
            return template


def _render_string(template: str, values: Values) -> Json | Absent:
    match pieces(template):
        case (Piece(kind="name", text=name),):
            value = value_of(name, values)
            return value if isinstance(value, Absent) else _escaped(value)
        case _:
            return render_text(template, values)


def _render_object(template: Mapping[str, Json], values: Values) -> Json:
    rendered: dict[str, Json] = {}
    for key, inner in template.items():
        value = _render(inner, values)
        if not isinstance(value, Absent):
            rendered[render_text(key, values)] = value
    return rendered


def _escaped(value: Json) -> Json:
    match value:
        case str():
            return escape(value)
        case Mapping():
            return {escape(key): _escaped(inner) for key, inner in value.items()}
        case Sequence():
            return [_escaped(inner) for inner in value]
        case _:
            return value


def _named(template: Json, kind: str, name_of: Callable[[str], str]) -> tuple[str, ...]:
    found = (name_of(piece.text) for text in _strings(template) for piece in pieces(text) if piece.kind == kind)
    return tuple(dict.fromkeys(found))


def _variable_name(written: str) -> str:
    found = _VARIABLE_NAME.match(written)
    return found[1] if found else ""


def _strings(template: Json) -> Iterator[str]:
    match template:
        case str():
            yield template
        case Mapping():
            for key, inner in template.items():
                yield key
                yield from _strings(inner)
        case Sequence():
            for inner in template:
                yield from _strings(inner)
        case _:
            return
