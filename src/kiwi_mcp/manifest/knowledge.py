"""Knowledge: reference text in Markdown, with YAML before it that says what it is.

The mapping has `tool_id`, `tool_type: knowledge`, `version`, `executor: null`, `description`, `category`, `tags`,
`author`, `created_at` and `config`, whose words are `title`, `entry_type` (default `learning`), `source_type`,
`source_url`, `references`, `extends`, `links` (the `[[targets]]` in the body, in order), `schema`, and `extra` for
whatever else the frontmatter holds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kiwi_mcp.domain.errors import InvalidManifest
from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject, as_text
from kiwi_mcp.manifest.signature import split
from kiwi_mcp.manifest.yaml import read_yaml

MAX_CHARACTERS = 4_000_000
"""The longest entry that is read; one longer than a book is a data file."""

_CONFIG = ("title", "source_type", "source_url", "references", "extends", "schema")
_MANIFEST = ("version", "category", "tags", "author", "created_at")
_NOT_CONTENT = {
    "id",
    "zettel_id",
    "entry_type",
    "description",
    "validated_at",
    "content_hash",
    "integrity",
    "embedding",
}
_END = re.compile(r"^---[ \t]*\r?$", re.MULTILINE)
_HEADING = re.compile(r"^#[ \t]+(\S[^\n]*)$", re.MULTILINE)
_LINK = re.compile(r"\[\[([^\[\]|\n]{1,200})(?:\|[^\[\]\n]{0,200})?\]\]")


def read_knowledge(text: str, *, what: str, stem: str = "") -> JsonObject:
    """Return the manifest of a knowledge entry; `stem` names it where its frontmatter does not."""
    front, content = _parts(text, what)
    title = as_text(front.get("title")) or _heading(content) or stem
    config: dict[str, Json] = {word: front[word] for word in _CONFIG if word in front}
    config |= {"title": title, "entry_type": front.get("entry_type") or "learning"}
    if found := links(content):
        config["links"] = list(found)
    known = {*_CONFIG, *_MANIFEST, *_NOT_CONTENT}
    if extra := {word: value for word, value in front.items() if word not in known}:
        config["extra"] = extra
    return {
        "tool_id": front.get("id") or front.get("zettel_id") or stem,
        "tool_type": "knowledge",
        "executor": None,
        "description": as_text(front.get("description")) or title,
        **{word: front[word] for word in _MANIFEST if word in front},
        "config": config,
    }


def body(text: str) -> str:
    """Return the text of an entry, without its signature and frontmatter."""
    return _cut(split(text, ".md")[1])[1].strip()


def links(content: str) -> tuple[str, ...]:
    """Return what a text links to as `[[target]]` or `[[target|label]]`, in order, each once."""
    return tuple(dict.fromkeys(found[1].strip() for found in _LINK.finditer(content)))


def _parts(text: str, what: str) -> tuple[JsonObject, str]:
    if len(text) > MAX_CHARACTERS:
        fix = "Split it, and link the parts as [[name]]."
        raise InvalidManifest(what, [Issue("", f"longer than {MAX_CHARACTERS:,} characters", fix)])
    unsigned = split(text, ".md")[1]
    front, content = _cut(unsigned)
    # Blank lines stand for the signature, so that faults name the line of the file.
    above = text.count("\n") - unsigned.count("\n")
    value = read_yaml("\n" * above + front, what=what).value if front.strip() else {}
    if not isinstance(value, Mapping):
        raise InvalidManifest(
            what, [Issue("", "the frontmatter is not a mapping", "Write `key: value` lines.", line=1)]
        )
    return value, content.strip()


def _cut(text: str) -> tuple[str, str]:
    """Return the frontmatter, its opening line blank, and what follows; no frontmatter where it is never closed."""
    opening = _END.match(text)
    closing = _END.search(text, opening.end() + 1) if opening else None
    if opening is None or closing is None:
        return "", text
    return text[opening.end() : closing.start()], text[closing.end() :]


def _heading(content: str) -> str:
    found = _HEADING.search(content)
    return found[1].strip() if found else ""
