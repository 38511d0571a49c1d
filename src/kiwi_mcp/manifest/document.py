"""Documents with limits: JSON, TOML and YAML; places such as `config.url`, and line numbers.

YAML is restricted to its JSON subset: no tags, no merges, no guessed types.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from typing import NoReturn, Self, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.data import FOLDER, parsed
from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.patterns import compiled_later, lazy_pattern

# Only the C parser is used; compiling the patterns of the Python one takes a twentieth of the time of a command.
with compiled_later():
    import yaml
    from yaml.cyaml import CSafeLoader
    from yaml.events import (
        AliasEvent,
        DocumentStartEvent,
        Event,
        MappingEndEvent,
        MappingStartEvent,
        ScalarEvent,
        SequenceEndEvent,
        SequenceStartEvent,
        StreamEndEvent,
    )

MAX_BYTES = 256_000
MAX_NODES = 20_000
MAX_DEPTH = 64
MAX_DIGITS = 18
BAD_TEXT = "text with a NUL character or half of a surrogate pair"

Raw: TypeAlias = "None | bool | int | float | str | datetime | date | time | Sequence[Raw] | Mapping[str, Raw]"
"""The values that the parsers of JSON and TOML return: JSON values and TOML's times."""

_SURROGATE = lazy_pattern("[\ud800-\udfff]")
_BAD_TEXT = lazy_pattern("[\0\ud800-\udfff]")


class Document(Struct, frozen=True):
    """A value, and the line of each place in it where the format tells (`config.url`, `parameters[0].type`)."""

    value: Json
    lines: Mapping[str, int] = field(default_factory=dict)


class WrittenFloat(float):
    """A fraction that remembers how it was written, so that `version = 1.10` does not become 1.1."""

    text: str

    def __new__(cls, text: str) -> Self:
        """Return the number a text stands for."""
        number = super().__new__(cls, text)
        number.text = text
        return number


class DocumentLimits(Struct, frozen=True):
    """How much of a document is read: nodes and depth."""

    what: str
    nodes: int
    depth: int

    def too_many(self) -> InvalidManifest:
        """Return the refusal of a document with too many nodes."""
        return refuse(self.what, f"more than {self.nodes:,} values, counting what aliases repeat", "Make it smaller.")

    def too_deep(self, line: int | None = None) -> InvalidManifest:
        """Return the refusal of a document that is nested too deeply."""
        return refuse(self.what, f"nested more than {self.depth} levels deep", "Flatten it.", line=line)


def join(place: str, key: str | int) -> str:
    """Return the place of a key or an index below another place."""
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else key


def place_of(path: Iterable[str | int], start: str = "") -> str:
    """Return the place that a path of keys and indexes leads to."""
    for key in path:
        start = join(start, key)
    return start


def line_of(place: str, lines: Mapping[str, int]) -> int | None:
    """Return the line of a place, or of the nearest place around it that has one."""
    while place and place not in lines:
        place = place[: max(place.rfind("."), place.rfind("["), 0)]
    return lines.get(place)


def refuse(what: str, reason: str, fix: str, *, place: str = "", line: int | None = None) -> InvalidManifest:
    """Return the refusal of a document for one reason."""
    return InvalidManifest(what, [Issue(place, reason, fix, line=line)])


def readable(text: str, *, what: str, max_bytes: int) -> str:
    """Return text that is safe to parse: within the size limit, Unicode, without NUL or a byte order mark."""
    if len(text) > max_bytes or len(text.encode(errors="replace")) > max_bytes:
        raise refuse(what, f"larger than {max_bytes:,} bytes", "Make it smaller, or move data into files of its own.")
    if (at := text.find("\0")) >= 0:
        raise refuse(what, "holds a NUL character", "Remove it.", line=text.count("\n", 0, at) + 1)
    if (lone := _SURROGATE.search(text)) is not None:
        line = text.count("\n", 0, lone.start()) + 1
        raise refuse(what, "holds half of a surrogate pair, which is not Unicode", "Remove it.", line=line)
    return text.removeprefix("\ufeff")


