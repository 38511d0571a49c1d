"""Old signatures: the manifests that old versions of Kiwi extracted, and whether a signature over them is valid."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import PurePosixPath
from typing import Literal

import yaml
from msgspec import Struct

from kiwi_mcp.domain.errors import Invalid
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.domain.patterns import lazy_pattern
from kiwi_mcp.manifest.document import read_yaml
from kiwi_mcp.manifest.signatures import sha256_hex, split

MAX_SOURCE = 1_000_000
"""The longest source that is read, in characters."""

_DUNDERS: Mapping[str, str] = {
    "version": "__version__",
    "tool_type": "__tool_type__",
    "executor_id": "__executor_id__",
    "category": "__category__",
    "config": "CONFIG",
    "config_schema": "CONFIG_SCHEMA",
    "validation": "VALIDATION",
    "extensions": "EXTENSIONS",
    "extraction_rules": "EXTRACTION_RULES",
}
_LATER: Sequence[Mapping[str, str]] = (
    {},
    {"env_config": "ENV_CONFIG"},
    {"requires": "REQUIRES"},
    {"env_config": "ENV_CONFIG", "requires": "REQUIRES"},
)


class Unreadable(Exception):
    """The manifest an old hash was taken over cannot be rebuilt."""


class Extractor(Struct, frozen=True):
    """A project's own rules for the metadata of some kinds of file."""

    extensions: tuple[str, ...]
    parser: str
    rules: Mapping[str, JsonObject]


def read_extractor(source: str) -> Extractor | None:
    """Return the rules an extractor file declares as literals, or None where it declares none."""
    try:
        names = _literals(source)
    except Unreadable:
        return None
    extensions, rules = names.get("EXTENSIONS"), as_object(names.get("EXTRACTION_RULES"))
    if not isinstance(extensions, list) or not rules:
        return None
    return Extractor(
        tuple(suffix.lower() for suffix in extensions if isinstance(suffix, str)),
        as_text(names.get("PARSER")) or "text",
        {field: as_object(rule) for field, rule in rules.items()},
    )


def manifests(source: str, *, file_name: str, extractors: Sequence[Extractor]) -> Iterator[JsonObject]:
    """Yield each manifest that an old generation may have seen in a file."""
    path = PurePosixPath(file_name)
    own = [extractor for extractor in extractors if path.suffix.lower() in extractor.extensions]
    if path.suffix == ".py":
        names = _literals(source)
        base: dict[str, Json] = {field: names.get(name) for field, name in _DUNDERS.items()}
        base |= {"name": path.stem, "description": _description(source)}
        for state in dict.fromkeys(("MUTATES_STATE", "__mutates_state__")):
            for later in _LATER:
                yield base | {"mutates_state": names.get(state)} | {key: names.get(name) for key, name in later.items()}
    elif not own:
        raise Unreadable
    for extractor in own:
        data = as_object(read_old_yaml(source)) if extractor.parser == "yaml" else {}
        names = _literals(source) if extractor.parser == "python_ast" else {}
        yield {field: _by_rule(rule, source, path.stem, data, names) for field, rule in extractor.rules.items()}


def read_old_yaml(text: str) -> Json:
    """Return YAML as old readers typed it (YAML 1.1: `yes` is true), once the bounded reader has let it pass."""
    try:
        read_yaml(text, what="The old metadata")
        loaded: Json = yaml.load(text, Loader=yaml.CSafeLoader)
    except (Invalid, yaml.YAMLError, ValueError, RecursionError) as fault:
        raise Unreadable from fault
    return loaded


def _by_rule(rule: JsonObject, source: str, stem: str, data: JsonObject, names: JsonObject) -> Json:
    match rule.get("type"):
        case "filename":
            return stem
        case "path":
            current: Json = data
            for key in as_text(rule.get("key")).split("."):
                if not isinstance(current, Mapping) or key not in current:
                    return data.get(as_text(rule.get("fallback")))
                current = current[key]
            return current
        case "ast_var":
            return names.get(as_text(rule.get("name")))
        case "ast_docstring":
            return _description(source)
        case _:
            # A project's regular expression can stall Python's engine, so none is tried.
            raise Unreadable


