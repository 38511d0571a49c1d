"""The files of clients as text: JSON with comments, TOML and YAML, read and edited in place.

TOML and YAML are edited by whole lines, so that everything else stays as it is written. What comes out is read again: a
file that is not as expected then, because it is written in another style, is refused and left as it is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.document import read_json, read_yaml, refuse

MAX_BYTES = 16_000_000
MAX_NODES = 1_000_000

# Every alternative matches to the end of the text where it is not closed, so that no text is scanned twice.
_JSON_STRING = r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)'
_JSON_COMMENT = re.compile(rf"{_JSON_STRING}|//[^\n\r]*|/\*.*?(?:\*/|\Z)", re.DOTALL)
# A comma directly after an opening bracket is an error, so it is left in place for the parser to report.
_COMMA = re.compile(rf"{_JSON_STRING}|[\[{{]\s*,|,(?=\s*[\]}}])", re.DOTALL)
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
    """A JSON text as written, without comments, and as plain JSON, with each character in the same place."""

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

    def _past_space(self, at: int) -> int:
        found = _SPACE.match(self.plain, at)
        return found.end() if found else at

    def member(self, start: int, key: str) -> Member | None:
        """Return the member with a key in the object that begins at a place."""
        return next((one for one in self.members(start)[0] if one.key == key), None)

    def comma(self, start: int, end: int) -> int:
        """Return where a comma stands between two places outside comments; -1 where none does."""
        return self.uncommented.find(",", start, end)

    def indent(self, at: int) -> str:
        """Return the white space that the line of a place begins with."""
        line = end = self.written.rfind("\n", 0, at) + 1
        while self.written[end : end + 1] in {" ", "\t"}:
            end += 1
        return self.written[line:end]

    def begins_line(self, at: int) -> bool:
        """Whether nothing but white space stands before a place on a line that is not the first."""
        line = self.written.rfind("\n", 0, at) + 1
        return line > 0 and not self.written[line:at].strip()


def plain(text: str) -> str:
    """Return the text as plain JSON: comments and trailing commas blanked, every character in its place."""
    return _views(text)[1]


def _views(text: str) -> tuple[str, str]:
    """Return a text with its comments blanked, and one with trailing commas blanked as well."""

    def without_comment(found: re.Match[str]) -> str:
        token = found[0]
        is_comment = token.startswith("//") or (token.startswith("/*") and token.endswith("*/") and len(token) > 3)  # noqa: PLR2004 - `/*/` is not closed
        return _NOT_BREAK.sub(" ", token) if is_comment else token

    uncommented = _JSON_COMMENT.sub(without_comment, text)
    return uncommented, _COMMA.sub(lambda found: " " if found[0] == "," else found[0], uncommented)


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
    view, at, depth = _holder(text, path)
    member = view.member(at, path[depth])
    if member is None:
        for outer in reversed(path[depth + 1 :]):
            value = {outer: value}
        return _inserted(view, at, path[depth], value)
    if depth < len(path) - 1:
        raise not_an_object(what, path[: depth + 1])
    known, _ = _DECODER.raw_decode(view.plain, member.value)
    if known == value:
        return view.written
    written = _spelled(view, value, indent=view.indent(member.start), is_compact=_is_compact(view, at))
    return view.written[: member.value] + written + view.written[member.end :]


def without_member(text: str, path: Sequence[str], *, what: str) -> str:
    """Return the text without one member, and everything else as it was written."""
    read_object(text, what=what)
    view, at, depth = _holder(text, path)
    index = next((index for index, one in enumerate(view.members(at)[0]) if one.key == path[depth]), None)
    return text if index is None or depth < len(path) - 1 else _removed(view, at, index)


def not_an_object(what: str, path: Sequence[str]) -> InvalidManifest:
    """Return the refusal of a configuration in which a word holds something else than an object."""
    return refuse(what, "is not an object", "Make it `{}`, or remove it.", place=".".join(path))


def _holder(text: str, path: Sequence[str]) -> tuple[Text, int, int]:
    """Return the view of a text, where the innermost object on a path begins, and how many keys lead to it.

    A text with nothing in it becomes an empty object.
    """
    if not plain(text).strip(_BLANK):
        gap = "\n" if text.strip(_BLANK) and not text.endswith("\n") else ""  # it may end in a comment
        text = f"{text}{gap}{{}}\n"
    view = Text(text, *_views(text))
    at = view.plain.index("{")
    for depth, key in enumerate(path[:-1]):
        member = view.member(at, key)
        if member is None or view.plain[member.value] != "{":
            return view, at, depth
        at = member.value
    return view, at, len(path) - 1


def _inserted(view: Text, at: int, key: str, value: Json) -> str:
    text, (found, close) = view.written, view.members(at)
    end = found[-1].end if found else at + 1
    has_comma = view.comma(end, close) >= 0
    # Behind the comments that follow the last member, which may be about it.
    place = end + len(text[end:close].rstrip())
    is_compact = _is_compact(view, at)
    is_on_line = bool(found) and view.begins_line(found[-1].start)
    indent = view.indent(found[-1].start) if is_on_line else view.indent(at) + _unit(view)
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
    line = text.rfind("\n", 0, start) + 1
    # A comment to the end of the line needs its line break.
    is_code = "//" not in text[line:start] or view.uncommented[line:start] == text[line:start]
    before = text[: start if is_code else member.start]
    if comma < 0 and index:
        spare = view.comma(found[index - 1].end, member.start)
        before = before[:spare] + before[spare + 1 :]
    if len(found) == 1 and not text[at + 1 : start].strip() and not text[end:close].strip():
        return text[: at + 1] + text[close:]
    return before + text[end:]


def _is_compact(view: Text, at: int) -> bool:
    found, close = view.members(at)
    if found:
        return "\n" not in view.written[at:close]
    root = view.plain.index("{")
    return at != root and "\n" not in view.written.strip()


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


Format = Literal["json", "toml", "yaml"]
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_TOML_HEADER = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?")
_TOML_KEY = re.compile(r"""\s*(?:([A-Za-z0-9_-]+)|"((?:[^"\\]|\\.)*)"|'([^']*)')\s*(?:\.|$)""")
_FLOW = re.compile(r"(?:\[\s*\]|\{\s*\}|null|~)?\s*(?:#.*)?")


