"""JSON with comments, edited in place."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.document import read_json, refuse

MAX_BYTES = 16_000_000
MAX_NODES = 1_000_000

# Every alternative matches to the end of the text where it is not closed, so that no text is scanned twice.
_STRING = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
_COMMENT = re.compile(rf"{_STRING}|//[^\n\r]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
# A comma directly after an opening bracket is an error, so it is left in place for the parser to report.
_COMMA = re.compile(rf"{_STRING}|[\[{{]\s*,|,(?=\s*[\]}}])", re.DOTALL)
_NOT_BREAK = re.compile(r"[^\n\r]")
_SPACE = re.compile(r"[ \t\n\r]*")
_BLANK = "\ufeff \t\n\r"
_DECODER = json.JSONDecoder()


class Member(Struct, frozen=True):
    """One key of an object, and where the key begins and the value begins and ends."""

    key: str
    start: int
    value: int
    end: int


class Text(Struct, frozen=True):
    """A JSON text with an object in it, in three forms: as written, without comments, and as plain JSON.

    All three have each character in the same place.
    """

    written: str
    uncommented: str
    plain: str

    def members(self, start: int) -> tuple[list[Member], int]:
        """Return the members of the object that begins at a place, and the place of its closing brace."""
        found: list[Member] = []
        at = self._past_space(start + 1)
        while self.plain[at] != "}":
            key, end = _DECODER.raw_decode(self.plain, at)
            value = self._past_space(self._past_space(end) + 1)
            _, after = _DECODER.raw_decode(self.plain, value)
            found.append(Member(key, at, value, after))
            at = self._past_space(after)
            if self.plain[at] == ",":
                at = self._past_space(at + 1)
        return found, at

    def comma(self, start: int, end: int) -> int:
        """Return where a comma stands between two places outside comments; -1 where none does."""
        return self.uncommented.find(",", start, end)

    def indent(self, at: int) -> str:
        """Return the white space that the line of a place begins with."""
        line = self.written.rfind("\n", 0, at) + 1
        return self.written[line : self._past_blank(line)]

    def begins_line(self, at: int) -> bool:
        """Whether nothing but white space stands before a place on a line that is not the first."""
        line = self.written.rfind("\n", 0, at) + 1
        return line > 0 and not self.written[line:at].strip()

    def _past_space(self, at: int) -> int:
        found = _SPACE.match(self.plain, at)
        return found.end() if found else at

    def _past_blank(self, at: int) -> int:
        while self.written[at : at + 1] in {" ", "\t"}:
            at += 1
        return at


def plain(text: str) -> str:
    """Return the text as plain JSON: comments and trailing commas blanked, every character in its place."""
    return _COMMA.sub(_without_comma, _COMMENT.sub(_without_comment, text))


def read_object(text: str, *, what: str) -> JsonObject:
    """Return the object that a text holds; a text with nothing in it holds an empty one."""
    bare = plain(text)
    if not bare.strip(_BLANK):
        return {}
    value = read_json(bare, what=what, max_bytes=MAX_BYTES, max_nodes=MAX_NODES).value
    if not isinstance(value, Mapping):
        raise refuse(what, "is not a JSON object", "Write `{ … }` with the servers in it.")
    return value


def with_member(text: str, path: Sequence[str], value: Json, *, what: str) -> str:
    """Return the text with one member set to a value, and everything else as it was written."""
    read_object(text, what=what)
    view, at = _open(text)
    for depth, key in enumerate(path):
        found, _ = view.members(at)
        member = next((one for one in found if one.key == key), None)
        if member is None:
            for outer in reversed(path[depth + 1 :]):
                value = {outer: value}
            return _inserted(view, at, key, value)
        if depth == len(path) - 1:
            return _replaced(view, at, member, value)
        if view.plain[member.value] != "{":
            raise not_an_object(what, path[: depth + 1])
        at = member.value
    return text


def without_member(text: str, path: Sequence[str], *, what: str) -> str:
    """Return the text without one member, and everything else as it was written."""
    read_object(text, what=what)
    view, at = _open(text)
    for depth, key in enumerate(path):
        found, _ = view.members(at)
        index = next((index for index, one in enumerate(found) if one.key == key), None)
        if index is None:
            return text
        if depth == len(path) - 1:
            return _removed(view, at, index)
        if view.plain[found[index].value] != "{":
            return text
        at = found[index].value
    return text


def not_an_object(what: str, path: Sequence[str]) -> InvalidManifest:
    """Return the refusal of a configuration in which a word holds something else than an object."""
    return refuse(what, "is not an object", "Make it `{}`, or remove it.", place=".".join(path))


def _open(text: str) -> tuple[Text, int]:
    """Return the view of a text, made an empty object where it holds nothing, and where its object begins."""
    if not plain(text).strip(_BLANK):
        gap = "\n" if text.strip(_BLANK) and not text.endswith("\n") else ""  # it may end in a comment
        text = f"{text}{gap}{{}}\n"
    uncommented = _COMMENT.sub(_without_comment, text)
    view = Text(text, uncommented, _COMMA.sub(_without_comma, uncommented))
    return view, view.plain.index("{")


def _without_comment(found: re.Match[str]) -> str:
    token = found[0]
    is_comment = token.startswith("//") or (token.startswith("/*") and token.endswith("*/") and len(token) > 3)  # noqa: PLR2004 - `/*/` is not closed
    return _NOT_BREAK.sub(" ", token) if is_comment else token


def _without_comma(found: re.Match[str]) -> str:
    return " " if found[0] == "," else found[0]


def _replaced(view: Text, at: int, member: Member, value: Json) -> str:
    known, _ = _DECODER.raw_decode(view.plain, member.value)
    if known == value:
        return view.written
    written = _spelled(view, value, indent=view.indent(member.start), is_compact=_is_compact(view, at))
    return view.written[: member.value] + written + view.written[member.end :]


def _inserted(view: Text, at: int, key: str, value: Json) -> str:
    text, (found, close) = view.written, view.members(at)
    end = found[-1].end if found else at + 1
    has_comma = view.comma(end, close) >= 0
    # Behind the comments that follow the last member, which may be about it.
    place = end + len(text[end:close].rstrip())
    is_compact = _is_compact(view, at)
    indent = _indent_of_member(view, at, found)
    lead = " " if is_compact else _break(text) + indent
    member = f"{json.dumps(key, ensure_ascii=False)}: {_spelled(view, value, indent=indent, is_compact=is_compact)}"
    closing = "" if is_compact or "\n" in text[place:close] else _break(text) + view.indent(at)
    comma = "," if found and not has_comma else ""
    new = f"{lead if found or not is_compact else ''}{member}{',' if has_comma else ''}{closing}"
    return f"{text[:end]}{comma}{text[end:place]}{new}{text[place:]}"


def _removed(view: Text, at: int, index: int) -> str:
    text, (found, close) = view.written, view.members(at)
    member, last = found[index], index == len(found) - 1
    comma = view.comma(member.end, close if last else found[index + 1].start)
    end = comma + 1 if comma >= 0 else member.end
    start = len(text[: member.start].rstrip())
    before = text[:start] if _is_code(view, start) else text[: member.start]
    if comma < 0 and index:
        spare = view.comma(found[index - 1].end, member.start)
        before = before[:spare] + before[spare + 1 :]
    left, right = before, text[end:]
    if len(found) == 1 and not text[at + 1 : start].strip() and not text[end:close].strip():
        left, right = text[: at + 1], text[close:]
    return left + right


def _is_code(view: Text, end: int) -> bool:
    """Whether a place follows something else than a comment to the end of the line, which needs its line break."""
    line = view.written.rfind("\n", 0, end) + 1
    return "//" not in view.written[line:end] or view.uncommented[line:end] == view.written[line:end]


def _is_compact(view: Text, at: int) -> bool:
    found, close = view.members(at)
    if found:
        return "\n" not in view.written[at:close]
    root = view.plain.index("{")
    return at != root and "\n" not in view.written.strip()


def _indent_of_member(view: Text, at: int, found: Sequence[Member]) -> str:
    if found and view.begins_line(found[-1].start):
        return view.indent(found[-1].start)
    return view.indent(at) + _unit(view)


def _unit(view: Text) -> str:
    """Return by how much the text indents, as its first member shows."""
    found, _ = view.members(view.plain.index("{"))
    return (view.indent(found[0].start) if found and view.begins_line(found[0].start) else "") or "  "


def _spelled(view: Text, value: Json, *, indent: str, is_compact: bool) -> str:
    if is_compact:
        return json.dumps(value, ensure_ascii=False)
    spelled = json.dumps(value, ensure_ascii=False, indent=_unit(view))
    return spelled.replace("\n", _break(view.written) + indent)


def _break(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"
