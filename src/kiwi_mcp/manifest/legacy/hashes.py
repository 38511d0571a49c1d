"""Are old signatures still valid."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Literal

from msgspec import Struct

from kiwi_mcp.domain.items import Signature
from kiwi_mcp.domain.json import Json, JsonObject, as_object
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.legacy.manifests import Extractor, Unreadable, manifests, read_old_yaml
from kiwi_mcp.manifest.signatures import sha256_hex, split

Kind = Literal["directive", "tool", "knowledge"]
Candidates = Iterator[tuple[str, str]]
"""Generations and the hash each would have written."""

SHORT = 12
"""The digits of a generation A hash."""

FIRST_DAY, LAST_DAY = "2026-01-24", "2026-03-01"
"""When generation B signed: only then can a statement that cannot be rebuilt be anything but a changed file."""

_OPENING = lazy_pattern(r"<directive[^>]*>")
_CLOSING = "</directive>"
_VERSION = lazy_pattern(r"""\sversion\s*=\s*["']([^"']*)["']""")
_SHEBANG = lazy_pattern(r"#!/[^\n]*\n")


class Subject(Struct, frozen=True):
    """A file as old generations saw it: its text without the signature, and the names it may have been signed under."""

    body: str
    file_name: str
    names: tuple[str, ...]
    category: str
    extractors: tuple[Extractor, ...]


def verdict(
    text: str,
    *,
    suffix: str,
    item_id: str,
    kind: Kind,
    category: str = "",
    file_name: str = "",
    extractors: Iterable[Extractor] = (),
) -> str:
    """Return `valid:<generation>`, `modified`, `unsigned` or `legacy-unverifiable`.

    `item_id` is the stem or `category/stem`; `extractors` are the project's own, which only `read_extractor` has read.
    """
    # Old readers opened files in text mode, so every line end counts as one character.
    signature, body = split(text.replace("\r\n", "\n").replace("\r", "\n"), suffix)
    if signature is None:
        return "unsigned"
    stem = item_id.rpartition("/")[2]
    names = dict.fromkeys((stem, f"{category}/{stem}" if category else stem, item_id))
    subject = Subject(body, file_name or stem + suffix, tuple(names), category, tuple(extractors))
    return _judge(signature, subject, kind)


def xml_of(text: str) -> str | None:
    """Return the directive in a Markdown text: from the first opening tag to the last closing one."""
    opening = _OPENING.search(text)
    end = text.rfind(_CLOSING)
    if opening is None or end < opening.end():
        return None
    return text[opening.start() : end + len(_CLOSING)]


def _judge(signature: Signature, subject: Subject, kind: Kind) -> str:
    try:
        for generation, digest in _candidates(signature, subject, kind):
            if digest == signature.hash:
                return f"valid:{generation}"
    except Unreadable:
        if FIRST_DAY <= signature.timestamp < LAST_DAY:
            return "legacy-unverifiable"
    return "modified"


def _candidates(signature: Signature, subject: Subject, kind: Kind) -> Candidates:
    content = _content(subject, kind)
    if content is None:
        return
    whole = sha256_hex(content.encode("utf-8", "surrogatepass"))
    if len(signature.hash) == SHORT:
        yield "A", whole[:SHORT]
    elif signature.scheme == "rye":
        yield "R", whole
    elif kind == "directive":
        yield from _directives(subject, content, whole)
    elif kind == "tool":
        yield from _tools(subject)
    else:
        yield from _knowledge(subject, whole)


def _content(subject: Subject, kind: Kind) -> str | None:
    match kind:
        case "directive":
            return xml_of(subject.body)
        case "tool":
            return _SHEBANG.sub("", subject.body, count=1) if subject.body.startswith("#!/") else subject.body
        case _:
            return _frontmatter(subject.body)[1]


def _directives(subject: Subject, xml: str, xml_hash: str) -> Candidates:
    opening = _OPENING.match(xml)
    version = _VERSION.search(opening[0]) if opening else None
    for name in subject.names:
        statement: JsonObject = {
            "directive_name": name,
            "metadata": {},
            "version": version[1] if version else "0.0.0",
            "xml_hash": xml_hash,
        }
        yield "B1", _hash(statement)


def _tools(subject: Subject) -> Candidates:
    file: JsonObject = {"path": subject.file_name, "sha256": sha256_hex(subject.body.encode("utf-8", "surrogatepass"))}
    found = manifests(subject.body, file_name=subject.file_name, extractors=subject.extractors)
    for manifest, name in product(found, subject.names):
        statement: dict[str, Json] = {
            "tool_id": name,
            "version": manifest.get("version") or "0.0.0",
            "manifest": manifest,
        }
        yield "B2", _hash(statement | {"files": [file]})
        yield "B1", _hash(statement | {"files": [{**file, "is_executable": False}]})


def _knowledge(subject: Subject, content_hash: str) -> Candidates:
    front = as_object(read_old_yaml(_frontmatter(subject.body)[0]))
    base: dict[str, Json] = {"version": front.get("version"), "content_hash": content_hash}
    category, entry_type, tags = front.get("category"), front.get("entry_type"), front.get("tags", [])
    for name in subject.names:
        facts = product((category, category or subject.category), (entry_type, entry_type or "learning"))
        for group, kind in facts:
            metadata: JsonObject = {"category": group, "entry_type": kind, "tags": tags}
            yield "B4", _hash(base | {"id": name, "metadata": metadata})
            yield "B3", _hash(base | {"zettel_id": name, "metadata": metadata})
            named: JsonObject = {"zettel_id": name, "title": front.get("title"), **metadata}
            yield "B1", _hash(base | {"zettel_id": name, "frontmatter": named})
        for frontmatter in ({}, _without_signature(front)):
            yield "B1", _hash(base | {"zettel_id": name, "frontmatter": frontmatter})


def _without_signature(front: JsonObject) -> JsonObject:
    return {key: value for key, value in front.items() if key not in {"validated_at", "content_hash", "integrity"}}


def _frontmatter(text: str) -> tuple[str, str]:
    """Return the frontmatter and the body, cut as old readers did: at the first `---` after the opening one."""
    end = text.find("---", 3) if text.startswith("---") else -1
    return ("", text) if end < 0 else (text[3:end], text[end + 3 :].strip())


def _hash(statement: JsonObject) -> str:
    """Return the SHA-256 of a statement as Python's own JSON writes it, sorted and without spaces."""
    try:
        written = json.dumps(statement, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as fault:  # dates, for one, were never signed this way
        raise Unreadable from fault
    return sha256_hex(written.encode())