def is_bad_text(text: str) -> bool:
    """Whether the text holds a NUL character or half of a surrogate pair, which no system passes on intact."""
    return _BAD_TEXT.search(text) is not None


def settle(value: Raw, limits: DocumentLimits) -> Json:
    """Return a parsed value as JSON within the limits, versions as they were written."""
    seen = 0

    def visit(part: Raw, place: str, key: str, depth: int) -> Json:
        nonlocal seen
        seen += 1
        if seen > limits.nodes:
            raise limits.too_many()
        if depth > limits.depth and isinstance(part, Mapping | list):
            raise limits.too_deep()
        match part:
            case Mapping():
                if any(is_bad_text(name) for name in part):
                    raise refuse(limits.what, BAD_TEXT, "Remove it.", place=place)
                return {name: visit(inner, join(place, name), name, depth + 1) for name, inner in part.items()}
            case WrittenFloat() if key == "version":
                return part.text
            case float() if not math.isfinite(part):
                raise refuse(limits.what, "a number that is not finite", "Write a finite number, or text.", place=place)
            case WrittenFloat():
                return float(part)
            case str() if is_bad_text(part):
                raise refuse(limits.what, BAD_TEXT, "Remove it.", place=place)
            case int() if abs(part) >= 10**MAX_DIGITS:
                reason = f"a number of more than {MAX_DIGITS} digits"
                raise refuse(limits.what, reason, "Write it as text.", place=place)
            case str() | bool() | None | int() | float():
                return part
            case datetime() | date() | time():
                return part.isoformat()
            case _:
                return [visit(inner, join(place, index), "", depth + 1) for index, inner in enumerate(part)]

    return visit(value, "", "", 1)


def read_json(
    text: str, *, what: str, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH
) -> Document:
    """Return the one value a JSON text holds."""
    limits = DocumentLimits(what, max_nodes, max_depth)
    try:
        value: Raw = json.loads(
            readable(text, what=what, max_bytes=max_bytes),
            object_pairs_hook=lambda pairs: _unique(pairs, what),
            parse_constant=lambda word: _refuse_constant(word, what),
            parse_float=WrittenFloat,
            # As in YAML: a number that not every reader keeps exactly stays text.
            parse_int=lambda digits: digits if len(digits.lstrip("-")) > MAX_DIGITS else int(digits),
        )
    except json.JSONDecodeError as error:
        raise refuse(what, f"not JSON: {error.msg}", "Fix the JSON at this line.", line=error.lineno) from None
    except RecursionError:
        raise limits.too_deep() from None
    return Document(settle(value, limits))


def read_toml(text: str, *, what: str) -> Document:
    """Return the table a TOML text holds; its dates become text."""
    limits = DocumentLimits(what, MAX_NODES, MAX_DEPTH)
    try:
        value: Raw = tomllib.loads(readable(text, what=what, max_bytes=MAX_BYTES), parse_float=WrittenFloat)
    except tomllib.TOMLDecodeError as error:
        raise refuse(what, f"not TOML: {error}", "Fix the TOML there.") from None
    except ValueError:
        # Python refuses to convert integers of thousands of digits.
        raise refuse(what, f"a number of more than {MAX_DIGITS} digits", "Write it as text.") from None
    except RecursionError:
        raise limits.too_deep() from None
    return Document(settle(value, limits))


def _unique(pairs: list[tuple[str, Raw]], what: str) -> Raw:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise refuse(what, f"the key {twice!r} stands twice in one object", "Keep one of them.", place=twice)
    return found


def _refuse_constant(word: str, what: str) -> NoReturn:
    raise refuse(what, f"{word} is not JSON", "Write a finite number, or text.")


_CORE = "tag:yaml.org,2002:"
_WORDS: dict[str, bool | None] = {
    "": None, "~": None, "null": None, "Null": None, "NULL": None,
    "true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False,
}  # fmt: skip
_KINDS: dict[str, tuple[type, ...]] = {
    f"{_CORE}null": (type(None),), f"{_CORE}bool": (bool,), f"{_CORE}int": (int,), f"{_CORE}float": (int, float),
}  # fmt: skip
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?", re.ASCII)


