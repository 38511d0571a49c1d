"""Templates with placeholders: text, URLs, headers and JSON bodies."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Final, Literal, TypeAlias
from urllib.parse import quote, unquote

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidRequest
from kiwi_mcp.domain.json import Json, text_of
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import refuse


class Absent(Enum):
    """The value of an optional parameter that was not given."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT
Values: TypeAlias = Mapping[str, "Json | Absent"]


class Piece(Struct, frozen=True):
    """A part of a template: text, the name of a value, or a variable exactly as it is written."""

    kind: Literal["text", "name", "variable"]
    text: str


# A part after a dot never begins with an underscore, so `{x.__class__}` is text.
_NAME = r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z][A-Za-z0-9_]*)*"
_TOKEN = lazy_pattern(
    rf"(?P<dollar>\$\$\{{)|(?P<variable>\$\{{[A-Za-z_][A-Za-z0-9_]*(?::-[^{{}}]*)?\}})"
    rf"|\{{(?P<literal>\{{{_NAME}\}})\}}|\{{(?P<name>{_NAME})\}}"
)
_VARIABLE_NAME = lazy_pattern(r"\$\{([A-Za-z0-9_]+)")


@lru_cache(maxsize=4096)
def pieces(template: str) -> tuple[Piece, ...]:
    """Return the parts of a template, in order."""
    found: list[Piece] = []
    end = 0
    for token in _TOKEN.finditer(template):
        found.append(Piece("text", template[end : token.start()]))
        if token["name"]:
            found.append(Piece("name", token["name"]))
        elif token["variable"]:
            found.append(Piece("variable", token["variable"]))
        else:
            found.append(Piece("text", token["literal"] or "${"))
        end = token.end()
    found.append(Piece("text", template[end:]))
    return tuple(piece for piece in found if piece.text)


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
    return _written(template, "name")


def variables(template: Json) -> tuple[str, ...]:
    """Return the names of the variables a template uses, in order, each once."""
    return tuple(dict.fromkeys(map(_variable_name, _written(template, "variable"))))


def defaulted(template: Json) -> tuple[str, ...]:
    """Return the names of the variables that a template can do without: each is written with a default."""
    written = _written(template, "variable")
    needed = {_variable_name(text) for text in written if ":-" not in text}
    return tuple(name for name in dict.fromkeys(map(_variable_name, written)) if name not in needed)


def value_of(name: str, values: Values) -> Json | Absent:
    """Return the value a placeholder stands for."""
    if name in values:
        return values[name]
    known = ", ".join(f"`{{{each}}}`" for each in sorted(values)[:20]) or "no name at all"
    fix = f"Declare a parameter `{name}`, write `{{{{{name}}}}}` for the bare text, or use {known}."
    raise refuse("The template", f"`{{{name}}}` is neither a parameter nor a fact", fix, place=name)


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
            parts = pieces(template)
            if len(parts) != 1 or parts[0].kind != "name":
                return render_text(template, values)
            value = value_of(parts[0].text, values)
            return value if isinstance(value, Absent) else _escaped(value)
        case Mapping():
            pairs = ((key, _render(inner, values)) for key, inner in template.items())
            return {render_text(key, values): value for key, value in pairs if not isinstance(value, Absent)}
        case Sequence():
            items = (_render(item, values) for item in template)
            return [item for item in items if not isinstance(item, Absent)]
        case _:
            return template


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


def _written(template: Json, kind: str) -> tuple[str, ...]:
    found = (piece.text for text in _strings(template) for piece in pieces(text) if piece.kind == kind)
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


Pieces = tuple[Piece, ...]


