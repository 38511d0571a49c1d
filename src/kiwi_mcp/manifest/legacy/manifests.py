"""Manifests as old generations extracted them."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import yaml
from msgspec import Struct

from kiwi_mcp.domain.errors import Invalid
from kiwi_mcp.domain.json import Json, JsonObject, as_object, as_text
from kiwi_mcp.manifest.yaml import read_yaml

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
        yield from _python_manifests(source, path.stem)
    elif not own:
        raise Unreadable
    for extractor in own:
        yield _extracted(source, path.stem, extractor)


def read_old_yaml(text: str) -> Json:
    """Return YAML as old readers typed it (YAML 1.1: `yes` is true), once the bounded reader has let it pass."""
    try:
        read_yaml(text, what="The old metadata")
        loaded: Json = yaml.load(text, Loader=yaml.CSafeLoader)
    except (Invalid, yaml.YAMLError, ValueError, RecursionError) as fault:
        raise Unreadable from fault
    return loaded


def _python_manifests(source: str, stem: str) -> Iterator[JsonObject]:
    names = _literals(source)
    base: dict[str, Json] = {field: names.get(name) for field, name in _DUNDERS.items()}
    base |= {"name": stem, "description": _description(source)}
    for state in dict.fromkeys(("MUTATES_STATE", "__mutates_state__")):
        for later in _LATER:
            yield base | {"mutates_state": names.get(state)} | {key: names.get(name) for key, name in later.items()}


def _extracted(source: str, stem: str, extractor: Extractor) -> JsonObject:
    data = as_object(read_old_yaml(source)) if extractor.parser == "yaml" else {}
    names = _literals(source) if extractor.parser == "python_ast" else {}
    return {field: _by_rule(rule, source, stem, data, names) for field, rule in extractor.rules.items()}


def _by_rule(rule: JsonObject, source: str, stem: str, data: JsonObject, names: JsonObject) -> Json:
    match rule.get("type"):
        case "filename":
            return stem
        case "path":
            return _at(data, rule)
        case "ast_var":
            return names.get(as_text(rule.get("name")))
        case "ast_docstring":
            return _description(source)
        case _:
            # A project's regular expression can stall Python's engine, so none is tried.
            raise Unreadable


def _at(data: JsonObject, rule: JsonObject) -> Json:
    current: Json = data
    for key in as_text(rule.get("key")).split("."):
        if not isinstance(current, Mapping) or key not in current:
            return data.get(as_text(rule.get("fallback")))
        current = current[key]
    return current


def _literals(source: str) -> dict[str, Json]:
    """Return the first value given to each module-level name; null where it is not a literal."""
    found: dict[str, Json] = {}
    for node in _tree(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in found:
                found[name] = _literal(value)
            case _:
                pass
    return found


def _literal(node: ast.expr) -> Json:
    try:
        value: Json = ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError, SyntaxError):
        return None
    return value


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