def read_yaml(
    text: str, *, what: str, max_bytes: int = MAX_BYTES, max_nodes: int = MAX_NODES, max_depth: int = MAX_DEPTH
) -> Document:
    """Return the one document a YAML text holds, and the lines of its parts; nothing but JSON values comes out.

    Only `true`, `false`, `null`, `~` and JSON numbers have a type; `no`, `1:30`, `0x10` and dates are text, keys are
    text, and a `version` is the text that was written.
    """
    reader = _Reader(DocumentLimits(what, max_nodes, max_depth))
    try:
        events = yaml.parse(readable(text, what=what, max_bytes=max_bytes), Loader=CSafeLoader)
        return Document(reader.read(events), reader.lines)
    except yaml.YAMLError as error:
        raise _refusal(error, what) from None


def read_data(name: str) -> Json:
    """Return the content of a YAML file that ships with Kiwi."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return parsed(text) or read_yaml(text, what=name).value


def syntax_fault(text: str, *, what: str) -> InvalidManifest | None:
    """Return why a text is not YAML of any kind, or is nested too deeply; None where it is too long for a manifest."""
    if len(text) > MAX_BYTES:
        return None
    depth = 0
    try:
        for event in yaml.parse(text, Loader=CSafeLoader):
            if isinstance(event, SequenceStartEvent | MappingStartEvent):
                depth += 1
            elif isinstance(event, SequenceEndEvent | MappingEndEvent):
                depth -= 1
            # The time libyaml takes for one token grows with the number of open brackets. It reads at most 1,024
            # characters ahead of an event (a key may be that long), so ending at the limit bounds its work.
            if depth > MAX_DEPTH:
                return DocumentLimits(what, MAX_NODES, MAX_DEPTH).too_deep(_line(event))
    except yaml.YAMLError as error:
        return _refusal(error, what)
    return None


def _refusal(error: yaml.YAMLError, what: str) -> InvalidManifest:
    if not isinstance(error, yaml.MarkedYAMLError):
        return refuse(what, f"not YAML: {error}", "Remove the character.")
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark is not None else None
    reason = " ".join(filter(None, (error.context, error.problem)))
    return refuse(what, f"not YAML: {reason}", "Fix the YAML at this line.", line=line)


class _Reader(Struct):
    """Builds one value from the parser's events, counting as it goes."""

    limits: DocumentLimits
    lines: dict[str, int] = field(default_factory=dict)
    anchors: dict[str, tuple[Json, int, int]] = field(default_factory=dict)
    """Each anchor's value, how many nodes it is, and how many levels it has below it."""
    seen: int = 0
    deepest: int = 0

    def read(self, events: Iterator[Event]) -> Json:
        value: Json = None
        documents = 0
        for event in events:
            if isinstance(event, DocumentStartEvent):
                first = next(events)
                if documents == 0:
                    value = self.node(first, events, "", "", 1)
                elif not (isinstance(first, ScalarEvent) and first.value == "" and first.tag is None):
                    raise self.fault(event, "", "holds a second document", "Keep one document in a file.")
                documents += 1
            elif isinstance(event, StreamEndEvent):
                break
        return value

    def node(self, event: Event, events: Iterator[Event], place: str, key: str, depth: int) -> Json:
        if isinstance(event, AliasEvent):
            return self.alias(event, place, depth)
        before, outer = self.seen, self.deepest
        self.deepest = depth
        self.count(1)
        value: Json
        match event:
            case ScalarEvent():
                value = self.scalar(event, place, key)
            case SequenceStartEvent() | MappingStartEvent():
                is_list = isinstance(event, SequenceStartEvent)
                if depth > self.limits.depth:
                    raise self.limits.too_deep(_line(event))
                if event.tag not in {None, "!", f"{_CORE}{'seq' if is_list else 'map'}"}:
                    raise self.fault(event, place, f"the tag {event.tag!r} is not read", "Remove the tag.")
                value = self.sequence(events, place, depth) if is_list else self.mapping(events, place, depth)
            case _:
                raise self.fault(event, place, "cannot be read", "Write a mapping, a list or a value.")
        if event.anchor:
            # Registered when complete, so a node can never contain itself.
            self.anchors[event.anchor] = (value, self.seen - before, self.deepest - depth)
        self.deepest = max(self.deepest, outer)
        return value

    def sequence(self, events: Iterator[Event], place: str, depth: int) -> list[Json]:
        found: list[Json] = []
        for event in events:
            if isinstance(event, SequenceEndEvent):
                break
            inner = join(place, len(found))
            self.lines[inner] = _line(event)
            found.append(self.node(event, events, inner, "", depth + 1))
        return found

    def mapping(self, events: Iterator[Event], place: str, depth: int) -> dict[str, Json]:
        found: dict[str, Json] = {}
        for event in events:
            if isinstance(event, MappingEndEvent):
                break
            key = self.key(event, place)
            inner = join(place, key)
            if key in found:
                raise self.fault(event, inner, f"the key {key!r} stands twice", "Keep one of them.")
            self.lines[inner] = _line(event)
            found[key] = self.node(next(events), events, inner, key, depth + 1)
        return found

    def key(self, event: Event, place: str) -> str:
        self.count(1)
        if not isinstance(event, ScalarEvent):
            raise self.fault(event, place, "a key that is not text", "Write keys as plain text.")
        if event.value == "<<" and event.implicit[0]:
            raise self.fault(event, place, "merge keys (`<<`) are not read", "Write the keys out.")
        if event.tag not in {None, "!", f"{_CORE}str"}:
            raise self.fault(event, place, f"the tag {event.tag!r} is not read", "Remove the tag.")
        return self.text(event, place)

    def text(self, event: ScalarEvent, place: str) -> str:
        if is_bad_text(event.value):  # an escape such as "\0" makes what the source did not hold
            raise self.fault(event, place, BAD_TEXT, "Remove it.")
        return str(event.value)

    def scalar(self, event: ScalarEvent, place: str, key: str) -> Json:
        if event.tag is None and event.implicit[0]:
            return _plain(event.value, is_version=key == "version")
        if event.tag in {None, "!", f"{_CORE}str"}:
            return self.text(event, place)
        value = _plain(event.value, is_version=False)
        kind = _KINDS.get(event.tag)
        if kind is None:
            raise self.fault(event, place, f"the tag {event.tag!r} is not read", "Remove the tag.")
        if not isinstance(value, kind):
            raise self.fault(event, place, f"{event.value!r} is not what its tag says", "Remove the tag.")
        return value

    def alias(self, event: AliasEvent, place: str, depth: int) -> Json:
        if event.anchor not in self.anchors:
            raise self.fault(event, place, f"the alias `*{event.anchor}` names nothing above it", "Write it out.")
        value, size, height = self.anchors[event.anchor]
        self.count(size)
        self.deepest = max(self.deepest, depth + height)
        if depth + height > self.limits.depth:
            raise self.limits.too_deep(_line(event))
        return value

    def count(self, size: int) -> None:
        self.seen += size
        if self.seen > self.limits.nodes:
            raise self.limits.too_many()

    def fault(self, event: Event, place: str, reason: str, fix: str) -> InvalidManifest:
        return refuse(self.limits.what, reason, fix, place=place, line=_line(event))


def _line(event: Event) -> int:
    return event.start_mark.line + 1 if event.start_mark is not None else 1


def _plain(text: str, *, is_version: bool) -> Json:
    if text in _WORDS:
        return _WORDS[text]
    found = _NUMBER.fullmatch(text)
    if found is None or is_version:
        return text
    if found.group(1) is None and found.group(2) is None:
        return int(text) if len(text.lstrip("-")) <= MAX_DIGITS else text
    number = float(text)
    return number if math.isfinite(number) else text