def render_url(template: str, values: Values) -> str:
    """Return a URL with each value percent-encoded for its place.

    Scheme, host, port and the literal parts of the path stay as written. In the query an absent value leaves its
    pair out and a list repeats it. `${NAME}` stays, wherever it stands.
    """
    before, fragment = _cut(pieces(template), "#")
    before, query = _cut(before, "?")
    origin, path = _origin(before)
    misplaced = [piece.text for piece in origin if piece.kind == "name"]
    if misplaced or not origin:
        reason = "has neither a scheme and host nor a `${NAME}`"
        if misplaced:
            reason = f"`{{{misplaced[0]}}}` stands in the scheme, host or port"
        fix = "Begin the URL with `https://host/` or `${NAME}/`, and use values after it only."
        raise refuse("The URL template", reason, fix, place="config.url")
    rendered = [*origin, *_joined((_segment(segment, values) for segment in _split(path, "/")), "/")]
    if query is not None and (pairs := _joined(_rendered_query(query, values), "&")):
        rendered += [Piece("text", "?"), *pairs]
    if fragment is not None:
        rendered += [Piece("text", "#"), *(_encoded(piece, values) for piece in fragment)]
    return assemble(rendered)


def render_header(template: str, values: Values) -> str | None:
    """Return the value of a header; None, to leave it out, where the template is one value that is absent."""
    match pieces(template):
        case (Piece(kind="name", text=name),) if isinstance(value_of(name, values), Absent):
            return None
        case _:
            rendered = render_text(template, values)
    if any(_is_control(character) and character != "\t" for character in rendered):
        raise _refused("A header's value holds a line break or another control character.")
    return rendered


def _origin(parts: Pieces) -> tuple[Pieces, Pieces]:
    """Return the scheme and host, and the path, which begins at the first `/` after `://` or a leading variable."""
    scheme, rest = _cut(parts, "://")
    if rest is None:
        scheme, rest = (), parts
        if not parts or parts[0].kind != "variable":
            return (), parts
    else:
        scheme = (*scheme, Piece("text", "://"))
    host, path = _cut(rest, "/")
    return (*scheme, *host), () if path is None else (Piece("text", "/"), *path)


def _segment(segment: Pieces, values: Values) -> list[Piece]:
    rendered = [_encoded(piece, values) for piece in segment]
    names = [piece.text for piece in segment if piece.kind == "name"]
    # Judged whole and decoded: `.` may come from the template, or from two values side by side.
    if names and unquote("".join(piece.text for piece in rendered)) in {"", ".", ".."}:
        raise _refused(f"`{names[0]}` would make an empty, `.` or `..` part of the URL's path.")
    return rendered


def _rendered_query(query: Pieces, values: Values) -> Iterator[list[Piece]]:
    for pair in _split(query, "&"):
        before, after = _cut(pair, "=")
        key, written = ((), before) if after is None else ((*before, Piece("text", "=")), after)
        if len(written) != 1 or written[0].kind != "name":
            yield [_encoded(piece, values) for piece in pair]
            continue
        value = value_of(written[0].text, values)
        # One placeholder makes no pair where its value is absent, and several for a list.
        given = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        for each in (one for one in given if not isinstance(one, Absent)):
            text = Piece("text", _quoted(text_of(each)))
            yield [*(_encoded(piece, values) for piece in key), text]


def _encoded(piece: Piece, values: Values) -> Piece:
    return Piece("text", _quoted(text_for(piece.text, values))) if piece.kind == "name" else piece


def _quoted(text: str) -> str:
    if any(map(_is_control, text)):
        raise _refused("A value for the URL holds a line break or another control character.")
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as fault:
        raise _refused("A value for the URL holds text that is not valid Unicode.") from fault


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc"


def _cut(parts: Pieces, mark: str) -> tuple[Pieces, Pieces | None]:
    """Return the parts before and after the first `mark` in literal text; None if there is no mark."""
    for at, piece in enumerate(parts):
        if piece.kind == "text" and mark in piece.text:
            before, _, after = piece.text.partition(mark)
            return (*parts[:at], *_text(before)), (*_text(after), *parts[at + 1 :])
    return parts, None


def _split(parts: Pieces, mark: str) -> list[Pieces]:
    found: list[Pieces] = []
    rest: Pieces | None = parts
    while rest is not None:
        before, rest = _cut(rest, mark)
        found.append(before)
    return found


def _text(text: str) -> Pieces:
    return (Piece("text", text),) if text else ()


def _joined(groups: Iterable[Sequence[Piece]], mark: str) -> list[Piece]:
    joined: list[Piece] = []
    for at, group in enumerate(groups):
        joined += [Piece("text", mark), *group] if at else group
    return joined


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, suggestion="Send a value that fits one place of the request.")
