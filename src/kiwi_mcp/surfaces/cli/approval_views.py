"""How answers about approvals look to a person."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kiwi_mcp.domain.json import JsonObject, as_list, as_object, as_text, text_of
from kiwi_mcp.surfaces.cli.screen import Screen, show_message, talk

_NARROWED = ("project", "digest", "actor", "paths", "hosts", "argv", "expires_at")


def _list(content: JsonObject, screen: Screen) -> None:
    found = [as_object(one) for one in as_list(content.get("approvals"))]
    for one in found:
        reasons = "; ".join(map(text_of, as_list(one.get("reasons"))))
        screen.line(
            f"{as_text(one.get('approval_id'))}  {as_text(one.get('status')):<8}  {one.get('identity')}  {reasons}"
        )
    if not found:
        talk("Nothing waits for you.")
        return
    for item in map(as_object, as_list(content.get("items"))):
        if item.get("count") != 1:
            talk(f"{as_text(item.get('identity'))}: {item.get('count')} of them")
    talk("hint: `kiwi approvals show ID`, then `approve ID` or `deny ID`.")


def _show(content: JsonObject, screen: Screen) -> None:
    screen.data(as_text(content.get("preview")))
    talk(f"status: {as_text(content.get('status'))}; until {as_text(content.get('expires_at'))}")
    for word in ("decided_at", "decided_how", "reason", "run_id", "warning"):
        if told := as_text(content.get(word)):
            talk(f"{word.replace('_', ' ')}: {told}")
    talk("hint: `--json` shows the whole plan.")


def _rules(content: JsonObject, screen: Screen) -> None:
    rules = [as_object(one) for one in as_list(content.get("rules"))]
    for rule in rules:
        narrowed = "  ".join(f"{word}={text_of(rule[word])}" for word in _NARROWED if word in rule)
        screen.line(f"{as_text(rule.get('rule_id'))}  {as_text(rule.get('item'))}  {narrowed}".rstrip())
    if not rules:
        talk("There are no rules: you are asked about everything that changes your files or sends data out.")


def _change(content: JsonObject, screen: Screen) -> None:
    if preview := as_text(content.get("preview")):
        talk(preview)
    show_message(content, screen)
    if rule := as_object(content.get("rule")):
        talk(f"hint: `kiwi approvals rules remove {as_text(rule.get('rule_id'))}` takes the rule back.")


VIEWS: Mapping[str, Callable[[JsonObject, Screen], None]] = MappingProxyType(
    {"approvals list": _list, "approvals show": _show, "approvals rules": _rules, "approvals change": _change}
)
