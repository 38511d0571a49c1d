"""The parts of a directive that hold numbers and names: inputs, limits and hooks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from kiwi_mcp.domain.issues import Issue
from kiwi_mcp.domain.json import Json, JsonObject
from kiwi_mcp.manifest.directive_xml import Element

CHECKPOINTS = frozenset({"auto", "explicit", "disabled"})

_TYPES: Mapping[str, str] = {
    **{name: name for name in ("string", "number", "integer", "boolean", "array", "object")},
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
}
_LIMITS: Mapping[str, str] = {
    **dict.fromkeys(("turns", "max_turns"), "turns"),
    **dict.fromkeys(("tokens", "max_tokens", "max_total_tokens", "context"), "tokens"),
    **dict.fromkeys(("spawns", "max_spawns", "spawn_threshold"), "spawns"),
    **dict.fromkeys(("depth", "max_depth"), "depth"),
    **dict.fromkeys(("duration", "duration_seconds"), "duration"),
    **dict.fromkeys(("spend", "max_spend", "max_cost_usd"), "spend"),
    **dict.fromkeys(("currency", "spend_currency"), "spend_currency"),
}
_NUMBER = re.compile(r"\$?\s*(\d{1,15}(?:\.\d{1,9})?)\s*(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600, None: 1}


def inputs_of(inputs: Element | None, issues: list[Issue]) -> list[JsonObject]:
    """Return the parameters a directive declares."""
    return [_input(each, issues) for each in inputs.named("input")] if inputs else []


def _input(element: Element, issues: list[Issue]) -> JsonObject:
    attributes = element.attributes
    name = attributes.get("name", "")
    if not name:
        issues.append(Issue("inputs", "<input> has no `name`", 'Write <input name="…" …>.', line=element.line))
    declared = _TYPES.get(attributes.get("type", "string").lower(), "string")
    read: dict[str, Json] = {"name": name, "type": declared, **_schema(element, name, issues)}
    read["required"] = attributes.get("required", "").lower() == "true"
    if description := _description(element):
        read["description"] = description
    if "default" in attributes:
        read["default"] = _typed(attributes["default"], declared)
    if choices := [word.strip() for word in re.split(r"[,|]", attributes.get("enum", "")) if word.strip()]:
        read["enum"] = [_typed(word, declared) for word in choices]
    return read


def _description(element: Element) -> str:
    said = element.text_at("description") or "".join(part for part in element.content if isinstance(part, str))
    return " ".join(said.split())


def _schema(element: Element, name: str, issues: list[Issue]) -> JsonObject:
    written = element.attributes.get("schema") or element.text_at("schema")
    if not written:
        return {}
    try:
        schema: Json = json.loads(written)
    except (ValueError, RecursionError):
        schema = None
    if isinstance(schema, Mapping):
        return schema
    place = f"inputs.{name}.schema"
    issues.append(
        Issue(place, "not a JSON object", 'Write a JSON Schema such as {"type": "array"}.', line=element.line)
    )
    return {}


def _typed(text: str, declared: str) -> Json:
    """Return an attribute as the type its input declares; text that is no such value stays text, for the check."""
    if declared == "string":
        return text
    try:
        value: Json = json.loads(text.lower() if declared == "boolean" else text)
    except (ValueError, RecursionError):
        return text
    return value


def limits_of(metadata: Element, issues: list[Issue]) -> JsonObject:
    """Return the limits in the one spelling; those of the older `cost` count where `limits` says nothing."""
    read: dict[str, Json] = {}
    for element in (*metadata.named("cost"), *metadata.named("limits")):
        for word, text, line in _written_limits(element):
            value = _limit(word, text)
            if value is not None:
                read[word] = value
            elif element.tag == "limits":
                issues.append(Issue(f"limits.{word}", f"{text!r} is not a limit", "Write a number.", line=line))
    if "spend" in read:
        read.setdefault("spend_currency", "USD")
    return read


def _written_limits(element: Element) -> Iterator[tuple[str, str, int]]:
    """Yield each limit with its line, from attributes and children alike."""
    for part in (element, *element.children):
        said = {**part.attributes, **({part.tag: part.text} if part is not element and part.text else {})}
        for word, text in said.items():
            if word in _LIMITS:
                yield _LIMITS[word], text, part.line


def _limit(word: str, text: str) -> Json:
    if word == "spend_currency":
        return text.strip().upper()
    found = _NUMBER.fullmatch(text.strip())
    if found is None or (found[2] and word != "duration"):
        return None
    number = float(found[1]) * _SECONDS[found[2]]
    if word == "spend":
        return number
    return int(number) if number.is_integer() else None


def hooks_of(hooks: Element | None, issues: list[Issue]) -> list[JsonObject]:
    """Return what is to run when, in order."""
    return [_hook(each, issues) for each in hooks.children] if hooks else []


def _hook(hook: Element, issues: list[Issue]) -> JsonObject:
    when = hook.attributes.get("when") or hook.text_at("when")
    execute = hook.first("execute")
    named = (execute.attributes.get("item_id") or execute.text) if execute else ""
    directive = hook.attributes.get("directive") or hook.text_at("directive") or named
    if not (when and directive):
        fix = 'Write <hook when="…" directive="…" />.'
        issues.append(Issue("hooks", "a hook needs `when` and `directive`", fix, line=hook.line))
    inputs = hook.first("inputs")
    given = {each.attributes.get("name", each.tag): each.text for each in (inputs.children if inputs else ())}
    return {"when": when, "directive": directive, "inputs": given}
