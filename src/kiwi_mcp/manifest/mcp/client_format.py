"""The files of clients as text: JSON with comments, TOML and YAML, read and edited in place.

TOML and YAML are edited by whole lines, so that everything else stays as it is written. What comes out is read again: a
file that is not as expected then, because it is written in another style, is refused and left as it is.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.json import Json, JsonObject, as_list, as_object, as_text
from kiwi_mcp.manifest.document import refuse
from kiwi_mcp.manifest.mcp.jsonc import not_an_object, read_object, with_member, without_member
from kiwi_mcp.manifest.yaml import read_yaml

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

    def root(self, text: str, *, what: str) -> JsonObject:
        """Return everything that a file holds."""
        return read_text_as(self.format, text, what=what)

    def servers(self, text: str, *, what: str) -> dict[str, JsonObject]:
        """Return the servers of a file, by name."""
        holder: Json = self.root(text, what=what)
        for depth, key in enumerate(self.key):
            if (inner := as_object(holder).get(key)) is None:
                return {}
            if not isinstance(inner, list if self.is_list else Mapping):
                raise not_an_object(what, self.key[: depth + 1])
            holder = inner
        if self.is_list:
            return {as_text(as_object(one).get("name")): _unnamed(as_object(one)) for one in as_list(holder)}
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


def _unnamed(words: JsonObject) -> JsonObject:
    return {word: value for word, value in words.items() if word != "name"}


def _joined(text: str, block: Sequence[str], *, gap: bool) -> str:
    lead = text if not text or text.endswith("\n") else f"{text}\n"
    return f"{lead}{chr(10) if gap and lead.strip() else ''}{''.join(f'{line}{chr(10)}' for line in block)}"


def _toml_added(text: str, file: ClientFile, name: str, words: JsonObject) -> str:
    path = ".".join(_toml_key(part) for part in (*file.key, name))
    tables = {word: value for word, value in words.items() if isinstance(value, Mapping)}
    block = [
        f"[{path}]",
        *(f"{_toml_key(word)} = {_toml(value)}" for word, value in words.items() if word not in tables),
    ]
    for word, table in tables.items():
        block += ["", f"[{path}.{_toml_key(word)}]"]
        block += [f"{_toml_key(inner)} = {_toml(value)}" for inner, value in as_object(table).items()]
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
    inner = next((line for line in lines[at + 1 : end] if line.strip() and not line.lstrip().startswith("#")), None)
    indent = inner[: len(inner) - len(inner.lstrip())] if inner is not None else "  "
    lines[at] = re.sub(r":\s*(?:\[\s*\]|\{\s*\}|null|~)", ":", lines[at], count=1)
    return _joined("", [*lines[:end], *_yaml_block(file, name, words, indent), *lines[end:]], gap=False)


def _yaml_removed(text: str, file: ClientFile, name: str) -> str:
    lines = text.splitlines()
    at = _yaml_header(lines, file.key[0])
    if at is None:
        return text
    end = _yaml_end(lines, at, is_list=file.is_list)
    starts = [place for place in range(at + 1, end) if _yaml_indent(lines[place]) == _yaml_first(lines, at, end)]
    for number, start in enumerate(starts):
        after = starts[number + 1] if number + 1 < len(starts) else end
        if _yaml_name(lines[start:after], is_list=file.is_list) == name:
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
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line.startswith((" ", "\t")) and not (is_list and line.startswith("-")):
            break
        end = place + 1
    return end


def _yaml_indent(line: str) -> int:
    return len(line) - len(line.lstrip()) if line.strip() and not line.lstrip().startswith("#") else -1


def _yaml_first(lines: Sequence[str], at: int, end: int) -> int:
    return next((depth for line in lines[at + 1 : end] if (depth := _yaml_indent(line)) >= 0), -2)


def _yaml_name(lines: Sequence[str], *, is_list: bool) -> str:
    """Return the name of the server that some lines describe."""
    value = read_yaml("\n".join(lines), what="the server").value
    if is_list:
        return as_text(as_object(as_list(value)[0]).get("name")) if as_list(value) else ""
    return next(iter(as_object(value)), "")


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

    def mask(found: re.Match[str]) -> str:
        return found[0] if found[2] or found[1] in own or found[3] in shown else '"…"'

    text = _STRING.sub(mask, text)
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
