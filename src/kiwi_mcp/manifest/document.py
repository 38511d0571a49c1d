"""Documents with limits: JSON, TOML, places such as `config.url`, and line numbers."""

from __future__ import annotations

import json
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from typing import NoReturn, Self, TypeAlias

from msgspec import Struct, field

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.patterns import lazy_pattern

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