def _literals(source: str) -> dict[str, Json]:
    """Return the first value given to each module-level name; null where it is not a literal."""
    found: dict[str, Json] = {}
    for node in _tree(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in found:
                found[name] = None
                with suppress(ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
                    found[name] = ast.literal_eval(value)
    return found


def _description(source: str) -> str | None:
    """Return the first paragraph of the module's docstring on one line."""
    match _tree(source).body:
        case [ast.Expr(value=ast.Constant(value=str() as text)), *_]:
            lines = [line.strip() for line in text.strip().split("\n")]
            end = lines.index("") if "" in lines else len(lines)
            return " ".join(lines[:end])
        case _:
            return None


def _tree(source: str) -> ast.Module:
    if len(source) > MAX_SOURCE:
        raise Unreadable
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as fault:
        raise Unreadable from fault


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
    names = tuple(dict.fromkeys((stem, f"{category}/{stem}" if category else stem, item_id)))
    content: str | None = body
    if kind == "directive":
        content = xml_of(body)
    elif kind == "knowledge":
        content = _frontmatter(body)[1]
    elif body.startswith("#!/"):
        content = _SHEBANG.sub("", body, count=1)
    if content is None:
        return "modified"
    whole = _sha256(content)
    candidates: Candidates
    if len(signature.hash) == SHORT:
        candidates = iter([("A", whole[:SHORT])])
    elif signature.scheme == "rye":
        candidates = iter([("R", whole)])
    elif kind == "directive":
        candidates = _directives(content, names)
    elif kind == "tool":
        candidates = _tools(body, names, file_name or stem + suffix, tuple(extractors))
    else:
        candidates = _knowledge(body, names, category)
    try:
        found = next((generation for generation, digest in candidates if digest == signature.hash), None)
    except Unreadable:
        return "legacy-unverifiable" if FIRST_DAY <= signature.timestamp < LAST_DAY else "modified"
    return f"valid:{found}" if found else "modified"


def xml_of(text: str) -> str | None:
    """Return the directive in a Markdown text: from the first opening tag to the last closing one."""
    opening = _OPENING.search(text)
    end = text.rfind(_CLOSING)
    if opening is None or end < opening.end():
        return None
    return text[opening.start() : end + len(_CLOSING)]


def _directives(xml: str, names: Sequence[str]) -> Candidates:
    opening = _OPENING.match(xml)
    version = _VERSION.search(opening[0]) if opening else None
    words: JsonObject = {"metadata": {}, "version": version[1] if version else "0.0.0", "xml_hash": _sha256(xml)}
    for name in names:
        yield "B1", _hash({"directive_name": name, **words})


def _tools(body: str, names: Sequence[str], file_name: str, extractors: Sequence[Extractor]) -> Candidates:
    file: JsonObject = {"path": file_name, "sha256": _sha256(body)}
    found = manifests(body, file_name=file_name, extractors=extractors)
    for manifest, name in product(found, names):
        version = manifest.get("version") or "0.0.0"
        statement: dict[str, Json] = {"tool_id": name, "version": version, "manifest": manifest}
        yield "B2", _hash(statement | {"files": [file]})
        yield "B1", _hash(statement | {"files": [{**file, "is_executable": False}]})


def _knowledge(body: str, names: Sequence[str], folder: str) -> Candidates:
    written, content = _frontmatter(body)
    front = as_object(read_old_yaml(written))
    base: dict[str, Json] = {"version": front.get("version"), "content_hash": _sha256(content)}
    unsigned = {key: value for key, value in front.items() if key not in {"validated_at", "content_hash", "integrity"}}
    category, entry_type, tags = front.get("category"), front.get("entry_type"), front.get("tags", [])
    for name in names:
        facts = product((category, category or folder), (entry_type, entry_type or "learning"))
        for group, kind in facts:
            metadata: JsonObject = {"category": group, "entry_type": kind, "tags": tags}
            yield "B4", _hash(base | {"id": name, "metadata": metadata})
            yield "B3", _hash(base | {"zettel_id": name, "metadata": metadata})
            named: JsonObject = {"zettel_id": name, "title": front.get("title"), **metadata}
            yield "B1", _hash(base | {"zettel_id": name, "frontmatter": named})
        for frontmatter in ({}, unsigned):
            yield "B1", _hash(base | {"zettel_id": name, "frontmatter": frontmatter})


def _frontmatter(text: str) -> tuple[str, str]:
    """Return the frontmatter and the body, cut as old readers did: at the first `---` after the opening one."""
    end = text.find("---", 3) if text.startswith("---") else -1
    return ("", text) if end < 0 else (text[3:end], text[end + 3 :].strip())


def _sha256(text: str) -> str:
    return sha256_hex(text.encode("utf-8", "surrogatepass"))


def _hash(statement: JsonObject) -> str:
    """Return the SHA-256 of a statement as Python's own JSON writes it, sorted and without spaces."""
    try:
        written = json.dumps(statement, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as fault:  # dates, for one, were never signed this way
        raise Unreadable from fault
    return sha256_hex(written.encode())