class ClientFile(Struct, frozen=True):
    """Where and how a client's file holds its servers."""

    format: Format
    key: tuple[str, ...]
    is_list: bool = False

    def servers(self, text: str, *, what: str) -> dict[str, JsonObject]:
        """Return the servers of a file, by name."""
        holder: Json = read_text_as(self.format, text, what=what)
        for depth, key in enumerate(self.key):
            if (inner := as_object(holder).get(key)) is None:
                return {}
            if not isinstance(inner, list if self.is_list else Mapping):
                raise not_an_object(what, self.key[: depth + 1])
            holder = inner
        if self.is_list:
            listed = [as_object(one) for one in as_list(holder)]
            unnamed = [{word: value for word, value in one.items() if word != "name"} for one in listed]
            return {as_text(one.get("name")): words for one, words in zip(listed, unnamed, strict=True)}
        return {name: as_object(words) for name, words in as_object(holder).items()}

    def with_server(self, text: str, name: str, words: JsonObject, *, what: str) -> str:
        """Return the text with one server set, and everything else as it was written."""
        if self.format == "json":
            return with_member(text, (*self.key, name), words, what=what)
        known = self.servers(text, what=what)
        if known.get(name) == words:
            return text
        bare = self.without_server(text, name, what=what)
        add = _toml_added if self.format == "toml" else _yaml_added
        return self._checked(add(bare, self, name, words), {**self.servers(bare, what=what), name: words}, what)

    def without_server(self, text: str, name: str, *, what: str) -> str:
        """Return the text without one server, and everything else as it was written."""
        if self.format == "json":
            return without_member(text, (*self.key, name), what=what)
        left = self.servers(text, what=what)
        if left.pop(name, None) is None:
            return text
        remove = _toml_removed if self.format == "toml" else _yaml_removed
        return self._checked(remove(text, self, name), left, what)

    def _checked(self, text: str, wanted: Mapping[str, JsonObject], what: str) -> str:
        try:
            is_right = self.servers(text, what=what) == wanted
        except Exception:  # noqa: BLE001 - however it cannot be read, it is not written
            is_right = False
        if not is_right:
            raise refuse(
                what,
                f"holds its servers in a style of {self.format.upper()} that Kiwi does not edit",
                "Write each server as lines of its own, or change the entry by hand.",
                place=".".join(self.key),
            )
        return text


