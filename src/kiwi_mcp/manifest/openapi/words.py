"""Names, versions and sentences made from what a document says."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable

from kiwi_mcp.domain.json import Json
from kiwi_mcp.domain.version import Version
from kiwi_mcp.manifest.names import is_tool_id

MAX_ID = 120
"""Shorter than a tool id may be, so that a number fits behind it."""

_MAX_NAME = 64
_TITLE_WORDS = 3
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_BREAK = re.compile(r"\s+[-+|\u2013\u2014]\s*|[:(,]")
_NUMBERS = re.compile(r"v?(\d{1,9})(?:[.-](\d{1,9}))?(?:[.-](\d{1,9}))?(?!\d)", re.ASCII | re.IGNORECASE)
_FILLER = {
    "", "a", "an", "the", "of", "for", "and", "s", "api", "apis", "rest", "restful", "http", "web", "service",
    "services", "official", "public", "open", "openapi", "swagger", "spec", "specification", "definition",
    "documentation", "docs", "reference", "description", "schema", "example", "sample", "simple",
    "v1", "v2", "v3", "v4",
}  # fmt: skip


def snake(text: str) -> str:
    """Return a text as an ASCII name in snake_case; empty where nothing of it is left."""
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    return re.sub(r"[^a-z0-9]+", "_", _HUMP.sub("_", plain).lower()).strip("_")


def short_name(title: str) -> str:
    """Return the first words of a title that name something: `GitHub v3 REST API` is `github`."""
    for phrase in _BREAK.split(title):
        # An API's own spelling (`GitHub`) is one word, so humps do not count here.
        words = [word for word in snake(phrase.lower()).split("_") if word not in _FILLER and not word.isdigit()]
        if words:
            return "_".join(words[:_TITLE_WORDS])[:40].strip("_")
    return "api"


def parameter_name(wire: str) -> str:
    """Return the name a template can use for a name of the wire: `filter[name]` is `filter_name`."""
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", wire, re.ASCII):
        return wire[:_MAX_NAME]
    name = snake(wire)[:_MAX_NAME]
    return name if name and not name[0].isdigit() else f"p_{name}".rstrip("_")


def variable_name(prefix: str) -> str:
    """Return the beginning of the names of an API's variables: `GITHUB` of `github`."""
    name = snake(prefix).upper()
    return f"API_{name}" if name[:1].isdigit() else name


def tool_ids(prefix: str, operations: Iterable[str]) -> tuple[str, ...]:
    """Return a tool id for each operation, in order, no two alike."""
    taken: dict[str, None] = {}
    for operation in operations:
        taken[unused(_tool_id(prefix, snake(operation)), taken)] = None
    return tuple(taken)


def _tool_id(prefix: str, name: str) -> str:
    is_prefixed = name == prefix or name.startswith(f"{prefix}_")
    whole = (name if is_prefixed else f"{prefix}_{name}")[:MAX_ID].strip("_")
    return whole if is_tool_id(whole) else f"api_{whole}"[:MAX_ID].strip("_")


def unused(name: str, taken: Collection[str]) -> str:
    """Return the name, or the name with the first number behind it that makes it a new one."""
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


def semantic(version: Json) -> str:
    """Return a document's version as a semantic one: `v2` is 2.0.0, a date is its three numbers."""
    text = str(version).strip()
    exact = Version.parse(text)
    if exact is None and (found := _NUMBERS.match(text)):
        major, minor, patch = (int(number or 0) for number in found.groups())
        exact = Version(major, minor, patch)
    return str(exact) if exact not in {None, Version(0, 0, 0)} else "1.0.0"


def sentence(*texts: Json, limit: int) -> str:
    """Return the first paragraphs of texts as one line, without what cannot be seen, cut at a word."""
    said: list[str] = []
    for text in texts:
        line = " ".join(_visible(_first_paragraph(text)).split()) if isinstance(text, str) else ""
        if line and not any(line.rstrip(".") in earlier for earlier in said):
            said.append(line if line.endswith((".", "!", "?", ":")) else f"{line}.")
    whole = " ".join(said)
    if len(whole) <= limit:
        return whole
    return f"{whole[: limit - 1].rpartition(' ')[0] or whole[: limit - 1]}…"


def _first_paragraph(text: str) -> str:
    # No more than this is ever shown, and a paragraph of a megabyte is not worth splitting.
    return re.split(r"\n[ \t\r]*\n", text[:4_000].strip(), maxsplit=1)[0]


def _visible(text: str) -> str:
    return "".join(
        " " if character in "\t\r\n" else character
        for character in text
        if character in "\t\r\n" or unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Cn"}
    )
