"""URLs and headers from templates: a value can fill its place, and can never leave it."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import quote, unquote

from kiwi_mcp.domain.errors import InvalidManifest, InvalidRequest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, text_of
from kiwi_mcp.manifest.render import Absent, Piece, Values, assemble, pieces, render_text, text_for, value_of

Pieces = tuple[Piece, ...]


def render_url(template: str, values: Values) -> str:
    """Return a URL with each value percent-encoded for its place.

    Scheme, host, port and the literal parts of the path stay as written. In the query an absent value leaves its
    pair out and a list repeats it. `${NAME}` stays, wherever it stands.
    """
    origin, path, query, fragment = _components(template)
    rendered = [*origin, *_rendered_path(path, values)]
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


def _components(template: str) -> tuple[Pieces, Pieces, Pieces | None, Pieces | None]:
    before, fragment = _cut(pieces(template), "#")
    before, query = _cut(before, "?")
    origin, path = _origin(before)
    misplaced = [piece.text for piece in origin if piece.kind == "name"]
    if misplaced or not origin:
        raise _wrong_origin(misplaced)
    return origin, path, query, fragment


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


def _rendered_path(path: Pieces, values: Values) -> Iterator[Piece]:
    segments = [_segment(segment, values) for segment in _split(path, "/")]
    return iter(_joined(segments, "/"))


def _segment(segment: Pieces, values: Values) -> list[Piece]:
    rendered = [_encoded(piece, values) for piece in segment]
    names = [piece.text for piece in segment if piece.kind == "name"]
    # Judged whole and decoded: `.` may come from the template, or from two values side by side.
    if names and unquote("".join(piece.text for piece in rendered)) in {"", ".", ".."}:
        raise _refused(f"`{names[0]}` would make an empty, `.` or `..` part of the URL's path.")
    return rendered


def _rendered_query(query: Pieces, values: Values) -> Iterator[list[Piece]]:
    for pair in _split(query, "&"):
        key, value = _cut(pair, "=")
        match key if value is None else value:
            case (Piece(kind="name", text=name),):
                yield from _repeated(key if value is not None else None, value_of(name, values), values)
            case _:
                yield [_encoded(piece, values) for piece in pair]


def _repeated(key: Pieces | None, value: Json | Absent, values: Values) -> Iterator[list[Piece]]:
    """Yield the pairs of one placeholder: none where it is absent, several for a list."""
    if isinstance(value, Absent):
        return
    for each in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
        text = Piece("text", _quoted(text_of(each)))
        yield [text] if key is None else [*(_encoded(piece, values) for piece in key), Piece("text", "="), text]


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
    """Return what stands before and after the first `mark` in literal text; None where there is no mark."""
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


def _wrong_origin(names: Sequence[str]) -> InvalidManifest:
    reason = (
        f"`{{{names[0]}}}` stands in the scheme, host or port"
        if names
        else "has neither a scheme and host nor a `${NAME}`"
    )
    return InvalidManifest(
        "The URL template",
        [
            Issue(
                "config.url", reason, "Begin the URL with `https://host/` or `${NAME}/`, and use values after it only."
            )
        ],
    )


def _refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, suggestion="Send a value that fits one place of the request.")