def read_text_as(kind: Format, text: str, *, what: str) -> JsonObject:
    """Return the object that a text in one of the formats holds; a text with nothing in it holds an empty one."""
    if kind == "json":
        return read_object(text, what=what)
    if kind == "toml":
        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as fault:
            raise refuse(what, f"is not TOML: {fault}", "Correct it at this line.") from None
    return as_object(read_yaml(text, what=what).value) if text.strip() else {}


def format_of(name: str) -> Format:
    """Return the format of a file by the ending of its name."""
    endings: Mapping[str, Format] = {"toml": "toml", "yaml": "yaml", "yml": "yaml"}
    return endings.get(name.rpartition(".")[2].lower(), "json")


def _joined(text: str, block: Sequence[str], *, gap: bool) -> str:
    lead = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{lead}{chr(10) if gap and lead.strip() else ''}{''.join(f'{line}{chr(10)}' for line in block)}"


def _toml_added(text: str, file: ClientFile, name: str, words: JsonObject) -> str:
    path = ".".join(_toml_key(part) for part in (*file.key, name))
    tables = {word: as_object(value) for word, value in words.items() if isinstance(value, Mapping)}
    block = [f"[{path}]"]
    block += [f"{_toml_key(word)} = {_toml(value)}" for word, value in words.items() if word not in tables]
    for word, table in tables.items():
        block += ["", f"[{path}.{_toml_key(word)}]"]
        block += [f"{_toml_key(inner)} = {_toml(value)}" for inner, value in table.items()]
    return _joined(text, block, gap=True)


def _toml_removed(text: str, file: ClientFile, name: str) -> str:
    """Leave out the table of a server and those in it, up to the next table; comments before that one stay."""
    kept: list[str] = []
    comments: list[str] = []
    is_inside = False
    for line in text.splitlines(keepends=True):
        if header := _TOML_HEADER.fullmatch(line.rstrip("\r\n")):
            is_inside = _toml_path(header[1])[: len(file.key) + 1] == (*file.key, name)
            kept += [] if is_inside else comments
            comments = []
        if not is_inside:
            kept.append(line)
        else:
            comments = [*comments, line] if not line.strip() or line.lstrip().startswith("#") else []
    # The blank lines before the removed table go with it at the end of the file.
    left = "".join(kept)
    return left if not is_inside else left.rstrip("\r\n") + ("\n" if left.strip() else "")


def _toml_path(text: str) -> tuple[str, ...]:
    found: list[str] = []
    while part := _TOML_KEY.match(text):
        found.append(next((one for one in part.groups() if one is not None), ""))
        text = text[part.end() :]
        if not text:
            break
    return tuple(found)


def _toml_key(text: str) -> str:
    return text if _BARE.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _toml(value: Json) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_toml_key(word)} = {_toml(inner)}" for word, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _yaml_added(text: str, file: ClientFile, name: str, words: JsonObject) -> str:
    lines = text.splitlines()
    at = _yaml_header(lines, file.key[0])
    if at is None:
        return _joined(text, [f"{file.key[0]}:", *_yaml_block(file, name, words, "  ")], gap=False)
    end = _yaml_end(lines, at, is_list=file.is_list)
    inner = next((line for line in lines[at + 1 : end] if line.lstrip()[:1] not in {"", "#"}), None)
    indent = inner[: len(inner) - len(inner.lstrip())] if inner is not None else "  "
    lines[at] = re.sub(r":\s*(?:\[\s*\]|\{\s*\}|null|~)", ":", lines[at], count=1)
    return _joined("", [*lines[:end], *_yaml_block(file, name, words, indent), *lines[end:]], gap=False)


def _yaml_removed(text: str, file: ClientFile, name: str) -> str:
    lines = text.splitlines()
    at = _yaml_header(lines, file.key[0])
    if at is None:
        return text
    end = _yaml_end(lines, at, is_list=file.is_list)
    written = [place for place in range(at + 1, end) if lines[place].lstrip()[:1] not in {"", "#"}]
    depths = {place: len(lines[place]) - len(lines[place].lstrip()) for place in written}
    starts = [place for place, depth in depths.items() if depth == next(iter(depths.values()))]
    for start, following in pairwise((*starts, end)):
        value = read_yaml("\n".join(lines[start:following]), what="the server").value
        known = as_text(as_object(next(iter(as_list(value)), None)).get("name"))
        if name == (known if file.is_list else next(iter(as_object(value)), "")):
            after = following
            while after > start + 1 and lines[after - 1].lstrip()[:1] in {"", "#"}:
                after -= 1  # a comment before the next server is about that one
            rest = [*lines[:start], *lines[after:]]
            if len(starts) == 1:
                rest[at] = f"{rest[at].rstrip()} {'[]' if file.is_list else '{}'}"
            return _joined("", rest, gap=False)
    return text


def _yaml_header(lines: Sequence[str], key: str) -> int | None:
    """Return the line of a key at the top whose value is a block or empty."""
    for place, line in enumerate(lines):
        if line.startswith(f"{key}:") and _FLOW.fullmatch(line[len(key) + 1 :].strip()):
            return place
    return None


def _yaml_end(lines: Sequence[str], at: int, *, is_list: bool) -> int:
    """Return the line behind the block of a key; items of a list may stand as far left as the key."""
    end = at + 1
    for place in range(at + 1, len(lines)):
        line = lines[place]
        if line.lstrip()[:1] in {"", "#"}:
            continue
        if not line.startswith((" ", "\t")) and not (is_list and line.startswith("-")):
            break
        end = place + 1
    return end


def _yaml_block(file: ClientFile, name: str, words: JsonObject, indent: str) -> list[str]:
    """Return the lines of a server; values are written as JSON, which YAML reads as well."""
    pairs = [f"{_yaml_key(word)}: {json.dumps(value, ensure_ascii=False)}" for word, value in words.items()]
    if file.is_list:
        return [f"{indent}- name: {json.dumps(name, ensure_ascii=False)}", *(f"{indent}  {pair}" for pair in pairs)]
    return [f"{indent}{_yaml_key(name)}:", *(f"{indent}  {pair}" for pair in pairs)]


def _yaml_key(text: str) -> str:
    return text if _BARE.fullmatch(text) and not text[:1].isdigit() else json.dumps(text, ensure_ascii=False)


_STRING = re.compile(r'("(?:[^"\\]|\\.)*+")(\s*:)?|\'([^\'\n]*)\'')
_COMMENT = re.compile(r"(^|\s)#.*", re.MULTILINE)
_YAML_LINE = re.compile(r"(\s*(?:-\s+)?(?:[\w.\"'-]+:(?=\s|$)\s*)?)(.*)")


def masked(text: str, kind: Format, shown: frozenset[str]) -> str:
    """Return a text in which every value is hidden except those that may be shown; comments are hidden too."""
    if kind == "yaml":
        return "".join(_masked_line(line, shown) for line in text.splitlines(keepends=True))
    own = {json.dumps(word, ensure_ascii=False) for word in shown}
    text = _STRING.sub(lambda found: found[0] if found[2] or found[1] in own or found[3] in shown else '"…"', text)
    return _COMMENT.sub(r"\1# …", text) if kind == "toml" else text


def _masked_line(line: str, shown: frozenset[str]) -> str:
    found = _YAML_LINE.match(line)
    lead, value = (found[1], found[2].strip()) if found else ("", line.strip())
    try:
        words = json.loads(value) if value else []
    except ValueError:
        words = value
    listed = words if isinstance(words, list) else [words]
    is_shown = not words or all(word is True or (isinstance(word, str) and word in shown) for word in listed)
    return line if is_shown else f"{lead}…\n"
